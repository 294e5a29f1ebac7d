"""States of jobs made by hand."""

from typing import Any

from coserve.jobs.lifecycle.state import JobState
from coserve.jobs.records import JobRecord


def make_record(
    id: str = "j", *, tenant: str = "a", is_validated: bool = True, **fields: Any
) -> JobRecord:
    """A queued job of nine steps."""
    given: dict[str, Any] = {
        "created_at": 1,
        "model": "m",
        "base": "m",
        "name": f"ft:{id}",
        "seed": 0,
        "settings": {},
    }
    given |= {"status": "queued", "training_file": "file-1", "num_steps": 9 if is_validated else 0}
    return JobRecord(**{"id": id, "tenant": tenant, **given, **fields})


def make_state(id: str = "j", *, record: dict[str, Any] | None = None, **fields: Any) -> JobState:
    """The state of such a job, which holds a slot."""
    return JobState(**{"job": make_record(id, **(record or {})), "slot": "held", **fields})

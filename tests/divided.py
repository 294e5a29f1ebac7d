"""Data-parallel jobs in tests: requests for them, and their results."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from job_data import adapter_in, steps_of
from job_engine import World

from coserve.jobs.records import JobRecord

# Seven examples in batches of three: the last batch of an epoch has parts without examples.
NUM_STEPS = 9
EXTENSION: dict[str, Any] = {
    "adapter": {"r": 3, "alpha": 6, "dropout": 0},
    "optimizer": {"learning_rate": 1e-3, "warmup_steps": 2},
    "checkpoint_every_steps": 4,
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "local-sgd": {"synchronization": "local-sgd", "synchronize_every_steps": 2},
    "asynchronous": {"synchronization": "asynchronous", "synchronize_every_steps": 2},
}


def run(test: Callable[[], Awaitable[Any]]) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(test(), 240)

    return asyncio.run(limited())


async def finished(
    made: World, job: JobRecord, read: Callable[[str], Any] = adapter_in
) -> tuple[list[Any], dict[int, Any]]:
    """Return a job's events, and the parameters in its checkpoints, when it has succeeded."""
    job = await made.until_over(job.id)
    assert (job.status, job.error) == ("succeeded", None)
    assert steps_of(made.events(job.id)) == list(range(1, job.num_steps + 1))
    await made.until(lambda: not (made.home / "jobs" / job.id / "contributions").exists())
    return made.events(job.id), {
        each.step: read(each.directory) for each in made.checkpoints(job.id)
    }


def losses(events: list[Any]) -> list[float]:
    return [event.data["train_loss"] for event in events if event.kind == "step"]

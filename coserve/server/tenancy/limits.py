"""How much of a server one tenant may use."""

from dataclasses import dataclass, fields

from coserve.settings import check_whole


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one tenant; None: no limit. ValueError when created names the field.

    max_requests: sequences of requests under way at once (one with n=4 has four).
    tokens_per_minute: of prompts and answers, in the long run. max_batches: batches that have not
    ended. max_jobs: jobs that have not ended. max_running_jobs: those that train at once.
    max_file_bytes: of all files together.
    """

    max_requests: int | None = None
    tokens_per_minute: int | None = None
    max_jobs: int | None = None
    max_running_jobs: int | None = None
    max_file_bytes: int | None = None
    max_batches: int | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            if (value := getattr(self, each.name)) is not None:
                check_whole(each.name, value, 1)

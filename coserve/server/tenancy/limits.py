"""Limits of a tenant."""

from dataclasses import dataclass, fields

from coserve.settings import check_whole


@dataclass(frozen=True, kw_only=True)
class TenantLimits:
    """Limits of one tenant; None: no limit.

    Raises:
        ValueError: A limit is below 1; the message names the field.
    """

    max_requests: int | None = None
    """Sequences running or waiting at once; a request with n=4 has four."""
    tokens_per_minute: int | None = None
    """Rate of prompt and generated tokens, averaged over time."""
    max_jobs: int | None = None
    """Jobs that have not ended."""
    max_running_jobs: int | None = None
    """Jobs that train at once."""
    max_file_bytes: int | None = None
    """Bytes of all files together."""
    max_batches: int | None = None
    """Batches that have not ended."""

    def __post_init__(self) -> None:
        for each in fields(self):
            if (value := getattr(self, each.name)) is not None:
                check_whole(each.name, value, 1)

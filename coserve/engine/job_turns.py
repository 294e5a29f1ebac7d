"""Whose turn it is among jobs: what each has been served, and where one that comes stands among them."""

from collections.abc import Sequence

from coserve.engine.job import Job


class JobTurns:
    """Rows of all jobs that run. Who comes, or comes back, stands with the one served least, as in start-time fair
    queueing: it does not catch up on what others had before.
    """

    def __init__(self) -> None:
        self._lifts: dict[str, float] = {}  # of jobs that run: rows that count as theirs, which they have not run

    def served(self, jobs: Sequence[Job]) -> dict[str, float]:
        """What counts for each. jobs: all that run now."""
        served = {job.id: job.num_rows_run + self._lifts[job.id] for job in jobs if job.id in self._lifts}
        least = min(served.values(), default=0.0)
        for job in jobs:
            if job.id not in served:
                served[job.id] = max(job.num_rows_run, least)
        self._lifts = {job.id: served[job.id] - job.num_rows_run for job in jobs}
        return served

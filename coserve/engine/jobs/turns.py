"""Whose turn it is among jobs: what each has been served, and where one that comes stands among them."""

from collections.abc import Collection, Sequence

from coserve.engine.jobs.job import Job


class JobTurns:
    """Rows of all jobs that run. One that comes, or is resumed, stands with the one served least of those that have
    work, as in start-time fair queueing: it does not catch up on what others had before, nor wait for what it had. One
    that had no work for a while does not catch up on that time.
    """

    def __init__(self) -> None:
        # Of jobs that run: rows that count as theirs beside those that they have run.
        self._lifts: dict[str, float] = {}
        self._working: frozenset[str] = frozenset()

    def served(self, jobs: Sequence[Job], working: Collection[str]) -> dict[str, float]:
        """What counts for each. jobs: all that run now. working: those of them that have work."""
        if len(jobs) == 1:  # nobody stands before it, nor after it
            (job,) = jobs
            lift = self._lifts.get(job.id, 0.0)
            self._lifts, self._working = {job.id: lift}, frozenset(working)
            return {job.id: job.num_rows_run + lift}
        served = {job.id: job.num_rows_run + self._lifts[job.id] for job in jobs if job.id in self._lifts}
        others = [served[id] for id in working if id in served and id in self._working]
        least = min(others, default=None)
        for job in jobs:
            if job.id not in served:
                served[job.id] = job.num_rows_run if least is None else least
            elif least is not None and job.id in working and job.id not in self._working:
                served[job.id] = max(served[job.id], least)
        self._lifts = {job.id: served[job.id] - job.num_rows_run for job in jobs}
        self._working = frozenset(working)
        return served

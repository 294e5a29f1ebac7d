"""Pages that hold the moments of jobs' optimizers, one run for each job. Bookkeeping alone.

Requests and packs may take these pages as if they were free: the moments of a job, the youngest job
first, then lie elsewhere, beside the pool or on the host. Pages are held against that while a job
that can make no step without them has a pack in memory or a step due. A device moves the tensors
accordingly (`PlaceOptimizer`).
"""

from collections.abc import Callable, Mapping

from coserve.memory.pages.allocator import PageAllocator

OWNER = "optimizer"

_NOWHERE = range(0)


class OptimizerPages:
    """Runs of pages by job."""

    def __init__(self, pool: PageAllocator) -> None:
        self.num_lendable = 0
        """Pages of runs that others can have now."""
        self.num_let_go = 0
        """How often a run that was held was held no more."""
        self._pool = pool
        self.on_place: Callable[[str, range], None] | None = None
        """Called with a job and the run in which its moments lie from now on, which is empty for a
        place elsewhere."""
        self._runs: dict[str, range] = {}
        self._held: set[str] = set()

    @property
    def runs(self) -> Mapping[str, range]:
        """Return the runs by job."""
        return self._runs

    @property
    def num_pages(self) -> int:
        """Return the number of pages of all runs."""
        return sum(map(len, self._runs.values()))

    def begin(self, job: str, run: range) -> None:
        """Give a job a run that was taken for it (as `OWNER`); it had none."""
        assert job not in self._runs
        self._runs[job] = run
        self._count()
        if self.on_place is not None:
            self.on_place(job, run)

    def hold(self, job: str, *, is_held: bool) -> None:
        """Set whether others cannot have the job's pages."""
        if is_held != (job in self._held):
            # The job is added if it was not held, and removed if it was.
            self._held.symmetric_difference_update([job])
            # Counted, so that `PageManager` looks again for what could not be had.
            self.num_let_go += not is_held and job in self._runs
            self._count()

    def release(self, job: str) -> None:
        """Free the run of a job whose moments are gone or on the host: no place is reported. No
        error if it has no run.
        """
        self._take_back(job)

    def lend(self, num_pages: int) -> None:
        """Have the moments of jobs lie elsewhere until as many more pages are free, or none is left
        to lend.
        """
        while num_pages > 0 and self.num_lendable:
            num_pages -= self.withdraw(
                next(job for job in reversed(self._runs) if job not in self._held)
            )

    def withdraw(self, job: str) -> int:
        """Have a job's moments lie elsewhere, and return how many pages that frees."""
        num_pages = self._take_back(job)
        if num_pages and self.on_place is not None:
            self.on_place(job, _NOWHERE)
        return num_pages

    def _take_back(self, job: str) -> int:
        run = self._runs.pop(job, _NOWHERE)
        self._pool.give_back_runs(OWNER, [run])
        self._held.discard(job)
        self._count()
        return len(run)

    def _count(self) -> None:
        self.num_lendable = sum(
            [len(run) for job, run in self._runs.items() if job not in self._held]
        )

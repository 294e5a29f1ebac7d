"""The pages in which moments of jobs' optimizers lie: one run for each job. Bookkeeping alone.

Requests and packs take them as if they were free: then the moments of a job, the youngest first,
lie elsewhere, beside the pool or on the host. What is held stays: the moments of a job that can
make no step without pages, while it has a pack in memory or its step is due. A device follows it
with the tensors (`PlaceOptimizer`).
"""

from collections.abc import Callable, Mapping

from coserve.memory.pages.allocator import PageAllocator

OWNER = "optimizer"

_NOWHERE = range(0)


class OptimizerPages:
    """runs: by job, those that there are. num_lendable: pages of them that others can have now.
    num_let_go: how often some were held no more.
    """

    def __init__(self, pool: PageAllocator) -> None:
        self.num_lendable = self.num_let_go = 0
        self._pool = pool
        self.on_place: Callable[[str, range], None] | None = None
        """Called with a job and the run in which its moments lie from now on, which is empty for a
        place elsewhere."""
        self._runs: dict[str, range] = {}
        self._held: set[str] = set()

    @property
    def runs(self) -> Mapping[str, range]:
        return self._runs

    @property
    def num_pages(self) -> int:
        """Of all runs."""
        return sum(map(len, self._runs.values()))

    def begin(self, job: str, run: range) -> None:
        """A run that was taken for it (`OWNER`) is the job's; it had none."""
        assert job not in self._runs
        self._runs[job] = run
        self._count()
        if self.on_place is not None:
            self.on_place(job, run)

    def hold(self, job: str, *, is_held: bool) -> None:
        """Whether others cannot have the job's pages now."""
        if is_held != (job in self._held):
            self._held.symmetric_difference_update([job])
            self.num_let_go += not is_held and job in self._runs
            self._count()

    def release(self, job: str) -> None:
        """The job's moments are gone, or on the host: no place is reported for them. No error if it
        has no run.
        """
        self._take_back(job)

    def lend(self, num_pages: int) -> None:
        """Have jobs' moments lie elsewhere until as many pages are free that were not, or none is
        left to lend.
        """
        while num_pages > 0 and self.num_lendable:
            num_pages -= self.withdraw(
                next(job for job in reversed(self._runs) if job not in self._held)
            )

    def withdraw(self, job: str) -> int:
        """Have a job's moments lie elsewhere; returns how many pages are free now."""
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

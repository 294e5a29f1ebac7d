"""The pages in which moments of jobs' optimizers lie: one run for each job. Bookkeeping alone.

Requests and packs take them as if they were free: then the moments of a job, the youngest first, lie elsewhere, beside
the pool or on the host. What is held stays: the moments of a job that can make no step without pages, while it has a
pack in memory or its step is due. A device follows it with the tensors (`PlaceOptimizer`).
"""

from collections.abc import Mapping

from coserve.memory.pages import PagePool

OWNER = "optimizer"

_NOWHERE = range(0)


class OptimizerPages:
    """runs: by job, those that there are. num_lendable: pages of them that others can have now. num_let_go: how often
    some were held no more.
    """

    def __init__(self, pool: PagePool) -> None:
        self.num_lendable = self.num_let_go = 0
        self._pool = pool
        self._runs: dict[str, range] = {}
        self._told: dict[str, range | None] = {}  # that the device knows; None: not known
        self._has_changed = False  # since it was told
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
        self._has_changed = True
        self._count()

    def hold(self, job: str, *, is_held: bool) -> None:
        """Whether others cannot have the job's pages now."""
        if is_held != (job in self._held):
            self._held.symmetric_difference_update([job])
            self.num_let_go += not is_held and job in self._runs
            self._count()

    def release(self, job: str) -> None:
        """The job's moments are gone, or on the host: the device need not be told. No error if it has no run."""
        self.withdraw(job)
        self._told.pop(job, None)

    def lend(self, num_pages: int) -> None:
        """Have jobs' moments lie elsewhere until as many pages are free that were not, or none is left to lend."""
        while num_pages > 0 and self.num_lendable:
            num_pages -= self.withdraw(next(job for job in reversed(self._runs) if job not in self._held))

    def withdraw(self, job: str) -> int:
        """Have a job's moments lie elsewhere; returns how many pages are free now."""
        run = self._runs.pop(job, _NOWHERE)
        self._pool.give_back_runs(OWNER, [run])
        self._has_changed = True
        self._held.discard(job)
        self._count()
        return len(run)

    @property
    def leaving(self) -> list[str]:
        """Jobs whose moments lie in pages, as far as the device may know, that are theirs no more."""
        if not self._has_changed:
            return []
        return [job for job, run in self._told.items() if run != _NOWHERE and run != self._runs.get(job, _NOWHERE)]

    @property
    def coming(self) -> dict[str, range]:
        """By job, pages in which its moments lie now, and the device may not know of it."""
        if not self._has_changed:
            return {}
        return {job: run for job, run in self._runs.items() if run != self._told.get(job)}

    def note_told(self, *, heard: bool = True) -> None:
        """The device was told; heard: whether that is known of all that it was ever told."""
        self._has_changed = not heard
        for job in {**self._told, **self._runs}:
            self._told[job] = self._runs.get(job, _NOWHERE) if heard else None

    def _count(self) -> None:
        self.num_lendable = sum([len(run) for job, run in self._runs.items() if job not in self._held])

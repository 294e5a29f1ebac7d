"""Who gets pages: what policies share. Requests come before jobs, for memory as for time.

A request is admitted once its whole prompt fits (FlexLLM section 7). Where pages are missing, jobs' packs are dropped,
those that lose least first, to be begun again later; only when no pack is left, the youngest request is preempted. A
policy may decide otherwise, in its own file.
"""

from collections.abc import Sequence

from coserve.scheduling.plan import JobView, RequestView, View

# A pack waits until there are this many pages per running request beside it: it would be dropped at once otherwise.
SPARE_PAGES = 4


class MemoryPlan:
    """Pages changing hands, decided piece by piece; `requests` and `jobs` are those that can run after it."""

    def __init__(self, view: View) -> None:
        self._view = view
        self.free = view.num_free_pages
        self.requests: list[RequestView] = list(view.requests)
        self.jobs: list[JobView] = [job for job in view.jobs if job.phase != "pack"]
        self.preempt: list[str] = []
        self.drop: list[str] = []
        self.admit: list[str] = []
        self.begin: list[str] = []

    def grow(self) -> None:
        """See to it that every request that runs has the pages of its next rows, whatever it takes."""
        for request in list(self.requests):
            while request.id not in self.preempt and request.num_pages > self.free:
                if not self._reclaim(request.num_pages):
                    # Of those that came at once, the one that was admitted last.
                    self._preempt(max(reversed(self.requests), key=lambda running: running.arrival_s))
            if request.id not in self.preempt:
                self.free -= request.num_pages

    def admit_waiting(self, waiting: Sequence[RequestView] | None = None) -> None:
        """Give waiting requests their pages, in this order (default: as they came), as long as whole prompts fit."""
        if self.preempt:
            return
        for request in self._view.waiting if waiting is None else waiting:
            if len(self.requests) >= self._view.max_requests:
                return
            if not request.may_start:
                continue
            # Those that run will want a page each, soon.
            needed = request.num_pages + len(self.requests)
            if needed > self.free and not self._reclaim(needed):
                return
            self.free -= request.num_pages
            self.requests.append(request)
            self.admit.append(request.id)

    def begin_packs(self, jobs: Sequence[JobView] | None = None, *, requests_first: bool = True) -> None:
        """Give jobs (default: the one served least first) the memory of their next packs, as far as requests do not
        want it (requests_first=False: whoever waits).
        """
        has_slots = requests_first and len(self.requests) < self._view.max_requests
        if has_slots and any(each.may_start and each.id not in self.admit for each in self._view.waiting):
            return
        jobs = self._view.jobs if jobs is None else jobs
        for job in jobs:
            if job.phase != "pack" or job.num_pages + SPARE_PAGES * len(self.requests) > self.free:
                continue
            self.free -= job.num_pages
            self.begin.append(job.id)
            self.jobs.append(job._replace(phase="forward", num_rows_left=job.num_rows))
        turns = {job.id: turn for turn, job in enumerate(jobs)}
        self.jobs.sort(key=lambda job: turns[job.id])

    def _reclaim(self, num_pages: int) -> bool:
        """Drop packs, those that lose least first, until so many pages are available. Drops none in vain."""
        packs = sorted((job for job in self.jobs if job.phase != "update"), key=lambda job: job.num_rows_done)
        if not packs or self.free + sum(job.num_pages for job in packs) < num_pages:
            return False
        for job in packs:
            self.free += job.num_pages
            self.drop.append(job.id)
            self.jobs.remove(job)
            if self.free >= num_pages:
                return True
        return False

    def _preempt(self, request: RequestView) -> None:
        self.free += request.num_held
        self.preempt.append(request.id)
        self.requests.remove(request)

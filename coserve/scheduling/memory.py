"""Allocation of pages, the part that policies share: requests come before jobs, in memory as in
time.

A request is admitted once its whole prompt fits (FlexLLM section 7). Where pages are missing, what
is cheapest to do again makes room: a job's pack, or the youngest request, whose tokens are computed
again later. A pack that has run for long is worth more than a short prompt; it is spared where the
request can wait until the pack returns its pages. A pack is begun only where the running requests
will leave it its pages until it is done. Batch work makes room before all of these, the youngest
first, and is admitted where no other request waits. A policy may decide otherwise, in its own file.
"""

from collections.abc import Callable, Iterable, Sequence
from math import inf

from msgspec import structs

from coserve.scheduling.order import by_due, by_priority
from coserve.scheduling.plan import JobProgress, RequestProgress, View

# A pack waits until there are this many pages per running request beside it: it would be dropped at
# once otherwise.
SPARE_PAGES = 4
# A request is preempted for a pack only if the pack loses this many times as many rows: requests
# come first.
PACK_WORTH = 4.0
# A pack that has waited for as many times its own time is begun though it might be dropped.
MAX_PACK_WAITS = 30.0

# Rows of packs in memory with which products are as fast as with more: a device computes longer
# than it reads weights from some hundred rows on. Another pack would hold memory for nothing.
ENOUGH_PACK_ROWS = 512

# Whether a request keeps its SLO if it waits until a pack is done.
CanWait = Callable[[RequestProgress, JobProgress], bool]


class MemoryPlan:
    """Pages that change hands, decided piece by piece; `requests`, `batch` and `jobs` can run after
    it.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self.free = view.num_free_pages
        self.requests: list[RequestProgress] = list(view.requests)
        self.batch: list[RequestProgress] = list(view.batch)
        self.jobs: list[JobProgress] = [job for job in view.jobs if job.phase != "pack"]
        self.preempt: list[str] = []
        self.drop: list[str] = []
        self.admit: list[str] = []
        self.begin: list[str] = []
        # Whether a request is not admitted because a pack will soon be done.
        self.waits_for_pack = False
        self.claimant = ""  # the tenant that pages are wanted for
        self._grown: dict[str, int] = {}
        self._is_short = False  # whether requests made room for others
        self._batch_pages = inf  # the share of batch work

    def grow(self, can_wait: CanWait | None = None) -> None:
        """Give every running request the pages of its next rows, whatever makes room for them."""
        needed = sum([request.num_pages for request in self.requests]) if self.requests else 0
        if needed <= self.free:
            self.free -= needed
            return
        # Batch work makes room before requests and packs do.
        self._preempt_batch(needed)
        for request in list(self.requests):
            self.claimant = request.info.tenant
            while request.id not in self.preempt and request.num_pages > self.free:
                # The youngest may be this very request, which then makes room itself.
                youngest = self._youngest()
                spares = can_wait is not None and self._spares(
                    youngest, youngest.num_past, can_wait
                )
                if spares or not self._reclaim(request.num_pages):
                    self._preempt(youngest)
            if request.id not in self.preempt:
                self.free -= request.num_pages
                # Remembered, since they come back if the request is preempted later in this plan.
                self._grown[request.id] = request.num_pages

    def admit_waiting(
        self, waiting: Iterable[RequestProgress] | None = None, can_wait: CanWait | None = None
    ) -> None:
        """Give waiting requests their pages, in this order (default: as they came), as long as
        whole prompts fit.
        """
        # Requests that have just made room would take it back at once.
        if self._is_short:
            return
        for request in by_priority(self._view.waiting) if waiting is None else waiting:
            if len(self.requests) >= self._view.max_requests:
                return
            if not request.may_start:
                continue
            # Running requests will need a page each, soon.
            needed = request.num_pages + len(self.requests)
            # Batch work makes room only if that, with all packs, is enough.
            if self.free + self._given(self.batch) + self._given(self._packs()) >= needed:
                self._preempt_batch(needed, slots=1)
            if needed > self.free:
                if can_wait is not None and self._spares(request, request.num_rows, can_wait):
                    self.waits_for_pack = True
                    return
                # Nobody overtakes a request that lacks pages.
                if not self._reclaim(needed):
                    return
            self.free -= request.num_pages
            self.requests.append(request)
            self.admit.append(request.id)

    def serve_batch(
        self, max_pages: float, waiting: Iterable[RequestProgress] | None = None
    ) -> None:
        """Give batch work the pages of its next rows and admit more of it, as long as no request
        waits and running ones keep a few pages.

        Args:
            max_pages: Pages of all batch work together, where more is to be admitted, and where a
                job needs the others.
            waiting: Batch work to admit, in this order; by default what is due first comes first.
        """
        self._batch_pages = max_pages
        # What this plan has admitted has its pages.
        for request in [each for each in self.batch if each.id not in self.admit]:
            if request.num_pages > self.free:
                self._preempt_batch(request.num_pages)
            if request.id not in self.preempt and request.num_pages <= self.free:
                self.free -= request.num_pages
                self._grown[request.id] = request.num_pages
        self._admit_batch(by_due(self._view.batch_waiting) if waiting is None else waiting)

    def _admit_batch(self, waiting: Iterable[RequestProgress]) -> None:
        """Give waiting batch work its pages and slots, as far as requests leave them."""
        # Requests that lack pages or were preempted come before new batch work.
        if self.preempt or self._not_admitted():
            return
        num_held = self._num_batch_pages()
        for request in waiting:
            if not request.may_start:
                continue
            if not self._fits_batch(
                request, num_held=num_held, num_free=self.free, num_batch=len(self.batch)
            ):
                return
            self._add_batch(request)
            num_held += request.num_pages

    def _fits_batch(
        self, request: RequestProgress, *, num_held: int, num_free: int, num_batch: int
    ) -> bool:
        """Return whether there is a slot for batch work, and pages within its share, beside the
        requests that run.

        Args:
            num_held: Pages that batch work has.
            num_free: Pages that are free.
            num_batch: Sequences of batch work that run.
        """
        if len(self.requests) + num_batch >= self._view.max_requests:
            return False
        # Pages that running requests and batch work will soon need.
        spare = SPARE_PAGES * len(self.requests) + num_batch
        # One sequence may exceed the share; otherwise a long prompt could never run.
        fits = num_held + request.num_pages <= self._batch_pages or not num_batch
        return fits and request.num_pages + spare <= num_free

    def _num_batch_pages(self) -> int:
        """Return the pages that batch work has, with those of its next rows."""
        return sum([each.num_held + each.num_pages for each in self.batch])

    def _add_batch(self, request: RequestProgress) -> None:
        """Admit one request of batch work."""
        self.free -= request.num_pages
        self.batch.append(request)
        self.admit.append(request.id)

    def begin_packs(
        self,
        jobs: Sequence[JobProgress] | None = None,
        pack_s: Callable[[JobProgress], float] | None = None,
        *,
        requests_first: bool = True,
    ) -> None:
        """Give jobs (default: the one served least first) the memory of their next packs, until
        packs in memory have enough rows, and as far as requests do not need it.

        Args:
            jobs: Jobs in the order in which they are served.
            pack_s: Function from a job to the seconds of its pack, until whose end running requests
                must find pages beside it.
            requests_first: Whether a waiting request keeps packs from beginning.
        """
        jobs = self._view.jobs if jobs is None else jobs
        if requests_first and self._requests_wait():
            return
        rows, full = self._rows_in_memory(), set[str]()
        for job in jobs:
            self.claimant, group = job.info.tenant, self._group_of(job)
            if group in full or (requests_first and self._keeps_others_waiting(job)):
                continue
            if job.phase == "update" and job.waited_s <= self._view.tpot_s:
                # Its next pack comes first, right after this step; unless the update finds no time.
                full.add(group)
                continue
            if job.phase != "pack":
                continue
            num_rows = rows.get(group, 0)
            if num_rows and num_rows + job.num_rows > ENOUGH_PACK_ROWS:
                full.add(group)  # in turn: smaller packs would keep a large one waiting for good
                continue
            seconds = pack_s(job) if pack_s is not None and self.requests else 0.0
            # A pack that has waited very long is begun though it might be dropped.
            until_s = seconds if job.waited_s < MAX_PACK_WAITS * seconds else 0.0
            spare = self._growth(max(until_s, self._view.give_back_s))
            if job.num_pages + spare > self.free:
                self._return_to_share(job.num_pages + spare)
            if job.num_pages + spare > self.free:
                continue
            rows[group] = num_rows + job.num_rows
            self.free -= job.num_pages
            self.begin.append(job.id)
            self.jobs.append(structs.replace(job, phase=job.begins_at))
        # Packs that have just begun were appended; they take their places in the order.
        if self.begin or jobs is not self._view.jobs:
            self.take_turns(jobs)

    def _requests_wait(self) -> bool:
        """Return whether no pack may begin, since a request waits for pages."""
        return (
            bool(self._view.waiting)
            and len(self.requests) < self._view.max_requests
            and bool(self._not_admitted())
        )

    def _keeps_others_waiting(self, job: JobProgress) -> bool:
        """Return whether this job may not begin a pack, though others may."""
        return False

    def _not_admitted(self) -> list[RequestProgress]:
        """Return the requests that could start and still wait."""
        admitted = set(self.admit)
        return [each for each in self._view.waiting if each.may_start and each.id not in admitted]

    def _group_of(self, job: JobProgress) -> str:
        """Return the group of jobs within which packs wait for one another: here all are one
        group.
        """
        return ""

    def _rows_in_memory(self) -> dict[str, int]:
        """Return the rows of the packs in memory, by group of jobs."""
        rows: dict[str, int] = {}
        for job in self.jobs:
            if job.phase != "update":
                group = self._group_of(job)
                rows[group] = rows.get(group, 0) + job.num_rows
        return rows

    def take_turns(self, jobs: Sequence[JobProgress]) -> None:
        """Order the jobs that can run as in `jobs`."""
        if len(self.jobs) < 2:
            return
        turns = {job.id: turn for turn, job in enumerate(jobs)}
        self.jobs.sort(key=lambda job: turns.get(job.id, len(turns)))

    def _growth(self, seconds: float) -> int:
        """Return the pages that running requests may take within this time; at least the spare
        ones.

        With the time T until pages are returned it follows HARLI's reserve (section 4.4), (T /
        TPOT) max_bs tokens. There it is kept at all times for as many requests as may ever run.
        Here it is required for a pack that is to begin, for the running requests, each up to its
        own end: once the pack is in memory they may take all of it.
        """
        pages, block = 0, self._view.block_tokens
        for request in self.requests:
            # Tokens within this time at the pace of the SLO.
            tokens = min(request.num_left, int(seconds / request.info.tpot_s) + 1)
            pages += max(min(SPARE_PAGES, -(-request.num_left // block)), -(-tokens // block))
        return pages

    def _reclaim(self, num_pages: int) -> bool:
        """Drop packs, those that lose least first, until as many pages are available. Returns
        whether any were dropped; drops none in vain.
        """
        packs = self._packs()
        if self.free + sum([job.num_pages for job in packs]) < num_pages:
            return False
        for job in packs:
            if self.free >= num_pages:
                break
            self.free += job.num_pages
            self.drop.append(job.id)
            self.jobs.remove(job)
        return bool(packs)

    def _spares(self, request: RequestProgress, num_rows: int, can_wait: CanWait) -> bool:
        """Return whether the pack that would be dropped first is worth more than these rows of a
        request that can wait.
        """
        packs = self._packs()
        return (
            bool(packs)
            and rows_lost(packs[0]) > PACK_WORTH * num_rows
            and can_wait(request, packs[0])
        )

    def _packs(self) -> list[JobProgress]:
        """Return the packs in memory, the one that loses least first."""
        return sorted([job for job in self.jobs if job.phase != "update"], key=rows_lost)

    def _youngest(self) -> RequestProgress:
        """Return the request that was admitted last, among those of least priority that arrived
        last.
        """
        # Reversed, since `max` returns the first of equals: that is the one admitted last.
        return max(
            reversed(self.requests),
            key=lambda running: (running.info.priority, running.info.arrival_s),
        )

    def _preempt(self, request: RequestProgress) -> None:
        self._is_short = True
        self.requests.remove(request)
        self._close(request)

    def _return_to_share(self, num_pages: int) -> None:
        """Have batch work beyond its share make room, if that frees as many pages."""
        held, given, kept = self._given(self.batch), 0, list(self.batch)
        while kept and held - given > self._batch_pages:
            given += kept.pop().num_held
        if self.free + given >= num_pages:
            while len(self.batch) > len(kept):
                self._close(self.batch.pop())

    def _given(self, items: Sequence[RequestProgress] | Sequence[JobProgress]) -> int:
        """Return the pages that are freed when these make room."""
        return sum(
            [each.num_pages if isinstance(each, JobProgress) else each.num_held for each in items]
        )

    def _preempt_batch(self, num_pages: int, *, slots: int = 0) -> None:
        """Have batch work make room, the latest first, until as many pages and slots are free, or
        none is left.
        """
        most = self._view.max_requests - len(self.requests) - slots
        while self.batch and (self.free < num_pages or len(self.batch) > most):
            request = self._last_of_batch()
            self.batch.remove(request)
            self._close(request)

    def _last_of_batch(self) -> RequestProgress:
        """Return the batch work that makes room first."""
        return self.batch[-1]

    def _close(self, request: RequestProgress) -> None:
        if request.id in self.admit:  # it has been admitted in this plan
            self.admit.remove(request.id)
            self.free += request.num_pages
            return
        self.free += request.num_held + self._grown.pop(request.id, 0)
        self.preempt.append(request.id)


def rows_lost(job: JobProgress) -> float:
    """Return the rows of a whole pass through the model that are lost if a job's pack is
    dropped.
    """
    num_parts = max(1, job.info.counts.num_parts)
    if job.phase == "forward":
        return job.num_rows - job.num_rows_left
    if job.phase == "loss":
        return job.num_rows
    # Parts done backward, the current one in proportion to its rows.
    parts_done = num_parts - job.num_parts_left + 1 - job.num_rows_left / job.num_rows
    return job.num_rows * (1 + max(0.0, parts_done) / num_parts)


def rows_to_go(job: JobProgress) -> float:
    """Return the rows of a whole pass that a pack in memory still has to run; inf if it is not in
    memory.
    """
    if job.phase == "pack":
        return inf
    return 2 * job.num_rows - rows_lost(job)

"""Memory of jobs: pages for their packs and for their optimizers' moments, on the device and on the
host.

A pack that gives way is dropped, or goes to the host. Moments lie in pages while nobody else needs
these; those of paused jobs go to the host, and come back before the job runs again. A job for whose
moments a device has no memory beside the pool (`TrainerOpened.moments_need_pages`) has a pack, and
makes an optimizer step, only while they lie in pages.
"""

from collections.abc import Callable, Iterable, Sequence

from coserve.devices.base import Clock
from coserve.devices.messages.jobs import DropPack, group_bytes
from coserve.devices.messages.pages import SwapInTensors, SwapOutTensors
from coserve.engine.command_log import CommandLog
from coserve.engine.host_swap import HostOwner, HostSwap
from coserve.engine.jobs.events import JobEvent
from coserve.engine.jobs.job import Job
from coserve.engine.jobs.pack import BegunPack
from coserve.engine.page_manager import MomentsNeed, PageManager
from coserve.errors import BudgetError
from coserve.memory.pages.pack_pages import PackPages
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.swapping import optimizer_swap_pays


class JobMemory:
    """Gives jobs on one device their memory, and takes it back."""

    def __init__(
        self,
        clock: Clock,
        log: CommandLog,
        pages: PageManager,
        swap: HostSwap,
        latency: LatencyModel,
        emit: Callable[[JobEvent], None],
    ) -> None:
        """Begin without jobs; emit: takes events."""
        self._clock = clock
        self._log = log
        self._pages = pages
        self._swap = swap
        self._latency = latency
        self._optimizers, self._emit = pages.cache.optimizers, emit

    # -- packs ----------------------------------------------------------------------

    def num_pack_pages(self, job: Job) -> int:
        """Return the number of pages of a job's pack in memory, or of its next one, with those of
        weights and moments that it needs; 0 without a pack.
        """
        place = job.progress.place
        if place is not None:
            held = place.pages if isinstance(place, BegunPack) else place
            return held.num_pages + self._num_other_pages(job)
        if (pack := job.next_pack) is None:
            return 0
        pages = job.pack_needs.group_pages(
            pack.num_rows, self._pages.pool.page_bytes, measures=job.progress.measures
        )
        return sum(pages) + self._num_other_pages(job)

    def begin_pack(self, job: Job, others: Iterable[Job]) -> bool:
        """Allocate the memory of a job's next pack, and have the device begin it. Returns False if
        it cannot be had now.

        Raises:
            DeviceMemoryError: there is no memory beside the pages; nothing is allocated.
        """
        other_model, pack = job.costs.other, job.next_pack
        if pack is None or _waits_for_another(job, others):
            return False
        needs, away, measures = job.pack_needs, job.progress.swapped, job.progress.measures
        sizes: Sequence[int | None]
        if away is not None:
            # A pack on the host may have released some of its groups already.
            sizes = away.group_pages
        else:
            sizes = needs.group_pages(pack.num_rows, self._pages.pool.page_bytes, measures=measures)
        window = None if other_model is None else self._pages.window_need(other_model)
        num_parts = needs.num_trained_parts(measures=measures)
        pages: PackPages | None = None
        try:
            pages = self._pages.take_pack(sizes, num_parts, window, self._moments_need(job))
            if away is not None:
                # The pack's bytes come first; `MovePack` then binds its tensors to these pages.
                self._log.execute(self._swap.command_to_bring_back_pack(job.id, pages.pages))
            self._log.execute(needs.command_to_begin(pack, pages, measures=measures, away=away))
            job.begin_pack(pages)
        except BaseException as error:
            # There are enough pages, but not side by side.
            if pages is None and isinstance(error, BudgetError):
                return False
            if pages is not None and job.progress.place is away:  # the pack was not booked
                pages.release()
            raise
        # Kept until here, so that an attempt that failed can be made again.
        self._swap.release_pack(job.id)
        return True

    def put_pack_away(self, job: Job) -> None:
        """Take the pages of a job's pack, which is copied to the host if that pays, and dropped
        otherwise.
        """
        begun = job.progress.begun
        assert begun is not None
        # Whether the copy pays depends on the rows that would be lost.
        seen = job.view(self._clock.now(), begun.pages.num_pages)
        if seen is not None and self._swap.keep_pack(seen, begun.pages.pages):
            job.swap_pack_out()
        else:
            self.drop_pack(job)

    def drop_pack(self, job: Job) -> None:
        """Discard a job's pack, in memory or on the host; it will be restarted."""
        self._swap.release_pack(job.id)
        job.drop_pack()
        self._log.send(DropPack(job.id))
        self._emit(job.event("pack_dropped", self._clock.now()))

    def _num_other_pages(self, job: Job) -> int:
        """Return the number of pages of weights and moments that a job needs beside a pack."""
        other, moments = job.costs.other, self._moments_need(job)
        num_pages = 0 if other is None else self._pages.window_need(other).min_pages
        return num_pages + (0 if moments is None else moments.num_pages)

    # -- moments --------------------------------------------------------------------

    def has_moments(self, job: Job) -> bool:
        """Return whether a job's moments lie where an optimizer step can use them."""
        return not job.costs.moments_need_pages or job.id in self._optimizers.runs

    def hold_moments(self, job: Job, *, for_pack: bool = False) -> None:
        """Decide whether others may have the pages of a job's moments now. for_pack: it is about to
        get a pack.
        """
        if job.costs.moments_need_pages:
            self._optimizers.hold(job.id, is_held=for_pack or job.has_pack or job.update_due)

    def place_moments(self, job: Job) -> None:
        """Allocate pages for a job's moments if they have none, and these can be had.

        Moments exist from the first step on. Those that need pages get them with a pack, or here
        for a step that is due.
        """
        costs = job.costs
        if job.is_terminal or job.id in self._optimizers.runs or not costs.optimizer_bytes:
            return
        # Moments that need pages get them here only for a due step. Others get none where a window
        # of weights has more use for the pages.
        if not job.update_due if costs.moments_need_pages else costs.other is not None:
            return
        num_pack_pages = 0
        # Moments that could lie elsewhere leave room for a pack of full size.
        if not costs.moments_need_pages:
            rows = job.config.pack_tokens
            num_pack_pages = sum(
                [self._pages.num_pages(group_bytes(group, rows)) for group in costs.training]
            )
        self._pages.place_optimizer(
            job.id,
            costs.optimizer_bytes,
            num_pack_pages=num_pack_pages,
            needs_pages=costs.moments_need_pages,
        )

    def put_moments_away(self, job: Job) -> None:
        """Swap the moments of a paused job to the host, if that pays and there is room; otherwise
        move them beside the pool.
        """
        if (slots := self._slots_for_moments(job)) is not None:
            # Booked first: the command stays in the log until the device has done it.
            job.set_optimizer_away(True)
            self._log.send(SwapOutTensors(job=job.id, slots=slots))
            self._optimizers.release(job.id)
        # Not swapped out: they lie beside the pool while the job is paused.
        if job.id in self._optimizers.runs:
            self._optimizers.withdraw(job.id)

    def bring_moments_back(self, job: Job) -> None:
        """Swap the moments of a job in, which is to run again.

        Raises:
            DeviceMemoryError: there is no room; they stay on the host.
        """
        # Pages first, if there are any, so that the moments come back to where they stay.
        self.place_moments(job)
        try:
            self._log.execute(SwapInTensors(job=job.id, slots=self._swap.tensor_slots(_owner(job))))
        except BaseException:
            self._optimizers.withdraw(job.id)
            raise
        job.set_optimizer_away(False)
        self._swap.note_tensors_back(_owner(job))

    def _slots_for_moments(self, job: Job) -> tuple[int, ...] | None:
        counts, num_bytes = job.costs.counts, job.costs.optimizer_bytes
        if job.optimizer_away or not self._swap.num_pages or not job.num_steps_done:
            return None
        if job.costs.moments_need_pages:
            return None  # they go to the host as they leave their pages
        if not optimizer_swap_pays(
            self._latency, counts, num_rows=job.num_rows_run, num_bytes=num_bytes
        ):
            return None
        return self._swap.keep_tensors(_owner(job), num_bytes)

    def _moments_need(self, job: Job) -> MomentsNeed | None:
        if not job.costs.moments_need_pages:
            return None
        return MomentsNeed(job.id, self._pages.num_pages(job.costs.optimizer_bytes))

    # -- the end --------------------------------------------------------------------

    def release(self, job: Job, others: Iterable[Job]) -> None:
        """Give back what a job that is over has on the host and in pages; its pack has gone with
        its end.
        """
        self._swap.release_pack(job.id)
        job.set_optimizer_away(False)
        self._swap.release_tensors(_owner(job))
        self._optimizers.release(job.id)
        # The window of weights goes with the last job on another model.
        if not any(other.costs.other and not other.is_terminal for other in others):
            self._pages.window.clear()


def _owner(job: Job) -> HostOwner:
    return "optimizer", job.id


def _waits_for_another(job: Job, others: Iterable[Job]) -> bool:
    """Return whether a pack of another job comes first.

    Of jobs that ran out of memory, only one at a time has a pack: what fails then is its own. So it
    is with jobs on other models, which would take the window of weights from one another.
    """
    fails, shares = job.progress.memory_failures.num_in_a_row > 0, job.costs.other is not None
    if not fails and not shares:
        return False
    packs = [other for other in others if other.has_pack]
    return any(
        (fails and other.progress.memory_failures.num_in_a_row) or (shares and other.costs.other)
        for other in packs
    )

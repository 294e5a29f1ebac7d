"""How packs of jobs come into memory, and leave it before they are done: dropped, or for the host."""

from collections.abc import Callable, Iterable

from coserve.devices.job_messages import DropPack
from coserve.engine.command_log import CommandLog
from coserve.engine.host_swap import HostSwap
from coserve.engine.jobs.job import Job
from coserve.engine.page_broker import MomentsNeed, PageBroker
from coserve.errors import BudgetError, DeviceMemoryError


class JobPacks:
    """The packs on one device; jobs know which is theirs."""

    def __init__(
        self,
        log: CommandLog,
        pages: PageBroker,
        swap: HostSwap,
        *,
        on_drop: Callable[[Job], None],
        on_memory_error: Callable[[Job, str], None],
    ) -> None:
        """on_drop: told of packs that will be begun again. on_memory_error: of packs that could not begin, with the
        device's reason.
        """
        self._log, self._pages, self._swap = log, pages, swap
        self._on_drop, self._on_memory_error = on_drop, on_memory_error

    def num_pages(self, job: Job) -> int:
        """Of its pack in memory, or of its next one, and what it needs beside that; 0 without any."""
        if (pack_pages := job.packs.pages or job.packs.swapped) is not None:
            return pack_pages.num_pages + self._num_other_pages(job)
        pack = job.wants_pack
        if pack is None:
            return 0
        return sum(job.packs.group_pages(pack.num_rows, self._pages.pool.page_bytes)) + self._num_other_pages(job)

    def begin(self, job: Job, others: Iterable[Job]) -> bool:
        """Give a job the memory of its next pack; False, and it has none, if it cannot be had now."""
        other_model = job.costs.other
        if (pack := job.wants_pack) is None or _waits_for_another(job, others):
            return False
        away = job.packs.swapped
        whole = job.packs.group_pages(pack.num_rows, self._pages.pool.page_bytes)
        try:
            sizes = whole if away is None else away.group_pages
            window = None if other_model is None else self._pages.window_need(other_model)
            pages = self._pages.take_pack(sizes, job.packs.num_trained_parts, window, self._moments_need(job))
        except BudgetError:  # enough pages, but not side by side
            return False
        try:
            if away is not None:
                self._log.execute(self._swap.command_to_bring_back_pack(job.id, pages.pages))
            self._log.execute(job.packs.command_to_begin(pages))
        except DeviceMemoryError as error:  # no memory beside the pages
            pages.release()
            self._on_memory_error(job, str(error))
            return False
        except BaseException:
            pages.release()
            raise
        job.packs.begin(pages)
        self._swap.release_pack(job.id)
        return True

    def put_away(self, job: Job, now_s: float) -> None:
        """Take the pages of its pack, which goes to the host if that is worth it."""
        assert job.packs.pages is not None
        view = job.view(now_s, job.packs.pages.num_pages)
        if view is not None and self._swap.keep_pack(view, job.packs.pages.pages):
            job.packs.swap_out()
        else:
            self.drop(job)

    def drop(self, job: Job) -> None:
        """Its pack, in memory or on the host, is to be begun again."""
        self._swap.release_pack(job.id)
        job.drop_pack()
        self._log.send(DropPack(job.id))
        self._on_drop(job)

    def _moments_need(self, job: Job) -> MomentsNeed | None:
        if not job.costs.moments_need_pages:
            return None
        return MomentsNeed(job.id, self._pages.num_pages(job.costs.optimizer_bytes))

    def _num_other_pages(self, job: Job) -> int:
        """Of weights and moments, that it cannot have a pack without."""
        other, moments = job.costs.other, self._moments_need(job)
        num_pages = 0 if other is None else self._pages.window_need(other).least_pages
        return num_pages + (0 if moments is None else moments.num_pages)


def _waits_for_another(job: Job, others: Iterable[Job]) -> bool:
    """Of jobs that ran out of memory, one at a time has a pack: what fails then is its own. So it is with jobs on other
    models, which would take the window of weights from one another.
    """
    fails, shares = job.memory_failures.num_in_a_row > 0, job.costs.other is not None
    if not fails and not shares:
        return False
    packs = [other for other in others if other.has_pack]
    return any((fails and other.memory_failures.num_in_a_row) or (shares and other.costs.other) for other in packs)

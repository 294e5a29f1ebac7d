"""The optimizers of jobs: their moments lie in pages while nobody else needs these; those of paused jobs go to the
host, and come back before the job runs again.

A job for whose moments a device has no memory beside the pool (`TrainerOpened.moments_need_pages`) has a pack, and
makes an optimizer step, only while they lie in pages.
"""

from coserve.devices.job_messages import group_bytes
from coserve.devices.swap_messages import SwapInTensors, SwapOutTensors
from coserve.engine.command_log import CommandLog
from coserve.engine.host_swap import HostOwner, HostSwap
from coserve.engine.jobs.job import Job
from coserve.engine.page_broker import PageBroker
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.swapping import optimizer_swap_pays


class OptimizerSwap:
    """Jobs know whether theirs is away (`Job.optimizer_away`)."""

    def __init__(self, log: CommandLog, pages: PageBroker, swap: HostSwap, latency: LatencyModel) -> None:
        self._log, self._pages, self._swap, self._latency = log, pages, swap, latency

    def is_ready(self, job: Job) -> bool:
        """Whether its moments lie where a step can be made with them, if it had one to make."""
        return not job.costs.moments_need_pages or job.id in self._pages.cache.optimizers.runs

    def hold(self, job: Job, *, for_pack: bool = False) -> None:
        """Note whether others can have its pages now. for_pack: it is to get a pack."""
        if job.costs.moments_need_pages:
            self._pages.cache.optimizers.hold(job.id, is_held=for_pack or job.has_pack or job.update_due)

    def place(self, job: Job) -> None:
        """Pages for its moments, which it has from its first step on, if it has none, and they can be had. Those that
        need pages get them with a pack, or here for a step that is due.
        """
        optimizers, costs = self._pages.cache.optimizers, job.costs
        if job.is_terminal or job.id in optimizers.runs or not costs.optimizer_bytes:
            return
        if not job.update_due if costs.moments_need_pages else costs.other is not None:
            return
        num_pack_pages = 0
        if not costs.moments_need_pages:
            rows = job.config.pack_tokens
            num_pack_pages = sum([self._pages.num_pages(group_bytes(group, rows)) for group in costs.training])
        self._pages.place_optimizer(
            job.id, costs.optimizer_bytes, num_pack_pages=num_pack_pages, needs_pages=costs.moments_need_pages
        )

    def put_away(self, job: Job) -> None:
        """A job rests: to the host, if it has moments, that pays, and there is room; else beside the pool."""
        self._put_on_host(job)
        if job.id in self._pages.cache.optimizers.runs:
            self._pages.cache.optimizers.withdraw(job.id)

    def _put_on_host(self, job: Job) -> None:
        counts, num_bytes = job.costs.counts, job.costs.optimizer_bytes
        if job.optimizer_away or not self._swap.num_pages or not job.num_steps_done:
            return
        if job.costs.moments_need_pages:
            return  # they go to the host as they leave their pages
        if not optimizer_swap_pays(self._latency, counts, num_rows=job.num_rows_run, num_bytes=num_bytes):
            return
        if (slots := self._swap.keep_tensors(_owner(job), num_bytes)) is not None:
            job.optimizer_away = True
            self._log.send(SwapOutTensors(job=job.id, slots=slots))
            self._pages.cache.optimizers.release(job.id)

    def bring_back(self, job: Job) -> None:
        """It is to run again; nothing if its optimizer is there. DeviceMemoryError: it is not yet."""
        if job.optimizer_away:
            self.place(job)
            try:
                self._log.execute(SwapInTensors(job=job.id, slots=self._swap.tensor_slots(_owner(job))))
            except BaseException:
                self._pages.cache.optimizers.withdraw(job.id)
                raise
            job.optimizer_away = False
            self._swap.note_tensors_back(_owner(job))

    def let_go(self, job: Job) -> None:
        """It is over."""
        job.optimizer_away = False
        self._swap.release_tensors(_owner(job))
        self._pages.cache.optimizers.release(job.id)


def _owner(job: Job) -> HostOwner:
    return "optimizer", job.id

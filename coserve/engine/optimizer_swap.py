"""The optimizers of paused jobs: their moments go to the host, and come back before the job runs again."""

from coserve.devices.base import Device
from coserve.devices.swap_messages import SwapInTensors, SwapOutTensors
from coserve.engine.host_swap import HostOwner, HostSwap
from coserve.engine.job import Job
from coserve.engine.owed_commands import OwedCommands
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.swapping import optimizer_swap_pays


class OptimizerSwap:
    """Jobs know whether theirs is away (`Job.optimizer_away`)."""

    def __init__(self, device: Device, swap: HostSwap, owed: OwedCommands, latency: LatencyModel) -> None:
        self._device, self._swap, self._owed, self._latency = device, swap, owed, latency

    def put_away(self, job: Job) -> None:
        """A job rests: to the host, if its optimizer has moments, that pays, and there is room."""
        counts, num_bytes = job.costs.counts, job.costs.optimizer_bytes
        if job.optimizer_away or not self._swap.num_pages or not job.num_steps_done:
            return
        if not optimizer_swap_pays(self._latency, counts, num_rows=job.num_rows_run, num_bytes=num_bytes):
            return
        if (slots := self._swap.keep_tensors(_owner(job), num_bytes)) is not None:
            job.optimizer_away = True
            self._owed.add(SwapOutTensors(job=job.id, slots=slots))

    def bring_back(self, job: Job) -> None:
        """It is to run again; nothing if its optimizer is there. DeviceMemoryError: it is not yet."""
        if job.optimizer_away:
            self._device.execute(SwapInTensors(job=job.id, slots=self._swap.tensor_slots(_owner(job))))
            job.optimizer_away = False
            self._swap.note_tensors_back(_owner(job))

    def let_go(self, job: Job) -> None:
        """It is over."""
        job.optimizer_away = False
        self._swap.release_tensors(_owner(job))


def _owner(job: Job) -> HostOwner:
    return "optimizer", job.id

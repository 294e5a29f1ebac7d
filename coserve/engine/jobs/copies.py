"""Copies of jobs' tensors on the device: checkpoints, and contributions to other nodes."""

from coserve.devices.base import Device
from coserve.devices.job_messages import TakeCheckpoint, TakeContribution
from coserve.engine.command_log import CommandLog
from coserve.engine.jobs.checkpoint import Checkpoint, TakenCopy
from coserve.engine.jobs.job import Job
from coserve.errors import JobError


class JobCopies:
    """Takes them."""

    def __init__(self, device: Device, log: CommandLog) -> None:
        self._device, self._log = device, log
        self._num_taken = 0

    def checkpoint(self, job: Job) -> Checkpoint:
        """See `EngineCore.checkpoint`. Of a job whose nodes each go their own way: as it was when they last met;
        JobError if they have not.
        """
        if job.checkpoint_step is None:
            raise JobError(f"the nodes of job {job.id!r} have not met yet: it has no state to be kept")
        if job.exchange is not None and job.exchange.common is not None:
            return job.exchange.common
        return self.now(job)

    def now(self, job: Job) -> Checkpoint:
        """As it is on this node, after its last whole optimizer step."""
        taken = self._new_copy(job)  # first, so that the copy goes with it in any case
        self._log.execute(TakeCheckpoint(job.id, taken.id))
        return Checkpoint(position=job.position(), state=taken)

    def contribution(self, job: Job) -> TakenCopy:
        """Take what the other nodes of a job are to have.

        Gradients can be taken once: until their combination comes, a caller that asks again gets the same copy, which
        the device takes unless it has.
        """
        exchange = job.exchange
        assert exchange is not None
        if exchange.taking is None:
            exchange.taking = self._new_copy(job)
        self._log.execute(TakeContribution(job.id, exchange.taking.id))
        return exchange.taking

    def _new_copy(self, job: Job) -> TakenCopy:
        self._num_taken += 1
        return TakenCopy(self._device, f"{job.id}/{self._num_taken - 1}", self._log.send)

"""Copies of jobs' tensors on the device: checkpoints, and contributions to other nodes."""

from collections.abc import Callable

from coserve.devices.base import Device
from coserve.devices.job_messages import TakeCheckpoint, TakeContribution
from coserve.devices.messages import Command
from coserve.engine.checkpoint import Checkpoint, TakenCopy
from coserve.engine.job import Job
from coserve.engine.owed_commands import OwedCommands
from coserve.errors import JobError


class JobCopies:
    """Takes them."""

    def __init__(self, device: Device, owed: OwedCommands, send: Callable[[Command], None]) -> None:
        """owed: what the device must do, shared with others. send: has the device do a command with the next step."""
        self._device, self._owed, self._send = device, owed, send
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
        return Checkpoint(position=job.position(), state=self._take(job, TakeCheckpoint))

    def contribution(self, job: Job) -> TakenCopy:
        """What the other nodes of a job are to have."""
        return self._take(job, TakeContribution)

    def _take(self, job: Job, kind: type[TakeCheckpoint | TakeContribution]) -> TakenCopy:
        copy = f"{job.id}/{self._num_taken}"
        self._num_taken += 1
        taken = TakenCopy(self._device, copy, self._send)  # first, so that the copy goes with it in any case
        self._owed.settle()
        self._device.execute(kind(job.id, copy))
        return taken

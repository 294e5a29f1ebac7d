"""What jobs that are divided among nodes give to the others, and take of them; where each stands is `exchange.py`."""

from collections.abc import Callable

from coserve.devices.base import Device
from coserve.devices.job_messages import CombineContributions
from coserve.engine.job import Job, JobEvent
from coserve.engine.job_copies import JobCopies
from coserve.engine.job_milestones import JobMilestones


class JobExchange:
    """Of the jobs on one device."""

    def __init__(
        self, device: Device, copies: JobCopies, milestones: JobMilestones, emit: Callable[[JobEvent], None]
    ) -> None:
        self._device, self._copies, self._milestones, self._emit = device, copies, milestones, emit

    def take_part(self, job: Job) -> None:
        """Contribute what is due, and take in what has come."""
        exchange = job.exchange
        if exchange is None or job.is_terminal:
            return
        if job.gradients_due:
            self.contribute(job)
        found = exchange.combination
        if found is None or job.state != "running" or job.optimizer_away:
            return
        number = len(found.directories)
        if not exchange.shard.gives_gradients and found.version is not None and not exchange.meets:
            self._combine(job, found.num_in_version)
            number -= found.num_in_version
            if job.config.live:
                self._milestones.publish(job, transient=True, step=found.version)
        if number and not job.is_terminal:
            self._combine(job, number)
        exchange.end(found)
        if not exchange.shard.gives_gradients and exchange.meets:
            exchange.common = self._copies.now(job) if exchange.shard.index == 0 else None

    def contribute(self, job: Job) -> None:
        """Tell that a contribution is due."""
        assert job.exchange is not None
        job.exchange.begin(job.num_steps_done)
        self._emit(job.event("contribution", self._device.clock.now()))

    def _combine(self, job: Job, number: int) -> None:
        assert job.exchange is not None
        self._device.execute(CombineContributions(job.id, number, meets=job.exchange.meets))
        if not job.exchange.shard.gives_gradients:
            self._milestones.note_change(job)

"""What jobs that are divided among nodes give to the others, and take of them; where each stands is `exchange.py`."""

from collections.abc import Callable

from coserve.devices.base import Clock
from coserve.devices.job_messages import CombineContributions
from coserve.engine.command_log import CommandLog
from coserve.engine.job import Job, JobEvent
from coserve.engine.job_copies import JobCopies
from coserve.engine.job_milestones import JobMilestones


class JobExchange:
    """Of the jobs on one device."""

    def __init__(
        self,
        clock: Clock,
        log: CommandLog,
        copies: JobCopies,
        milestones: JobMilestones,
        emit: Callable[[JobEvent], None],
    ) -> None:
        self._clock, self._log, self._copies, self._milestones, self._emit = clock, log, copies, milestones, emit

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
        if not exchange.shard.gives_gradients and found.version is not None and not exchange.meets:
            self._combine(job, found.num_in_version - exchange.num_combined)
            if job.config.live and exchange.num_combined == found.num_in_version:
                self._milestones.publish(job, transient=True, step=found.version)
        if not job.is_terminal:
            self._combine(job, len(found.directories) - exchange.num_combined)
        exchange.end(found)
        if not exchange.shard.gives_gradients and exchange.meets:
            exchange.common = self._copies.now(job) if exchange.shard.index == 0 else None

    def contribute(self, job: Job) -> None:
        """Tell that a contribution is due."""
        assert job.exchange is not None
        job.exchange.begin(job.num_steps_done)
        self._emit(job.event("contribution", self._clock.now()))

    def _combine(self, job: Job, number: int) -> None:
        """Take in the next contributions, once: a caller that was interrupted continues with those after them."""
        if number <= 0:
            return
        assert job.exchange is not None
        self._log.send(CombineContributions(job.id, number, meets=job.exchange.meets))
        job.exchange.num_combined += number
        if not job.exchange.shard.gives_gradients:
            self._milestones.note_change(job)
        self._log.flush()

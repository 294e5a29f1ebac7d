"""What jobs that are divided among nodes give to the others, and take of them; where each stands is `exchange.py`."""

from collections.abc import Callable

from coserve.devices.base import Clock
from coserve.devices.job_messages import CombineContributions
from coserve.engine.command_log import CommandLog
from coserve.engine.jobs.copies import JobCopies
from coserve.engine.jobs.endings import JobEndings
from coserve.engine.jobs.events import JobEvent
from coserve.engine.jobs.job import Job
from coserve.engine.jobs.milestones import JobMilestones
from coserve.errors import DeviceMemoryError
from coserve.tuning.shard import Combination


class JobExchange:
    """Of the jobs on one device."""

    def __init__(
        self,
        clock: Clock,
        log: CommandLog,
        copies: JobCopies,
        milestones: JobMilestones,
        endings: JobEndings,
        emit: Callable[[JobEvent], None],
    ) -> None:
        self._clock, self._log, self._copies, self._emit = clock, log, copies, emit
        self._milestones, self._endings = milestones, endings

    def take_part(self, job: Job) -> None:
        """Contribute what is due, and take in what has come."""
        exchange = job.exchange
        if exchange is None or job.is_terminal:
            return
        if job.gradients_due:
            self.contribute(job)
        found = exchange.combination
        if found is None or job.state != "running" or job.optimizer_away or job.memory_failures.num_turns:
            return
        try:
            self._take_in(job, found)
        except DeviceMemoryError as error:
            self._endings.note_memory_failure(job, str(error))

    def _take_in(self, job: Job, found: Combination) -> None:
        exchange = job.exchange
        assert exchange is not None
        if not exchange.shard.gives_gradients and found.version is not None and not exchange.meets:
            self._combine(job, found.num_in_version - exchange.num_combined)
            if job.config.live and exchange.num_combined == found.num_in_version:
                self._milestones.publish(job, transient=True, step=found.version)
        if not job.is_terminal:
            self._combine(job, len(found.directories) - exchange.num_combined)
        if not exchange.shard.gives_gradients and exchange.meets:
            # Before the end: without memory for it all this comes again.
            exchange.common = self._copies.now(job) if exchange.shard.index == 0 else None
        exchange.end(found)

    def contribute(self, job: Job) -> None:
        """Tell that a contribution is due."""
        assert job.exchange is not None
        job.exchange.begin(job.num_steps_done)
        self._emit(job.event("contribution", self._clock.now()))

    def _combine(self, job: Job, number: int) -> None:
        """Take in the next contributions, once: a caller that was interrupted asks the device again, which knows.

        Raises:
            DeviceMemoryError: Nothing has been taken in.
        """
        if number <= 0:
            return
        exchange = job.exchange
        assert exchange is not None
        up_to = exchange.num_taken_in + number
        self._log.execute(CombineContributions(job.id, up_to, meets=exchange.meets))
        exchange.num_taken_in = up_to
        if not exchange.shard.gives_gradients:
            self._milestones.note_change(job)

"""How jobs end, and what goes back with them."""

from collections.abc import Callable, Mapping

from coserve.devices.base import Clock
from coserve.devices.job_messages import CloseTrainer
from coserve.engine.command_log import CommandLog
from coserve.engine.host_swap import HostSwap
from coserve.engine.jobs.answers import Answers
from coserve.engine.jobs.events import EventKind, JobEvent
from coserve.engine.jobs.job import Job
from coserve.engine.jobs.optimizer_swap import OptimizerSwap
from coserve.engine.page_broker import PageBroker
from coserve.scheduling.fairness import TokenCounters


class JobEndings:
    """Of the jobs on one device."""

    def __init__(
        self,
        clock: Clock,
        pages: PageBroker,
        swap: HostSwap,
        counters: TokenCounters,
        *,
        log: CommandLog,
        optimizers: OptimizerSwap,
        answers: Answers,
        emit: Callable[[JobEvent], None],
        jobs: Mapping[str, Job],
    ) -> None:
        """jobs: all that there are, now and later."""
        self._clock, self._pages, self._swap, self._counters = clock, pages, swap, counters
        self._log, self._optimizers, self._answers, self._emit, self._jobs = log, optimizers, answers, emit, jobs

    def end(self, job: Job, state: EventKind, *, message: str = "") -> None:
        """It is over, and the device lets go of what it has of it."""
        assert state in ("succeeded", "failed", "cancelled")
        if job.state == "running":
            self._counters.leave(job.tenant)
        job.end(state)
        self._answers.cancel(job)
        self._swap.release_pack(job.id)
        self._optimizers.let_go(job)
        if not any(other.costs.other and not other.is_terminal for other in self._jobs.values()):
            self._pages.window.clear()
        self._log.send(CloseTrainer(job.id))
        self._emit(job.event(state, self._clock.now(), message=message))

    def fail(self, job: Job, message: str) -> None:
        """It ends with this reason."""
        job.error = message
        self.end(job, "failed", message=message)

    def note_memory_failure(self, job: Job, message: str, num_rows: int | None = None) -> None:
        """The device had no memory for it: it is held back for some turns, or fails if that was once too often.
        num_rows: of its largest piece then.
        """
        job.memory_failures.note_failure(num_rows)
        if job.memory_failures.too_many:
            self.fail(job, job.memory_failures.reason(message))

"""What steps bring to jobs: rows that have run, packs and optimizer steps that are done, or a failure."""

from collections.abc import Callable, Mapping

from coserve.devices.step_messages import StepBatch, StepResult
from coserve.engine.jobs.endings import JobEndings
from coserve.engine.jobs.events import JobEvent
from coserve.engine.jobs.exchanges import JobExchange
from coserve.engine.jobs.job import Job
from coserve.engine.jobs.memory import JobPacks
from coserve.engine.jobs.milestones import JobMilestones
from coserve.engine.jobs.step_shares import joined_jobs, largest_pieces, shares_of_time
from coserve.engine.records import WindowUse
from coserve.scheduling.fairness import TokenCounters


class JobSteps:
    """Of the jobs on one device. window_use: what came of the window of weights so far."""

    def __init__(
        self,
        jobs: Mapping[str, Job],
        packs: JobPacks,
        counters: TokenCounters,
        *,
        endings: JobEndings,
        milestones: JobMilestones,
        exchange: JobExchange,
        emit: Callable[[JobEvent], None],
    ) -> None:
        """jobs: all that there are, now and later."""
        self._jobs, self._packs, self._counters = jobs, packs, counters
        self._endings, self._milestones, self._exchange, self._emit = endings, milestones, exchange, emit
        self.window_use = WindowUse()

    def apply(self, batch: StepBatch, result: StepResult, *, started_s: float, now_s: float) -> None:
        """A step has run; started_s: when it began."""
        jobs = self._jobs
        for job_id, seconds in shares_of_time(batch, result).items():
            jobs[job_id].count_seconds(started_s, **seconds)
        for update in batch.updates:
            self._book_update(jobs[update.job], result.norms[update.job], now_s)
        for window in batch.windows:
            jobs[window.job].packs.run_window(window)
        for piece in batch.losses:
            jobs[piece.job].packs.run_loss(piece)
        for tasklets in batch.tasklets:
            jobs[tasklets.job].packs.run_tasklets(tasklets, result.num_tasklets[tasklets.job])
        for job_id, group in joined_jobs(batch, result).items() if batch.tasklets else ():
            jobs[job_id].joined = group
        self.window_use.add(result)
        for job_id, message in result.broken.items():
            self._endings.fail(jobs[job_id], message)
        for job_id in largest_pieces(batch):
            job = jobs[job_id]
            if not job.is_terminal:
                self._counters.charge(job.tenant, tuning=job.count_rows(now_s))
        for job_id, sums in result.packs.items():
            job = jobs[job_id]
            if not job.finish_pack(sums):
                continue
            if job.questions:
                job.answers_due = True
            else:
                self._milestones.finish_evaluation(job, {})

    def recover(self, batch: StepBatch, result: StepResult, now_s: float) -> bool:
        """See `JobSet.recover`."""
        assert result.failure is not None
        for job_id, norm in result.norms.items():
            self._book_update(self._jobs[job_id], norm, now_s)
        if result.failure.broken_update is not None:
            job = self._jobs[result.failure.broken_update]
            self._endings.fail(job, f"out of memory within an optimizer step: {result.failure.message}")
        largest = largest_pieces(batch)
        moved = [job for job_id in largest if (job := self._jobs[job_id]).has_pack]
        for job in moved:
            self._packs.drop(job)
            self._endings.note_memory_failure(job, result.failure.message, largest[job.id])
        return bool(moved) or bool(batch.updates)

    def abandon(self, batch: StepBatch, error: BaseException) -> None:
        """The device failed: the step's packs and updates are in an unknown state. All else is as it was."""
        for update in batch.updates:
            self._endings.fail(self._jobs[update.job], f"the device failed within an optimizer step: {error!r}")
        for job_id in largest_pieces(batch):
            if (job := self._jobs[job_id]).has_pack:
                self._packs.drop(job)

    def _book_update(self, job: Job, norm: float | None, now_s: float) -> None:
        self._milestones.note_change(job)
        self._emit(job.finish_update(norm, now_s))
        if job.error is not None:
            self._endings.fail(job, job.error)
        elif job.exchange is not None and job.exchange.finish_update(job.num_steps_done):
            self._exchange.contribute(job)

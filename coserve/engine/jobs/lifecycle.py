"""Lifecycle of jobs: steps that have run, and what follows from them (contributions, versions,
evaluations, ends).

What has happened is booked first, in one assignment to `Job.progress`; what follows from it is due
until it has been done. A caller can be interrupted in any command to the device: `follow` then does
the rest when it is called again.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from msgspec.structs import replace

from coserve.devices.base import Device
from coserve.devices.messages.jobs import CloseTrainer, CombineContributions, TakeContribution
from coserve.devices.messages.steps import StepBatch, StepResult
from coserve.engine.command_log import CommandLog
from coserve.engine.jobs.answers import Answers
from coserve.engine.jobs.checkpoint import Checkpoint, DeviceCopies, DeviceCopy
from coserve.engine.jobs.events import JobEvent
from coserve.engine.jobs.job import Job
from coserve.engine.jobs.memory import JobMemory
from coserve.engine.jobs.pack import BegunPack
from coserve.engine.jobs.progress import Exchange, JobEnd
from coserve.engine.records import WindowUse
from coserve.engine.served_adapters import ServedAdapters
from coserve.errors import DeviceMemoryError, JobError
from coserve.scheduling.fairness import TokenCounters
from coserve.tuning.shard import Combination


class JobLifecycle:
    """Advances the jobs on one device from one optimizer step to the next, and to their ends."""

    def __init__(
        self,
        device: Device,
        memory: JobMemory,
        adapters: ServedAdapters,
        counters: TokenCounters,
        *,
        log: CommandLog,
        answers: Answers,
        emit: Callable[[JobEvent], None],
        jobs: Mapping[str, Job],
    ) -> None:
        """Begin with nothing due.

        Args:
            answers: Answers to validation sets.
            emit: Takes events.
            jobs: All jobs, now and later.
        """
        self._clock = device.clock
        self._memory = memory
        self._adapters = adapters
        self._counters = counters
        self._log, self._answers, self._emit, self._jobs = log, answers, emit, jobs
        self._copies = DeviceCopies(device, log)
        self.window_use = WindowUse()
        """What came of the window of weights so far."""

    # -- what a step brought ----------------------------------------------------------

    def apply(
        self, batch: StepBatch, result: StepResult, *, started_s: float, now_s: float
    ) -> None:
        """Apply the result of a step to its jobs. started_s: when the step began."""
        jobs = self._jobs
        for job_id, seconds in shares_of_time(batch, result).items():
            jobs[job_id].count_seconds(started_s, seconds)
        for update in batch.updates:
            self._finish_update(jobs[update.job], result.norms[update.job], now_s)
        for window in batch.windows:
            _begun(jobs[window.job]).run_window(window)
        for piece in batch.losses:
            _begun(jobs[piece.job]).run_loss(piece)
        for tasklets in batch.tasklets:
            _begun(jobs[tasklets.job]).run_tasklets(tasklets, result.num_tasklets[tasklets.job])
        for job_id, group in joined_jobs(batch, result).items() if batch.tasklets else ():
            jobs[job_id].set_joined(group)
        self.window_use.add(result)
        # These jobs' weights can no longer be read from their files.
        for job_id, message in result.broken.items():
            self.end(jobs[job_id], "failed", message)
        # Before packs are finished: counting rows needs the pack in memory.
        for job_id in largest_pieces(batch):
            job = jobs[job_id]
            if not job.is_terminal:
                self._counters.charge(job.tenant, tuning=job.count_rows(now_s))
        for job_id, sums in result.packs.items():
            job = jobs[job_id]
            job.finish_pack(sums)
            if job.progress.stage == "answers" and not job.questions:
                self._finish_evaluation(job, {})

    def recover(self, batch: StepBatch, result: StepResult, now_s: float) -> bool:
        """Apply a step that ran out of memory. Returns whether this freed something.

        Optimizer steps that were made stand; one that was under way fails its job. Packs that took
        part are dropped, and their jobs are held back for some turns, or fail if that was once too
        often.
        """
        assert result.failure is not None
        for job_id, norm in result.norms.items():
            self._finish_update(self._jobs[job_id], norm, now_s)
        if result.failure.broken_update is not None:
            job = self._jobs[result.failure.broken_update]
            self.end(
                job, "failed", f"out of memory within an optimizer step: {result.failure.message}"
            )
        largest = largest_pieces(batch)
        moved = [job for job_id in largest if (job := self._jobs[job_id]).has_pack]
        for job in moved:
            self._memory.drop_pack(job)
            self.hold_back(job, result.failure.message, largest[job.id])
        return bool(moved) or bool(batch.updates)

    def abandon(self, batch: StepBatch, error: BaseException) -> None:
        """Give up a step that the device failed in, or that was not applied completely: its packs,
        and its updates that were not booked, are in an unknown state. All else is as it was.
        """
        # A step that is still due was not booked, and may have changed some of the parameters.
        for update in batch.updates:
            if (job := self._jobs[update.job]).update_due:
                self.end(job, "failed", f"the device failed within an optimizer step: {error!r}")
        for job_id in largest_pieces(batch):
            if (job := self._jobs[job_id]).has_pack:
                self._memory.drop_pack(job)

    def _finish_update(self, job: Job, norm: float | None, now_s: float) -> None:
        self.note_change(job)
        self._emit(job.finish_update(norm, now_s))
        if job.error is not None:
            self.end(job, "failed", job.error)
        self._contribute(job)

    # -- what follows -----------------------------------------------------------------

    def follow(self, job: Job) -> None:
        """Do what is due for a job, as far as it can be done now."""
        if job.exchange is not None:
            self._contribute(job)
            self._combine(job)
        # Versions and evaluations wait for the combination, which is still to change the values.
        waits = job.exchange is not None and job.exchange.is_waiting
        if job.progress.stage == "after_step" and not job.is_terminal and not waits:
            self._follow_update(job)
        if job.progress.stage == "answers" and job.state == "running":
            self._follow_evaluation(job)

    def note_change(self, job: Job) -> None:
        """Note that the trained values have changed, which matters to requests if the job trains
        the model that serves.
        """
        self._adapters.versions.num_model_changes += job.costs.changes_model

    def serve_again(self, job: Job) -> None:
        """Publish at once what a live job resumes from; its event was reported when it was first
        published.

        Without room, its next step publishes, or reports the lack. A divided job publishes where
        its nodes meet.
        """
        if job.config.live and job.num_steps_done and job.exchange is None:
            with suppress(DeviceMemoryError):
                self._adapters.publish(
                    job.id,
                    job.name,
                    job.num_steps_done,
                    costs=job.costs,
                    transient=True,
                    model=job.model,
                )

    def _follow_update(self, job: Job) -> None:
        """Publish a version, evaluate unless that was done, and turn to the next step."""
        step, config = job.num_steps_done, job.config
        last = step == job.order.num_steps
        if job.exchange is not None and not job.exchange.holds_what_all_hold(step):
            pass  # values that only this node has are not published
        elif config.live:
            self._publish(job, transient=not last)
        elif last or (config.publish_every_steps and step % config.publish_every_steps == 0):
            self._publish(job)
        if job.is_terminal:
            return
        due = last or (config.evaluate_every_steps and step % config.evaluate_every_steps == 0)
        if not (due and not job.progress.is_evaluated and job.start_evaluation()):
            self._next_step(job)

    def _follow_evaluation(self, job: Job) -> None:
        """Ask the questions of a job's validation set, or continue if they are answered."""
        if not job.questions:
            self._finish_evaluation(job, {})
            return
        try:
            self._answers.begin(job)
        except DeviceMemoryError as error:
            message = (
                f"out of memory where {job.name}@{job.num_steps_done} was to be evaluated: {error}"
            )
            self.end(job, "failed", message)
            return
        if (metrics := self._answers.found(job)) is not None:
            self._finish_evaluation(job, metrics)

    def _finish_evaluation(self, job: Job, answers: Mapping[str, float]) -> None:
        """Complete an evaluation. answers: metrics of the answers to its questions."""
        self._emit(job.finish_evaluation(self._clock.now(), answers))
        self._next_step(job)

    def _next_step(self, job: Job) -> None:
        """Begin the next optimizer step, or end the job after its last step or where it stops
        early.
        """
        if job.stops_early and job.num_steps_done < job.order.num_steps:
            self._publish(job)  # the served version is the job's result
            if not job.is_terminal:
                self.end(job, "succeeded")
        elif not job.start_step():
            self.end(job, "succeeded")

    def _publish(self, job: Job, *, transient: bool = False, step: int | None = None) -> None:
        """Publish the job's adapter as it is. step: mean number of steps of the nodes, where that
        is not the job's own.
        """
        step = job.num_steps_done if step is None else step
        try:
            version = self._adapters.publish(
                job.id, job.name, step, costs=job.costs, transient=transient, model=job.model
            )
        except DeviceMemoryError as error:
            self.end(
                job, "failed", f"out of memory where {job.name}@{step} was to be kept: {error}"
            )
            return
        self._emit(job.event("version", self._clock.now(), version=version.label))

    # -- other nodes ------------------------------------------------------------------

    def checkpoint(self, job: Job) -> Checkpoint:
        """Return a copy of a job after its last whole optimizer step. Where its nodes each go their
        own way, it is the copy made when they last met.

        Raises:
            JobError: the nodes have not met yet.
        """
        if job.progress.checkpoint_step is None:
            raise JobError(
                f"the nodes of job {job.id!r} have not met yet: it has no state to be kept"
            )
        if job.exchange is not None and job.exchange.common is not None:
            return job.exchange.common
        return self._copies.checkpoint(job.id, job.position())

    def contribution(self, job: Job) -> DeviceCopy:
        """Return a copy of what the other nodes of a job are to have.

        Gradients can be taken once: until their combination comes, further calls return the same
        copy, which the device takes unless it has.
        """
        exchange = job.exchange
        assert exchange is not None
        # Booked before it is taken, so that a repeated call takes the same copy.
        if (copy := exchange.taking) is None:
            copy = self._copies.new(job.id)
            job.set_exchange(replace(exchange, taking=copy))
        self._log.execute(TakeContribution(job.id, copy.id))
        return copy

    def _contribute(self, job: Job) -> None:
        """Emit an event if a contribution is due."""
        if job.progress.contribution_due:
            assert job.exchange is not None
            job.set_exchange(job.exchange.begin(job.num_steps_done))
            self._emit(job.event("contribution", self._clock.now()))

    def _combine(self, job: Job) -> None:
        """Apply the nodes' contributions, if they have come and the job can run."""
        assert job.exchange is not None
        combination = job.exchange.combination
        if (
            combination is None
            or job.state != "running"
            or job.optimizer_away
            or job.progress.memory_failures.num_turns
        ):
            return
        try:
            self._take_in_all(job, combination)
        except DeviceMemoryError as error:
            self.hold_back(job, str(error))

    def _take_in_all(self, job: Job, combination: Combination) -> None:
        exchange = job.exchange
        assert exchange is not None
        gives_gradients, meets = exchange.shard.gives_gradients, exchange.meets
        # A live job publishes the state that all nodes have in common, before the rest is applied.
        if not gives_gradients and combination.version is not None and not meets:
            exchange = self._take_in(job, combination.num_in_version)
            if job.config.live and exchange.num_combined == combination.num_in_version:
                self._publish(job, transient=True, step=combination.version)
        if not job.is_terminal:
            exchange = self._take_in(job, len(combination.directories))
        common = exchange.common
        if not gives_gradients and meets:
            # Copied before `end`: without memory for it, all of this is done again. Only the first
            # node writes checkpoints, so the others keep no copy.
            common = (
                self._copies.checkpoint(job.id, job.position())
                if exchange.shard.index == 0
                else None
            )
        job.set_exchange(exchange.end(combination, common))

    def _take_in(self, job: Job, number: int) -> Exchange:
        """Have the device apply this many contributions of the combination, and return the state of
        the exchange then.

        Each is applied once: after an interruption the command is repeated, and the device skips
        those that it has applied.

        Raises:
            DeviceMemoryError: nothing more has been applied.
        """
        exchange = job.exchange
        assert exchange is not None
        if number <= exchange.num_combined:
            return exchange
        up_to = exchange.num_before + number
        self._log.execute(CombineContributions(job.id, up_to, meets=exchange.meets))
        exchange = replace(exchange, num_taken_in=up_to)
        job.set_exchange(exchange)
        if not exchange.shard.gives_gradients:
            self.note_change(job)
        return exchange

    # -- ends -------------------------------------------------------------------------

    def hold_back(self, job: Job, message: str, num_rows: int | None = None) -> None:
        """Hold back a job for which the device had no memory, or fail it if that was once too
        often.

        Args:
            message: Error of the device.
            num_rows: Rows of its largest piece then.
        """
        job.set_memory_failures(job.progress.memory_failures.after_failure(num_rows))
        if job.progress.memory_failures.too_many:
            self.end(job, "failed", job.progress.memory_failures.reason(message))

    def end(self, job: Job, status: JobEnd, message: str = "") -> None:
        """End a job, and do what follows from its end. message: why it has failed."""
        job.end(status, message or None)
        self.follow_end(job)

    def follow_end(self, job: Job) -> None:
        """Do what follows from the end of a job, unless that was done: everything that it holds is
        given back.

        A caller that was interrupted calls again, so each statement but the last may run twice.
        """
        if not job.progress.end_due:
            return
        self._counters.leave(job.tenant, job.queue_item)
        self._answers.cancel(job)
        self._memory.release(job, self._jobs.values())
        self._log.send(CloseTrainer(job.id))
        self._emit(job.finish_end(self._clock.now()))


def _begun(job: Job) -> BegunPack:
    begun = job.progress.begun
    assert begun is not None, f"a step ran a pack of job {job.id}, which has none"
    return begun


# -- what a step was to each of its jobs ------------------------------------------------


def largest_pieces(batch: StepBatch) -> dict[str, int]:
    """Return the jobs whose packs advance in a step, with the rows of the largest piece of each."""
    num_rows: dict[str, int] = {}
    for pieces in (batch.windows, batch.losses, batch.tasklets):
        for piece in pieces:
            num_rows[piece.job] = max(piece.num_rows, num_rows.get(piece.job, 0))
    return num_rows


def joined_jobs(batch: StepBatch, result: StepResult) -> dict[str, frozenset[str]]:
    """Return the jobs whose tasklets have run, each with the jobs, itself included, whose tasklets
    were one batch of rows with its own.
    """
    groups: dict[int | str, list[str]] = {}
    for each in batch.tasklets:
        if result.num_tasklets[each.job]:
            groups.setdefault(each.job if each.group is None else each.group, []).append(each.job)
    return {job: frozenset(group) for group in groups.values() for job in group}


def shares_of_time(batch: StepBatch, result: StepResult) -> dict[str, dict[str, float]]:
    """Return each job's share of a step by rows: seconds by job and by section (fields of
    `StepSeconds`).
    """
    shares: dict[str, dict[str, float]] = {}
    # Time beside the forward pass counts as the kind of work that most of it is.
    loss_s, backward_s = (0.0, result.beside_s) if batch.tasklets else (result.beside_s, 0.0)
    if batch.windows:
        # Rows of requests bear their share of the forward pass, which no job is charged for.
        num_others = sum([len(rows.tokens) for rows in batch.requests])
        num_rows = [(piece.job, piece.num_rows) for piece in batch.windows]
        _share(shares, "forward_s", num_rows, result.forward_s, num_others)
    if batch.losses:
        num_rows = [(piece.job, piece.num_rows) for piece in batch.losses]
        _share(shares, "loss_s", num_rows, result.loss_s + loss_s)
    if batch.tasklets:
        num_rows = [
            (each.job, each.num_rows * result.num_tasklets[each.job]) for each in batch.tasklets
        ]
        _share(shares, "backward_s", num_rows, result.backward_s + backward_s)
    if batch.updates:
        _share(shares, "update_s", [(update.job, 1) for update in batch.updates], result.update_s)
    return shares


def _share(
    shares: dict[str, dict[str, float]],
    name: str,
    num_rows: Sequence[tuple[str, int]],
    seconds: float,
    others: int = 0,
) -> None:
    """Divide a section's seconds among its jobs by their rows. others: rows of no job."""
    # At least 1: possibly no tasklet has run.
    whole = max(1, others + sum([number for _, number in num_rows]))
    for job, number in num_rows:
        shares.setdefault(job, {})[name] = seconds * number / whole

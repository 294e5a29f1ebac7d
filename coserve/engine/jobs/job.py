"""A fine-tuning job as the engine sees it: packs of one optimizer step after the other.

A job goes through the optimizer steps of its `TrainingOrder`. Each is some packs, one at a time:
memory is allocated, forward windows, the loss and backward tasklets run, and the gradients are
added to the step's; then comes the update. In between the job measures the loss of the validation
set, without a backward pass, and publishes versions. A pack can be dropped at any moment: it is
restarted, or comes back from the host as it was, and everything else stands. This is bookkeeping
alone: the device has the tensors.
"""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from coserve.devices.messages.jobs import TrainerOpened
from coserve.devices.messages.steps import PackSums
from coserve.engine.jobs.checkpoint import JobPosition
from coserve.engine.jobs.events import EventKind, JobEvent
from coserve.engine.jobs.pack import BegunPack, PackNeeds
from coserve.engine.jobs.progress import (
    Exchange,
    JobEnd,
    JobStatus,
    MemoryFailures,
    TrainingProgress,
)
from coserve.memory.pages.pack_pages import PackPages
from coserve.scheduling.plan import JobInfo, JobPhase, JobProgress
from coserve.tuning.config import TuningConfig
from coserve.tuning.early_stopping import evaluated_value
from coserve.tuning.evaluation import Question
from coserve.tuning.examples import Example
from coserve.tuning.order import PackMembers, TrainingOrder, packs_of
from coserve.tuning.shard import Shard

# A gradient that is not finite skips its optimizer step; this many in a row fail the job.
_MAX_BAD_STEPS = 5


class Job:
    """A job: its constants, and its current state (`progress`)."""

    def __init__(
        self,
        *,
        id: str,
        name: str,
        config: TuningConfig,
        examples: Sequence[Example],
        validation: Sequence[Example],
        costs: TrainerOpened,
        tenant: str = "",
        model: str = "",
        questions: Sequence[Question] = (),
        shard: Shard | None = None,
    ) -> None:
        """Make a job that is at its beginning.

        Args:
            name: Name of the adapter that it publishes.
            config: Hyperparameters.
            examples: Training examples.
            validation: Validation examples.
            costs: The device's report on its trainer.
            tenant: Owner of the job.
            model: Model that it trains, if that is not the one that serves.
            questions: Questions of the validation set, which are answered in each evaluation.
            shard: Part of a divided job that this engine trains.
        """
        self.id, self.name, self.config, self.costs, self.tenant = id, name, config, costs, tenant
        self.info = JobInfo(counts=costs.counts, tenant=tenant)
        self.model = model
        self.questions = questions
        self.order = TrainingOrder(examples, config, shard)
        self.alone_until_step = 0
        """Until this optimizer step, steps of the engine that work for the job work for no other
        job."""
        self.pack_needs = PackNeeds(id, costs)
        self.progress = TrainingProgress(
            packs=tuple(self.order.packs(0)),
            exchange=None
            if shard is None
            else Exchange(shard=shard, num_steps=self.order.num_steps),
        )
        self._validation = tuple(validation)

    # -- questions ----------------------------------------------------------------

    @property
    def state(self) -> JobStatus:
        """Return whether the job runs, is paused, or how it has ended."""
        return self.progress.status

    @property
    def is_terminal(self) -> bool:
        """Return whether the job is over."""
        return self.progress.is_terminal

    @property
    def error(self) -> str | None:
        """Return why the job has failed."""
        return self.progress.error

    @property
    def num_steps_done(self) -> int:
        """Return the optimizer steps that were made."""
        return self.progress.num_steps_done

    @property
    def num_tokens_trained(self) -> int:
        """Return the number of tokens in packs whose gradients were added."""
        return self.progress.num_tokens_trained

    @property
    def num_rows_run(self) -> float:
        """Return the number of forward and reversed rows run, by which jobs share the device."""
        return self.progress.num_rows_run

    @property
    def optimizer_away(self) -> bool:
        """Return whether the optimizer's moments lie on the host."""
        return self.progress.optimizer_away

    @property
    def exchange(self) -> Exchange | None:
        """Return the state of a divided job's exchange with its other nodes."""
        return self.progress.exchange

    @property
    def queue_item(self) -> tuple[str, str]:
        """Return the key of the job in its tenant's queue (`TokenCounters`)."""
        return "job", self.id

    @property
    def is_alone(self) -> bool:
        """Return whether the steps of the engine that work for the job work for no other job."""
        return self.progress.num_steps_done < self.alone_until_step

    @property
    def has_pack(self) -> bool:
        """Return whether a pack is in memory."""
        return self.progress.begun is not None

    @property
    def next_pack(self) -> PackMembers | None:
        """Return the pack to begin next, if it is time for one."""
        progress = self.progress
        is_due = progress.status == "running" and progress.packs and progress.begun is None
        return progress.packs[0] if is_due else None

    @property
    def update_due(self) -> bool:
        """Return whether the optimizer step can be made."""
        return self.progress.update_due

    @property
    def stops_early(self) -> bool:
        """Return whether its evaluations have not improved for as long as its configuration
        allows.
        """
        stopping = self.config.early_stopping
        return stopping is not None and self.progress.best.num_without_gain >= stopping.patience

    @property
    def num_tokens_done(self) -> float:
        """Return the number of tokens trained, with what is done of the pack in memory, half of it
        forward and half backward; without dropped work, and without packs of the validation set.
        """
        is_measured = self.progress.stage == "evaluation"
        return self.progress.num_tokens_trained + (
            0.0 if is_measured else self.progress.num_rows_counted / 2
        )

    @property
    def phase(self) -> JobPhase | None:
        """Return what a step could do for the job; None: nothing."""
        progress = self.progress
        if progress.status != "running":
            return None
        if isinstance(progress.place, BegunPack):
            return progress.place.cursor.phase
        return "pack" if progress.packs else "update" if progress.update_due else None

    def view(self, now_s: float, num_pages: int) -> JobProgress | None:
        """Return a policy's view of the job; None if it has nothing to do. num_pages: pages of the
        pack in memory, or of the next one.
        """
        if (phase := self.phase) is None:
            return None
        progress = self.progress
        waited_s, num_rows_run = max(0.0, now_s - progress.moved_s), progress.num_rows_run
        if not progress.packs:
            return JobProgress(
                id=self.id,
                info=self.info,
                phase=phase,
                waited_s=waited_s,
                num_rows_run=num_rows_run,
            )
        pack = progress.packs[0]
        if progress.place is None:
            cursor = self.pack_needs.first_cursor(pack, measures=progress.measures)
        else:
            cursor = progress.place.cursor
        return JobProgress(
            id=self.id,
            info=self.info,
            phase=phase,
            num_rows=cursor.num_rows,
            num_rows_left=cursor.num_rows_left,
            num_parts_left=cursor.num_parts - cursor.num_parts_done,
            mean_context_len=pack.mean_context_len,
            waited_s=waited_s,
            num_pages=num_pages,
            num_rows_done=cursor.num_rows_done,
            num_rows_run=num_rows_run,
            begins_at=cursor.phase,
        )

    def position(self) -> JobPosition:
        """Return the job's position, in whole optimizer steps."""
        order, progress = self.order, self.progress
        return JobPosition(
            num_steps_done=progress.num_steps_done,
            num_tokens_trained=progress.num_tokens_at_step,
            num_rows_run=progress.num_rows_run,
            num_bad_steps=progress.num_bad_steps,
            evaluated=progress.evaluation_is_done,
            num_steps=order.num_steps,
            num_examples=len(order.examples),
            num_tokens=sum(len(example.tokens) for example in order.examples),
            best=progress.best,
        )

    def event(
        self, kind: EventKind, now_s: float, *, version: str | None = None, message: str = ""
    ) -> JobEvent:
        """Return an event without numbers."""
        return JobEvent(
            job=self.id,
            kind=kind,
            step=self.num_steps_done,
            now_s=now_s,
            version=version,
            message=message,
        )

    # -- what happens -------------------------------------------------------------

    def resume(self, position: JobPosition) -> None:
        """Take up a position, before anything has run.

        Raises:
            JobError: it is another job's.
        """
        position.check_is_of(self.position())
        self.progress = self.progress.resumed_from(position)

    def set_status(self, status: JobStatus) -> None:
        """Pause the job, or let it run."""
        self.progress = replace(self.progress, status=status)

    def set_optimizer_away(self, is_away: bool) -> None:
        """Note whether the optimizer's moments lie on the host."""
        self.progress = replace(self.progress, optimizer_away=is_away)

    def set_memory_failures(self, failures: MemoryFailures) -> None:
        """Note failures of its packs for lack of memory."""
        self.progress = replace(self.progress, memory_failures=failures)

    def set_exchange(self, exchange: Exchange) -> None:
        """Note the state of the exchange with other nodes."""
        self.progress = replace(self.progress, exchange=exchange)

    def set_joined(self, jobs: frozenset[str]) -> None:
        """Note with which jobs its last tasklets were one batch of rows."""
        if jobs != self.progress.joined:
            self.progress = replace(self.progress, joined=jobs)

    def count_seconds(self, started_s: float, seconds: Mapping[str, float]) -> None:
        """Add the job's share of an engine step. seconds: by section, as `StepSeconds` names it."""
        self.progress = self.progress.after_seconds(started_s, **seconds)

    def begin_pack(self, pages: PackPages) -> None:
        """Note that the device has begun the next pack on these pages, or has it back."""
        progress = self.progress
        if progress.swapped is not None:
            cursor = progress.swapped.cursor
        else:
            cursor = self.pack_needs.first_cursor(progress.packs[0], measures=progress.measures)
        self.progress = progress.after_begin(BegunPack(pages, cursor))

    def count_rows(self, now_s: float) -> float:
        """Count the rows of the pack in memory that have run since the last call, and return their
        number; pages that the pack no longer needs are given back.

        A row counts once forward, and once for the loss and all parts backward.
        """
        before, begun = self.progress, self.progress.begun
        assert begun is not None
        num_rows = begun.cursor.num_rows_run(self.costs.counts.num_parts)
        self.progress = before.after_rows(num_rows, now_s)
        begun.pages.follow(begun.cursor)
        return num_rows - before.num_rows_counted

    def swap_pack_out(self) -> None:
        """Give the pages of the pack in memory back; it lies on the host, and will resume where it
        is.
        """
        self._leave_pages(self.progress.after_swap())

    def drop_pack(self) -> None:
        """Give the pack's memory back, on the device or the host; it will be restarted."""
        self._leave_pages(self.progress.after_drop())

    def finish_pack(self, sums: PackSums) -> None:
        """Complete the pack in memory, which has these sums."""
        self._leave_pages(self.progress.after_pack(sums))

    def finish_update(self, norm: float | None, now_s: float) -> JobEvent:
        """Complete an optimizer step, and return its event. norm: None if the gradient was not
        finite, and the step was skipped.
        """
        before = self.progress
        num_bad_steps = 0 if norm is not None else before.num_bad_steps + 1
        # A job whose every step was skipped has trained nothing, and fails before the limit.
        never = before.num_steps_done + 1 == self.order.num_steps == num_bad_steps
        error = None
        if never or num_bad_steps == _MAX_BAD_STEPS:
            error = f"the gradient was not finite in {num_bad_steps} optimizer steps in a row"
        self.progress = before.after_update(was_finite=norm is not None, error=error)
        return JobEvent(
            job=self.id,
            kind="step",
            step=self.progress.num_steps_done,
            now_s=now_s,
            loss=before.sums.mean_loss,
            token_accuracy=before.sums.token_accuracy,
            num_trained=before.sums.num_trained,
            metrics=before.sums.mean_metrics,
            num_tokens=before.num_tokens_trained - before.num_tokens_at_step,
            norm=norm,
            learning_rate=self.config.optimizer.learning_rate_at(
                before.num_steps_done, self.order.num_steps
            ),
            seconds=before.seconds,
        )

    def start_evaluation(self) -> bool:
        """Measure the validation set next. Returns whether there is one."""
        if self._validation:
            self.progress = self.progress.evaluating(tuple(packs_of(self._validation, self.config)))
        return bool(self._validation)

    def finish_evaluation(self, now_s: float, answers: Mapping[str, float]) -> JobEvent:
        """Complete an evaluation, and return its event. answers: metrics of the answers to its
        questions.
        """
        sums, step = self.progress.sums, self.num_steps_done
        metrics = {**sums.mean_metrics, **answers}
        metric, stopping = self.config.best_metric, self.config.early_stopping
        value = evaluated_value(
            metric, loss=sums.mean_loss, token_accuracy=sums.token_accuracy, metrics=metrics
        )
        min_delta = 0.0 if stopping is None else stopping.min_delta
        best = self.progress.best.after(step, value, metric=metric, min_delta=min_delta)
        self.progress = self.progress.after_evaluation(best)
        return JobEvent(
            job=self.id,
            kind="evaluation",
            step=step,
            now_s=now_s,
            loss=sums.mean_loss,
            token_accuracy=sums.token_accuracy,
            num_trained=sums.num_trained,
            metrics=metrics,
            is_best=best.step == step,
        )

    def start_step(self) -> bool:
        """Turn to the packs of the next optimizer step; return False if all steps are done."""
        step = self.num_steps_done
        if step == self.order.num_steps:
            return False
        self.progress = self.progress.starting_step(tuple(self.order.packs(step)))
        return True

    def end(self, status: JobEnd, error: str | None) -> None:
        """End the job: its pages are given back. error: why it has failed."""
        self._leave_pages(self.progress.ended(status, error))

    def finish_end(self, now_s: float) -> JobEvent:
        """Note that all that follows from the end has been done; return the event of the end."""
        status, error = self.progress.status, self.progress.error
        assert status != "running" and status != "paused"
        self.progress = replace(self.progress, end_due=False)
        return self.event(status, now_s, message=(error or "") if status == "failed" else "")

    def _leave_pages(self, after: TrainingProgress) -> None:
        """Give the pages of the pack in memory back, and take over a state without them.

        An interruption in between leaves the job in that state, too: no pack is ever on pages that
        others may have.
        """
        try:
            if (begun := self.progress.begun) is not None:
                begun.pages.release()
        finally:
            self.progress = after

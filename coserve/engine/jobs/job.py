"""A fine-tuning job as the engine sees it: packs of one optimizer step after the other, and what came of them.

A job goes through the optimizer steps of its `TrainingOrder`. Each is packs, one at a time: memory is taken, forward
windows, the loss and backward tasklets run, gradients are added to the step's; then the update. In between it measures
the loss of the validation set, nothing backward, and publishes versions. A pack can be dropped at any moment: it is
begun again, or comes back from the host as it was, and everything else stands. Bookkeeping alone: the tensors are the
device's.
"""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Literal

from coserve.devices.job_messages import TrainerOpened
from coserve.devices.step_messages import PackSums
from coserve.engine.jobs.checkpoint import JobPosition
from coserve.engine.jobs.events import EventKind, JobEvent, StepSeconds
from coserve.engine.jobs.exchange import Exchange
from coserve.engine.jobs.memory_failures import MemoryFailures
from coserve.engine.jobs.pack_queue import PackQueue
from coserve.engine.jobs.view import job_view
from coserve.scheduling.plan import JobPhase, JobView
from coserve.tuning.config import TuningConfig
from coserve.tuning.early_stopping import BestEvaluation, evaluated_value
from coserve.tuning.evaluation import Question
from coserve.tuning.examples import Example
from coserve.tuning.loss_sums import LossSums
from coserve.tuning.order import PackMembers, TrainingOrder, packs_of
from coserve.tuning.shard import Shard

JobState = Literal["running", "paused", "succeeded", "failed", "cancelled"]

# A gradient that is not finite skips its optimizer step; this many in a row fail the job.
_MAX_BAD_STEPS = 5


class Job:
    """Bookkeeping of one job; the engine asks `view`, and tells it what was run."""

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
        """costs: what the device said of its trainer. model: that it trains, if that is not the one that serves.
        questions: of the validation set, to be answered with each evaluation. shard: this is one node's part of it.
        """
        self.id, self.name, self.config, self.costs, self.tenant = id, name, config, costs, tenant
        self.model = model
        self.state: JobState = "running"
        self.order = TrainingOrder(examples, config, shard)
        self.exchange = None if shard is None else Exchange(shard, self.order.num_steps)
        self.num_steps_done = 0
        self.alone_until_step = 0  # until then, steps of the engine that work for it work for no other job
        self.num_rows_run = 0.0  # forward rows and reversed rows, for sharing the device among jobs
        self.moved_s = -inf  # when it last got on
        self.num_tokens_trained = 0  # rows of packs whose gradients are in
        self.num_drops = 0
        self.memory_failures = MemoryFailures()
        self.error: str | None = None
        self.joined: frozenset[str] = frozenset()  # whose tasklets were one batch with its last ones, its own included
        self.questions = questions
        self.evaluating = False
        self.answers_due = False  # whether only its answers are missing to an evaluation
        self.follow_due = False  # whether what its last optimizer step brings with it is still to come
        self.evaluated = False  # whether the validation set was measured after that step, before it was resumed
        self.sums = LossSums()  # of the packs that are done, of the step or the evaluation
        self.seconds = StepSeconds()  # of the step so far
        self.optimizer_away = False  # whether its moments lie on the host
        self.best = BestEvaluation()
        self._validation = tuple(validation)
        self._num_bad_steps = 0
        self._num_tokens_at_step = 0  # those of them in whole optimizer steps
        self.packs = PackQueue(id, costs)
        self.packs.extend(self.order.packs(0))

    # -- questions ----------------------------------------------------------------

    @property
    def is_terminal(self) -> bool:
        return self.state not in ("running", "paused")

    @property
    def is_alone(self) -> bool:
        """Whether the steps of the engine that work for it work for no other job."""
        return self.num_steps_done < self.alone_until_step

    @property
    def wants_pack(self) -> PackMembers | None:
        """The pack to begin next, if it is time for one."""
        return self.packs.next if self.state == "running" else None

    @property
    def stops_early(self) -> bool:
        """Return whether its evaluations have not improved for as long as its configuration allows."""
        stopping = self.config.early_stopping
        return stopping is not None and self.best.num_without_gain >= stopping.patience

    @property
    def has_pack(self) -> bool:
        return self.packs.current is not None

    @property
    def num_tokens_done(self) -> float:
        """Tokens trained, with what is done of the pack in memory, half of it forward and half backward; work that was
        dropped is not among them.
        """
        return self.num_tokens_trained + self.packs.num_rows_begun

    @property
    def update_due(self) -> bool:
        return self._has_trained and (not self._gives_gradients or self._num_combined is not None)

    @property
    def gradients_due(self) -> bool:
        """Whether the other nodes are to have the gradients of the step, before it can be made."""
        if self.exchange is None or not self._gives_gradients:
            return False
        return self._has_trained and not self.exchange.is_waiting and self.exchange.num_trained is None

    @property
    def _has_trained(self) -> bool:
        """Whether all packs of the optimizer step are done."""
        busy = bool(self.packs) or self.evaluating or self.follow_due
        return self.state == "running" and not busy

    @property
    def _gives_gradients(self) -> bool:
        return self.exchange is not None and self.exchange.shard.gives_gradients

    @property
    def _num_combined(self) -> int | None:
        return None if self.exchange is None else self.exchange.num_trained

    @property
    def num_trained(self) -> int:
        """Rows that the gradients of the step are of, those of other nodes included; at least 1, also of a part of a
        batch that has no examples.
        """
        return max(1, self._num_combined or self.sums.num_trained)

    @property
    def checkpoint_step(self) -> int | None:
        """Optimizer steps that a checkpoint would have now; None: there cannot be one yet."""
        if self.exchange is None or self._gives_gradients:
            return self.num_steps_done
        return None if self.exchange.common is None else self.exchange.common.position.num_steps_done

    @property
    def phase(self) -> JobPhase | None:
        """What it is at; None: nothing that a step could do."""
        if self.state != "running":
            return None
        if (cursor := self.packs.cursor) is not None:
            return cursor.phase
        return "pack" if self.packs else "update" if self.update_due else None

    def view(self, now_s: float, num_pages: int) -> JobView | None:
        """What a policy may do with it now; None: nothing. num_pages: of the pack in memory, or of the next one."""
        if (phase := self.phase) is None:
            return None
        pack = self.packs.current or self.packs.next
        return job_view(
            self.id,
            self.costs.counts,
            phase=phase,
            cursor=self.packs.begins_at,
            mean_context_len=0.0 if pack is None else pack.mean_context_len,
            waited_s=max(0.0, now_s - self.moved_s),
            tenant=self.tenant,
            num_pages=0 if pack is None else num_pages,
            num_rows_run=self.num_rows_run,
        )

    # -- what happened ------------------------------------------------------------

    def count_seconds(
        self,
        started_s: float,
        *,
        forward_s: float = 0.0,
        loss_s: float = 0.0,
        backward_s: float = 0.0,
        update_s: float = 0.0,
    ) -> None:
        """A step that began then has taken this for it; see `StepSeconds`."""
        so_far = self.seconds
        self.seconds = StepSeconds(
            started_s=so_far.started_s or started_s,
            forward_s=so_far.forward_s + forward_s,
            loss_s=so_far.loss_s + loss_s,
            backward_s=so_far.backward_s + backward_s,
            update_s=so_far.update_s + update_s,
        )

    def position(self) -> JobPosition:
        """How far it has come in whole optimizer steps."""
        order = self.order
        return JobPosition(
            num_steps_done=self.num_steps_done,
            num_tokens_trained=self._num_tokens_at_step,
            num_rows_run=self.num_rows_run,
            num_bad_steps=self._num_bad_steps,
            evaluated=not self.evaluating and (self.evaluated or not self.follow_due),
            num_steps=order.num_steps,
            num_examples=len(order.examples),
            num_tokens=sum(len(example.tokens) for example in order.examples),
            best=self.best,
        )

    def resume(self, position: JobPosition) -> None:
        """Take up a position, before anything has been run; JobError if it is another job's."""
        position.check_is_of(self.position())
        self.num_steps_done, self.num_rows_run = position.num_steps_done, position.num_rows_run
        self.num_tokens_trained = self._num_tokens_at_step = position.num_tokens_trained
        self._num_bad_steps, self.best = position.num_bad_steps, position.best
        if self.num_steps_done:
            self.packs.clear()
            self.follow_due, self.evaluated = True, position.evaluated

    def drop_pack(self) -> None:
        """Give its pack's memory back, in memory or on the host; it will be begun again."""
        self.packs.drop()
        self.num_drops += 1

    def count_rows(self, now_s: float) -> float:
        """Some of the pack has been run; returns how many rows (see `PackQueue.count_rows`)."""
        self.moved_s = now_s
        num_new = self.packs.count_rows()
        self.num_rows_run += num_new
        return num_new

    def finish_pack(self, sums: PackSums) -> bool:
        """Collect the sums of a pack that is done. Returns whether an evaluation is complete with it."""
        pack = self.packs.finish()
        self.memory_failures.note_pack()
        if not pack.is_reference:
            found = LossSums(loss=sums.loss, num_correct=sums.num_correct, num_trained=sums.num_trained)
            found.metrics.update(sums.metrics)
            self.sums.add(found)
            self.num_tokens_trained += 0 if self.evaluating else pack.num_rows
        return self.evaluating and not self.packs

    def event(self, kind: EventKind, now_s: float, *, version: str | None = None, message: str = "") -> JobEvent:
        """Something that has no numbers but these."""
        return JobEvent(job=self.id, kind=kind, step=self.num_steps_done, now_s=now_s, version=version, message=message)

    def finish_update(self, norm: float | None, now_s: float) -> JobEvent:
        """An optimizer step has been made (norm None: skipped, since the gradient was not finite)."""
        sums, step = self.sums, self.num_steps_done
        rate = self.config.optimizer.learning_rate_at(step, self.order.num_steps)
        self.num_steps_done += 1
        self.follow_due, self.evaluated = True, False
        num_tokens = self.num_tokens_trained - self._num_tokens_at_step
        self._num_tokens_at_step = self.num_tokens_trained
        self._num_bad_steps = 0 if norm is not None else self._num_bad_steps + 1
        never = self.num_steps_done == self.order.num_steps == self._num_bad_steps
        if never or self._num_bad_steps == _MAX_BAD_STEPS:
            self.error = f"the gradient was not finite in {self._num_bad_steps} optimizer steps in a row"
        self.sums = LossSums()
        return JobEvent(
            job=self.id,
            kind="step",
            step=self.num_steps_done,
            now_s=now_s,
            loss=sums.mean_loss,
            token_accuracy=sums.token_accuracy,
            num_trained=sums.num_trained,
            metrics=sums.mean_metrics,
            num_tokens=num_tokens,
            norm=norm,
            learning_rate=rate,
            seconds=self.seconds,
        )

    def start_evaluation(self) -> bool:
        """Measure the validation set next, if there is one."""
        if not self._validation:
            return False
        self.evaluating = True
        self.packs.extend(packs_of(self._validation, self.config), evaluate=True)
        return True

    def finish_evaluation(self, now_s: float, answers: Mapping[str, float]) -> JobEvent:
        """Return the event of a whole evaluation. answers: what came of the questions, by the metric's name."""
        sums, self.sums, self.evaluating, self.answers_due = self.sums, LossSums(), False, False
        metrics = {**sums.mean_metrics, **answers}
        metric, stopping = self.config.best_metric, self.config.early_stopping
        value = evaluated_value(metric, loss=sums.mean_loss, token_accuracy=sums.token_accuracy, metrics=metrics)
        self.best = self.best.after(
            self.num_steps_done, value, metric=metric, min_delta=0.0 if stopping is None else stopping.min_delta
        )
        return JobEvent(
            job=self.id,
            kind="evaluation",
            step=self.num_steps_done,
            now_s=now_s,
            loss=sums.mean_loss,
            token_accuracy=sums.token_accuracy,
            num_trained=sums.num_trained,
            metrics=metrics,
            is_best=self.best.step == self.num_steps_done,
        )

    def start_step(self) -> bool:
        """Turn to the packs of the next optimizer step; False if all are done."""
        if self.num_steps_done == self.order.num_steps:
            return False
        self.packs.extend(self.order.packs(self.num_steps_done))
        self.seconds = StepSeconds()
        return True

    def end(self, state: JobState) -> None:
        """It is over: its pages go back."""
        self.state = state
        self.packs.clear()

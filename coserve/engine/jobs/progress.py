"""State of a fine-tuning job as one frozen value, and the next state after each event.

A change builds the next value and puts it in place of the last one in a single assignment. So a
caller that is interrupted leaves a job before the change or after it, never between. Nothing here
has a side effect: `lifecycle.py` and `memory.py` find in the value what is due for memory, the
device and other nodes.
"""

from dataclasses import replace as with_fields
from math import inf
from typing import Literal, Self

import msgspec
from msgspec.structs import replace

from coserve.devices.messages.steps import PackSums
from coserve.engine.host_swap import SwappedPack
from coserve.engine.jobs.checkpoint import Checkpoint, DeviceCopy, JobPosition
from coserve.engine.jobs.events import StepSeconds
from coserve.engine.jobs.pack import BegunPack
from coserve.tuning.early_stopping import BestEvaluation
from coserve.tuning.loss_sums import LossSums
from coserve.tuning.order import PackMembers
from coserve.tuning.shard import Combination, Shard

JobStatus = Literal["running", "paused", "succeeded", "failed", "cancelled"]
JobEnd = Literal["succeeded", "failed", "cancelled"]
JobStage = Literal["packs", "after_step", "evaluation", "answers"]

MAX_FAILURES = 10


class MemoryFailures(msgspec.Struct, frozen=True, gc=False):
    """Failures of a job's packs for lack of memory, which must not make steps fail for ever.

    Each failure holds the job back for 1, 2, 4, 8, … turns of the step loop, in which others run
    without it. Its pieces are half as large when it comes back. A pack that is completed ends the
    series. After ten failures in a row the job itself fails.
    """

    num_in_a_row: int = 0
    """Number of failures since the last completed pack."""
    num_turns: int = 0
    """Number of turns for which the job is still held back."""
    max_rows: int | None = None
    """Maximum number of rows of a piece (window, piece of the loss, tasklet); None: no limit."""

    @property
    def too_many(self) -> bool:
        """Return whether the job fails."""
        return self.num_in_a_row >= MAX_FAILURES

    def reason(self, message: str) -> str:
        """Return why the job fails, and what would be right. message: the last failure's."""
        return (
            f"the device ran out of memory {self.num_in_a_row} times in a row in the same pack: "
            f"{message}; "
            "lower max_sequence_length, or give the engine fewer bytes for pages, so that more is "
            "left beside them"
        )

    def after_failure(self, num_rows: int | None = None) -> Self:
        """Hold the job back. num_rows: rows of its largest piece in the step that failed; None: no
        piece had run.
        """
        max_rows = self.max_rows if num_rows is None else max(1, self.limit(num_rows) // 2)
        return replace(
            self,
            # 1, 2, 4, … turns: the exponent is the number of failures before this one.
            num_turns=1 << self.num_in_a_row,
            num_in_a_row=self.num_in_a_row + 1,
            max_rows=max_rows,
        )

    def after_pack(self) -> Self:
        """End the series, and let pieces grow by an eighth with each pack: what they were too large
        for may be over.
        """
        if self.max_rows is None and not self.num_in_a_row:
            return self
        return replace(
            self,
            num_in_a_row=0,
            max_rows=None if self.max_rows is None else self.max_rows + 1 + self.max_rows // 8,
        )

    def after_turn(self) -> Self:
        """Count a turn of the step loop."""
        return replace(self, num_turns=max(0, self.num_turns - 1))

    def limit(self, num_rows: int) -> int:
        """Return how many of the planned rows a piece may have."""
        return num_rows if self.max_rows is None else min(num_rows, self.max_rows)


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """State of a divided job's exchange with its other nodes (`coserve.tuning.shard`)."""

    shard: Shard
    """Part of the job that this node trains."""
    num_steps: int
    """Number of optimizer steps of the whole job."""
    is_waiting: bool = False
    """Whether this node has contributed, and waits for the combination."""
    step: int = 0
    """Number of optimizer steps before the last contribution, or before the checkpoint that the job
    has resumed from.
    """
    combination: Combination | None = None
    """Combination that is to be applied, once it has come."""
    common: Checkpoint | None = None
    """Copy of the job when nodes last met, where each goes its own way between."""
    num_trained: int | None = None
    """Number of trained rows of the combined gradients for the next step; None: they are not
    combined yet.
    """
    num_taken_in: int = 0
    """Number of contributions that the device has applied since the job was opened."""
    num_before: int = 0
    """Number of these that belong to earlier combinations."""
    taking: DeviceCopy | None = None
    """Copy of this node's contribution, for all who ask for it, until the combination comes."""

    @property
    def num_combined(self) -> int:
        """Return how many contributions of the combination the device has applied."""
        return self.num_taken_in - self.num_before

    @property
    def meets(self) -> bool:
        """Return whether the contribution waits for those of all others."""
        return self.shard.meets_after(self.step, self.num_steps)

    def contributes_after(self, step: int) -> bool:
        """Return whether this node's progress is due to the others after an optimizer step, and not
        contributed yet.
        """
        is_new = step != self.step
        return (
            is_new
            and not self.shard.gives_gradients
            and self.shard.contributes_after(step, self.num_steps)
        )

    def holds_what_all_hold(self, step: int) -> bool:
        """Return whether all nodes have the same values after this many steps."""
        return self.shard.gives_gradients or (
            self.shard.contributes_after(step, self.num_steps)
            and self.shard.meets_after(step, self.num_steps)
        )

    def begin(self, step: int) -> Self:
        """Contribute."""
        return replace(self, taking=None, step=step, is_waiting=True)

    def arrive(self, combination: Combination) -> Self:
        """Take a combination that has come, this node's own contribution among it; again after an
        interruption.
        """
        # Repeated after an interruption: contributions that the device has applied stay counted.
        if self.combination is not None:
            return replace(self, combination=combination)
        return replace(self, taking=None, num_before=self.num_taken_in, combination=combination)

    def end(self, combination: Combination, common: Checkpoint | None) -> Self:
        """Note that all of a combination has been applied. common: a copy of the job now, where
        nodes have met.
        """
        num_trained = combination.num_trained if self.shard.gives_gradients else self.num_trained
        return replace(
            self, is_waiting=False, combination=None, num_trained=num_trained, common=common
        )


class TrainingProgress(msgspec.Struct, frozen=True, kw_only=True):
    """State of a job."""

    status: JobStatus = "running"
    """Whether the job runs, is paused, or how it has ended."""
    error: str | None = None
    """Reason for which the job has failed, or is about to."""
    end_due: bool = False
    """Whether the job has ended, and what follows from that is still to be done."""
    stage: JobStage = "packs"
    """Next work: the packs of an optimizer step and the step itself (`packs`); what follows from
    it, such as a contribution or a version (`after_step`); the packs of the validation set
    (`evaluation`); or the answers to its questions (`answers`).
    """
    packs: tuple[PackMembers, ...] = ()
    """Unfinished packs of the stage, the next one first."""
    place: BegunPack | SwappedPack | None = None
    """Place and progress of the next pack; None: it has not begun."""
    num_rows_counted: float = 0.0
    """Rows of the next pack that num_rows_run includes."""
    num_steps_done: int = 0
    """Number of optimizer steps done, skipped ones included."""
    num_bad_steps: int = 0
    """Number of latest optimizer steps in a row whose gradient was not finite."""
    num_tokens_trained: int = 0
    """Number of tokens in packs whose gradients were added."""
    num_tokens_at_step: int = 0
    """Number of these in whole optimizer steps."""
    num_rows_run: float = 0.0
    """Number of forward and reversed rows run, lost work included, by which jobs share the device.
    """
    moved_s: float = -inf
    """Time of the last progress."""
    num_drops: int = 0
    """Number of packs whose work was discarded."""
    sums: LossSums = LossSums()
    """Sums over the finished packs of the optimizer step or of the evaluation; never changed in
    place.
    """
    seconds: StepSeconds = StepSeconds()
    """Device time of the optimizer step so far."""
    is_evaluated: bool = False
    """Whether the validation set was measured after the last optimizer step."""
    best: BestEvaluation = BestEvaluation()
    """Best evaluation so far."""
    joined: frozenset[str] = frozenset()
    """Jobs whose tasklets were one batch of rows with this job's last ones, itself included."""
    optimizer_away: bool = False
    """Whether the optimizer's moments lie on the host."""
    memory_failures: MemoryFailures = MemoryFailures()
    """Latest failures for lack of memory."""
    exchange: Exchange | None = None
    """Exchange with the other nodes of a divided job."""

    # -- questions ----------------------------------------------------------------

    @property
    def is_terminal(self) -> bool:
        """Return whether the job is over."""
        return self.status != "running" and self.status != "paused"

    @property
    def measures(self) -> bool:
        """Return whether the next pack runs nothing backward."""
        return self.stage == "evaluation" or (bool(self.packs) and self.packs[0].is_reference)

    @property
    def has_trained(self) -> bool:
        """Return whether all packs of an optimizer step are done, and the step itself is not."""
        return self.stage == "packs" and not self.packs and self.status == "running"

    @property
    def update_due(self) -> bool:
        """Return whether the optimizer step can be made."""
        if self.packs or not self.has_trained:
            return False
        exchange = self.exchange
        return (
            exchange is None
            or not exchange.shard.gives_gradients
            or exchange.num_trained is not None
        )

    @property
    def contribution_due(self) -> bool:
        """Return whether the other nodes are to have this one's gradients, before the optimizer
        step can be made, or its progress after it.
        """
        exchange = self.exchange
        if exchange is None or exchange.is_waiting or self.is_terminal:
            return False
        # Gradients are due before the optimizer step, progress after it.
        if exchange.shard.gives_gradients:
            return self.has_trained and exchange.num_trained is None
        return self.stage == "after_step" and exchange.contributes_after(self.num_steps_done)

    @property
    def num_trained(self) -> int:
        """Return the rows that the gradients of the step are of, those of other nodes included; at
        least 1, also for a part of a batch that has no examples.
        """
        combined = None if self.exchange is None else self.exchange.num_trained
        return max(1, combined or self.sums.num_trained)

    @property
    def checkpoint_step(self) -> int | None:
        """Return the optimizer steps that a checkpoint would have now; None: there cannot be one
        yet.
        """
        # With shared gradients all nodes hold the same values, so any step can be kept.
        if self.exchange is None or self.exchange.shard.gives_gradients:
            return self.num_steps_done
        return (
            None if self.exchange.common is None else self.exchange.common.position.num_steps_done
        )

    @property
    def evaluation_is_done(self) -> bool:
        """Return whether nothing is left to measure after the last optimizer step."""
        return self.stage == "packs" or (self.stage == "after_step" and self.is_evaluated)

    @property
    def begun(self) -> BegunPack | None:
        """Return the pack in memory."""
        return self.place if isinstance(self.place, BegunPack) else None

    @property
    def swapped(self) -> SwappedPack | None:
        """Return the pack on the host."""
        return self.place if isinstance(self.place, SwappedPack) else None

    # -- what each event makes of it ----------------------------------------------

    def resumed_from(self, position: JobPosition) -> Self:
        """Take up a position, before anything has been run."""
        resumed = replace(
            self,
            num_steps_done=position.num_steps_done,
            num_rows_run=position.num_rows_run,
            num_tokens_trained=position.num_tokens_trained,
            num_tokens_at_step=position.num_tokens_trained,
            num_bad_steps=position.num_bad_steps,
            best=position.best,
        )
        # After no step nothing is due: the job begins as a new one does.
        if not position.num_steps_done:
            return resumed
        exchange = (
            None if self.exchange is None else replace(self.exchange, step=position.num_steps_done)
        )
        return replace(
            resumed,
            stage="after_step",
            packs=(),
            is_evaluated=position.evaluated,
            exchange=exchange,
        )

    def after_begin(self, begun: BegunPack) -> Self:
        """Have the next pack in memory, from its beginning or back from the host."""
        # A pack from the host keeps its count; a restarted one begins at zero.
        num_rows_counted = 0.0 if self.swapped is None else self.num_rows_counted
        return replace(self, place=begun, num_rows_counted=num_rows_counted)

    def after_rows(self, num_rows: float, now_s: float) -> Self:
        """Count what a step has run of the pack; num_rows: of all that has run of it."""
        num_new = num_rows - self.num_rows_counted
        return replace(
            self, num_rows_run=self.num_rows_run + num_new, num_rows_counted=num_rows, moved_s=now_s
        )

    def after_swap(self) -> Self:
        """Have the pack in memory on the host; it will resume where it is."""
        begun = self.begun
        assert begun is not None
        return replace(
            self, place=SwappedPack(cursor=begun.cursor, group_pages=begun.pages.group_pages)
        )

    def after_seconds(
        self,
        started_s: float,
        *,
        forward_s: float = 0.0,
        loss_s: float = 0.0,
        backward_s: float = 0.0,
        update_s: float = 0.0,
    ) -> Self:
        """Add the job's share of an engine's step that began then."""
        so_far = self.seconds
        return replace(
            self,
            seconds=StepSeconds(
                started_s=so_far.started_s or started_s,
                forward_s=so_far.forward_s + forward_s,
                loss_s=so_far.loss_s + loss_s,
                backward_s=so_far.backward_s + backward_s,
                update_s=so_far.update_s + update_s,
            ),
        )

    def after_pack(self, sums: PackSums) -> Self:
        """Complete the next pack."""
        pack, packs = self.packs[0], self.packs[1:]
        is_measured = self.stage == "evaluation"
        total, num_tokens = self.sums, self.num_tokens_trained
        if not pack.is_reference:
            # Copied, since states are immutable and earlier ones hold the same dict.
            total = with_fields(total, metrics=dict(total.metrics))
            total.add(
                LossSums(
                    loss=sums.loss,
                    num_correct=sums.num_correct,
                    num_trained=sums.num_trained,
                    metrics=dict(sums.metrics),
                )
            )
            num_tokens += 0 if is_measured else pack.num_rows
        return replace(
            self,
            stage="answers" if is_measured and not packs else self.stage,
            packs=packs,
            place=None,
            num_rows_counted=0.0,
            sums=total,
            num_tokens_trained=num_tokens,
            memory_failures=self.memory_failures.after_pack(),
        )

    def after_drop(self) -> Self:
        """Give up what was done of the next pack."""
        return replace(self, place=None, num_rows_counted=0.0, num_drops=self.num_drops + 1)

    def after_update(self, *, was_finite: bool, error: str | None) -> Self:
        """Complete an optimizer step. was_finite: whether it was made, and not skipped. error: see
        `error`.
        """
        exchange = self.exchange
        return replace(
            self,
            stage="after_step",
            is_evaluated=False,
            num_steps_done=self.num_steps_done + 1,
            num_tokens_at_step=self.num_tokens_trained,
            num_bad_steps=0 if was_finite else self.num_bad_steps + 1,
            sums=LossSums(),
            error=error,
            # Combined gradients are spent with the step.
            exchange=None if exchange is None else replace(exchange, num_trained=None),
        )

    def evaluating(self, packs: tuple[PackMembers, ...]) -> Self:
        """Measure the validation set next, which has these packs."""
        return replace(self, stage="evaluation", packs=packs)

    def after_evaluation(self, best: BestEvaluation) -> Self:
        """Complete an evaluation; what follows it is the next optimizer step, or the end."""
        return replace(self, stage="after_step", is_evaluated=True, sums=LossSums(), best=best)

    def starting_step(self, packs: tuple[PackMembers, ...]) -> Self:
        """Turn to the next optimizer step, which has these packs."""
        return replace(self, stage="packs", packs=packs, seconds=StepSeconds())

    def ended(self, status: JobEnd, error: str | None) -> Self:
        """End the job; one that has succeeded has nothing left to measure. error: see `error`."""
        is_evaluated = self.is_evaluated or status == "succeeded"
        return replace(
            self,
            status=status,
            packs=(),
            place=None,
            num_rows_counted=0.0,
            is_evaluated=is_evaluated,
            error=error or self.error,
            end_due=True,
        )

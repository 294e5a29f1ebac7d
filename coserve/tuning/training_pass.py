"""The pass of one pack through the model: forward in windows of any size, the loss in pieces of any
size, then backward in tasklets, each one block × one window.

FlexLLM section 6.1, algorithm 2, with the suspension of LLMStation section 5.1. Forward windows run
from the first row to the last, each through all blocks, in whatever batch they share with others.
Their output waits for the loss. Backward tasklets run from the last block to the first, and in a
block from the last window to the first; the windows of a block need not be those of another, nor
those of the forward pass. A pass can pause between any two of these, and within a tasklet between
any two instructions; its sums stay its own until it is done, so that it can be dropped at any time
without a trace.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from coserve.adapters.base import Adapter
from coserve.graph.operators.base import AttentionRows
from coserve.graph.states import StateRows
from coserve.kernels.attention import AttentionBatch, Segment
from coserve.kernels.dropout import dropout_ids_of_part, dropout_row_ids
from coserve.kernels.transfer import on_device
from coserve.memory.tensors.activations import ActivationMemory, DeviceMemory
from coserve.models.base import Part
from coserve.models.batch import Keep, RowGroup, RowSpan, forward, forward_part
from coserve.models.traced import InWindow, KeptTensors
from coserve.tuning.captured import CapturedWindows
from coserve.tuning.cursor import Cursor
from coserve.tuning.joined import joined_tasklet, run_losses
from coserve.tuning.loss_sums import LossSums
from coserve.tuning.pack import UNTRAINED, Pack
from coserve.tuning.pack_states import PackStates
from coserve.tuning.pass_memory import PassMemory
from coserve.tuning.programs import TrainingPrograms
from coserve.tuning.scores import PackScores
from coserve.tuning.sums import zeros_like_all
from coserve.tuning.tasklet import BackwardWindow, Tasklet
from coserve.tuning.window_rooms import DROPOUT_ROW_IDS, WindowInputs


class TrainingPass:
    """The state of a pack between its first forward window and its last backward tasklet.

    After the last tasklet, `gradients` holds the gradient of the pack's summed loss for every
    master parameter of the adapter (float32, by full name), and `sums` the loss, accuracy and
    number of trained rows. Dividing by the trained rows of the whole optimizer step gives the mean.
    `kept` has its tensors meanwhile.
    """

    joins_others: ClassVar[bool] = True  # whether its rows may be among those of other passes

    def __init__(
        self,
        adapter: Adapter,
        programs: TrainingPrograms,
        pack: Pack,
        *,
        dropout_seed: int = 0,
        first_row: int = 0,
        memory: ActivationMemory | None = None,
        training: bool = True,
        bare: bool = False,
        scores: PackScores | None = None,
        captured: CapturedWindows | None = None,
    ) -> None:
        """Take the memory of the whole pass.

        Args:
            dropout_seed: Seed of the dropout masks.
            first_row: The pack's first row among all that the job ever trains on, for these masks.
            memory: Allocator of its tensors; by default PyTorch's.
            training: Whether rows take what only training has (dropout); an evaluation does not.
            bare: Whether rows leave the adapter out.
            scores: Scores of an objective over whole sequences, which then weighs the gradients of
                the rows.
            captured: Captured calls of the adapter, for windows of `programs`; not for rows without
                it, or without dropout.

        Raises:
            BudgetError: There is not enough memory; nothing is taken.
        """
        backbone = adapter.backbone
        self.backbone, self.adapter, self.programs, self.pack = backbone, adapter, programs, pack
        # Summed loss, and rows whose likeliest token is the target: float64 [2], on the device.
        self.totals = torch.zeros(2, dtype=torch.float64, device=backbone.device)
        self.gradients = zeros_like_all(adapter.masters)
        # Where ranks other than 0 put gradients that all ranks have, and rank 0 alone counts.
        dropped, shared = (
            adapter.graphs.dropped if backbone.ranks.rank else (),
            adapter.layout.shared,
        )
        self._dropped = {
            name: torch.zeros_like(self.gradients[shared.get(name, name)]) for name in dropped
        }
        self.cursor = Cursor(
            num_rows=pack.num_rows, num_trained=pack.num_trained, num_parts=len(programs.parts)
        )
        self._bypasses = None if bare else adapter.bypasses(training=training)
        self.is_bare, self.scores = bare, scores
        self.captured, self._window_rows = captured, dict[tuple[int, int], WindowInputs]()
        # Keys follow from a row's number in the job, so masks do not depend on windows.
        ids = dropout_row_ids(dropout_seed, torch.arange(first_row, first_row + pack.num_rows))
        # Rows of the pack that have a loss, int64 [num_trained].
        trained = (pack.targets != UNTRAINED).nonzero()[:, 0]
        # int64 [4, num_rows], so that one transfer takes all to the device.
        rows = torch.stack((pack.tokens, pack.positions, pack.targets, ids))
        self._tokens, self._positions, self._targets, self._dropout_row_ids = on_device(
            rows, backbone.device
        ).unbind()
        self._trained = on_device(trained, backbone.device)
        self._attention_batches: dict[tuple[int, int], AttentionBatch] = {}
        self._states = PackStates(backbone.device)
        self._tasklet: Tasklet | None = None
        self._released = False
        self.kept = PassMemory(
            memory or DeviceMemory(backbone.device), programs, backbone, pack.num_rows
        )
        if captured is not None:
            self.kept.find_addresses()
        self._in_windows = KeptTensors(self.kept.saved, self._bypasses)

    # -- forward ----------------------------------------------------------------

    @property
    def forward_done(self) -> bool:
        return self.cursor.forward_done

    def next_window(self, max_rows: int) -> RowSpan:
        """Return the next window of at most this many rows, as a span of a forward batch;
        `finish_window` must follow the batch.
        """
        assert not self._released, "the pass was released"
        return _Window(self, *self.cursor.next_forward(max_rows))

    def finish_window(self, hidden: Tensor) -> None:
        """Take the blocks' output for the window's rows [n, hidden_size]."""
        assert not self._released, "the pass was released"
        start, end = self.cursor.next_forward(hidden.shape[0])
        self.kept.rows[start:end] = hidden
        self.cursor.advance_forward(end - start)
        if self.forward_done:
            # Below the lowest trained part, K and V were kept for later windows alone.
            for part in [part for part in self.kept.saved if part not in self.programs.parts]:
                self.kept.give_back(part)
            # From now on `rows` turns into gradients, which are 0 for rows without a loss.
            self.kept.rows.masked_fill_((self._targets == UNTRAINED)[:, None], 0)
            # A pack that only measures, and has no trained rows, is done already.
            self._release_if_done()

    # -- loss -------------------------------------------------------------------

    @property
    def sums(self) -> LossSums:
        """Return the sums of the loss so far; waits for the device."""
        loss, num_correct = self.totals.tolist()
        return LossSums(loss=loss, num_correct=int(num_correct), num_trained=self.num_units)

    @property
    def num_units(self) -> int:
        """Return the number of units that the loss so far is a sum over: trained rows, or the units
        of an objective.
        """
        outcome = None if self.scores is None else self.scores.outcome
        return self.cursor.num_loss_rows if outcome is None else outcome.count

    @property
    def metrics(self) -> dict[str, float]:
        """Return the summed metrics of an objective; waits for the device."""
        outcome = None if self.scores is None else self.scores.outcome
        return (
            {}
            if outcome is None
            else {name: float(value) for name, value in outcome.metrics.items()}
        )

    @property
    def loss_done(self) -> bool:
        return self.cursor.loss_done

    def run_loss(self, max_rows: int) -> None:
        """Run the next trained rows, `max_rows` at most, through the head: their loss, and its
        gradient.
        """
        run_losses([(self, max_rows)])

    def next_loss_rows(self, max_rows: int) -> Tensor:
        """Return the next rows of the pack for the loss, int64 [n]."""
        assert not self._released, "the pass was released"
        return self._trained[slice(*self.cursor.next_loss(max_rows))]

    def loss_constants(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the loss's inputs for these rows beside the blocks' output."""
        return {"targets": self._targets[rows], **_made(self._constants("head", rows))}

    def finish_loss(self, rows: Tensor, losses: Tensor, correct: Tensor, gradient: Tensor) -> None:
        """Take the rows' losses, whether their likeliest token is the target, and the gradients of
        the losses.
        """
        # float64 [2], as `totals`.
        self.totals += torch.stack([each.sum(dtype=torch.float64) for each in (losses, correct)])
        self.kept.rows[rows] = gradient
        self.cursor.advance_loss(len(rows))
        if self.scores is not None:
            self.scores.take(losses)
            if self.loss_done:
                self._weigh(self.scores)
        self._release_if_done()

    def _weigh(self, scores: PackScores) -> None:
        """Weigh the gradients by the objective, now that all rows have their log-probabilities."""
        weights = scores.weigh()
        if weights is not None and (outcome := scores.outcome) is not None:
            # Gradients of trained rows [num_trained, hidden_size], each times its row's weight.
            self.kept.rows[self._trained] *= weights[:, None]
            # The objective's own loss replaces the sum over rows.
            self.totals = torch.stack([outcome.loss.double(), outcome.correct.double()])

    # -- backward ---------------------------------------------------------------

    @property
    def done(self) -> bool:
        return self.cursor.done

    @property
    def num_parts_done(self) -> int:
        """Return the parts that have been backward; passes with as many are at the same part."""
        return self.cursor.num_parts_done

    def next_tasklet(self, max_rows: int) -> Tasklet:
        """Return the next tasklet, of at most this many rows; the one before it must be done."""
        return joined_tasklet([(self, max_rows)])

    def run_tasklet(self, max_rows: int) -> None:
        """Run the next tasklet as a whole."""
        self.next_tasklet(max_rows).run()

    def next_backward_window(self, max_rows: int) -> BackwardWindow:
        """Return the window that the next tasklet reverses, of at most this many rows; `begin` must
        follow.
        """
        assert not self._released and self._tasklet is None, (
            "the pass was released, or its tasklet is not done"
        )
        start, end = self.cursor.next_backward(max_rows)
        part, rows = self.programs.parts[self.cursor.num_parts_done], slice(start, end)
        graph = self.programs.program[part].graph
        # A part's first tasklet is that of the pack's last rows.
        if end == self.pack.num_rows:
            self.kept.clear_gradients(part)
        return BackwardWindow(
            part=part,
            program=self.programs.program[part],
            tokens=self._tokens[rows],
            positions=self._positions[rows],
            saved=self.kept.saved_rows(part, rows, self._constants(part, rows)),
            parameters=self.adapter.tensors(part),
            accumulators=self.accumulators(part),
            gradient=self.kept.rows[rows],
            attention=self._backward_attention(part, start, end) if graph.kv_tensors else None,
            states=self._backward_states(part, start, end) if graph.state_size else None,
            finish=partial(self._finish_tasklet, part, start, end),
        )

    def begin(self, tasklet: Tasklet) -> None:
        """Record that a tasklet with the next window is under way."""
        self._tasklet = tasklet

    def _finish_tasklet(self, part: Part, start: int, end: int, gradient: Tensor | None) -> None:
        """Store the gradient for the part below; after a part's first row, let its saved tensors
        go.
        """
        # None for the lowest trained part, and where a captured call has stored it already.
        if gradient is not None:
            self.kept.rows[start:end] = gradient
        self._tasklet = None
        if self.cursor.advance_backward(end - start):
            self.kept.give_back(part)
            self._release_if_done()

    # -- memory -----------------------------------------------------------------

    @property
    def num_saved_bytes(self) -> int:
        """Return the bytes of saved tensors that are held now."""
        return self.kept.num_saved_bytes

    def release(self) -> None:
        """Return all memory, at any moment; a pass that is not done is lost, and leaves no trace.

        Its windows and its tasklet must not run any more: they refuse to.
        """
        self._released = True
        if self._tasklet is not None:
            self._tasklet.cancel()
            self._tasklet = None
        self.kept.release()

    def move(self, memory: ActivationMemory) -> None:
        """Continue in other memory, to which the pass's own has been copied; not within a tasklet.

        Args:
            memory: Allocator that lends groups in the order in which the pass took those that it
                still has.
        """
        assert not self._released and self._tasklet is None, (
            "the pass was released, or its tasklet is not done"
        )
        self.kept.move(memory)
        self._in_windows = KeptTensors(self.kept.saved, self._bypasses)

    def _release_if_done(self) -> None:
        if self.done:
            self.release()

    def _constants(self, part: Part, rows: slice | Tensor) -> dict[str, Callable[[], Tensor]]:
        """Return functions that make the constants which only training rows have: the keys of their
        dropout masks in a part, if it drops anything.
        """
        program = self.programs.loss if part == "head" else self.programs.program[part]
        if DROPOUT_ROW_IDS not in program.graph.spec:
            return {}
        number = self.backbone.architecture.parts.index(part)
        return {DROPOUT_ROW_IDS: lambda: dropout_ids_of_part(self._dropout_row_ids[rows], number)}

    def accumulators(self, part: Part) -> dict[str, Tensor]:
        """Return the sums of gradients of a part's parameters, by their names there."""
        adapter, dropped, prefix = (
            self.adapter,
            self._dropped,
            self.adapter.architecture.prefix(part),
        )
        names = adapter.parameters(part)
        return {
            name: dropped.get(prefix + name, self.gradients[adapter.master_name(part, name)])
            for name in names
        }

    def _segments(self, start: int, end: int) -> list[Segment]:
        """Return the attention segments of rows [start, end); the keys are those of the whole
        pack.
        """
        # Causal attention: a segment's last row sees all keys from its sequence's first row on.
        return [
            Segment(num_rows=last - first, num_keys=last - begin, first_key=begin)
            for begin, first, last in self.pack.sequences_within(start, end)
        ]

    def _attention_batch(self, start: int, end: int) -> AttentionBatch:
        """Return these segments for the kernels; a window is that of many blocks in turn."""
        if (start, end) not in self._attention_batches:
            # The pack's keys and values are a store of one page, as long as the pack.
            batch = self.backbone.backend.prepare_attention(
                self._segments(start, end), block_tokens=self.pack.num_rows
            )
            self._attention_batches[start, end] = batch
        return self._attention_batches[start, end]

    def window_rows(self, start: int, end: int) -> WindowInputs:
        """Return rows [start, end) for captured calls; the same object for all blocks."""
        if (start, end) not in self._window_rows:
            rows = slice(start, end)
            self._window_rows[start, end] = WindowInputs(
                tokens=self._tokens[rows],
                positions=self._positions[rows],
                dropout_row_ids=self._dropout_row_ids[rows],
                first_row=start,
                attention=self._attention_batch(start, end),
                num_segments=len(self._segments(start, end)),
                pack_rows=self.pack.num_rows,
            )
        return self._window_rows[start, end]

    def _run_captured(self, window: "_Window", start: int, end: int) -> Tensor | None:
        """Run a window through the embedding and all blocks, if there are captured calls for it."""
        if self.captured is None or not self.captured.fit(rows := self.window_rows(start, end)):
            return None
        embed = partial(forward_part, self.backbone, [window], self.backbone.local.parts[0], None)
        return self.captured.forward(rows, self.programs.program, self.kept, embed)

    def _forward_states(self, layer: int, start: int, end: int) -> StateRows:
        return self._states.forward(
            self.kept.states(layer), list(self.pack.sequences_within(start, end))
        )

    def _backward_states(self, part: Part, start: int, end: int) -> StateRows:
        saved, graph = self.kept.saved[part], self.programs.program[part].graph
        lead = (saved[name] for name in graph.lead_tensors if name in saved)
        return self._states.backward(
            self.kept.states(part), list(self.pack.sequences_within(start, end)), lead
        )

    def _backward_attention(self, part: Part, start: int, end: int) -> AttentionRows:
        """Return the attention of rows [start, end), with the accumulators of dK and dV."""
        assert isinstance(part, int)
        keys, values = self.kept.stores(part)
        key_grads, value_grads = self.kept.key_value_grads
        return AttentionRows(
            rows=slice(0, end - start),
            batch=self._attention_batch(start, end),
            keys=keys,
            values=values,
            # [1, num_rows, width]: again a store of one page.
            key_grads=key_grads[None],
            value_grads=value_grads[None],
            place=slice(start, end),
        )


def _made(constants: Mapping[str, Callable[[], Tensor]]) -> dict[str, Tensor]:
    return {name: make() for name, make in constants.items()}


class _Window(RowSpan, RowGroup):
    """A forward window: saves its program's set, and attends within the pack's sequences."""

    keeps_inside = True

    def __init__(self, training: TrainingPass, start: int, end: int) -> None:
        rows = slice(start, end)
        self.tokens, self.positions = training._tokens[rows], training._positions[rows]
        self.bypasses, self.num_rows = training._bypasses, end - start
        self.segments, self.block_tokens = training._segments(start, end), training.pack.num_rows
        self._pass, self._rows = training, rows

    def gather(self, others: Sequence[Any]) -> RowGroup:
        return self

    def keep(self, part: Part) -> Keep:
        assert not self._pass._released, "the pass was released"
        if part not in self._pass.kept.saved:
            return Keep()
        saved = self._pass.kept.saved_rows(part, self._rows)
        return Keep(rows=saved, only_kept=self._pass.programs.program[part].only_saved)

    @property
    def in_window(self) -> InWindow | None:
        kept, row_ids = self._pass._in_windows, self._pass._dropout_row_ids[self._rows]
        return InWindow(
            kept=kept, first_row=self._rows.start, segments=self.segments, dropout_row_ids=row_ids
        )

    def run_captured(self) -> Tensor | None:
        return self._pass._run_captured(self, self._rows.start, self._rows.stop)

    def constants(self, part: Part) -> Mapping[str, Tensor]:
        return _made(self._pass._constants(part, self._rows))

    def stores(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._pass.kept.stores(layer)

    def states(self, layer: int) -> StateRows:
        return self._pass._forward_states(layer, self._rows.start, self._rows.stop)


def window_of(training: TrainingPass, start: int, end: int) -> RowSpan:
    """Return rows of a pack as a span of a forward batch, through any parts."""
    return _Window(training, start, end)


def run_alone(training: TrainingPass, *, forward_rows: int, backward_rows: int) -> None:
    """Run a pass to its end with no other rows beside it, in windows of at most these sizes."""
    while not training.forward_done:
        training.finish_window(forward(training.backbone, [training.next_window(forward_rows)]))
    while not training.loss_done:
        training.run_loss(forward_rows)
    while not training.done:
        training.run_tasklet(backward_rows)

"""A pass of a pack through a model that does not serve: forward, loss and backward part by part,
all as tasklets.

Rows of other work go through other weights, so batching gains nothing. Part by part, each part is
needed twice in a pack, however many rows the plan's pieces have; so weights that pass through a
window (`coserve.memory.tensors.weight_window`) are loaded twice at most. As in HARLI section 6, the
unit that a scheduler sees is a part of the model, forward or backward; it is cut by rows, as
tasklets are (FlexLLM section 6.1).
"""

from math import ceil

from coserve.adapters.base import Adapter
from coserve.graph.operators.base import Load
from coserve.memory.tensors.activations import ActivationMemory
from coserve.memory.tensors.weight_window import WeightWindow
from coserve.models.base import Part
from coserve.models.batch import forward_part
from coserve.tuning.cursor import LayerwiseCursor
from coserve.tuning.pack import Pack
from coserve.tuning.programs import TrainingPrograms
from coserve.tuning.training_pass import TrainingPass, window_of


class LayerwisePass(TrainingPass):
    """A pass whose turns are parts of the model. Only `run_tasklet` is to be called; `cursor`
    counts what has run.
    """

    joins_others = False

    def __init__(
        self,
        window: WeightWindow,
        adapter: Adapter,
        programs: TrainingPrograms,
        pack: Pack,
        *,
        dropout_seed: int = 0,
        first_row: int = 0,
        memory: ActivationMemory | None = None,
        training: bool = True,
    ) -> None:
        """Take the memory of the whole pass, as `TrainingPass` does.

        Args:
            window: Holds the weights of the adapter's backbone.
        """
        super().__init__(
            adapter,
            programs,
            pack,
            dropout_seed=dropout_seed,
            first_row=first_row,
            memory=memory,
            training=training,
        )
        self._window = window
        self._forward_parts = adapter.backbone.local.parts[:-1]
        self._num_loss_turns = num_loss_turns(adapter, programs)
        self._turn = LayerwiseCursor(
            num_rows=pack.num_rows,
            forward_turns=len(self._forward_parts),
            loss_turns=self._num_loss_turns,
            num_parts=len(programs.parts),
        )
        # The part of every turn. After the last turn the next pack's begin, which are the same.
        loss: list[Part] = ["head"] * self._num_loss_turns
        self._parts: list[Part] = [*self._forward_parts, *loss, *programs.parts]

    @property
    def num_parts_done(self) -> int:
        return self._turn.num_parts_done

    def is_there(self, most_s: float = 0.0) -> bool:
        """Return whether the weights of the next tasklet are in the window, after waiting for them
        up to this long.

        Raises:
            WeightsError: They cannot be read.
        """
        order = self._order
        self._window.fetch(order)
        return self._window.wait(order[0], most_s)

    def run_tasklet(self, max_rows: int) -> None:
        """Run the next rows of the part whose turn it is.

        Raises:
            WeightsError: Its weights cannot be read; nothing has run.
        """
        turn = self._turn.num_parts_done
        start, end = self._turn.next_backward(max_rows)
        num_rows = self.pack.num_rows
        self._window.use(self._order)
        try:
            if turn < len(self._forward_parts):
                # The cursor counts from the last row; the forward pass begins at the first.
                self._run_forward(self._parts[turn], num_rows - end, num_rows - start)
            elif turn < len(self._forward_parts) + self._num_loss_turns:
                self._run_loss(turn - len(self._forward_parts), num_rows - start)
            else:
                super().run_tasklet(end - start)
        finally:
            self._window.release()
        self._turn.advance_backward(end - start)

    def _run_forward(self, part: Part, start: int, end: int) -> None:
        rows = self.kept.rows
        # The embedding reads tokens instead of rows.
        x = None if part == self._forward_parts[0] else rows[start:end]
        hidden = forward_part(self.backbone, [window_of(self, start, end)], part, x)
        # After the last block the output takes the place of the rows for the loss.
        if part == self._forward_parts[-1]:
            self.finish_window(hidden)
        else:
            rows[start:end] = hidden

    def _run_loss(self, turn: int, num_rows: int) -> None:
        """Run up to this many rows of a turn of the loss: as large a share of the trained rows."""
        # Rows of all turns of the loss so far; the same share of the trained rows must be through.
        share = turn * self.pack.num_rows + num_rows
        until = self.cursor.num_trained * share // (self._num_loss_turns * self.pack.num_rows)
        # So small a share may hold no further trained row.
        if until > self.cursor.num_loss_rows:
            self.run_loss(until - self.cursor.num_loss_rows)

    @property
    def _order(self) -> list[Part]:
        """Return the parts of the turns to come, and of the next pack's."""
        turn = min(self._turn.num_parts_done, len(self._parts) - 1)
        return [*self._parts[turn:], *self._parts[:turn]]


def num_loss_turns(adapter: Adapter, programs: TrainingPrograms) -> int:
    """Return the number of turns in which rows go through the loss: the ratio of its cost to a
    block's forward and backward pass, so that no tasklet takes much longer than another.
    """
    load = Load(rows=1, mean_context_len=0, compute_dtype=adapter.backbone.dtype)

    def flops(part: Part | None) -> float:
        program = programs.loss if part is None else programs.program[part]
        return program.forward_cost(load).flops + program.backward_cost(load).flops

    block = max(flops(layer) for layer in range(adapter.backbone.architecture.num_layers))
    # Rounded up, so that a turn costs no more than a block.
    return max(1, ceil(flops(None) / block))

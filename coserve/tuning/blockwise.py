"""A pass over a pack in pieces that do not depend on the plan, so that its gradient does not
either.

The cuts that a plan makes between windows, in the loss and between tasklets decide in which order
gradients are summed up, and with which shapes kernels are called. Here plans only count rows: a
block of rows, always the same ones, runs as soon as all of them have been counted, with no rows of
others beside it.
"""

from functools import cached_property

from coserve.models.backbone import Backbone
from coserve.models.batch import forward
from coserve.tuning.cursor import Cursor
from coserve.tuning.training_pass import TrainingPass

# Rows of a block. With more, steps whose plan has smaller pieces take longer than planned; with
# less, training is slower, on a GPU by far.
_BLOCK_ROWS = {"cpu": 64}
_MANY_BLOCK_ROWS = 256


class BlockwisePass(TrainingPass):
    """A pass whose gradient does not depend on the plan. Only `run_window`, `run_loss` and
    `run_tasklet` are to be called; `cursor` counts what has run.
    """

    joins_others = False

    @property
    def num_parts_done(self) -> int:
        return self._counted.num_parts_done

    def run_window(self, max_rows: int) -> None:
        """Count the next forward window, of at most this many rows."""
        start, end = self._counted.next_forward(max_rows)
        self._counted.advance_forward(end - start)
        while rows := self._block(self.cursor.num_forward_rows, end, self.cursor.num_rows):
            self.finish_window(forward(self._freely, [self.next_window(rows)]))

    def run_loss(self, max_rows: int) -> None:
        start, end = self._counted.next_loss(max_rows)
        self._counted.advance_loss(end - start)
        while rows := self._block(self.cursor.num_loss_rows, end, self.cursor.num_trained):
            super().run_loss(rows)

    def run_tasklet(self, max_rows: int) -> None:
        cursor, part = self.cursor, self._counted.num_parts_done
        start, end = self._counted.next_backward(max_rows)
        self._counted.advance_backward(end - start)
        num_rows = cursor.num_rows
        while cursor.num_parts_done == part:
            if not (
                rows := self._block(num_rows - cursor.num_backward_rows, num_rows - start, num_rows)
            ):
                return
            super().run_tasklet(rows)

    def _block(self, num_run: int, num_counted: int, num_rows: int) -> int:
        """Return the rows of the next block among num_rows, if all of them have been counted;
        otherwise 0.
        """
        size = _BLOCK_ROWS.get(self.backbone.device.type, _MANY_BLOCK_ROWS)
        rows = min(size, num_rows - num_run)
        return rows if num_run + rows <= num_counted else 0

    @cached_property
    def _counted(self) -> Cursor:
        cursor = self.cursor
        return Cursor(
            num_rows=cursor.num_rows, num_trained=cursor.num_trained, num_parts=cursor.num_parts
        )

    @cached_property
    def _freely(self) -> Backbone:
        """Return the backbone for rows that are a block anyway."""
        return self.backbone.deterministic(is_so=False)

"""The position of a pack on its pass through the model: rows forward, rows through the loss, then
parts backward, each from its last row to its first.

FlexLLM section 6.1, algorithm 2: forward windows go from the first row to the last, each through
all parts; backward windows go from the last part to the first, and in a part from the last row to
the first. The loss is a piece of its own between the two: the head's weight is as large as many
blocks', and a few rows cost it as much as a hundred, so its rows are not those of the forward
windows. Pure counting, so that plans and simulations need no tensors.
"""

from typing import Literal


class Cursor:
    """Counts of the rows run, of `num_rows` rows, `num_trained` of which have a loss, and of
    `num_parts` parts that have a backward pass.
    """

    def __init__(self, *, num_rows: int, num_trained: int, num_parts: int) -> None:
        self.num_rows, self.num_trained, self.num_parts = num_rows, num_trained, num_parts
        self.num_forward_rows = 0
        self.num_loss_rows = 0
        self.num_parts_done = 0
        self.num_backward_rows = num_rows  # rows of the current part that are still to be reversed

    @property
    def forward_done(self) -> bool:
        return self.num_forward_rows == self.num_rows

    @property
    def loss_done(self) -> bool:
        return self.num_loss_rows == self.num_trained and self.num_forward_rows == self.num_rows

    @property
    def phase(self) -> Literal["forward", "loss", "backward"]:
        """Return the next phase of a pack that is not done."""
        if self.num_forward_rows < self.num_rows:
            return "forward"
        return "loss" if self.num_loss_rows < self.num_trained else "backward"

    @property
    def done(self) -> bool:
        return self.num_parts_done == self.num_parts and self.loss_done

    @property
    def num_parts_reversed(self) -> int:
        """Return the parts whose saved tensors are no longer needed."""
        return self.num_parts_done

    @property
    def saved_all(self) -> bool:
        """Return whether everything that the backward pass reads has been saved; the parts below it
        are then no longer needed.
        """
        return self.forward_done

    @property
    def num_rows_left(self) -> int:
        """Return the rows that are still to go forward, through the loss, or backward in the
        current part.
        """
        if (phase := self.phase) == "backward":
            return self.num_backward_rows
        return (
            self.num_rows - self.num_forward_rows
            if phase == "forward"
            else self.num_trained - self.num_loss_rows
        )

    @property
    def num_rows_done(self) -> int:
        """Return the rows that would be lost with the pack; the loss, and each part backward, count
        as a pass each.
        """
        return self.num_forward_rows + self.num_loss_rows + self.num_parts_done * self.num_rows

    def num_rows_run(self, num_trained_parts: int) -> float:
        """Return the rows run forward and backward: one counts once forward, and once for the loss
        and all trained parts backward.
        """
        # Parts reversed as a whole, and rows of the current part from its end.
        num_reversed: float = (self.num_parts_done + 1) * self.num_rows - self.num_backward_rows
        # The loss counts as one more part backward.
        if self.loss_done:
            num_reversed += self.num_rows
        elif self.num_loss_rows:
            num_reversed += self.num_rows * self.num_loss_rows / self.num_trained
        return self.num_forward_rows + num_reversed / (num_trained_parts + 1)

    def next_forward(self, max_rows: int) -> tuple[int, int]:
        """Return the first and last-plus-one row of the next forward window of at most this many
        rows.
        """
        start = self.num_forward_rows
        end = min(start + max_rows, self.num_rows)
        assert start < end, "the forward pass is done, or the window is empty"
        return start, end

    def advance_forward(self, num_rows: int) -> None:
        self.num_forward_rows += num_rows
        assert self.num_forward_rows <= self.num_rows

    def next_loss(self, max_rows: int) -> tuple[int, int]:
        """Return the first and last-plus-one of the trained rows that go through the loss next."""
        assert self.forward_done, "the loss comes after the forward pass"
        start = self.num_loss_rows
        end = min(start + max_rows, self.num_trained)
        assert start < end, "the loss is done, or no rows were asked for"
        return start, end

    def advance_loss(self, num_rows: int) -> None:
        self.num_loss_rows += num_rows
        assert self.num_loss_rows <= self.num_trained

    def next_backward(self, max_rows: int) -> tuple[int, int]:
        """Return the first and last-plus-one row of the current part's next backward window."""
        # Called for each tasklet of a step, so the conditions are written out.
        loss_done = (
            self.num_loss_rows == self.num_trained and self.num_forward_rows == self.num_rows
        )
        assert loss_done and self.num_parts_done < self.num_parts, (
            "there is nothing to run backward"
        )
        assert max_rows > 0, "a tasklet has rows"
        end = self.num_backward_rows
        return (end - max_rows if end > max_rows else 0), end

    def advance_tasklets(self, max_rows: int, number: int) -> None:
        """Count as many backward windows, each of at most this many rows, as run."""
        left = -(-self.num_backward_rows // max_rows)  # of the current part
        if number >= left:
            # After the current part come whole parts, then windows of the part after these.
            num_parts, number = divmod(number - left, -(-self.num_rows // max_rows))
            self.num_parts_done += 1 + num_parts
            self.num_backward_rows = self.num_rows
        self.num_backward_rows -= number * max_rows
        assert self.num_parts_done + (number > 0) <= self.num_parts, (
            "there is nothing to run backward"
        )

    def next_tasklets(self, max_rows: int, number: int) -> list[int]:
        """Return the rows of each of the next backward windows of at most this many rows."""
        assert self.loss_done and self.num_parts_done < self.num_parts, (
            "there is nothing to run backward"
        )
        first, whole = _windows(self.num_backward_rows, max_rows), _windows(self.num_rows, max_rows)
        sizes = [*first, *whole * (self.num_parts - self.num_parts_done - 1)][:number]
        assert len(sizes) == number, "there are fewer tasklets left"
        return sizes

    def advance_backward(self, num_rows: int) -> bool:
        """Count rows of a backward window. Returns whether the current part is done; the next one
        begins at its last row.
        """
        self.num_backward_rows -= num_rows
        assert self.num_backward_rows >= 0
        if self.num_backward_rows:
            return False
        self.num_parts_done += 1
        self.num_backward_rows = self.num_rows
        return True


class LayerwiseCursor(Cursor):
    """The position of a pack whose forward pass and loss are tasklets, too: turns of parts, of
    which the first are forward, then some through the loss, and the last backward. It begins where
    another pack's backward pass does.
    """

    def __init__(
        self, *, num_rows: int, forward_turns: int, loss_turns: int, num_parts: int
    ) -> None:
        super().__init__(
            num_rows=num_rows, num_trained=0, num_parts=forward_turns + loss_turns + num_parts
        )
        # The phase is "backward" from the start: all that comes before it are turns, too.
        self.num_forward_rows = num_rows
        self._forward_turns, self._turns_before = forward_turns, forward_turns + loss_turns

    @property
    def num_parts_reversed(self) -> int:
        return max(0, self.num_parts_done - self._turns_before)

    @property
    def saved_all(self) -> bool:
        return self.num_parts_done >= self._forward_turns

    def num_rows_run(self, num_trained_parts: int) -> float:
        # Turns done, the current one by its rows; all turns together count as two passes of the
        # rows.
        num_turns = self.num_parts_done + 1 - self.num_backward_rows / self.num_rows
        return 2 * self.num_rows * num_turns / self.num_parts


def _windows(num_rows: int, max_rows: int) -> list[int]:
    """Return the rows of each window of a part, in the order in which they run."""
    whole, rest = divmod(num_rows, max_rows)
    return [max_rows] * whole + [rest] * (rest > 0)

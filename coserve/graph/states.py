"""States that operators carry from row to row: one of fixed size for each sequence, beside the keys
and values of attention.

The rows of a batch are pieces of sequences. A piece begins with the state that its sequence had
before (or with zeros) and leaves the one after it. The owner of the rows says where these lie.
Backward, pieces run from the last to the first, and the gradient of the state goes along.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class StateStore(Protocol):
    """A store of one block's states, float32 [places, state size]."""

    def read(self, places: Tensor) -> Tensor:
        """Return a copy of the states at these places, int64 [n]."""

    def write(self, places: Tensor, states: Tensor) -> None:
        """Write states to these places, int64 [n]."""


@dataclass(frozen=True, eq=False)
class TensorStates:
    """A store of states that is one tensor."""

    tensor: Tensor
    """States, float32 [places, state size]."""

    def read(self, places: Tensor) -> Tensor:
        return self.tensor[places]

    def write(self, places: Tensor, states: Tensor) -> None:
        self.tensor[places] = states


@dataclass(frozen=True, kw_only=True, eq=False)
class StateRun:
    """Pieces of equal length, each of another sequence."""

    num_rows: int
    """Rows of each piece."""
    rows: slice | Tensor
    """Rows of all pieces, piece after piece, among those of their owner."""
    before: Tensor
    """Place of the state before each piece, int64 [pieces]."""
    after: Tensor
    """Place of the state after each piece, int64 [pieces]."""
    fresh: Tensor | None = None
    """Whether each piece begins a sequence, whose state is zero, bool [pieces]; None: none does."""

    def state(self, store: StateStore) -> Tensor:
        """Return the states before the rows, [pieces, state size]."""
        found = store.read(self.before)
        # In place: `read` has returned a copy.
        return found if self.fresh is None else found.masked_fill_(self.fresh[:, None], 0.0)

    def pieces(self, x: Tensor) -> Tensor:
        """Return the pieces' rows of the owner's x [n, ...] as [pieces, num_rows, ...]."""
        own = x[self.rows]
        return own.reshape(-1, self.num_rows, *own.shape[1:])


@dataclass(frozen=True, kw_only=True, eq=False)
class Lead:
    """Rows before a window, from the last state that was kept up to the window's first row. They
    run again for the state after them.
    """

    run: StateRun
    """The rows, as one piece."""
    tensors: Sequence[Tensor]
    """Tensors [n, ...] in the order of `Operator.lead`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StateRows:
    """Some rows of a batch, in runs that can run in this order, and where their states lie.

    Backward, each run is one piece.
    """

    rows: slice
    """These rows, among those of the batch."""
    runs: Sequence[StateRun]
    """Their runs."""
    store: StateStore
    """Store of their states."""
    gradient: Tensor | None = None
    """Gradient of the state after the rows, float32 [state size], which becomes that of the state
    before them; None in a forward pass.
    """
    lead: Lead | None = None
    """Rows that lead to the first piece, if its state was not kept."""

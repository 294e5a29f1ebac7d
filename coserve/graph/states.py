"""What operators carry from row to row: a state of fixed size for each sequence, beside what
attention looks back at.

The rows of a batch are pieces of sequences. A piece begins with the state that its sequence had
before (or with zeros) and leaves the one after it; where these lie is known to the owner of the
rows. Backward, pieces run from the last to the first, and the gradient of the state goes along.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class StateStore(Protocol):
    """States float32 [places, state size] of one block."""

    def read(self, places: Tensor) -> Tensor:
        """A copy of those at these places, int64 [n]."""
        ...

    def write(self, places: Tensor, states: Tensor) -> None:
        """Put them there."""
        ...


@dataclass(frozen=True, eq=False)
class TensorStates:
    """A store that is one tensor."""

    tensor: Tensor

    def read(self, places: Tensor) -> Tensor:
        return self.tensor[places]

    def write(self, places: Tensor, states: Tensor) -> None:
        self.tensor[places] = states


@dataclass(frozen=True, kw_only=True, eq=False)
class StateRun:
    """Pieces of equal length, each of another sequence.

    num_rows: of each. rows: of all, among those of their owner, piece after piece. before, after
    int64 [pieces]: the places of their states. fresh bool [pieces]: those that begin a sequence,
    whose state is zero; None: none does.
    """

    num_rows: int
    rows: slice | Tensor
    before: Tensor
    after: Tensor
    fresh: Tensor | None = None

    def state(self, store: StateStore) -> Tensor:
        """Before the rows, [pieces, state size]."""
        found = store.read(self.before)
        return found if self.fresh is None else found.masked_fill_(self.fresh[:, None], 0.0)

    def pieces(self, x: Tensor) -> Tensor:
        """Their rows of the owner's [n, ...]: [pieces, num_rows, ...]."""
        own = x[self.rows]
        return own.reshape(-1, self.num_rows, *own.shape[1:])


@dataclass(frozen=True, kw_only=True, eq=False)
class Lead:
    """Rows before a window, from the last state that was kept up to the window's first row: run
    again for its state.

    tensors: by the operator's slots, in the order of `Operator.lead`, [n, ...].
    """

    run: StateRun
    tensors: Sequence[Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class StateRows:
    """Some rows of a batch: runs of them in an order in which they can be run, and where their
    states lie.

    Backward, each run is one piece. gradient: float32 [state size], of the state after the rows; it
    becomes that of the state before them. lead: what leads to the first piece, if its state was not
    kept.
    """

    rows: slice
    runs: Sequence[StateRun]
    store: StateStore
    gradient: Tensor | None = None
    lead: Lead | None = None

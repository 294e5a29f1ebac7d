"""States of a pack's sequences between windows, in one block that carries a state (gated delta
layers).

Forward, the state after the rows so far is kept in one place, and that before every `CHUNK_ROWS`-th
row of the pack in a place of its own, if the block is to run backward. Backward, a window begins
with the last of these before it, and runs the rows between again; the gradient of the state goes
from window to window in a place of its own. So windows of both passes may be of any size.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from coserve.graph.states import Lead, StateRows, StateRun, TensorStates
from coserve.kernels.gated_delta import CHUNK_ROWS

# The tensor's name among those that a pass saves of a part.
STATES = "states"
_RUNNING, _GRADIENT = 0, 1
# Number of states of a block that only runs forward, and of one that runs backward, which has
# another one for each chunk.
NUM_PLACES, NUM_FIXED = 1, 2

# The first row of a sequence, and the first and last-plus-one row of a piece of it, all counted in
# the pack.
Piece = tuple[int, int, int]


def states_shape(size: int, num_rows: int, *, is_trained: bool) -> tuple[int, int]:
    """Return the shape of the states of a pack of this many rows, each of this size."""
    return (NUM_FIXED + -(-num_rows // CHUNK_ROWS) if is_trained else NUM_PLACES), size


class PackStates:
    """State runs of windows, shared by all blocks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._runs: dict[tuple[int, int, bool], list[StateRun]] = {}

    def forward(self, states: Tensor, pieces: Sequence[Piece]) -> StateRows:
        """Return the states of a forward window.

        Args:
            states: States of the block.
            pieces: The window's pieces, one after another.
        """
        return StateRows(
            rows=slice(None), runs=self._of(pieces, states), store=TensorStates(states)
        )

    def backward(
        self, states: Tensor, pieces: Sequence[Piece], tensors: Iterable[Tensor]
    ) -> StateRows:
        """Return the states of a backward window.

        Args:
            states: States of the block.
            pieces: The window's pieces, one after another.
            tensors: Whole tensors of the block that lead to a state (`Operator.lead`).
        """
        return StateRows(
            rows=slice(None),
            runs=self._of(pieces, states),
            store=TensorStates(states),
            gradient=states[_GRADIENT],
            # Only the window's first piece can begin within a sequence: all others begin theirs.
            lead=self._lead(pieces[0], tensors),
        )

    def _of(self, pieces: Sequence[Piece], states: Tensor) -> list[StateRun]:
        # All blocks go through the same windows, so each window's runs are made once.
        key = pieces[0][1], pieces[-1][2], states.shape[0] > NUM_PLACES
        if key not in self._runs:
            start, _, keeps = key
            self._runs[key] = [self._run(piece, start, keeps=keeps) for piece in _cut(pieces)]
        return self._runs[key]

    def _lead(self, piece: Piece, tensors: Iterable[Tensor]) -> Lead | None:
        begin, first, _ = piece
        # The last row whose state was kept; rows from there on lead to the window's first state.
        start = max(begin, first // CHUNK_ROWS * CHUNK_ROWS)
        if start == first:
            return None
        return Lead(
            run=self._run((begin, start, first), start, keeps=True),
            tensors=[x[start:first] for x in tensors],
        )

    def _run(self, piece: Piece, start: int, *, keeps: bool) -> StateRun:
        """Return the run of a piece.

        Args:
            start: First row of the window.
            keeps: Whether states have places of their own.
        """
        begin, first, last = piece
        places = torch.tensor(
            [_place(first, keeps=keeps), _place(last, keeps=keeps)], device=self._device
        )
        # A sequence begins without a state.
        fresh = torch.ones(1, dtype=torch.bool, device=self._device) if first == begin else None
        rows = slice(first - start, last - start)
        return StateRun(
            num_rows=last - first, rows=rows, before=places[:1], after=places[1:], fresh=fresh
        )


def clear_gradient(states: Tensor) -> None:
    """Zero the gradient of the state after the last row of a pack, on which nothing depends."""
    states[_GRADIENT].zero_()


def _place(row: int, *, keeps: bool) -> int:
    """Return the place of the state before a row that is not the first of its sequence."""
    return 1 + row // CHUNK_ROWS if keeps and row and row % CHUNK_ROWS == 0 else _RUNNING


def _cut(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Cut pieces at the rows whose states are kept."""
    for begin, first, last in pieces:
        while first < last:
            end = min(last, (first // CHUNK_ROWS + 1) * CHUNK_ROWS)
            yield begin, first, end
            first = end

"""Rooms: tensors that captured calls read and write for rows of a pack's windows
(`coserve.tuning.captured`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from coserve.graph.program import Program
from coserve.kernels.attention import AttentionBatch, AttentionRoom
from coserve.kernels.base import Backend
from coserve.kernels.dropout import dropout_ids_of_part
from coserve.kernels.row_copies import RowCopies
from coserve.kernels.transfer import on_device
from coserve.models.backbone import Backbone
from coserve.models.base import Part
from coserve.models.batch import Keep, RowGroup, RowSpan
from coserve.models.bypasses import Bypasses
from coserve.tuning.sums import zeros_like_all

# Rows of rooms: a window takes the first that it fits into. In larger windows kernels take longer
# than launches.
_ROWS = (64, 128, 256, 384, 512, 768, 1024)
# Keys of rooms, which are the rows of a pack.
_KEYS = (512, 2048, 8192)
# Segments of rooms, at least; more go by powers of two.
_SEGMENTS = 16
DROPOUT_ROW_IDS = "dropout_row_ids"


@dataclass(frozen=True, kw_only=True, eq=False)
class WindowInputs:
    """The inputs of a window of a pack: n rows."""

    tokens: Tensor
    """Token ids, int64 [n]."""
    positions: Tensor
    """Positions, int64 [n]."""
    dropout_row_ids: Tensor
    """Keys of dropout, int64 [n]."""
    first_row: int
    """First of the rows in the pack."""
    attention: AttentionBatch
    """Attention of the rows."""
    num_segments: int
    """Segments of the attention."""
    pack_rows: int
    """Rows of the pack."""

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]

    @cached_property
    def copied(self) -> Tensor:
        """Return by `Copied` the first of the pack's rows and their number, int64 [kinds, 2]."""
        first, n, m = self.first_row, self.num_rows, self.pack_rows
        kinds = {
            Copied.OWN: (first, n),
            Copied.EARLIER: (0, first),
            Copied.SEEN: (0, first + n),
            # Backward, a pack's last window comes first and loads no sums; its first stores none.
            Copied.SUMS_BEFORE: (0, m if first + n < m else 0),
            Copied.SUMS_AFTER: (0, m if first else 0),
        }
        return on_device([kinds[kind] for kind in Copied], self.tokens.device, torch.int64)


class Copied(IntEnum):
    """Ranges of a pack's rows that calls copy for a window: its own rows, those before it, and
    both; and the rows of dK and dV, which are loaded unless the window is the first to run
    backward, and stored unless it is the last.
    """

    OWN = 0
    EARLIER = 1
    SEEN = 2
    SUMS_BEFORE = 3
    SUMS_AFTER = 4


@dataclass(frozen=True, kw_only=True)
class RoomSize:
    """The capacity of a room."""

    rows: int
    """Maximum number of rows of a window."""
    keys: int
    """Maximum number of rows of its pack."""
    segments: int
    """Maximum number of segments."""


def size_for(window: WindowInputs) -> RoomSize | None:
    """Return the size of the room for a window; None if it is too large."""
    rows = next((most for most in _ROWS if window.num_rows <= most), None)
    keys = next((most for most in _KEYS if window.pack_rows <= most), None)
    if rows is None or keys is None:
        return None
    return RoomSize(
        rows=rows, keys=keys, segments=max(_SEGMENTS, 1 << (window.num_segments - 1).bit_length())
    )


class WindowRoom:
    """Tensors that captured calls read and write: `x`, the rows on their way; `saved`, the rows
    that a block keeps, by name; keys and values of a pack [1, most rows + 1, width], and sums of
    their gradients, the last place of which is that of rows that are not there.
    """

    def __init__(
        self,
        backbone: Backbone,
        size: RoomSize,
        shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    ) -> None:
        """Allocate the room.

        Args:
            shapes: Shape and dtype of the saved tensors of a row, by name.
        """
        device, widths = backbone.device, backbone.local.kv_widths
        attention = backbone.backend.attention_room(
            num_rows=size.rows, num_keys=size.keys, num_segments=size.segments
        )
        assert attention is not None, "a backend that captures"
        self.attention: AttentionRoom = attention
        self.size, self._backend = size, backbone.backend
        numbers = torch.zeros(3, size.rows, dtype=torch.int64, device=device)
        self.tokens, self.positions, self.dropout_row_ids = numbers.unbind()
        # The place after the last key is a spare one, for rows that are not there.
        self.place = torch.full((size.rows,), size.keys, dtype=torch.int64, device=device)
        self.copied = torch.zeros(len(Copied), 2, dtype=torch.int64, device=device)
        self.x = torch.zeros(
            size.rows, backbone.architecture.hidden_size, dtype=backbone.dtype, device=device
        )
        self.gradient = torch.zeros_like(self.x)
        self.saved = {
            name: torch.zeros(size.rows, *shape, dtype=dtype, device=device)
            for name, (shape, dtype) in shapes.items()
        }
        # [1, keys + 1, width]: the last row is the spare place.
        self.keys, self.values = (
            torch.zeros(1, size.keys + 1, width, dtype=backbone.dtype, device=device)
            for width in widths
        )
        self.key_grads, self.value_grads = (
            torch.zeros(1, size.keys + 1, width, dtype=torch.float32, device=device)
            for width in widths
        )
        self._sums: dict[str, Tensor] = {}
        self._window: WindowInputs | None = None

    def enter(self, window: WindowInputs) -> None:
        """Copy a window's tables into the room, unless they are there."""
        # All blocks bring the same object for a window (`window_rows`): it is copied once.
        if self._window is window:
            return
        self._window, n = window, window.num_rows
        self.tokens[:n], self.positions[:n] = window.tokens, window.positions
        self.dropout_row_ids[:n] = window.dropout_row_ids
        torch.arange(window.first_row, window.first_row + n, out=self.place[:n])
        # Rows that are not there write to the spare place.
        self.place[n:] = self.size.keys
        self.copied.copy_(window.copied)
        self.attention.fill(window.attention)

    def leave(self) -> None:
        """Clear the room: calls copy nothing, as when they are captured."""
        self._window = None
        self.copied.zero_()

    def copies(self, tensors: Sequence[Tensor], *, in_place: bool = False) -> RowCopies:
        """Return copies between tensors of the room and a pack's.

        Args:
            in_place: Whether the room's tensors have a row for each of the pack's.
        """
        most_rows = self.size.keys if in_place else self.size.rows
        copies = self._backend.row_copies(tensors, in_place=in_place, max_rows=most_rows)
        assert copies is not None, "a backend that captures"
        return copies

    def sums(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors for sums of these shapes, which are the same for all blocks of a
        program.
        """
        if not self._sums:
            self._sums = zeros_like_all(tensors)
        return self._sums


class RoomRows(RowSpan, RowGroup):
    """The rows of a room, as a window of a block."""

    keeps_inside = True

    def __init__(self, room: WindowRoom, program: Program, bypasses: Bypasses, part: int) -> None:
        """part: number of the block among the model's parts."""
        self.tokens, self.positions, self.num_rows = room.tokens, room.positions, room.size.rows
        self.segments, self.block_tokens = (), room.size.keys + 1
        self.bypasses = bypasses
        self._room, self._program, self._part = room, program, part

    def gather(self, others: Sequence[Any]) -> RowGroup:
        return self

    def attention(self, backend: Backend) -> AttentionBatch:
        return self._room.attention

    def keep(self, part: Part) -> Keep:
        room, (keys, values) = self._room, self._program.graph.kv_tensors
        stores = {keys: _Placed(room.keys, room.place), values: _Placed(room.values, room.place)}
        return Keep(rows={**room.saved, **stores}, only_kept=self._program.only_saved)

    def stores(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._room.keys, self._room.values

    def constants(self, part: Part) -> Mapping[str, Tensor]:
        return {DROPOUT_ROW_IDS: dropout_ids_of_part(self._room.dropout_row_ids, self._part)}


@dataclass(frozen=True, kw_only=False)
class _Placed:
    """Rows of a store of one page, as a target of `copy_`."""

    store: Tensor
    """Store."""
    place: Tensor
    """Places of the rows, int64 [n]."""

    def copy_(self, value: Tensor) -> None:
        self.store[0].index_copy_(0, self.place, value)

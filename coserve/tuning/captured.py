"""Windows of a pack as calls that were captured (`Backend.capture`): one launch for a block, forward or backward.

A block has some hundred kernels, and a GPU waits for the host to launch them unless a window has thousands of rows.
What a call reads and writes lies in a room: a window's rows are copied there and what comes out is copied back, which
is little beside what the kernels move. A window of fewer rows than its room fills it up with rows of zeros, which
attend to nothing and whose gradients are zeros, so that they add nothing to any sum.

Which sequences a pack has is not fixed in a call, nor which of its rows a window has. A call belongs to an adapter,
whose parameters it reads where they lie.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from coserve.adapters.base import Adapter
from coserve.graph.operators.base import AttentionRows
from coserve.graph.program import Program
from coserve.kernels.attention import AttentionBatch, AttentionRoom
from coserve.kernels.base import Backend
from coserve.kernels.dropout import dropout_ids_of_part
from coserve.models.backbone import Backbone
from coserve.models.base import Part
from coserve.models.batch import BatchRows, Keep, Span, forward_part
from coserve.models.bypasses import Bypasses
from coserve.tuning.pass_memory import PassMemory
from coserve.tuning.sums import zeros_like_all
from coserve.tuning.tasklet import BackwardWindow, reversed_window

# Rows of rooms: a window takes the first that it fits into. In larger windows kernels take longer than launches.
_ROWS = (64, 128, 256, 384, 512, 768, 1024)
# Keys of rooms, which are the rows of a pack.
_KEYS = (512, 2048, 8192)
# Segments of rooms, at least; more go by powers of two.
_SEGMENTS = 16
# A call is captured when it is asked for as often as this: it takes some times what it saves once.
_CAPTURED_AT = 2
# Rooms of an adapter; for more, those of sizes that were not used for long are let go: they lie beside the page pool,
# and the largest of an 8B model takes some 100 MB.
_MOST_ROOMS = 24

DROPOUT_ROW_IDS = "dropout_row_ids"


@dataclass(frozen=True, kw_only=True, eq=False)
class WindowRows:
    """A window's rows of a pack: tokens, positions and keys of dropout int64 [n], the pack's first row among them, and
    whom they attend to.
    """

    tokens: Tensor
    positions: Tensor
    dropout_row_ids: Tensor
    first_row: int
    attention: AttentionBatch
    num_segments: int
    pack_rows: int

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]


class _Room:
    """Where calls read and write. x: rows that go in and come out; saved: what a block keeps of them, by name; keys and
    values of a pack [1, most rows + 1, width], and sums of their gradients: the last place is that of rows that are not
    there.
    """

    def __init__(
        self, backbone: Backbone, size: "_Size", shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    ) -> None:
        """shapes: of what is saved of a row."""
        device, widths = backbone.device, backbone.architecture.kv_widths
        attention = backbone.backend.attention_room(num_rows=size.rows, num_keys=size.keys, num_segments=size.segments)
        assert attention is not None, "a backend that captures"
        self.attention: AttentionRoom = attention
        self.size, self.device = size, device
        numbers = torch.zeros(3, size.rows, dtype=torch.int64, device=device)
        self.tokens, self.positions, self.dropout_row_ids = numbers.unbind()
        self.place = torch.full((size.rows,), size.keys, dtype=torch.int64, device=device)
        self.x = torch.zeros(size.rows, backbone.architecture.hidden_size, dtype=backbone.dtype, device=device)
        self.gradient = torch.zeros_like(self.x)
        self.saved = {
            name: torch.zeros(size.rows, *shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes.items()
        }
        self.keys, self.values = (
            torch.zeros(1, size.keys + 1, width, dtype=backbone.dtype, device=device) for width in widths
        )
        self.key_grads, self.value_grads = (
            torch.zeros(1, size.keys + 1, width, dtype=torch.float32, device=device) for width in widths
        )
        self._sums: dict[str, Tensor] = {}
        self._window: WindowRows | None = None

    def enter(self, window: WindowRows) -> None:
        """A window's tables, unless they are there."""
        if self._window is window:
            return
        self._window, n = window, window.num_rows
        self.tokens[:n], self.positions[:n] = window.tokens, window.positions
        self.dropout_row_ids[:n] = window.dropout_row_ids
        torch.arange(window.first_row, window.first_row + n, out=self.place[:n])
        self.place[n:] = self.size.keys
        self.attention.fill(window.attention)

    def sums(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Room for sums of their shapes, which are the same for all blocks of a program."""
        if not self._sums:
            self._sums = zeros_like_all(tensors)
        return self._sums


@dataclass(frozen=True, kw_only=True)
class _Size:
    """Most rows of a window, rows of its pack, and segments."""

    rows: int
    keys: int
    segments: int


# Of a call: its direction, its block, the program by its identity, and the size of its room.
_Key = tuple[str, Part, int, _Size]


class CapturedWindows:
    """All calls of an adapter."""

    def __init__(self, adapter: Adapter, bypasses: Bypasses) -> None:
        self._adapter, self._bypasses = adapter, bypasses
        # Programs by their identity: they are long to compare.
        self._rooms: dict[tuple[int, _Size], _Room | None] = {}
        self._calls: dict[_Key, Callable[[], None] | None] = {}
        self._num_asked: dict[_Key, int] = {}
        self._sizes: dict[_Size, None] = {}  # the one that was used last is the last

    @classmethod
    def of(cls, adapter: Adapter) -> "CapturedWindows | None":
        """None where windows run as always: on backends that capture nothing, with adapters that are not of low rank
        (or the model itself, whose gradients are as large as it is), in models with blocks of other kinds than
        attention.
        """
        backbone, bypasses = adapter.backbone, adapter.bypasses(training=True)
        architecture = backbone.architecture
        if not backbone.backend.captures or backbone.block_rows is not None:
            return None
        if bypasses.low_rank is None or not bypasses.low_rank.mask:
            return None
        if architecture.kv_layers != architecture.parts[1:-1] or any(architecture.state_sizes.values()):
            return None
        return cls(adapter, bypasses)

    def fit(self, window: WindowRows) -> bool:
        """Whether there may be calls for a window."""
        return _size(window) is not None

    # -- forward ----------------------------------------------------------------

    def forward(
        self, window: WindowRows, programs: Mapping[Part, Program], pack: PassMemory, embed: Callable[[], Tensor]
    ) -> Tensor | None:
        """All blocks on the window's rows, with what the pack keeps of them: [n, hidden_size]; None where they must run
        as always. embed: gives the rows after the embedding, where that is needed.
        """
        if (size := _size(window)) is None:
            return None
        self._use(size)
        blocks: list[tuple[int, _Room, Callable[[], None] | None]] = []
        for part in self._adapter.backbone.architecture.kv_layers:
            if (room := self._room(programs[part], size, pack.saved[part])) is None:
                return None
            call = self._call(
                ("forward", part, id(programs[part]), size),
                partial(partial, self._forward, room, part, programs[part]),
            )
            blocks.append((part, room, call))
        if any(call is None for _, _, call in blocks):
            return None
        n, first, x = window.num_rows, window.first_row, embed()
        rows = slice(first, first + n)
        for part, room, call in blocks:
            assert call is not None
            room.enter(window)
            if x is not room.x:
                room.x[:n] = x[:n]
                room.x[n:] = 0
            saved, stores, own_stores = pack.saved[part], pack.stores(part), (room.keys, room.values)
            if first:
                torch._foreach_copy_([each[0, :first] for each in own_stores], [each[0, :first] for each in stores])
            call()
            names = [name for name in room.saved if name not in programs[part].graph.kv_tensors]
            targets = [*(saved[name][rows] for name in names), *(each[0, rows] for each in stores)]
            _copy_all(targets, [*(room.saved[name][:n] for name in names), *(each[0, rows] for each in own_stores)])
            x = room.x
        return x[:n].clone()

    def _forward(self, room: _Room, part: Part, program: Program) -> None:
        span = _RoomRows(room, program, self._bypasses, self._adapter.backbone.architecture.parts.index(part))
        room.x.copy_(forward_part(self._adapter.backbone, [span], part, room.x))

    # -- backward ---------------------------------------------------------------

    def backward(self, window: WindowRows, given: BackwardWindow) -> bool:
        """Reverse a window's rows in a block; False where they must run as always."""
        if (size := _size(window)) is None or given.attention is None:
            return False
        self._use(size)
        saved = {name: rows for name, rows in given.saved.items() if name != DROPOUT_ROW_IDS}
        if (room := self._room(given.program, size, saved)) is None:
            return False
        key = ("backward", given.part, id(given.program), size)
        call = self._call(key, lambda: partial(self._backward, room, self._in_room(room, given)))
        if call is None:
            return False
        attention, n, m = given.attention, window.num_rows, window.pack_rows
        assert attention.key_grads is not None and attention.value_grads is not None
        room.enter(window)
        targets, end = [room.saved[name] for name in saved], window.first_row + n
        own_stores, stores = (room.keys, room.values), (attention.keys, attention.values)
        _copy_all(
            [*(each[:n] for each in targets), room.gradient[:n], *(each[0, :end] for each in own_stores)],
            [*saved.values(), given.gradient, *(each[0, :end] for each in stores)],
        )
        if n < size.rows:
            for x in (*targets, room.gradient):
                x[n:].zero_()
        own = [room.key_grads, room.value_grads]
        theirs = [x[0, :m] for x in (attention.key_grads, attention.value_grads)]
        torch._foreach_zero_(own)
        if end < m:
            torch._foreach_copy_([x[0, :m] for x in own], theirs)
        call()
        if window.first_row:
            torch._foreach_copy_(theirs, [x[0, :m] for x in own])
        sums = room.sums(given.accumulators)
        if sums:
            torch._foreach_add_(list(given.accumulators.values()), [sums[name] for name in given.accumulators])
        given.finish(room.gradient[:n] if "x" in given.program.asked else None)
        return True

    def _in_room(self, room: _Room, given: BackwardWindow) -> BackwardWindow:
        """A block's window as it lies in a room, with nothing of the pack."""
        return replace(
            given,
            tokens=room.tokens,
            positions=room.positions,
            saved=room.saved,
            accumulators=room.sums(given.accumulators),
            gradient=room.gradient,
            attention=AttentionRows(
                rows=slice(0, room.size.rows),
                batch=room.attention,
                keys=room.keys,
                values=room.values,
                key_grads=room.key_grads,
                value_grads=room.value_grads,
                place=room.place,
            ),
            finish=_take_nothing,
        )

    def _backward(self, room: _Room, window: BackwardWindow) -> None:
        """Of a block, on what is in the room; the gradient of its input comes where that of its output was."""
        backbone = self._adapter.backbone
        if window.accumulators:
            torch._foreach_zero_(list(window.accumulators.values()))
        if DROPOUT_ROW_IDS in window.program.graph.spec:
            part = backbone.architecture.parts.index(window.part)
            ids = dropout_ids_of_part(room.dropout_row_ids, part)
            window = replace(window, saved={**window.saved, DROPOUT_ROW_IDS: ids})
        found = reversed_window(backbone, window)
        if found is not None:
            room.gradient.copy_(found)

    # -- rooms and calls ----------------------------------------------------------

    def _use(self, size: _Size) -> None:
        """It is the last one used."""
        self._sizes.pop(size, None)
        self._sizes[size] = None

    def _room(self, program: Program, size: _Size, saved: Mapping[str, Tensor]) -> _Room | None:
        """None where there is no memory for it."""
        if (id(program), size) not in self._rooms:
            self._let_go(size)
            shapes = {name: (tuple(rows.shape[1:]), rows.dtype) for name, rows in saved.items()}
            try:
                self._rooms[id(program), size] = _Room(self._adapter.backbone, size, shapes)
            except torch.OutOfMemoryError:
                self._rooms[id(program), size] = None
        return self._rooms[id(program), size]

    def _let_go(self, but: _Size) -> None:
        """Sizes that were not used for the longest time, with their calls, until there may be a room more."""
        for size in [size for size in self._sizes if size != but]:
            if len(self._rooms) < _MOST_ROOMS:
                return
            del self._sizes[size]
            self._rooms = {key: room for key, room in self._rooms.items() if key[1] != size}
            self._calls = {key: call for key, call in self._calls.items() if key[3] != size}
            self._num_asked = {key: number for key, number in self._num_asked.items() if key[3] != size}

    def _call(self, key: _Key, made: Callable[[], Callable[[], None]]) -> Callable[[], None] | None:
        """The call of a block; None before it has been asked for often enough, and where it cannot be captured. made:
        gives what is captured, which a call keeps.
        """
        if key not in self._calls:
            self._num_asked[key] = self._num_asked.get(key, 0) + 1
            if self._num_asked[key] < _CAPTURED_AT:
                return None
            self._calls[key] = self._adapter.backbone.backend.capture(made())
        return self._calls[key]


def _take_nothing(gradient: Tensor | None) -> None:
    """What comes out of a room's window stays there."""


class _RoomRows(Span, BatchRows):
    """The rows of a room, as a window of a block."""

    keeps_inside = True

    def __init__(self, room: _Room, program: Program, bypasses: Bypasses, part: int) -> None:
        """part: number of the block among the model's parts."""
        self.tokens, self.positions, self.num_rows = room.tokens, room.positions, room.size.rows
        self.segments, self.block_tokens = (), room.size.keys + 1
        self.bypasses = bypasses
        self._room, self._program, self._part = room, program, part

    def gather(self, others: Sequence[Any]) -> BatchRows:
        return self

    def attention(self, backend: Backend) -> AttentionBatch:
        return self._room.attention

    def keep(self, part: Part) -> Keep:
        room, (keys, values) = self._room, self._program.graph.kv_tensors
        stores = {keys: _Placed(room.keys, room.place), values: _Placed(room.values, room.place)}
        return Keep(rows={**room.saved, **stores}, packed_signs=self._program.packed_signs)

    def stores(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._room.keys, self._room.values

    def constants(self, part: Part) -> Mapping[str, Tensor]:
        return {DROPOUT_ROW_IDS: dropout_ids_of_part(self._room.dropout_row_ids, self._part)}


@dataclass(frozen=True, kw_only=False)
class _Placed:
    """Rows of a store of one page, as something to copy into."""

    store: Tensor
    place: Tensor

    def copy_(self, value: Tensor) -> None:
        self.store[0].index_copy_(0, self.place, value)


def _copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Tensors into others of the same dtype: one launch for each dtype."""
    pairs: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        one, other = pairs.setdefault(target.dtype, ([], []))
        one.append(target)
        other.append(source)
    for one, other in pairs.values():
        torch._foreach_copy_(one, other)


def _size(window: WindowRows) -> _Size | None:
    """Of the room for a window; None where there is none."""
    rows = next((most for most in _ROWS if window.num_rows <= most), None)
    keys = next((most for most in _KEYS if window.pack_rows <= most), None)
    if rows is None or keys is None:
        return None
    return _Size(rows=rows, keys=keys, segments=max(_SEGMENTS, 1 << (window.num_segments - 1).bit_length()))

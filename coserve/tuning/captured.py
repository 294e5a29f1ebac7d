"""Windows of a pack as captured calls (`Backend.capture`): one launch for all blocks forward, one
for each block backward.

A block has some hundred kernels, and a GPU waits for the host to launch them unless a window has
thousands of rows. A call reads and writes tensors of a room: a window's rows are copied there and
what comes out is copied back, which is little beside what the kernels move. A window of fewer rows
than its room fills it up with rows of zeros, which attend to nothing and whose gradients are zeros,
so that they add nothing to any sum.

A call fixes neither which sequences a pack has nor which of its rows a window has. It belongs to an
adapter, whose parameters it reads where they lie.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from coserve.adapters.base import Adapter
from coserve.graph.program import Program
from coserve.models.base import Part
from coserve.models.bypasses import Bypasses
from coserve.tuning.captured_backward import CapturedBackward
from coserve.tuning.captured_forward import CapturedForward
from coserve.tuning.pass_memory import PassMemory
from coserve.tuning.tasklet import BackwardWindow
from coserve.tuning.window_rooms import RoomSize, WindowInputs, WindowRoom, size_for

# Number of the use at which a call is captured: capturing takes several times as long as one call
# saves.
_CAPTURED_AT = 2
# Rooms of an adapter; for more, those of sizes that were not used for long are let go: they lie
# beside the page pool, and the largest of an 8B model takes some 100 MB.
_MAX_ROOMS = 24

# Key of a call: its direction, its block (forward: the first), the identity of its program
# (forward: 0, for all programs), and the size of its room.
_Key = tuple[str, Part, int, RoomSize]


class _Runs(Protocol):
    def run(self) -> None:
        """Run the part that is captured."""


_WhatT = TypeVar("_WhatT", bound=_Runs)


@dataclass(frozen=True, eq=False)
class _Call(Generic[_WhatT]):
    what: _WhatT
    """Room and tables of the call."""
    run: Callable[[], None]
    """Launches the captured call."""


class CapturedWindows:
    """All captured calls of an adapter."""

    def __init__(self, adapter: Adapter, bypasses: Bypasses) -> None:
        self._adapter, self._bypasses = adapter, bypasses
        # Programs by their identity: they are long to compare.
        self._rooms: dict[tuple[int, RoomSize], WindowRoom | None] = {}
        self._calls: dict[_Key, _Call[Any] | None] = {}
        self._num_asked: dict[_Key, int] = {}
        self._sizes: dict[RoomSize, None] = {}  # the one that was used last is the last

    @classmethod
    def of(cls, adapter: Adapter) -> "CapturedWindows | None":
        """Return the calls of an adapter; None where windows run as always.

        That is on backends that capture nothing, with adapters that are not of low rank (or the
        model itself, whose gradients are as large as it is), and in models with blocks of other
        kinds than attention.
        """
        backbone, bypasses = adapter.backbone, adapter.bypasses(training=True)
        local = backbone.local
        if (
            not backbone.backend.captures
            or backbone.block_rows is not None
            or backbone.ranks.size > 1
        ):
            return None
        if bypasses.low_rank is None or not bypasses.low_rank.mask:
            return None
        if local.kv_layers != local.parts[1:-1] or any(local.state_sizes.values()):
            return None
        return cls(adapter, bypasses)

    def fit(self, window: WindowInputs) -> bool:
        """Return whether there may be calls for a window."""
        return size_for(window) is not None

    # -- forward ----------------------------------------------------------------

    def forward(
        self,
        window: WindowInputs,
        programs: Mapping[Part, Program],
        pack: PassMemory,
        embed: Callable[[], Tensor],
    ) -> Tensor | None:
        """Run all blocks on the window's rows, and keep for the pack what it needs. Returns their
        output [n, hidden_size]; None where they must run as always.

        Args:
            embed: Returns the rows after the embedding, where that is needed.
        """
        if (size := size_for(window)) is None:
            return None
        self._use(size)
        # Blocks of one program share a room; without memory for one room, nothing is captured.
        layers, rooms = self._adapter.backbone.local.kv_layers, dict[Part, WindowRoom]()
        for part in layers:
            if (room := self._room(programs[part], size, pack.saved[part])) is None:
                return None
            rooms[part] = room

        def make() -> CapturedForward:
            # Capturing runs the kernels: a cleared room has them copy nothing.
            for room in rooms.values():
                room.leave()
            return CapturedForward(self._adapter.backbone, self._bypasses, programs, rooms, pack)

        if (call := self._call(("forward", layers[0], 0, size), make)) is None:
            return None
        # Rooms that blocks share are entered once.
        for room in dict.fromkeys(rooms.values()):
            room.enter(window)
        call.what.enter(embed(), pack)
        call.run()
        return call.what.leave(window.num_rows)

    # -- backward ---------------------------------------------------------------

    def backward(self, window: WindowInputs, given: BackwardWindow, pack: PassMemory) -> bool:
        """Reverse a window's rows in a block; False where they must run as always."""
        if (size := size_for(window)) is None or given.attention is None:
            return False
        self._use(size)
        if (room := self._room(given.program, size, pack.saved[given.part])) is None:
            return False

        def make() -> CapturedBackward:
            room.leave()
            return CapturedBackward(
                self._adapter.backbone, room, given, list(pack.addressed(given.part))
            )

        if (call := self._call(("backward", given.part, id(given.program), size), make)) is None:
            return False
        room.enter(window)
        addresses, places = pack.addresses
        call.what.enter(addresses[places[given.part]])
        call.run()
        # The call's sums are this window's alone; the pack's are added to outside of it.
        call.what.add_sums(given)
        given.finish(None)  # the gradient is in its place
        return True

    # -- rooms and calls ----------------------------------------------------------

    def _use(self, size: RoomSize) -> None:
        """Mark a size as the last one used."""
        # Reinserted at the end, since the order of the dict is that of last use.
        self._sizes.pop(size, None)
        self._sizes[size] = None

    def _room(
        self, program: Program, size: RoomSize, saved: Mapping[str, Tensor]
    ) -> WindowRoom | None:
        """Return a room of a program; None where there is no memory for it."""
        if (id(program), size) not in self._rooms:
            self._let_go(size)
            shapes = {name: (tuple(rows.shape[1:]), rows.dtype) for name, rows in saved.items()}
            try:
                self._rooms[id(program), size] = WindowRoom(self._adapter.backbone, size, shapes)
            except torch.OutOfMemoryError:
                # Not tried again before rooms of this size have been released.
                self._rooms[id(program), size] = None
        return self._rooms[id(program), size]

    def _let_go(self, but: RoomSize) -> None:
        """Release rooms of the sizes unused for longest, with their calls, until there may be one
        more.
        """
        for size in [size for size in self._sizes if size != but]:
            if len(self._rooms) < _MAX_ROOMS:
                return
            del self._sizes[size]
            self._rooms = {key: room for key, room in self._rooms.items() if key[1] != size}
            self._calls = {key: call for key, call in self._calls.items() if key[3] != size}
            self._num_asked = {
                key: number for key, number in self._num_asked.items() if key[3] != size
            }

    def _call(self, key: _Key, make: Callable[[], "_WhatT"]) -> "_Call[_WhatT] | None":
        """Return a captured call; None before it has been wanted often enough, and where it cannot
        be captured.
        """
        if key not in self._calls:
            self._num_asked[key] = self._num_asked.get(key, 0) + 1
            if self._num_asked[key] < _CAPTURED_AT:
                return None
            try:
                what = make()
            except torch.OutOfMemoryError:  # of its tables and sums
                self._calls[key] = None
                return None
            run = self._adapter.backbone.backend.capture(what.run)
            self._calls[key] = None if run is None else _Call(what, run)
        return self._calls[key]

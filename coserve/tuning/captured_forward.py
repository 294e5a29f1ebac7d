"""The forward pass of a window through all blocks, on rooms: one captured call
(`coserve.tuning.captured`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.graph.program import Program
from coserve.kernels.row_copies import RowCopies
from coserve.models.backbone import Backbone
from coserve.models.base import Part
from coserve.models.batch import forward_part
from coserve.models.bypasses import Bypasses
from coserve.tuning.pass_memory import PassMemory
from coserve.tuning.window_rooms import Copied, RoomRows, WindowRoom

# Slices of a block's addresses (`PassMemory.addresses`): saved tensors, and keys and values.
_KEPT, _KEY_VALUES = slice(1, -4), slice(-4, -2)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Copies:
    """Copies between a room and a pack."""

    kept: RowCopies
    """Rows that blocks keep."""
    key_values: RowCopies
    """Keys and values, with those of earlier rows."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Block:
    """A block of the call."""

    part: Part
    """The block."""
    room: WindowRoom
    """Its room."""
    rows: RoomRows
    """Rows of the room as a window of the block."""
    others: slice
    """Range of the block among the addresses of the pack's tensors."""


class CapturedForward:
    """A forward call through the blocks, one after the other: a block reads the keys and values of
    earlier rows from the pack, and copies to it what it keeps.
    """

    def __init__(
        self,
        backbone: Backbone,
        bypasses: Bypasses,
        programs: Mapping[Part, Program],
        rooms: Mapping[Part, WindowRoom],
        pack: PassMemory,
    ) -> None:
        """Prepare the call.

        Args:
            rooms: Room of each block; blocks of one program share one.
            pack: Any pack.
        """
        addresses, places = pack.addresses
        self._backbone, self._blocks = backbone, list[_Block]()
        self._copies: dict[WindowRoom, _Copies] = {}
        for part, room in rooms.items():
            number = backbone.architecture.parts.index(part)
            rows = RoomRows(room, programs[part], bypasses, number)
            self._blocks.append(_Block(part=part, room=room, rows=rows, others=places[part]))
            # Blocks that share a room share its copies, too.
            if room not in self._copies:
                names, stores = pack.addressed(part)[:-2], [room.keys[0], room.values[0]]
                self._copies[room] = _Copies(
                    kept=room.copies([room.saved[name] for name in names]),
                    key_values=room.copies(stores, in_place=True),
                )
        # A captured call reads fixed places: a pack's addresses are copied here before it.
        self._others = torch.empty_like(addresses)

    def enter(self, x: Tensor, pack: PassMemory) -> None:
        """Set the rows [n, hidden_size] after the embedding, of the window that has entered the
        rooms, and its pack.
        """
        first = self._blocks[0].room
        first.x[: len(x)] = x
        first.x[len(x) :] = 0
        self._others.copy_(pack.addresses[0])

    def leave(self, num_rows: int) -> Tensor:
        """Return the output of the last block."""
        # A copy, since the next call overwrites the room.
        return self._blocks[-1].room.x[:num_rows].clone()

    def run(self) -> None:
        before = self._blocks[0].room
        for block in self._blocks:
            room, others, copies = block.room, self._others[block.others], self._copies[block.room]
            # The input of the block is the output of the one before, in that one's room.
            if room is not before:
                room.x.copy_(before.x)
            # K and V of earlier rows come from the pack; what is kept of the own rows goes there.
            copies.key_values.load(others[_KEY_VALUES], room.copied[Copied.EARLIER])
            room.x.copy_(forward_part(self._backbone, [block.rows], block.part, room.x))
            copies.kept.store(others[_KEPT], room.copied[Copied.OWN])
            copies.key_values.store(others[_KEY_VALUES], room.copied[Copied.OWN])
            before = room

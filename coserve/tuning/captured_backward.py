"""The backward pass of a window through a block, on a room: one captured call
(`coserve.tuning.captured`).
"""

from dataclasses import replace

import torch
from torch import Tensor

from coserve.graph.operators.base import AttentionRows
from coserve.kernels.dropout import dropout_ids_of_part
from coserve.models.backbone import Backbone
from coserve.tuning.tasklet import BackwardWindow, reversed_window
from coserve.tuning.window_rooms import DROPOUT_ROW_IDS, Copied, WindowRoom


class CapturedBackward:
    """A backward call. The pack's saved rows are copied into the room, with the gradient of the
    block's output and the sums of dK and dV so far; the gradient of its input and the sums are
    copied back. Sums of the adapter's gradients are the window's alone.
    """

    def __init__(
        self, backbone: Backbone, room: WindowRoom, given: BackwardWindow, names: list[str]
    ) -> None:
        """Prepare the call.

        Args:
            given: Any window of the block; all but its rows is used.
            names: Names of saved tensors, in the order of addresses.
        """
        self._backbone, self._room = backbone, room
        # In the order of the addresses: the rows between parts, then saved tensors.
        rows = [room.gradient, *(room.saved[name] for name in names)]
        key_values, sums = [room.keys[0], room.values[0]], [room.key_grads[0], room.value_grads[0]]
        self._rows, self._gradient = room.copies(rows), room.copies(rows[:1])
        self._key_values, self._sums = (
            room.copies(key_values, in_place=True),
            room.copies(sums, in_place=True),
        )
        # By dtype, since one launch clears all tensors of one.
        self._cleared: dict[torch.dtype, list[Tensor]] = {}
        for tensor in (*rows, *sums):
            self._cleared.setdefault(tensor.dtype, []).append(tensor)
        # Addresses of the rows between parts, of `names`, and of dK and dV.
        self._others = torch.zeros(len(names) + 3, dtype=torch.int64, device=backbone.device)
        self._window = replace(
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

    def enter(self, others: Tensor) -> None:
        """Set the addresses of the block's tensors for the pack whose window has entered the
        room.
        """
        self._others.copy_(others)

    def add_sums(self, given: BackwardWindow) -> None:
        """Add the gradients of the adapter's parameters to those of the pack."""
        if given.accumulators:
            sums = self._window.accumulators
            torch._foreach_add_(
                list(given.accumulators.values()), [sums[name] for name in given.accumulators]
            )

    def run(self) -> None:
        room, others, window = self._room, self._others, self._window
        for tensors in self._cleared.values():  # of rows that are not there
            torch._foreach_zero_(tensors)
        # Own rows of the gradient and of saved tensors; K and V of all rows seen; dK and dV so far.
        self._rows.load(others[:-2], room.copied[Copied.OWN])
        self._key_values.load(others[-4:-2], room.copied[Copied.SEEN])
        self._sums.load(others[-2:], room.copied[Copied.SUMS_BEFORE])
        # The window's own sums begin at zero (`add_sums`).
        if window.accumulators:
            torch._foreach_zero_(list(window.accumulators.values()))
        if DROPOUT_ROW_IDS in window.program.graph.spec:
            part = self._backbone.architecture.parts.index(window.part)
            ids = dropout_ids_of_part(room.dropout_row_ids, part)
            window = replace(window, saved={**window.saved, DROPOUT_ROW_IDS: ids})
        gradient = reversed_window(self._backbone, window)
        if gradient is not None:
            room.gradient.copy_(gradient)
            self._gradient.store(others[:1], room.copied[Copied.OWN])
        self._sums.store(others[-2:], room.copied[Copied.SUMS_AFTER])


def _take_nothing(gradient: Tensor | None) -> None:
    """Discard the gradient: the call itself copies it to the pack."""

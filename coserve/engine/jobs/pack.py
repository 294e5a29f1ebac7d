"""A job's pack in memory, and what its packs need of memory and of the device.

A pack can give way at any moment: it is restarted, or comes back from the host as it was
(`SwappedPack`).
"""

from collections.abc import Sequence
from functools import lru_cache, partial

import msgspec

from coserve.devices.messages.jobs import BeginPack, TrainerOpened, group_bytes
from coserve.devices.messages.pages import MovePack
from coserve.devices.messages.steps import LossRows, Tasklets, WindowRows
from coserve.engine.host_swap import SwappedPack
from coserve.memory.pages.pack_pages import PackPages
from coserve.tuning.cursor import Cursor, LayerwiseCursor
from coserve.tuning.order import PackMembers


class BegunPack(msgspec.Struct, frozen=True):
    """A pack in memory, whose cursor and pages advance in place; a restarted pack has new ones."""

    pages: PackPages
    """Pages of the pack."""
    cursor: Cursor
    """Progress of the pack."""

    def run_window(self, rows: WindowRows) -> None:
        """Note that rows have been through the forward pass."""
        self.cursor.advance_forward(rows.num_rows)

    def run_loss(self, rows: LossRows) -> None:
        """Note that trained rows have been through the loss."""
        start, end = self.cursor.next_loss(rows.num_rows)
        self.cursor.advance_loss(end - start)

    def run_tasklets(self, tasklets: Tasklets, num_run: int) -> None:
        """Note that some of these tasklets have run."""
        self.cursor.advance_tasklets(tasklets.num_rows, num_run)

    @property
    def num_loss_rows_left(self) -> int:
        """Return how many trained rows are still to go through the loss."""
        return self.cursor.num_trained - self.cursor.num_loss_rows


class PackNeeds:
    """Memory that the packs of one job need, and the commands that begin them."""

    def __init__(self, job: str, costs: TrainerOpened) -> None:
        """Use the costs that the device has reported of the trainer of `job`, which is the job's
        id.
        """
        self._job, self._costs = job, costs
        # Every view asks for them.
        self._group_pages = lru_cache(maxsize=64)(partial(_pages_of, costs))

    def num_trained_parts(self, *, measures: bool) -> int:
        """Return how many parts of the model a pack runs backward. measures: none of them."""
        return 0 if measures else self._costs.trained_parts

    def group_pages(self, num_rows: int, page_bytes: int, *, measures: bool) -> Sequence[int]:
        """Return the number of pages of each group of tensors of a pack with this many rows."""
        return self._group_pages(measures, num_rows, page_bytes)

    def first_cursor(self, pack: PackMembers, *, measures: bool) -> Cursor:
        """Return the cursor of a pack that has not begun."""
        num_parts = self.num_trained_parts(measures=measures)
        if (other := self._costs.other) is None:
            return Cursor(num_rows=pack.num_rows, num_trained=pack.num_trained, num_parts=num_parts)
        return LayerwiseCursor(
            num_rows=pack.num_rows,
            forward_turns=other.forward_turns,
            loss_turns=other.evaluation_loss_turns if measures else other.loss_turns,
            num_parts=num_parts,
        )

    def command_to_begin(
        self, pack: PackMembers, pages: PackPages, *, measures: bool, away: SwappedPack | None
    ) -> BeginPack | MovePack:
        """Return the command that begins a pack on these pages, or brings it back. away: the pack
        as it lies on the host.
        """
        if away is not None:
            return MovePack(self._job, pages.places)
        return BeginPack(
            job=self._job,
            sequences=tuple(
                [sequence for example in pack.examples for sequence in example.sequences]
            ),
            first_row=pack.first_row,
            runs=pages.places,
            evaluate=measures,
            is_reference=pack.is_reference,
            values=tuple([numbers for example in pack.examples for numbers in example.values]),
            labels=tuple([label for example in pack.examples for label in example.labels]),
        )


def _pages_of(
    costs: TrainerOpened, evaluate: bool, num_rows: int, page_bytes: int
) -> tuple[int, ...]:
    groups = costs.evaluation if evaluate else costs.training
    return tuple([-(-group_bytes(tensors, num_rows) // page_bytes) for tensors in groups])

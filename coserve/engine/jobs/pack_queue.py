"""The packs that a job is to run next: those that wait, and the one that has begun and how far it has come.

A pack can give way at any moment: it is begun again, or comes back from the host as it was, before those that wait.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial

from coserve.devices.job_messages import BeginPack, TrainerOpened, group_bytes
from coserve.devices.step_messages import LossRows, Tasklets, WindowRows
from coserve.devices.swap_messages import MovePack
from coserve.engine.host_swap import SwappedPack
from coserve.memory.pack_pages import PackPages
from coserve.tuning.cursor import Cursor, LayerwiseCursor
from coserve.tuning.order import PackMembers


class PackQueue:
    """Of one job. current: the pack in memory, on these pages; the cursor says how far it has come. swapped: how the
    next one lies on the host.
    """

    def __init__(self, job: str, costs: TrainerOpened) -> None:
        """job: its id. costs: what the device said of its trainer."""
        self._job, self._costs = job, costs
        self._waiting: deque[PackMembers] = deque()
        self._measures_all = False
        self.current: PackMembers | None = None
        self.pages: PackPages | None = None
        self.swapped: SwappedPack | None = None
        self.cursor: Cursor | None = None
        self._num_rows_counted = 0.0  # of the pack that has begun, by `count_rows`
        self._group_pages = lru_cache(maxsize=64)(partial(_pages_of, costs))  # asked of packs that wait, for every view

    # -- questions ----------------------------------------------------------------

    def __bool__(self) -> bool:
        """Whether there is one, begun or waiting."""
        return self.current is not None or bool(self._waiting)

    @property
    def next(self) -> PackMembers | None:
        """The pack to begin; None while another one is in memory."""
        return self._waiting[0] if self._waiting and self.current is None else None

    @property
    def measures(self) -> bool:
        """Whether the pack that is begun, or else the next one, runs nothing backward."""
        pack = self.current or (self._waiting[0] if self._waiting else None)
        return self._measures_all or (pack is not None and pack.is_reference)

    @property
    def num_trained_parts(self) -> int:
        """Parts of the model that the same pack runs backward."""
        return 0 if self.measures else self._costs.trained_parts

    def group_pages(self, num_rows: int, page_bytes: int) -> Sequence[int]:
        """Pages of each group of tensors of the next pack, if it has this many rows."""
        return self._group_pages(self.measures, num_rows, page_bytes)

    @property
    def num_loss_rows_left(self) -> int:
        """Trained rows of the pack in memory that are still to go through the loss."""
        assert self.cursor is not None
        return self.cursor.num_trained - self.cursor.num_loss_rows

    @property
    def begins_at(self) -> Cursor | None:
        """How far the pack in memory has come, or else where the next one will begin; None without any."""
        if self.cursor is not None:
            return self.cursor
        if self.swapped is not None:
            return self.swapped.cursor
        return None if (pack := self.next) is None else self._new_cursor(pack)

    @property
    def num_rows_begun(self) -> float:
        """Rows of the pack that has begun that count as run, half of them forward and half backward; none of a pack
        that only measures the loss of a validation set.
        """
        has_begun = self.current is not None or self.swapped is not None
        return self._num_rows_counted / 2 if has_begun and not self._measures_all else 0.0

    def _new_cursor(self, pack: PackMembers) -> Cursor:
        if (other := self._costs.other) is not None:
            return LayerwiseCursor(
                num_rows=pack.num_rows,
                forward_turns=other.forward_turns,
                loss_turns=other.evaluation_loss_turns if self.measures else other.loss_turns,
                num_parts=self.num_trained_parts,
            )
        return Cursor(num_rows=pack.num_rows, num_trained=pack.num_trained, num_parts=self.num_trained_parts)

    # -- what happened ------------------------------------------------------------

    def extend(self, packs: Iterable[PackMembers], *, evaluate: bool = False) -> None:
        """Packs to run after all others. evaluate: they measure the loss alone, as all that are here then do."""
        self._measures_all = evaluate
        self._waiting.extend(packs)

    def clear(self) -> None:
        """None of them is to run: their memory goes back."""
        self._release()
        self._waiting.clear()
        self.swapped = None

    def command_to_begin(self, pages: PackPages) -> BeginPack | MovePack:
        """What to tell the device about the next pack, which has these pages; `begin` once it has begun."""
        pack, runs = self._waiting[0], pages.places
        if self.swapped is not None:
            return MovePack(self._job, runs)
        return BeginPack(
            job=self._job,
            sequences=tuple([sequence for example in pack.examples for sequence in example.sequences]),
            first_row=pack.first_row,
            runs=runs,
            evaluate=self.measures,
            is_reference=pack.is_reference,
            values=tuple([numbers for example in pack.examples for numbers in example.values]),
            labels=tuple([label for example in pack.examples for label in example.labels]),
        )

    def begin(self, pages: PackPages) -> None:
        """The device has begun the next pack, or has it again."""
        pack = self.current = self._waiting.popleft()
        self.pages = pages
        if self.swapped is not None:
            self.cursor, self.swapped = self.swapped.cursor, None
        else:
            self.cursor, self._num_rows_counted = self._new_cursor(pack), 0.0

    def run_window(self, rows: WindowRows) -> None:
        """Rows have been through the forward pass."""
        assert self.cursor is not None
        self.cursor.advance_forward(rows.num_rows)

    def run_loss(self, rows: LossRows) -> None:
        """Trained rows have been through the loss."""
        assert self.cursor is not None
        start, end = self.cursor.next_loss(rows.num_rows)
        self.cursor.advance_loss(end - start)

    def run_tasklets(self, tasklets: Tasklets, num_run: int) -> None:
        """Of these tasklets, some have run."""
        assert self.cursor is not None
        self.cursor.advance_tasklets(tasklets.num_rows, num_run)

    def count_rows(self) -> float:
        """Some of the pack has been run; returns how many rows, and gives back pages that it does not need any more.

        A row counts once forward, and once for the loss and all parts backward.
        """
        cursor = self.cursor
        assert cursor is not None and self.pages is not None
        num_rows = cursor.num_rows_run(self._costs.counts.num_parts)
        num_new, self._num_rows_counted = num_rows - self._num_rows_counted, num_rows
        self.pages.follow(cursor)
        return num_new

    def drop(self) -> None:
        """Give the pack's memory back, in memory or on the host; it will be begun again."""
        if self.swapped is not None:
            self.swapped = None
        else:
            self._put_back()

    def swap_out(self) -> None:
        """Give the pack's memory back; what was in it lies on the host, and the pack will resume where it is."""
        assert self.cursor is not None and self.pages is not None
        self.swapped = SwappedPack(cursor=self.cursor, group_pages=self.pages.group_pages)
        self._put_back()

    def finish(self) -> PackMembers:
        """The pack is done, which is returned."""
        pack = self.current
        assert pack is not None
        self._release()
        return pack

    def _put_back(self) -> None:
        assert self.current is not None
        self._waiting.appendleft(self.current)
        self._release()

    def _release(self) -> None:
        if self.pages is not None:
            self.pages.release()
        self.current = self.cursor = self.pages = None


def _pages_of(costs: TrainerOpened, evaluate: bool, num_rows: int, page_bytes: int) -> tuple[int, ...]:
    groups = costs.evaluation if evaluate else costs.training
    return tuple([-(-group_bytes(tensors, num_rows) // page_bytes) for tensors in groups])

"""Blocks as one call on a GPU: a CUDA graph for each of some numbers of rows, for steps in which every request decodes.

There the host takes several times as long to launch kernels as the GPU to run them; replaying a graph is one launch. A
graph reads its rows and tables where it was captured with them (`_Room`): those of a step are copied there first. A
step of fewer rows than its graph fills it up with rows that belong to no segment, no page and no adapter.

Which layers, adapters' places and ranks there are is fixed in a graph; which adapters and sequences is not.
"""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import ref

import torch
from torch import Tensor

from coserve.kernels.attention import AttentionBatch
from coserve.kernels.base import Backend
from coserve.kernels.low_rank import PLACE_NUMBERS, AdapterBatch, LowRankAdapter
from coserve.kernels.trace import Trace, TracedCalls, TracedStep, UntraceableError
from coserve.kernels.transfer import on_device
from coserve.kernels.triton import DECODE_ROWS
from coserve.kernels.triton import rows as row_launches
from coserve.kernels.triton.adapters import (
    BLOCK_NUMBERS,
    MOST_RANK,
    RowTables,
    StaticAdapters,
    host_blocks,
    room_for_rank,
    table_of,
)
from coserve.kernels.triton.attention_tables import SEGMENT_NUMBERS, SingleRows, StaticSingleRows, TritonAttentionBatch

if TYPE_CHECKING:
    from coserve.kernels.triton import TritonBackend

# Programs for each row and key head: few rows leave a GPU empty, many would make programs without keys.
_SPLITS = ((4, 16), (16, 8), (64, 4), (256, 2))
# Room for pages of all sequences of a step, to begin with.
_NUM_PAGES = 1 << 14


class _Room:
    """Where a graph reads what changes from step to step. size: rows."""

    def __init__(
        self, size: int, widths: Mapping[str, int], dtype: torch.dtype, adapters: "_AdapterRoom | None", pages: Tensor
    ) -> None:
        device = pages.device
        self.size, self.adapters, self.page_table = size, adapters, pages
        self.inputs = {name: torch.zeros(size, width, dtype=dtype, device=device) for name, width in widths.items()}
        self.segments = torch.zeros(size, SEGMENT_NUMBERS, dtype=torch.int64, device=device)
        self.pages = torch.full((size,), -1, dtype=torch.int64, device=device)
        self.offsets = torch.zeros(size, dtype=torch.int64, device=device)
        splits = next(splits for most, splits in _SPLITS if size <= most)
        self.attention = StaticSingleRows(SingleRows(segments=self.segments, pages=pages, splits=splits), size)
        self._num_filled = 0
        self._output: Tensor | None = None

    @property
    def output(self) -> Tensor:
        """Rows, until the next replay."""
        assert self._output is not None, "nothing has run"
        return self._output

    def take(self, output: Tensor) -> None:
        """The output's rows come here."""
        if self._output is None:
            self._output = torch.empty_like(output)
        self._output.copy_(output)

    def fill(self, step: TracedStep) -> None:
        """With a step's."""
        n, attention = step.pages.shape[0], step.attention
        assert isinstance(attention, TritonAttentionBatch)
        for name, rows in self.inputs.items():
            rows[:n].copy_(step.inputs[name])
        self.segments[:n].copy_(attention.segments)
        self.page_table[: attention.pages.shape[0]].copy_(attention.pages)
        self.pages[:n].copy_(step.pages)
        self.offsets[:n].copy_(step.offsets)
        if n < self._num_filled:
            self.segments[n : self._num_filled].zero_()
            self.pages[n : self._num_filled].fill_(-1)
        self._num_filled = n
        if self.adapters is not None:
            assert step.adapters is not None
            self.adapters.fill(step.adapters)


class _AdapterRoom:
    """The same of a step's adapters, of one row each at most."""

    def __init__(self, size: int, num_places: int, rank: int, mask: int, device: torch.device) -> None:
        self.tables = RowTables(
            blocks=torch.full((size, BLOCK_NUMBERS), -1, dtype=torch.int64, device=device),
            table=torch.zeros(size, num_places, PLACE_NUMBERS, dtype=torch.int64, device=device),
            rank=rank,
        )
        self.batch = StaticAdapters(self.tables, mask)
        self._num_filled = 0
        self._adapters: Sequence[ref[LowRankAdapter]] = ()

    def fill(self, batch: AdapterBatch) -> None:
        blocks = host_blocks(batch)
        self.tables.blocks[: len(blocks)].copy_(on_device(blocks, self.tables.blocks.device))
        if len(blocks) < self._num_filled:
            self.tables.blocks[len(blocks) : self._num_filled].fill_(-1)
        self._num_filled = len(blocks)
        if [known() for known in self._adapters] != list(batch.adapters):
            self.tables.table[: len(batch.adapters)].copy_(table_of(batch))
            self._adapters = [ref(adapter) for adapter in batch.adapters]


class _RoomTrace(Trace[Backend]):
    """A trace that runs on a room's rows."""

    def __init__(self, backend: "TritonBackend", room: _Room) -> None:
        self._backend, self._room = backend, room

    @property
    def backend(self) -> Backend:
        return self._backend

    @property
    def attention(self) -> AttentionBatch:
        return self._room.attention

    @property
    def adapters(self) -> AdapterBatch:
        if self._room.adapters is None:
            raise UntraceableError
        return self._room.adapters.batch

    def input(self, name: str, width: int) -> Tensor:
        return self._room.inputs[name]

    def keep(self, name: Hashable, rows: Tensor) -> None:
        pass  # no windows run here

    def store(self, name: Hashable, rows: Tensor, store: Tensor) -> None:
        if rows.dtype != store.dtype or not row_launches.fit(rows):
            raise UntraceableError
        row_launches.store_rows(rows, store, self._room.pages, self._room.offsets)


class GraphCalls(TracedCalls):
    """See `TracedCalls`. `run` is what a trace runs; it is captured at the first step of each size."""

    def __init__(self, backend: "TritonBackend", dtype: torch.dtype, run: Callable[[Trace[Backend]], Tensor]) -> None:
        self._backend, self._dtype, self._run = backend, dtype, run
        self._page_table = torch.empty(_NUM_PAGES, dtype=torch.int64, device=backend.device)
        self._graphs: dict[tuple[int, int], _Graph | None] = {}  # None: of what cannot be captured

    @property
    def most_rows(self) -> int:
        return DECODE_ROWS[-1]

    @property
    def most_prompt_pairs(self) -> int:
        return 0

    @property
    def kept(self) -> Mapping[Hashable, int]:
        return {}

    def fit(self, step: TracedStep) -> bool:
        attention, adapters = step.attention, step.adapters
        if step.windows or step.pieces:
            return False
        if not isinstance(attention, TritonAttentionBatch) or not attention.is_single:
            return False
        if any(rows.dtype != self._dtype for rows in step.inputs.values()):
            return False
        if adapters is not None and (adapters.dtype != self._dtype or room_for_rank(adapters) > MOST_RANK):
            return False
        with torch.inference_mode():
            return self._graph(step) is not None

    def run(self, step: TracedStep) -> Tensor:
        with torch.inference_mode():
            graph = self._graph(step)
            assert graph is not None, "asked for what does not fit"
            graph.room.fill(step)
            graph.replay()
            return graph.room.output[: step.pages.shape[0]]

    def run_timed(self, step: TracedStep) -> tuple[Tensor, Mapping[str, float]]:
        """As one, since a graph does not say what its kernels take."""
        self._synchronize()
        start_s = time.perf_counter()
        found = self.run(step)
        self._synchronize()
        return found, {"graph": time.perf_counter() - start_s}

    def _synchronize(self) -> None:
        if self._backend.device.type == "cuda":
            torch.cuda.synchronize(self._backend.device)

    def _graph(self, step: TracedStep) -> "_Graph | None":
        """The one for a step; None where it cannot be captured."""
        assert isinstance(step.attention, TritonAttentionBatch)
        if (num_pages := step.attention.pages.shape[0]) > self._page_table.shape[0]:
            self._graphs.clear()
            self._page_table = self._page_table.new_empty(2 * num_pages)
        n, adapters = step.pages.shape[0], step.adapters
        size = next(size for size in DECODE_ROWS if n <= size)
        rank = 0 if adapters is None else room_for_rank(adapters)
        if (size, rank) not in self._graphs:
            try:
                self._graphs[size, rank] = self._captured(step, size, rank)
            except torch.OutOfMemoryError:  # of the room
                self._graphs[size, rank] = None
        return self._graphs[size, rank]

    def _captured(self, step: TracedStep, size: int, rank: int) -> "_Graph | None":
        """For steps like this one, of up to `size` rows, with adapters of up to this rank."""
        own = None
        if step.adapters is not None:
            num_places = len(step.adapters.adapters[0].places)
            own = _AdapterRoom(size, num_places, rank, step.adapters.mask, self._backend.device)
        widths = {name: rows.shape[1] for name, rows in step.inputs.items()}
        room = _Room(size, widths, self._dtype, own, self._page_table)
        trace = _RoomTrace(self._backend, room)
        replay = self._backend.capture(lambda: room.take(self._run(trace)))
        return None if replay is None else _Graph(room, replay)


@dataclass(frozen=True, eq=False)
class _Graph:
    """One that is captured, and where it reads and writes."""

    room: _Room
    replay: Callable[[], None]

"""Blocks as one call on a GPU: a CUDA graph for each of some numbers of rows, for steps of
requests, in which each decodes, or some have pieces of prompts.

There the host takes several times as long to launch kernels as the GPU to run them; replaying a
graph is one launch. A graph reads rows and tables where it was captured with them (`_Rows`,
`_Room`): those of a step are copied there first. A step of fewer rows than its graph is filled up
with rows that belong to no segment, no page and no adapter.

A graph fixes the layers, the adapters' places and ranks, and the maximum number of segments. The
adapters and sequences, and how many rows each has, may change.
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
from coserve.kernels.trace import ANY_PROMPT_PAIRS, Trace, TracedCalls, TracedStep, UntraceableError
from coserve.kernels.transfer import on_device
from coserve.kernels.triton import DECODE_ROWS, PROMPT_ROWS
from coserve.kernels.triton import rows as row_launches
from coserve.kernels.triton.adapters import (
    BLOCK_NUMBERS,
    BLOCK_ROWS,
    MAX_RANK,
    RowTables,
    StaticAdapters,
    host_blocks,
    room_for_rank,
    table_of,
)
from coserve.kernels.triton.attention_tables import (
    StaticSegments,
    StaticSingleRows,
    TritonAttentionBatch,
)

if TYPE_CHECKING:
    from coserve.kernels.triton import TritonBackend

# Segments of steps with pieces of prompts.
_SEGMENTS = (16, 64, 256, 1024)
# Programs for each row that is alone and key head: few rows leave a GPU empty, many would make
# programs without keys.
_SPLITS = ((4, 16), (16, 8), (64, 4), (1024, 2))
# Room for pages of all sequences of a step, to begin with.
_NUM_PAGES = 1 << 14


@dataclass(frozen=True, kw_only=True)
class _Size:
    """The size of a graph."""

    rows: int
    """Maximum number of rows."""
    segments: int
    """Maximum number of segments of several rows or one; 0 where every request decodes."""
    rank: int
    """Room for the rank of adapters; 0: there are none."""


class _Rows:
    """Tensors from which all graphs read a step's rows and their pages, and in which they leave the
    output. Rows that a step does not have go to page -1.
    """

    def __init__(
        self, size: int, widths: Mapping[str, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._size = size
        self.inputs = {
            name: torch.zeros(size, width, dtype=dtype, device=device)
            for name, width in widths.items()
        }
        self.pages = torch.full((size,), -1, dtype=torch.int64, device=device)
        self.offsets = torch.zeros(size, dtype=torch.int64, device=device)
        self._num_filled = 0
        self._output: Tensor | None = None

    @property
    def output(self) -> Tensor:
        """Return the output's rows, which hold until the next replay."""
        assert self._output is not None, "nothing has run"
        return self._output

    def take(self, output: Tensor) -> None:
        """Copy the output's rows here."""
        if self._output is None:
            self._output = output.new_empty(self._size, output.shape[1])
        # Into one tensor for all graphs, so that a graph's own pool can be reused by the next.
        self._output[: output.shape[0]].copy_(output)

    def fill(self, step: TracedStep) -> None:
        """Fill it with a step's rows."""
        n = step.pages.shape[0]
        for name, rows in self.inputs.items():
            rows[:n].copy_(step.inputs[name])
        self.pages[:n].copy_(step.pages)
        self.offsets[:n].copy_(step.offsets)
        self._leave(n)

    def clear(self) -> None:
        """Clear the pages, so that nothing is written to any."""
        self._leave(0)

    def _leave(self, n: int) -> None:
        # Only rows that the step before had: the others have page -1 already.
        if n < self._num_filled:
            self.pages[n : self._num_filled].fill_(-1)
        self._num_filled = n


class _Room:
    """Tensors from which a graph reads what changes from step to step: the first of the rows, and
    tables of its own.
    """

    def __init__(
        self, size: _Size, rows: _Rows, pages: Tensor, adapters: "_AdapterRoom | None"
    ) -> None:
        """Allocate the tables, with room for the pages of all sequences."""
        # With segments the rows alone are at most those; without, every row is one.
        splits = next(splits for most, splits in _SPLITS if (size.segments or size.rows) <= most)
        self.size, self.rows, self.adapters = size, rows, adapters
        self.attention: StaticSingleRows | StaticSegments = (
            StaticSegments(size.rows, size.segments, pages, splits)
            if size.segments
            else StaticSingleRows(size.rows, pages, splits)
        )

    def fill(self, step: TracedStep) -> None:
        """Fill it with a step's tables."""
        self.rows.fill(step)
        self.attention.fill(step.attention)
        if self.adapters is not None:
            assert step.adapters is not None
            self.adapters.fill(step.adapters)


class _AdapterRoom:
    """Room for the tables of a step's adapters."""

    def __init__(self, size: _Size, num_places: int, mask: int, device: torch.device) -> None:
        # Each adapter has a segment at least, and a block that is not full at most.
        most_adapters = size.segments or size.rows
        num_blocks = min(size.rows, size.rows // BLOCK_ROWS + most_adapters)
        self.tables = RowTables(
            blocks=torch.full((num_blocks, BLOCK_NUMBERS), -1, dtype=torch.int64, device=device),
            table=torch.zeros(
                most_adapters, num_places, PLACE_NUMBERS, dtype=torch.int64, device=device
            ),
            rank=size.rank,
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
        # Mostly the adapters of the step before. Weak references, so that dropped adapters can go.
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
        return self._room.rows.inputs[name][: self._room.size.rows]

    def keep(self, name: Hashable, rows: Tensor) -> None:
        pass  # no windows run here

    def store(self, name: Hashable, rows: Tensor, store: Tensor) -> None:
        if rows.dtype != store.dtype or not row_launches.fit(rows):
            raise UntraceableError
        n, places = self._room.size.rows, self._room.rows
        row_launches.store_rows(rows, store, places.pages[:n], places.offsets[:n])


class GraphCalls(TracedCalls):
    """The calls of a trace as CUDA graphs, captured at the first step of each size."""

    def __init__(
        self, backend: "TritonBackend", dtype: torch.dtype, run: Callable[[Trace[Backend]], Tensor]
    ) -> None:
        self._backend, self._dtype, self._run = backend, dtype, run
        self._page_table = torch.empty(_NUM_PAGES, dtype=torch.int64, device=backend.device)
        self._rows: _Rows | None = None
        self._graphs: dict[_Size, _Graph | None] = {}  # None: of what cannot be captured

    @property
    def max_rows(self) -> int:
        """Return the maximum number of rows of steps with pieces of prompts, or of requests that
        decode.
        """
        return max(PROMPT_ROWS[-1], DECODE_ROWS[-1])

    @property
    def max_prompt_pairs(self) -> int:
        return ANY_PROMPT_PAIRS

    @property
    def rows_apart(self) -> bool:
        return False

    @property
    def kept(self) -> Mapping[Hashable, int]:
        return {}

    def fit(self, step: TracedStep) -> bool:
        adapters = step.adapters
        if (
            step.windows
            or not isinstance(step.attention, TritonAttentionBatch)
            or _size(step) is None
        ):
            return False
        if any(rows.dtype != self._dtype for rows in step.inputs.values()):
            return False
        if adapters is not None and (
            adapters.dtype != self._dtype or room_for_rank(adapters) > MAX_RANK
        ):
            return False
        with torch.inference_mode():
            # Captures if need be: what cannot be captured runs kernel by kernel.
            return self._graph(step) is not None

    def run(self, step: TracedStep) -> Tensor:
        with torch.inference_mode():
            graph = self._graph(step)
            assert graph is not None, "asked for what does not fit"
            graph.room.fill(step)
            # In the same stream as the copies before it, hence after them.
            graph.replay()
            return graph.room.rows.output[: step.pages.shape[0]]

    def run_timed(self, step: TracedStep) -> tuple[Tensor, Mapping[str, float]]:
        """Run the graph and time it as one call, since its kernels cannot be timed."""
        self._synchronize()
        start_s = time.perf_counter()
        found = self.run(step)
        self._synchronize()
        return found, {"graph": time.perf_counter() - start_s}

    def _synchronize(self) -> None:
        if self._backend.device.type == "cuda":
            torch.cuda.synchronize(self._backend.device)

    def _graph(self, step: TracedStep) -> "_Graph | None":
        """Return the graph for a step; None where it cannot be captured."""
        assert isinstance(step.attention, TritonAttentionBatch)
        if (num_pages := step.attention.pages.shape[0]) > self._page_table.shape[0]:
            # Graphs read the page table where it was: with a larger one all are captured anew.
            self._graphs.clear()
            self._page_table = self._page_table.new_empty(2 * num_pages)
        size = _size(step)
        assert size is not None, "asked for what does not fit"
        if size not in self._graphs:
            try:
                self._graphs[size] = self._captured(step, size)
            except torch.OutOfMemoryError:  # of the room
                self._graphs[size] = None
        return self._graphs[size]

    def _captured(self, step: TracedStep, size: _Size) -> "_Graph | None":
        """Capture a graph for steps like this one, of up to this size."""
        adapters = None
        if step.adapters is not None:
            num_places = len(step.adapters.adapters[0].places)
            adapters = _AdapterRoom(size, num_places, step.adapters.mask, self._backend.device)
        if (rows := self._rows) is None:
            widths = {name: rows.shape[1] for name, rows in step.inputs.items()}
            rows = self._rows = _Rows(self.max_rows, widths, self._dtype, self._backend.device)
        rows.clear()  # it runs before it is captured
        room = _Room(size, rows, self._page_table, adapters)
        trace = _RoomTrace(self._backend, room)
        replay = self._backend.capture(lambda: rows.take(self._run(trace)))
        return None if replay is None else _Graph(room, replay)


def _size(step: TracedStep) -> _Size | None:
    """Return the size of the graph for a step; None where there is none for as many rows."""
    n, attention = step.pages.shape[0], step.attention
    assert isinstance(attention, TritonAttentionBatch)
    only_decodes = attention.is_single and n <= DECODE_ROWS[-1]  # more have room among prompts
    rows = next(
        (most for most in (DECODE_ROWS if only_decodes else PROMPT_ROWS) if n <= most), None
    )
    if rows is None:
        return None
    segments = 0
    if not only_decodes:
        segments = min(rows, next(most for most in _SEGMENTS if attention.num_segments <= most))
    return _Size(
        rows=rows,
        segments=segments,
        rank=0 if step.adapters is None else room_for_rank(step.adapters),
    )


@dataclass(frozen=True, eq=False)
class _Graph:
    """A captured graph, and the tensors that it reads and writes."""

    room: _Room
    """Tensors that it reads."""
    replay: Callable[[], None]
    """Launches it."""

"""Calls that a trace recorded, and everything that they need to run on the rows of a step
(`calls.cpp`).
"""

from array import array
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.kernels.attention import Segment
from coserve.kernels.cpu.attention import CpuAttentionBatch, has_room_for_tiles
from coserve.kernels.cpu.compiled import Library
from coserve.kernels.cpu.products import FEW_FLOAT32_ROWS
from coserve.kernels.cpu.stand_ins import ALIGNMENT, MemorySlot
from coserve.kernels.cpu.tile_products import MAX_ROWS, has_wide_products
from coserve.kernels.groups.base import RankGroup
from coserve.kernels.trace import (
    ANY_PROMPT_PAIRS,
    MAX_PROMPT_PAIRS,
    TracedCalls,
    TracedPiece,
    TracedStep,
    TracedWindow,
)

# Numbers of a window (see `windows.cpp`).
_WINDOW_NUMBERS = 6
# Minimum rows of a prompt for which arranging its keys in tiles pays; as in `windows.cpp`. On an
# AMD EPYC, one thread and layer, microseconds one by one and in tiles: 8 rows of 1,100 keys 577 and
# 747, 13 of 700 603 and 477.
_MIN_ROWS_BY_TILES = 10


@dataclass(frozen=True, kw_only=True, eq=False)
class WrittenCalls:
    """The record of a trace."""

    kernels: Library
    """The compiled kernels."""
    dtype: torch.dtype
    """The compute dtype."""
    numbers: "array[int]"
    """Numbers of all calls: kernels and arguments."""
    names: Sequence[str]
    """Names of the kernels, call by call."""
    read: Sequence[Tensor]
    """Tensors whose addresses are among the numbers, which must stay."""
    inputs: Sequence[str]
    """Names of the inputs, in their order."""
    row_bytes: int
    """Bytes of memory that a step needs for each row."""
    output: MemorySlot
    """Place of the output's rows in that memory."""
    width: int
    """Elements of a row of the output."""
    max_rows: int
    """Maximum number of rows that all kernels are for."""
    has_tile_products: bool
    """Whether there are products in tiles, which are for fewer rows with many threads."""
    has_adapters: bool
    """Whether adapters are added."""
    has_attention_tiles: bool
    """Whether rows of windows and of prompts attend in tiles."""
    head_width: int
    """Maximum width of a head."""
    kept: Mapping[Hashable, int]
    """Bytes of a row of the tensors that windows can keep; see `TracedCalls.kept`."""
    groups: Sequence[RankGroup] = ()
    """Groups of ranks with sums among the calls."""


class CpuCalls(TracedCalls):
    """The recorded calls of a trace on a CPU."""

    def __init__(self, written: WrittenCalls) -> None:
        self._written = written

    @property
    def max_rows(self) -> int:
        written = self._written
        bounded = written.has_tile_products and not has_wide_products(written.kernels)
        return min(written.max_rows, MAX_ROWS) if bounded else written.max_rows

    @property
    def kept(self) -> Mapping[Hashable, int]:
        return self._written.kept

    @property
    def max_prompt_pairs(self) -> int:
        return ANY_PROMPT_PAIRS if self._written.has_attention_tiles else MAX_PROMPT_PAIRS

    @property
    def rows_apart(self) -> bool:
        return True

    @property
    def names(self) -> Sequence[str]:
        """Return the names of the kernels, call by call."""
        return self._written.names

    def fit(self, step: TracedStep) -> bool:
        written = self._written
        if not isinstance(step.attention, CpuAttentionBatch) or step.attention.single is None:
            return False
        if written.has_adapters and (step.adapters is None or step.adapters.dtype != written.dtype):
            return False
        if not written.has_attention_tiles:
            return all(_is_short(window.segments) for window in step.windows)
        max_keys = max([piece.num_keys for piece in self._by_tiles(step.pieces)], default=0)
        return has_room_for_tiles(max_keys, written.head_width)

    def run(self, step: TracedStep) -> Tensor:
        return self._run(step, 0)

    def run_timed(self, step: TracedStep) -> tuple[Tensor, Mapping[str, float]]:
        nanoseconds = array("q", bytes(8 * len(self._written.names)))
        result = self._run(step, nanoseconds.buffer_info()[0])
        found: defaultdict[str, float] = defaultdict(float)
        for name, each in zip(self._written.names, nanoseconds, strict=True):
            found[name] += each / 1e9
        return result, found

    def _run(self, step: TracedStep, nanoseconds: int) -> Tensor:
        """Run all calls on a step.

        Args:
            nanoseconds: address where the time of each call is written; 0: nowhere.
        """
        written = self._written
        assert isinstance(step.attention, CpuAttentionBatch) and step.attention.single is not None
        num_paged_rows = step.attention.num_rows
        n = num_paged_rows + sum([window.num_rows for window in step.windows])
        table, first_page, lengths = step.attention.single.paged
        inputs = [step.inputs[name].contiguous() for name in written.inputs]
        assert all(rows.shape[0] == n and rows.dtype == written.dtype for rows in inputs)
        # One allocation for all tensors of the step, each at its place times the number of rows.
        memory = torch.empty(n * written.row_bytes + ALIGNMENT, dtype=torch.uint8)
        skipped = -memory.data_ptr() % ALIGNMENT
        adapters = (0, 0, 0, 0, 0)
        if written.has_adapters:
            given = step.adapters
            assert given is not None
            addresses = given.addresses
            adapters = (
                given.rows.data_ptr(),
                given.ends.data_ptr(),
                *addresses.shape[:2],
                addresses.data_ptr(),
            )
        windows = _Windows(step.windows, num_paged_rows)
        pieces = array("q")
        if by_tiles := self._by_tiles(step.pieces):
            lengths, starts = lengths.clone(), first_page.tolist()
            for piece in by_tiles:
                rows = slice(piece.first_row, piece.first_row + piece.num_rows)
                lengths[rows] = 0
                pieces.extend((rows.start, piece.num_rows, piece.num_keys, starts[rows.stop - 1]))
        # In the order of `STEP_NUMBERS`, and then the inputs.
        numbers = array(
            "q", [n, memory.data_ptr() + skipped, torch.get_num_threads(), num_paged_rows]
        )
        numbers.extend(x.data_ptr() for x in (step.pages, step.offsets, table, first_page, lengths))
        numbers.extend((pieces.buffer_info()[0], len(by_tiles), windows.address, len(step.windows)))
        numbers.extend(adapters)
        numbers.append(0 if step.windows else FEW_FLOAT32_ROWS)
        numbers.extend(rows.data_ptr() for rows in inputs)
        written.kernels.run_calls(
            written.numbers.buffer_info()[0],
            len(written.names),
            numbers.buffer_info()[0],
            nanoseconds,
        )
        for group in written.groups:
            group.raise_failure()
        start = skipped + n * written.output.start
        size = n * written.width * written.dtype.itemsize
        return memory[start : start + size].view(written.dtype).view(n, written.width)

    def _by_tiles(self, pieces: Sequence[TracedPiece]) -> Sequence[TracedPiece]:
        """Return the pieces whose rows attend in tiles."""
        has_tiles = self._written.has_attention_tiles
        return [piece for piece in pieces if has_tiles and piece.num_rows >= _MIN_ROWS_BY_TILES]


class _Windows:
    """A table of windows for the kernels.

    Args:
        windows: the windows.
        first_row: the step's row with which they begin.
    """

    def __init__(self, windows: Sequence[TracedWindow], first_row: int) -> None:
        self._numbers, self._segments = array("q"), []
        for window in windows:
            row, segments = 0, array("q")
            for each in window.segments:
                segments.extend((row, each.num_rows, each.first_key, each.num_keys))
                row += each.num_rows
            assert row == window.num_rows
            self._numbers.extend(
                (first_row, window.num_rows, window.first_in_pack, window.kept.data_ptr())
            )
            self._numbers.extend((segments.buffer_info()[0], len(window.segments)))
            self._segments.append(segments)
            first_row += window.num_rows
        assert len(self._numbers) == _WINDOW_NUMBERS * len(windows)

    @property
    def address(self) -> int:
        return self._numbers.buffer_info()[0]


def _is_short(segments: Sequence[Segment]) -> bool:
    """Return whether rows may attend one by one."""
    return sum([each.num_rows * each.num_keys for each in segments]) <= MAX_PROMPT_PAIRS

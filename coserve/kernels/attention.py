"""Attention as a backend gets it: which rows see which keys, and how scores are computed.

Shapes: n query rows, m keys, Hq query heads, Hkv key heads (Hq is a multiple of Hkv), D width of a
head. Keys and values lie in a store of pages, [num_pages, block_tokens, Hkv * D]; a contiguous
tensor of m keys is a store of one page, [1, m, Hkv * D].
"""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, repeat
from typing import overload

import msgspec
import torch
from torch import Tensor

from coserve.kernels.transfer import int_tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionSpec:
    """A formula of scores: softmax(soft_cap(q k^T * scale) + bias) over a row's keys."""

    scale: float
    """Factor of the products of queries and keys."""
    sliding_window: int | None = None
    """Number of its last keys that a row sees, its own among them; None: all up to its own."""
    soft_cap: float | None = None
    """Bound of scores: they become cap * tanh(score / cap) (Gemma 2, arXiv 2408.00118); None:
    unbounded.
    """
    alibi_slopes: tuple[float, ...] | None = None
    """Slope of each query head: -slope * distance is added (arXiv 2108.12409)."""
    sinks: Tensor | None = None
    """Score of one more key per head that has no value, float [Hq] (arXiv 2309.17453, as in
    gpt-oss).
    """

    @property
    def is_basic(self) -> bool:
        """Return whether there is nothing but a scale and a sliding window."""
        return self.soft_cap is None and self.alibi_slopes is None and self.sinks is None


class Segment(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Consecutive query rows of one sequence, at least one, which are the last of its keys."""

    num_rows: int
    """Number of query rows."""
    num_keys: int
    """Number of keys of the sequence."""
    pages: Sequence[int] = (0,)
    """Pages of the store, in order."""
    first_key: int = 0
    """Place of the first key in these pages laid end to end."""


class PageTables:
    """Page tables of some sequences end to end, on the CPU, made once for as long as none of them
    changes.

    Args:
        tables: by sequence; an `array` is taken as it lies.
    """

    def __init__(self, tables: Sequence[Sequence[int]]) -> None:
        self.tables = tables

    @cached_property
    def num_pages(self) -> Tensor:
        """Return the number of pages of each sequence, int64 [sequences]."""
        return int_tensor([len(table) for table in self.tables])

    @cached_property
    def first_page(self) -> Tensor:
        """Return the place in `pages` where each sequence begins, int64 [sequences]."""
        # Pages before each sequence: sums without its own.
        return int_tensor([0, *accumulate(map(len, self.tables))][:-1])

    @cached_property
    def pages(self) -> Tensor:
        """Return the pages of all sequences, int64."""
        # Bytes are joined as they are, without a Python integer for every page.
        if set(map(type, self.tables)) == {array}:
            joined = bytearray().join(self.tables)  # type: ignore[arg-type]
            return torch.frombuffer(joined, dtype=torch.int64)
        return int_tensor(list(chain.from_iterable(self.tables)))

    @staticmethod
    def joined(tables: Sequence["PageTables"]) -> "PageTables":
        """Return the page tables of all sequences."""
        return PageTables([table for each in tables for table in each.tables])

    def __len__(self) -> int:
        return len(self.tables)


@dataclass(frozen=True, kw_only=True, eq=False)
class SegmentTable(Sequence[Segment]):
    """Segments by columns, int64 [segments] on the CPU, so that a step of hundreds makes no object
    for each of them.
    """

    num_rows: Tensor
    """Number of query rows of each."""
    num_keys: Tensor
    """Number of keys of each."""
    first_key: Tensor | None
    """Place of each one's first key in its pages; None: keys begin with a page."""
    first_page: Tensor
    """Place in `pages` where those of each begin."""
    num_pages: Tensor
    """Number of pages that each has there, which may be more than it reads."""
    pages: Tensor
    """Pages of all, int64."""

    @staticmethod
    def of(segments: Sequence[Segment]) -> "SegmentTable":
        """Return the table of some segments."""
        if isinstance(segments, SegmentTable):
            return segments
        tables = PageTables([segment.pages for segment in segments])
        return SegmentTable(
            num_rows=int_tensor([segment.num_rows for segment in segments]),
            num_keys=int_tensor([segment.num_keys for segment in segments]),
            first_key=int_tensor([segment.first_key for segment in segments]),
            first_page=tables.first_page,
            num_pages=tables.num_pages,
            pages=tables.pages,
        )

    def __len__(self) -> int:
        return self.num_rows.shape[0]

    @overload
    def __getitem__(self, index: int) -> Segment: ...

    @overload
    def __getitem__(self, index: slice) -> list[Segment]: ...

    def __getitem__(self, index: int | slice) -> Segment | list[Segment]:
        return self._each[index]

    @cached_property
    def _each(self) -> list[Segment]:
        table, first_keys = (
            self.pages.tolist(),
            repeat(0) if self.first_key is None else self.first_key.tolist(),
        )
        columns = torch.stack(
            [self.num_rows, self.num_keys, self.first_page, self.num_pages]
        ).tolist()
        return [
            Segment(
                num_rows=num_rows,
                num_keys=num_keys,
                pages=table[page : page + num_pages],
                first_key=first_key,
            )
            for num_rows, num_keys, page, num_pages, first_key in zip(
                *columns, first_keys, strict=False
            )
        ]

    @cached_property
    def total_rows(self) -> int:
        """Return the number of query rows of all segments."""
        return sum(self.num_rows.tolist())

    @property
    def is_single(self) -> bool:
        """Return whether each segment has one row."""
        return self.total_rows == len(self)

    def take(self, which: Tensor) -> "SegmentTable":
        """Return the table of some segments, int64 [n], with no other pages than theirs."""
        num_pages = self.num_pages[which]
        # Where each segment's pages begin in the new table.
        first_page = num_pages.cumsum(0) - num_pages
        # For each page of the new table, the distance to its place in the old one.
        sources = torch.repeat_interleave(self.first_page[which] - first_page, num_pages)
        return SegmentTable(
            num_rows=self.num_rows[which],
            num_keys=self.num_keys[which],
            first_key=None if self.first_key is None else self.first_key[which],
            first_page=first_page,
            num_pages=num_pages,
            pages=self.pages[sources + torch.arange(sources.shape[0])],
        )


class AttentionBatch(ABC):
    """Segments whose rows follow each other, and everything that a backend derives from them:
    prepared once for all layers of a step (`Backend.prepare_attention`).
    """

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Return the number of query rows of all segments."""


class AttentionRoom(AttentionBatch):
    """Room for the segments of one batch after another, for calls that were captured with it
    (`Backend.capture`). Rows that belong to no segment attend to nothing, and their results are
    zeros.
    """

    @abstractmethod
    def fill(self, batch: AttentionBatch) -> None:
        """Fill it with the segments of a batch, whose keys lie in stores of one page."""

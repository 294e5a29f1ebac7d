"""What crosses to a backend for attention: which rows see which keys, and how scores are made.

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
    """How scores are made: softmax(soft_cap(q k^T * scale) + bias) over the keys that a row sees.

    sliding_window: a row sees this many of its last keys, itself among them; None: all up to
    itself. soft_cap: scores become cap * tanh(score / cap) (Gemma 2, arXiv 2408.00118).
    alibi_slopes: by query head; -slope * distance is added (arXiv 2108.12409). sinks: float [Hq],
    the score of one more key per head that has no value (arXiv 2309.17453, as in gpt-oss).
    """

    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None
    sinks: Tensor | None = None

    @property
    def is_basic(self) -> bool:
        """Whether there is nothing but a scale and a sliding window."""
        return self.soft_cap is None and self.alibi_slopes is None and self.sinks is None


class Segment(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Consecutive query rows of one sequence, at least one, which are the last `num_rows` of its
    `num_keys` keys.

    pages: of the store, in order. Key j is entry `first_key + j` of these pages laid end to end.
    """

    num_rows: int
    num_keys: int
    pages: Sequence[int] = (0,)
    first_key: int = 0


class PageTables:
    """Page tables of some sequences end to end, on the CPU: made once for as long as none of them
    changes.

    tables: by sequence. pages: int64 [all]. first_page, num_pages: int64 [sequences], where each
    begins there, and how many it has.
    """

    def __init__(self, tables: Sequence[Sequence[int]]) -> None:
        """An array is taken as it lies."""
        self.tables = tables

    @cached_property
    def num_pages(self) -> Tensor:
        return int_tensor([len(table) for table in self.tables])

    @cached_property
    def first_page(self) -> Tensor:
        return int_tensor([0, *accumulate(map(len, self.tables))][:-1])

    @cached_property
    def pages(self) -> Tensor:
        if set(map(type, self.tables)) == {array}:
            return torch.frombuffer(bytearray().join(self.tables), dtype=torch.int64)  # type: ignore[arg-type]
        return int_tensor(list(chain.from_iterable(self.tables)))

    @staticmethod
    def joined(tables: Sequence["PageTables"]) -> "PageTables":
        """Those of all."""
        return PageTables([table for each in tables for table in each.tables])

    def __len__(self) -> int:
        return len(self.tables)


@dataclass(frozen=True, kw_only=True, eq=False)
class SegmentTable(Sequence[Segment]):
    """Segments by columns, int64 [segments] on the CPU, so that a step of hundreds makes no object
    for each of them.

    first_key: None: keys begin with a page. first_page: where the pages of each begin among
    `pages`, int64 [all]. num_pages: how many each has there, which may be more than it reads.
    """

    num_rows: Tensor
    num_keys: Tensor
    first_key: Tensor | None
    first_page: Tensor
    num_pages: Tensor
    pages: Tensor

    @staticmethod
    def of(segments: Sequence[Segment]) -> "SegmentTable":
        """The same segments."""
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
        """Of all."""
        return sum(self.num_rows.tolist())

    @property
    def is_single(self) -> bool:
        """Whether each has one row."""
        return self.total_rows == len(self)

    def take(self, which: Tensor) -> "SegmentTable":
        """Some of them, int64 [n], with no pages but theirs."""
        num_pages = self.num_pages[which]
        first_page = num_pages.cumsum(0) - num_pages
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
    """Segments whose rows follow each other, with whatever a backend derives from them: prepared
    once for all layers of a step (`Backend.prepare_attention`).
    """

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Query rows of all segments."""


class AttentionRoom(AttentionBatch):
    """Room for the segments of one batch after another, for calls that were captured with it
    (`Backend.capture`). Rows that belong to no segment attend to nothing, and their results are
    zeros.
    """

    @abstractmethod
    def fill(self, batch: AttentionBatch) -> None:
        """With the segments of a batch, whose keys lie in stores of one page."""

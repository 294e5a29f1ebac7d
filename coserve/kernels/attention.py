"""What crosses to a backend for attention: which rows see which keys, and how scores are made.

Shapes: n query rows, m keys, Hq query heads, Hkv key heads (Hq is a multiple of Hkv), D width of a head. Keys and
values lie in a store of pages, [num_pages, block_tokens, Hkv * D]; a contiguous tensor of m keys is a store of one
page, [1, m, Hkv * D].
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionSpec:
    """How scores are made: softmax(soft_cap(q k^T * scale) + bias) over the keys that a row sees.

    sliding_window: a row sees this many of its last keys, itself among them; None: all up to itself.
    soft_cap: scores become cap * tanh(score / cap) (Gemma 2, arXiv 2408.00118).
    alibi_slopes: by query head; -slope * distance is added (arXiv 2108.12409).
    sinks: float [Hq], the score of one more key per head that has no value (arXiv 2309.17453, as in gpt-oss).
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
    """Consecutive query rows of one sequence, at least one, which are the last `num_rows` of its `num_keys` keys.

    pages: of the store, in order. Key j is entry `first_key + j` of these pages laid end to end.
    """

    num_rows: int
    num_keys: int
    pages: Sequence[int] = (0,)
    first_key: int = 0


class AttentionBatch(ABC):
    """Segments whose rows follow each other, with whatever a backend derives from them: prepared once for all layers of
    a step (`Backend.prepare_attention`).
    """

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Query rows of all segments."""


class AttentionRoom(AttentionBatch):
    """Room for the segments of one batch after another, for calls that were captured with it (`Backend.capture`). Rows
    that belong to no segment attend to nothing, and their results are zeros.
    """

    @abstractmethod
    def fill(self, batch: AttentionBatch) -> None:
        """With the segments of a batch, whose keys lie in stores of one page."""

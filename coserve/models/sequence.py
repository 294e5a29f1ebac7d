"""A sequence with a KV cache of its own: contiguous, of fixed capacity."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from coserve.errors import BudgetError
from coserve.kernels.attention import Segment
from coserve.models.backbone import Backbone
from coserve.models.base import Part
from coserve.models.batch import BatchRows, Keep, Span
from coserve.models.bypasses import Bypasses


class CachedSequence:
    """Tokens that have been run, as K and V of every block: float [capacity, Hkv * D] each, in the compute dtype."""

    def __init__(self, backbone: Backbone, capacity: int, bypasses: Bypasses | None = None) -> None:
        self.bypasses = bypasses
        self.capacity = capacity
        self.length = 0
        self._device = backbone.device
        self.cache: dict[Part, dict[str, Tensor]] = {}
        for layer in range(backbone.architecture.num_layers):
            graph = backbone.architecture.graphs[layer]
            self.cache[layer] = {
                name: torch.zeros(capacity, *graph.spec[name].shape, dtype=backbone.dtype, device=backbone.device)
                for name in graph.kv_tensors
            }

    def extend(self, tokens: Tensor) -> Span:
        """A span that runs the next tokens (int64 [n]): a prefill chunk, or one decoded token."""
        start, end = self.length, self.length + tokens.shape[0]
        if end > self.capacity:
            raise BudgetError(f"a sequence of {end} tokens does not fit its cache of {self.capacity}")
        self.length = end
        return _CachedRows(self, tokens.to(self._device), start, end)


class _CachedRows(Span, BatchRows):
    def __init__(self, sequence: CachedSequence, tokens: Tensor, start: int, end: int) -> None:
        self.tokens, self.bypasses, self.num_rows = tokens, sequence.bypasses, end - start
        self.positions = torch.arange(start, end, device=tokens.device)
        self.segments = [Segment(num_rows=end - start, num_keys=end)]
        self.block_tokens = sequence.capacity
        self._cache, self._start, self._end = sequence.cache, start, end

    def gather(self, others: Sequence[Any]) -> BatchRows:
        return self

    def keep(self, part: Part) -> Keep:
        return Keep(rows={name: rows[self._start : self._end] for name, rows in self._cache.get(part, {}).items()})

    def stores(self, layer: int) -> tuple[Tensor, Tensor]:
        keys, values = (rows[None] for rows in self._cache[layer].values())
        return keys, values

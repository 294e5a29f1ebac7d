"""A sequence with a KV cache, and states, of its own: contiguous, of fixed capacity."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from coserve.errors import BudgetError
from coserve.graph.states import StateRows, StateRun, TensorStates
from coserve.kernels.attention import Segment
from coserve.models.backbone import Backbone
from coserve.models.base import Part
from coserve.models.batch import Keep, RowGroup, RowSpan
from coserve.models.bypasses import Bypasses


class CachedSequence:
    """Tokens that have run, as K and V of every block with attention, float [capacity, Hkv * D]
    each in the compute dtype, and the states of the other blocks, float32 [1, state size].
    """

    def __init__(self, backbone: Backbone, capacity: int, bypasses: Bypasses | None = None) -> None:
        self.bypasses = bypasses
        self.capacity = capacity
        self.length = 0
        self._device = backbone.device
        self.states = {
            layer: TensorStates(torch.zeros(1, size, device=backbone.device))
            for layer, size in backbone.local.state_sizes.items()
        }
        self.cache: dict[Part, dict[str, Tensor]] = {}
        for layer in backbone.local.kv_layers:
            graph = backbone.local.graphs[layer]
            self.cache[layer] = {
                name: torch.zeros(
                    capacity, *graph.spec[name].shape, dtype=backbone.dtype, device=backbone.device
                )
                for name in graph.kv_tensors
            }

    def extend(self, tokens: Tensor) -> RowSpan:
        """Return a span that runs the next tokens (int64 [n]): a prefill chunk, or one decoded
        token.
        """
        start, end = self.length, self.length + tokens.shape[0]
        if end > self.capacity:
            raise BudgetError(
                f"a sequence of {end} tokens does not fit its cache of {self.capacity}"
            )
        self.length = end
        return _CachedRows(self, tokens.to(self._device), start, end)


class _CachedRows(RowSpan, RowGroup):
    def __init__(self, sequence: CachedSequence, tokens: Tensor, start: int, end: int) -> None:
        self.tokens, self.bypasses, self.num_rows = tokens, sequence.bypasses, end - start
        self.positions = torch.arange(start, end, device=tokens.device)
        self.segments = [Segment(num_rows=end - start, num_keys=end)]
        self.block_tokens = sequence.capacity
        self._cache, self._start, self._end = sequence.cache, start, end
        self._states = sequence.states

    def gather(self, others: Sequence[Any]) -> RowGroup:
        return self

    def keep(self, part: Part) -> Keep:
        return Keep(
            rows={
                name: rows[self._start : self._end]
                for name, rows in self._cache.get(part, {}).items()
            }
        )

    def stores(self, layer: int) -> tuple[Tensor, Tensor]:
        keys, values = (rows[None] for rows in self._cache[layer].values())
        return keys, values

    def states(self, layer: int) -> StateRows:
        place = torch.zeros(1, dtype=torch.int64, device=self.tokens.device)
        run = StateRun(num_rows=self.num_rows, rows=slice(None), before=place, after=place)
        return StateRows(rows=slice(None), runs=[run], store=self._states[layer])

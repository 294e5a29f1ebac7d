"""Causal self-attention: the one operator that looks at whom a row belongs to."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor

from coserve.graph.operators.base import Attributes, Load, Operator, Shape, Shapes, Values
from coserve.graph.tensors import TensorSpec
from coserve.kernels.attention import AttentionKernel, PageTable


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive rows of one sequence, and all the keys that they may look at, their own last.

    keys, values: asked when attention runs, since the rows' own are only written just before; [m, Hkv * D].
    """

    rows: slice
    keys: Callable[[], Tensor]
    values: Callable[[], Tensor]
    key_grads: Tensor | None = None  # float32 [m, Hkv * D], added to in the backward pass
    value_grads: Tensor | None = None

    def moved(self, start: int) -> "Segment":
        """The segment, when its rows stand `start` further."""
        return replace(self, rows=slice(start + self.rows.start, start + self.rows.stop))

    def attend(self, kernel: AttentionKernel, q: Tensor, attributes: Attributes) -> tuple[Tensor, Tensor]:
        """Attention of its rows: q [n, Hq, D] -> output [n, Hq, D], log-sum-exp [n, Hq]."""
        num_key_heads = attributes["num_key_value_heads"]
        keys, values = _heads(self.keys(), num_key_heads), _heads(self.values(), num_key_heads)
        settings = {name: attributes[name] for name in ("scale", "sliding_window")}
        return kernel.forward(q, keys, values, **settings)


@dataclass(frozen=True, kw_only=True)
class PagedSegment:
    """Rows that are each the last of a sequence of its own, whose keys lie in pages. They run forward only.

    keys, values: [num_pages, block_tokens, Hkv * D].
    """

    rows: slice
    keys: Tensor
    values: Tensor
    table: PageTable

    def moved(self, start: int) -> "PagedSegment":
        """The segment, when its rows stand `start` further."""
        return replace(self, rows=slice(start + self.rows.start, start + self.rows.stop))

    def attend(self, kernel: AttentionKernel, q: Tensor, attributes: Attributes) -> tuple[Tensor, Tensor]:
        """Attention of its rows: q [n, Hq, D] -> output [n, Hq, D], log-sum-exp [n, Hq]."""
        settings = {name: attributes[name] for name in ("scale", "sliding_window")}
        return kernel.forward_paged(q, self.keys, self.values, self.table, **settings)


@dataclass(frozen=True, kw_only=True)
class AttentionContext:
    """What attention needs beyond its rows. K and V of the rows must be among the segments' before it runs.

    `key_grads` and `value_grads` are the accumulators' rows of the window that runs backward: float32 [n, Hkv * D].
    Windows run from the last to the first, so once a window's own attention has been reversed, they are complete
    (FlexLLM section 6.1, figure 8).
    """

    kernel: AttentionKernel
    segments: tuple[Segment | PagedSegment, ...] = field(default=())
    key_grads: Tensor | None = None
    value_grads: Tensor | None = None


class Attention(Operator):
    """y = softmax(q k^T * scale, masked) v; q [n, Hq * D], k and v [n, Hkv * D] plus the earlier rows that the
    context holds.

    Attributes: num_heads (Hq), num_key_value_heads (Hkv), scale, sliding_window (number of keys, or None). Outputs: y
    [n, Hq * D], lse float32 [n, Hq].
    """

    name = "attention"
    inputs = ("q", "k", "v")
    outputs = ("y", "lse")
    needs = dict.fromkeys(inputs, ("q", "k", "v", "y", "lse"))
    whole = ("k", "v")

    def infer(self, shapes: Mapping[str, Shape], attributes: Attributes) -> Shapes:
        return {"y": (shapes["q"], None), "lse": ((attributes["num_heads"],), torch.float32)}

    def forward(self, values: Values, attributes: Attributes, context: AttentionContext) -> dict[str, Tensor]:
        q = values["q"]
        if [segment.rows for segment in context.segments] == [slice(0, q.shape[0])]:
            # What comes out needs no copying.
            y, lse = context.segments[0].attend(context.kernel, _heads(q, attributes["num_heads"]), attributes)
            return {"y": y.flatten(1), "lse": lse}
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[0], attributes["num_heads"], dtype=torch.float32, device=q.device)
        for segment in context.segments:
            y, norm = segment.attend(context.kernel, _heads(q[segment.rows], attributes["num_heads"]), attributes)
            out[segment.rows] = y.flatten(1)
            lse[segment.rows] = norm
        return {"y": out, "lse": lse}

    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: AttentionContext,
    ) -> dict[str, Tensor]:
        q, dy = values["q"], gradients["y"]
        assert context.key_grads is not None and context.value_grads is not None
        dq = torch.empty_like(q)
        for segment in context.segments:
            assert isinstance(segment, Segment), "rows in pages run forward only"
            assert segment.key_grads is not None and segment.value_grads is not None
            rows, num_heads, num_key_heads = segment.rows, attributes["num_heads"], attributes["num_key_value_heads"]
            grad = context.kernel.backward(
                _heads(dy[rows], num_heads),
                _heads(q[rows], num_heads),
                _heads(segment.keys(), num_key_heads),
                _heads(segment.values(), num_key_heads),
                _heads(values["y"][rows], num_heads),
                values["lse"][rows],
                scale=attributes["scale"],
                sliding_window=attributes["sliding_window"],
                key_grads=_heads(segment.key_grads, num_key_heads),
                value_grads=_heads(segment.value_grads, num_key_heads),
            )
            dq[rows] = grad.flatten(1)
        result = {"q": dq, "k": context.key_grads.to(q.dtype), "v": context.value_grads.to(q.dtype)}
        return {slot: result[slot] for slot in wanted}

    def flops_per_row(self, specs: Mapping[str, TensorSpec], attributes: Attributes, mean_context_len: float) -> float:
        return 4 * prod(specs["q"].shape) * min(mean_context_len, attributes["sliding_window"] or mean_context_len)

    def bytes_moved(self, specs: Mapping[str, TensorSpec], attributes: Attributes, load: Load) -> int:
        """The rows of a sequence share its earlier keys, so those are read once. Sum over sequences."""
        earlier = max(
            0.0, min(load.mean_context_len, attributes["sliding_window"] or load.mean_context_len) - load.rows / 2
        )
        per_key = sum(specs[slot].num_bytes(load.compute_dtype) for slot in self.whole)
        return super().bytes_moved(specs, attributes, load) + round(earlier * per_key)

    def vjp_flops_per_row(
        self,
        wanted: Collection[str],
        specs: Mapping[str, TensorSpec],
        attributes: Attributes,
        mean_context_len: float,
    ) -> float:
        # Five matrix products where the forward pass has two: scores again, dP, dQ, dK and dV.
        return 2.5 * self.flops_per_row(specs, attributes, mean_context_len)


def _heads(x: Tensor, num_heads: int) -> Tensor:
    return x.view(x.shape[0], num_heads, -1)

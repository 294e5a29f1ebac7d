"""Causal self-attention: the one operator for which it matters whose row a row is."""

from collections.abc import Collection, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from coserve.graph.layouts import AnyState, Given, Layout
from coserve.graph.operators.base import Attributes, Context, Load, Operator, Shape, Shapes, Values
from coserve.graph.tensors import TensorSpec
from coserve.kernels.attention import AttentionSpec
from coserve.kernels.base import rows_of_owner
from coserve.kernels.cuts import Cut, head_cut

_HEADS = "heads of attention"


class Attention(Operator):
    """y = softmax(q k^T * scale, masked) v; q [n, Hq * D], k and v [n, Hkv * D] plus the earlier
    rows that the context holds.

    Attributes: num_heads (Hq), num_key_value_heads (Hkv), scale, sliding_window (number of keys, or
    None), and, where there are any, soft_cap and alibi_slopes; sinks [Hq] is an input (see
    `AttentionSpec`). Outputs: y [n, Hq * D], lse float32 [n, Hq].
    """

    name = "attention"
    inputs = ("q", "k", "v", "sinks")
    optional = frozenset({"sinks"})
    outputs = ("y", "lse")
    needs = {**dict.fromkeys(("q", "k", "v"), ("q", "k", "v", "sinks", "y", "lse")), "sinks": None}
    whole = ("k", "v")
    apart = frozenset(("q", "k", "v", "y", "lse"))

    def infer(self, shapes: Mapping[str, Shape], attributes: Attributes) -> Shapes:
        return {"y": (shapes["q"], None), "lse": ((attributes["num_heads"],), torch.float32)}

    def layouts(self, given: Given) -> Sequence[Layout]:
        cuts = self.demands(given)
        if not all(cut in given.states.get(slot, ()) for slot, cut in cuts.items()):
            return []
        heads = head_cut(given.attributes["num_heads"], 1, given.size, name=_HEADS)
        return [Layout(inputs={**cuts, "sinks": heads}, outputs={"y": cuts["q"], "lse": heads})]

    def demands(self, given: Given) -> dict[str, Cut]:
        """Return the cuts into whole heads; of key heads, several ranks may have the same one."""
        numbers = {
            "q": given.attributes["num_heads"],
            **dict.fromkeys("kv", given.attributes["num_key_value_heads"]),
        }
        names = {"q": _HEADS, **dict.fromkeys("kv", "key heads")}
        return {
            slot: head_cut(
                number,
                given.specs[slot].shape[0] // number,
                given.size,
                name=names[slot],
                may_copy=slot != "q",
            )
            for slot, number in numbers.items()
        }

    def localized(
        self, attributes: Attributes, states: Mapping[str, AnyState], rank: int
    ) -> Attributes:
        q, k = states["q"], states["k"]
        if not isinstance(q, Cut) or not isinstance(k, Cut):
            return attributes
        heads, key_heads = attributes["num_heads"], attributes["num_key_value_heads"]
        found = {
            **attributes,
            "num_heads": heads // q.size,
            "num_key_value_heads": key_heads * k.local // k.width,
        }
        if (slopes := attributes.get("alibi_slopes")) is not None:
            # Query heads are cut into neighbouring runs, so a rank's slopes are neighbours, too.
            found["alibi_slopes"] = slopes[rank * heads // q.size : (rank + 1) * heads // q.size]
        return found

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        q, spec = _heads(values["q"], attributes["num_heads"]), attention_spec(values, attributes)
        found = [
            context.backend.attention(q[own.rows], own.keys, own.values, own.batch, spec)
            for own in context.attention
        ]
        y, lse = (_joined(parts) for parts in zip(*found, strict=True))
        return {"y": y.flatten(1), "lse": lse}

    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> dict[str, Tensor]:
        heads, spec = attributes["num_heads"], attention_spec(values, attributes)
        found: dict[str, list[Tensor]] = {"q": [], "k": [], "v": []}
        for index, own in enumerate(context.attention):
            assert own.key_grads is not None and own.value_grads is not None, (
                "requests run forward only"
            )
            q, y, lse = (rows_of_owner(values[slot], index, own.rows) for slot in ("q", "y", "lse"))
            dq = context.backend.attention_gradient(
                *(
                    _heads(gradients["y"][own.rows], heads),
                    _heads(q, heads),
                    own.keys,
                    own.values,
                    _heads(y, heads),
                ),
                *(lse, own.batch, spec),
                key_grads=own.key_grads,
                value_grads=own.value_grads,
            )
            found["q"].append(dq.flatten(1))
            # Complete by now: windows run last to first, so every later row has added its part.
            found["k"].append(own.key_grads[0, own.place].to(dq.dtype))
            found["v"].append(own.value_grads[0, own.place].to(dq.dtype))
        return {slot: _joined(found[slot]) for slot in wanted}

    def flops_per_row(
        self, specs: Mapping[str, TensorSpec], attributes: Attributes, mean_context_len: float
    ) -> float:
        return (
            # Two products (scores, and values weighed by them) of 2 FLOPs per query element and
            # key.
            4
            * prod(specs["q"].shape)
            * min(mean_context_len, attributes["sliding_window"] or mean_context_len)
        )

    def bytes_moved(
        self, specs: Mapping[str, TensorSpec], attributes: Attributes, load: Load
    ) -> int:
        """Return the memory traffic, in which the rows of a sequence share its earlier keys: these
        are read once. The load is of one sequence; costs of several add up.
        """
        earlier = max(
            0.0,
            min(load.mean_context_len, attributes["sliding_window"] or load.mean_context_len)
            - load.rows / 2,
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


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _heads(x: Tensor, num_heads: int) -> Tensor:
    return x.view(x.shape[0], num_heads, -1)


def attention_spec(values: Values, attributes: Attributes) -> AttentionSpec:
    """Return a node's attributes, and its sinks, as a value for the kernels."""
    return AttentionSpec(
        scale=attributes["scale"],
        sliding_window=attributes["sliding_window"],
        soft_cap=attributes.get("soft_cap"),
        alibi_slopes=attributes.get("alibi_slopes"),
        sinks=values.get("sinks"),
    )

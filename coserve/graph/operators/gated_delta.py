"""Gated delta layers: linear attention with a state of fixed size in place of keys and values."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from coserve.graph.layouts import AnyState, Given, Layout
from coserve.graph.operators.base import (
    Attributes,
    Context,
    Operator,
    RowWise,
    Shape,
    Shapes,
    Values,
)
from coserve.graph.states import StateRun
from coserve.graph.tensors import TensorSpec
from coserve.kernels.cuts import Cut, head_cut, side_by_side
from coserve.kernels.gated_delta import GatedDeltaRows, GatedDeltaSpec, GatedDeltaWeights

_ROWS, _WEIGHTS = ("x", "b", "a"), ("conv", "a_log", "dt_bias")

_HEADS = "heads of a state"


class GatedDelta(Operator):
    """y = the gated delta rule on the short causal convolution of x (see
    `kernels.plain.gated_delta`): x [n, C], b and a [n, Hv] -> y [n, Hv * Dv]; weights conv [C, 1,
    K], a_log and dt_bias [Hv]. Source: arXiv 2412.06464.

    Attributes: num_key_heads, num_value_heads, key_dim, value_dim, kernel_size.
    """

    name = "gated_delta"
    inputs = (*_ROWS, *_WEIGHTS)
    needs = dict.fromkeys(inputs, inputs)
    lead = _ROWS

    def infer(self, shapes: Mapping[str, Shape], attributes: Attributes) -> Shapes:
        return {"y": ((attributes["num_value_heads"] * attributes["value_dim"],), None)}

    def state_size(self, attributes: Attributes) -> int:
        return GatedDeltaSpec(**attributes).state_size

    def layouts(self, given: Given) -> Sequence[Layout]:
        # Only whole heads can be divided, since a state belongs to one head.
        cuts = self.demands(given)
        if not all(cut in given.states.get(slot, ()) for slot, cut in cuts.items()):
            return []
        weights = {"conv": cuts["x"].along(-3), "a_log": cuts["a"], "dt_bias": cuts["a"]}
        heads, width = given.attributes["num_value_heads"], given.attributes["value_dim"]
        return [
            Layout(
                inputs={**cuts, **weights},
                outputs={"y": head_cut(heads, width, given.size, name=_HEADS)},
            )
        ]

    def demands(self, given: Given) -> dict[str, Cut]:
        """Return the cuts into whole heads; of key heads, several ranks may have the same one."""
        spec = GatedDeltaSpec(**given.attributes)
        keys = head_cut(
            spec.num_key_heads, spec.key_dim, given.size, name="key heads of a state", may_copy=True
        )
        values = head_cut(spec.num_value_heads, spec.value_dim, given.size, name=_HEADS)
        heads = head_cut(spec.num_value_heads, 1, given.size, name=_HEADS)
        return {"x": side_by_side([keys, keys, values]), "b": heads, "a": heads}

    def localized(
        self, attributes: Attributes, states: Mapping[str, AnyState], rank: int
    ) -> Attributes:
        x, heads = states["x"], states["a"]
        if not isinstance(x, Cut) or not isinstance(heads, Cut):
            return attributes
        # x is queries, keys and values side by side, and there are as many query as key heads.
        keys = (x.local - heads.local * attributes["value_dim"]) // (2 * attributes["key_dim"])
        return {**attributes, "num_key_heads": keys, "num_value_heads": heads.local}

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        spec, weights = GatedDeltaSpec(**attributes), _weights(values)
        x: Tensor = values["x"]
        y = x.new_empty(x.shape[0], spec.num_value_heads * spec.value_dim)
        for own in context.states:
            rows, into = [values[slot][own.rows] for slot in _ROWS], y[own.rows]
            # In order: a run may begin with the state that one before it has written.
            for run in own.runs:
                found, state = context.backend.gated_delta(
                    _pieces(run, rows), weights, run.state(own.store), spec
                )
                own.store.write(run.after, state)
                into[run.rows] = found.flatten(0, 1)
        return {"y": y}

    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> dict[str, Tensor]:
        spec, weights, backend = GatedDeltaSpec(**attributes), _weights(values), context.backend
        found = {slot: torch.empty_like(values[slot]) for slot in _ROWS}
        sums = {
            slot: torch.zeros_like(values[slot], dtype=torch.float32)
            for slot in _WEIGHTS
            if slot in wanted
        }
        for own in context.states:
            assert own.gradient is not None, "requests run forward only"
            rows, grad = [values[slot][own.rows] for slot in _ROWS], gradients["y"][own.rows]
            # Before any gradient: [pieces, state size] for each run, as the forward pass had them.
            states = [run.state(own.store) for run in own.runs]
            if (lead := own.lead) is not None:
                # Only some states are kept; rows since the last kept one run again for the first
                # piece's.
                _, states[0] = backend.gated_delta(
                    _pieces(lead.run, lead.tensors), weights, lead.run.state(own.store), spec
                )
            # [1, state size]; from the last piece to the first, each gives the gradient of the
            # state before it.
            state_grad = own.gradient[None]
            for run, state in zip(reversed(own.runs), reversed(states), strict=True):
                piece = backend.gated_delta_gradient(
                    run.pieces(grad), state_grad, _pieces(run, rows), weights, state, spec
                )
                for slot, value in zip(_ROWS, piece.rows, strict=True):
                    found[slot][own.rows][run.rows] = value.flatten(0, 1)
                for slot, total in sums.items():
                    total += getattr(piece.weights, slot)
                # The rows before the first row of a sequence are another sequence's.
                state_grad = piece.state if run.fresh is None else torch.zeros_like(piece.state)
            # For the window before this one, which is reversed next.
            own.gradient.copy_(state_grad[0])
        return {slot: value for slot, value in {**found, **sums}.items() if slot in wanted}

    def flops_per_row(
        self, specs: Mapping[str, TensorSpec], attributes: Attributes, mean_context_len: float
    ) -> float:
        spec = GatedDeltaSpec(**attributes)
        # The rule reads the state twice and writes it once, an element two operations each.
        return 2.0 * spec.kernel_size * spec.num_channels + 6.0 * (spec.state_size - spec.tail_size)

    def vjp_flops_per_row(
        self,
        wanted: Collection[str],
        specs: Mapping[str, TensorSpec],
        attributes: Attributes,
        mean_context_len: float,
    ) -> float:
        # Forward again, and two products for each of its own.
        return 3 * self.flops_per_row(specs, attributes, mean_context_len)


class SigmoidMul(RowWise):
    """y = sigmoid(gate) * x, as attention's output is gated in Qwen3-Next (arXiv 2505.06708), and
    its shared expert's; x [n, width], gate [n, width] or [n, 1].
    """

    name = "sigmoid_mul"
    inputs = ("x", "gate")
    needs = {"gate": ("gate", "x"), "x": ("gate",)}
    restores = ("y",)
    flops_per_element = 5
    by_columns = True
    linear_in = (frozenset({"x"}),)

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        return {"y": torch.sigmoid(values["gate"]) * values["x"]}

    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> dict[str, Tensor]:
        dy, gate, result = gradients["y"], torch.sigmoid(values["gate"]), {}
        if "gate" in wanted:
            slope = dy * values["x"]
            slope = slope if gate.shape == dy.shape else slope.sum(-1, keepdim=True)
            result["gate"] = slope * gate * (1 - gate)
        if "x" in wanted:
            result["x"] = dy * gate
        if "y" in wanted:
            result["y"] = gate * values["x"]
        return result


def _weights(values: Values) -> GatedDeltaWeights:
    return GatedDeltaWeights(**{slot: values[slot] for slot in _WEIGHTS})


def _pieces(run: StateRun, rows: Collection[Tensor]) -> GatedDeltaRows:
    return GatedDeltaRows(*(run.pieces(x) for x in rows))

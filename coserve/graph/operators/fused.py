"""Operators that replace several others (`graph/fuse.py`).

Each runs a kernel of the backend (`Backend.fused`), or the operators that it replaces where the
kernel is not for its tensors. Each runs in one direction only.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from typing import Any

from torch import Tensor

from coserve.graph.operators.base import Attributes, Context, Operator, Shape, Shapes, Values
from coserve.graph.tensors import TensorSpec
from coserve.kernels.base import Factor
from coserve.kernels.low_rank import LowRankGradient, LowRankRows
from coserve.kernels.weights import Weight, as_dense, as_weight, piece_of


class _Fused(Operator):
    """A base of fused operators that run forward."""

    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> dict[str, Tensor]:
        raise AssertionError(f"{self.name} runs forward only")

    def flops_per_row(
        self, specs: Mapping[str, TensorSpec], attributes: Attributes, mean_context_len: float
    ) -> float:
        return 2.0 * sum(
            prod(spec.shape) for slot, spec in specs.items() if slot.endswith(("weight", "factor"))
        )

    def _kernel(self, context: Context) -> Callable[..., Tensor | None]:
        return context.backend.fused.get(self.name, _no_kernel)


def _no_kernel(*_: object) -> None:
    return None


class LinearOnto(_Fused):
    """y = onto + (x W^T + b), rounded before the sum, too; x [n, in], weight [out, in], bias [out],
    onto [n, out].

    Kernel: (x, weight, bias or None, onto) -> y.
    """

    name = "linear_onto"
    inputs = ("x", "weight", "bias", "onto")
    optional = frozenset({"bias"})
    needs = dict.fromkeys(inputs)

    def infer(self, shapes: Mapping[str, Shape], attributes: Attributes) -> Shapes:
        return {"y": (shapes["onto"], None)}

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        x, weight, bias, onto = (
            values["x"],
            as_weight(values["weight"]),
            values.get("bias"),
            values["onto"],
        )
        if (dense := as_dense(weight)) is not None:
            found = self._kernel(context)(x, dense, bias, onto)
            if found is not None:
                return {"y": found}
        return {"y": onto + weight.product(context.backend, x, bias)}


class LinearAndLowRank(_Fused):
    """y = x W^T + b + narrow F^T, rounded once where there is a kernel; x [n, in], weight [out,
    in], bias [out], narrow [n, rank], factor [out, rank]. Without the last two it is `linear`.

    Kernel: (x, weight, bias or None, `LowRankRows` of some of its columns, of which none is in two)
    -> y.
    """

    name = "linear_and_low_rank"
    inputs = ("x", "weight", "bias", "narrow", "factor")
    optional = frozenset({"bias", "narrow", "factor"})
    needs = dict.fromkeys(inputs)

    def infer(self, shapes: Mapping[str, Shape], attributes: Attributes) -> Shapes:
        return {"y": ((shapes["weight"][0],), None)}

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        return products_of_same_rows([values], context)[0]


def products_of_same_rows(runs: Sequence[Values], context: Context) -> list[dict[str, Tensor]]:
    """Return the results of several `linear_and_low_rank` (or `linear`) that read the same rows x,
    from one product where their weights lie in one piece of memory.
    """
    weights = _weights(runs)
    biases = [values.get("bias") for values in runs]
    # Weights that lie row after row in memory are one matrix: one product reads x once for all.
    if (piece := piece_of(weights, biases)) is not None:
        results = _products(runs, piece.whole, piece.bias, piece.sizes, context)
        return [{"y": y} for y in results]
    return [
        {"y": _products([values], weight, bias, [weight.shape[0]], context)[0]}
        for values, weight, bias in zip(runs, weights, biases, strict=True)
    ]


def _products(
    runs: Sequence[Values],
    whole: Weight,
    bias: Tensor | None,
    sizes: Sequence[int],
    context: Context,
) -> Sequence[Tensor]:
    """Return the results of runs from one product with their weights row after row.

    Args:
        whole: weights of all runs [sum(sizes), in].
        bias: biases of all runs [sum(sizes)].
        sizes: rows of each run's weight.
    """
    backend, x = context.backend, runs[0]["x"]
    added = _added(runs, sizes)
    # Quantised weights have no dense matrix for the kernel: they take the way below.
    if added and (dense := as_dense(whole)) is not None:
        y = backend.fused.get(LinearAndLowRank.name, _no_kernel)(x, dense, bias, added)
        if y is not None:
            return y.split_with_sizes(sizes, -1)
    results = whole.product(backend, x, bias).split_with_sizes(sizes, -1)
    if added:
        for values, y in zip(runs, results, strict=True):
            if "narrow" in values:
                # In place: y is a view of this run's columns of the product.
                backend.low_rank_product(values["narrow"], values["factor"], y)
    return results


class GatedLinear(_Fused):
    """y = silu(x G^T + b + …) * (x U^T + c + …), as `silu_mul` of two `linear_and_low_rank`.

    Inputs: x [n, in], gate_weight and up_weight [width, in], and the other inputs of those two.
    gate_room and up_room are the places where the factors are kept [n, width].

    Kernel: (x, G's rows and then U's [2 width, in], b and then c or None, `LowRankRows` of some of
    these columns, rooms of both factors or none) -> y.
    """

    name = "gated_linear"
    inputs = (
        "x",
        *("gate_weight", "gate_bias", "gate_narrow", "gate_factor", "gate_room"),
        *("up_weight", "up_bias", "up_narrow", "up_factor", "up_room"),
    )
    outputs = ("y", "gate", "up")
    optional = frozenset(inputs) - {"x", "gate_weight", "up_weight"}
    needs = dict.fromkeys(inputs)

    def infer(self, shapes: Mapping[str, Shape], attributes: Attributes) -> Shapes:
        return dict.fromkeys(self.outputs, ((shapes["gate_weight"][0],), None))

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        halves = [_half_of(values, name) for name in ("gate", "up")]
        rooms = [values[slot] for slot in ("gate_room", "up_room") if slot in values]
        piece = piece_of(_weights(halves), [half.get("bias") for half in halves])
        if piece is not None and (dense := as_dense(piece.whole)) is not None:
            added = _added(halves, piece.sizes)
            y = self._kernel(context)(values["x"], dense, piece.bias, added, rooms)
            if y is not None:
                # The kernel has written the factors into their rooms; without rooms they are not
                # kept.
                return {"y": y, **dict(zip(("gate", "up"), rooms, strict=False))}
        gate, up = (results["y"] for results in products_of_same_rows(halves, context))
        return {"y": context.backend.silu_mul(gate, up), "gate": gate, "up": up}


def _half_of(values: Values, name: str) -> dict[str, Any]:
    """Return the inputs of the product that is one factor of a gated unit."""
    slots = {slot: f"{name}_{slot}" for slot in ("weight", "bias", "narrow", "factor")}
    return {
        "x": values["x"],
        **{slot: values[given] for slot, given in slots.items() if given in values},
    }


def _weights(runs: Sequence[Values]) -> list[Weight]:
    return [as_weight(values["weight"]) for values in runs]


def _added(runs: Sequence[Values], sizes: Sequence[int]) -> list[LowRankRows]:
    """Return the low-rank products that are added, at their columns where the results stand side by
    side.
    """
    # `first` counts columns of all runs' results side by side.
    added, first = list[LowRankRows](), 0
    for values, size in zip(runs, sizes, strict=True):
        if "narrow" in values:
            added.append(LowRankRows(narrow=values["narrow"], b=values["factor"], first=first))
        first += size
    return added


class LinearBesideLowRank(Operator):
    """y = x W^T + b and narrow = x F^T, of which only the gradient of x is computed: dx = dy W +
    dnarrow F; x [n, in], weight [out, in], factor [rank, in].

    Kernel: (dy, weight, `LowRankGradient` of dnarrow and factor, rows that the result is added to
    or None) -> dx, rounded once.
    """

    name = "linear_beside_low_rank"
    inputs = ("x", "weight", "bias", "factor")
    outputs = ("y", "narrow")
    optional = frozenset({"bias"})
    needs = {"x": ("weight", "factor"), "weight": None, "bias": None, "factor": None}
    joins_rows = True
    grouped = frozenset({"factor"})

    def infer(self, shapes: Mapping[str, Shape], attributes: Attributes) -> Shapes:
        return {"y": ((shapes["weight"][0],), None), "narrow": ((shapes["factor"][0],), None)}

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        raise AssertionError(f"{self.name} runs backward only")

    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> dict[str, Tensor]:
        return {"x": _gradient_beside_low_rank(None, values, gradients, context)}

    def flops_per_row(
        self, specs: Mapping[str, TensorSpec], attributes: Attributes, mean_context_len: float
    ) -> float:
        return 2.0 * (prod(specs["weight"].shape) + prod(specs["factor"].shape))


def add_gradient_beside_low_rank(
    total: Factor, values: Values, gradients: Values, attributes: Attributes, context: Context
) -> None:
    """Add a `linear_beside_low_rank`'s gradient of x to rows, in place."""
    assert isinstance(total, Tensor)
    _gradient_beside_low_rank(total, values, gradients, context)


def _gradient_beside_low_rank(
    total: Tensor | None, values: Values, gradients: Values, context: Context
) -> Tensor:
    backend, dy, dnarrow = context.backend, gradients["y"], gradients["narrow"]
    weight, factor = as_weight(values["weight"]), values["factor"]
    kernel, dense = backend.fused.get(LinearBesideLowRank.name), as_dense(weight)
    if kernel is not None and dense is not None and isinstance(factor, Tensor):
        dx = kernel(dy, dense, LowRankGradient(narrow=dnarrow, a=factor), total)
        if dx is not None:
            return dx
    # Without the kernel: the low-rank part first, onto which the product's gradient is added.
    total = backend.low_rank_input_gradient(dnarrow, factor, total)
    return weight.input_gradient(backend, dy, total)

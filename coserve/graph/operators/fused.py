"""Operators that several others were (`graph/fuse.py`). Each runs a kernel of the backend
(`Backend.fused`), or what it was made of where the kernel is not for its tensors. Each runs in one
direction only.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from typing import Any, ClassVar

from torch import Tensor

from coserve.graph.operators.base import Attributes, Context, Operator, Shape, Shapes, Values
from coserve.graph.tensors import TensorSpec
from coserve.kernels.base import Factor
from coserve.kernels.low_rank import LowRankGradient, LowRankRows
from coserve.kernels.weights import Weight, as_dense, as_weight, join_again


class _Fused(Operator):
    """What they have in common."""

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
    needs: ClassVar = dict.fromkeys(inputs)

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
    needs: ClassVar = dict.fromkeys(inputs)
    shared: ClassVar[str | None] = "x"

    def infer(self, shapes: Mapping[str, Shape], attributes: Attributes) -> Shapes:
        return {"y": ((shapes["weight"][0],), None)}

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        [y] = self.products([values], context)
        return {"y": y}

    def forward_all(
        self, runs: Sequence[tuple[Values, Attributes]], context: Context
    ) -> list[dict[str, Tensor]]:
        return [{"y": y} for y in self.products([values for values, _ in runs], context)]

    def products(self, runs: Sequence[Values], context: Context) -> Sequence[Tensor]:
        """The results for inputs that share x, from one product where their weights lie in one
        piece.
        """
        backend, x = context.backend, runs[0]["x"]
        weights, biases, added = (
            _weights(runs),
            [values.get("bias") for values in runs],
            _added(runs),
        )
        whole, bias = join_again(weights, biases) if len(runs) > 1 else (weights[0], biases[0])
        if whole is None:
            return [self.products([values], context)[0] for values in runs]
        if added and (dense := as_dense(whole)) is not None:
            y = self._kernel(context)(x, dense, bias, added)
            if y is not None:
                return y.split_with_sizes([weight.shape[0] for weight in weights], -1)
        results = weights[0].products(backend, x, weights, biases)
        for values, y in zip(runs, results, strict=True):
            if "narrow" in values:
                backend.low_rank_product(values["narrow"], values["factor"], y)
        return results


class GatedLinear(_Fused):
    """y = silu(x G^T + b + …) * (x U^T + c + …), as `silu_mul` of two `linear_and_low_rank`; x [n,
    in], gate_weight and up_weight [width, in], and what else those two take. gate_room, up_room:
    where the factors are kept [n, width].

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
    needs: ClassVar = dict.fromkeys(inputs)

    def infer(self, shapes: Mapping[str, Shape], attributes: Attributes) -> Shapes:
        return dict.fromkeys(self.outputs, ((shapes["gate_weight"][0],), None))

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        halves = [_half_of(values, name) for name in ("gate", "up")]
        rooms = [values[slot] for slot in ("gate_room", "up_room") if slot in values]
        whole, bias = join_again(_weights(halves), [half.get("bias") for half in halves])
        if whole is not None and (dense := as_dense(whole)) is not None:
            y = self._kernel(context)(values["x"], dense, bias, _added(halves), rooms)
            if y is not None:
                return {"y": y, **dict(zip(("gate", "up"), rooms, strict=False))}
        gate, up = _PRODUCTS.products(halves, context)
        return {"y": context.backend.silu_mul(gate, up), "gate": gate, "up": up}


_PRODUCTS = LinearAndLowRank()


def _half_of(values: Values, name: str) -> dict[str, Any]:
    """What a factor of a gated unit is a product of."""
    slots = {slot: f"{name}_{slot}" for slot in ("weight", "bias", "narrow", "factor")}
    return {
        "x": values["x"],
        **{slot: values[given] for slot, given in slots.items() if given in values},
    }


def _weights(runs: Sequence[Values]) -> list[Weight]:
    return [as_weight(values["weight"]) for values in runs]


def _added(runs: Sequence[Values]) -> list[LowRankRows]:
    """What is added to products, at their columns if they stand side by side."""
    found, first = list[LowRankRows](), 0
    for values in runs:
        if "narrow" in values:
            found.append(LowRankRows(narrow=values["narrow"], b=values["factor"], first=first))
        first += values["weight"].shape[0]
    return found


class LinearBesideLowRank(Operator):
    """y = x W^T + b and narrow = x F^T, of which only the gradient of x is taken: dx = dy W +
    dnarrow F; x [n, in], weight [out, in], factor [rank, in].

    Kernel: (dy, weight, `LowRankGradient` of dnarrow and factor, rows that the result is added to
    or None) -> dx, rounded once.
    """

    name = "linear_beside_low_rank"
    inputs = ("x", "weight", "bias", "factor")
    outputs = ("y", "narrow")
    optional = frozenset({"bias"})
    needs: ClassVar = {"x": ("weight", "factor"), "weight": None, "bias": None, "factor": None}
    sums: ClassVar[frozenset[str]] = frozenset({"x"})
    joins_rows: ClassVar[bool] = True
    grouped: ClassVar[frozenset[str]] = frozenset({"factor"})

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
        return {"x": self._gradient(None, values, gradients, context)}

    def vjp_onto(
        self,
        total: Factor,
        slot: str,
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> None:
        assert isinstance(total, Tensor), "rows"
        self._gradient(total, values, gradients, context)

    def _gradient(
        self, total: Tensor | None, values: Values, gradients: Values, context: Context
    ) -> Tensor:
        weight, factor, dy, narrow = (
            as_weight(values["weight"]),
            values["factor"],
            gradients["y"],
            gradients["narrow"],
        )
        kernel, dense = context.backend.fused.get(self.name), as_dense(weight)
        if kernel is not None and dense is not None and isinstance(factor, Tensor):
            found = kernel(dy, dense, LowRankGradient(narrow=narrow, a=factor), total)
            if found is not None:
                return found
        total = context.backend.low_rank_input_gradient(narrow, factor, total)
        return weight.input_gradient(context.backend, dy, total)

    def flops_per_row(
        self, specs: Mapping[str, TensorSpec], attributes: Attributes, mean_context_len: float
    ) -> float:
        return 2.0 * (prod(specs["weight"].shape) + prod(specs["factor"].shape))

"""Operators that several others were (`graph/fuse.py`). Each runs a kernel of the backend (`Backend.fused`), or what it
was made of where the kernel is not for its tensors. Each runs in one direction only.
"""

from collections.abc import Callable, Collection, Mapping
from math import prod
from typing import ClassVar

from torch import Tensor

from coserve.graph.operators.base import Attributes, Context, Operator, Shape, Shapes, Values
from coserve.graph.tensors import TensorSpec
from coserve.kernels.base import Factor
from coserve.kernels.low_rank import LowRankGradient
from coserve.kernels.weights import as_dense, as_weight, join_again


class _Fused(Operator):
    """What they have in common."""

    def vjp(
        self, wanted: Collection[str], values: Values, gradients: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        raise AssertionError(f"{self.name} runs forward only")

    def flops_per_row(self, specs: Mapping[str, TensorSpec], attributes: Attributes, mean_context_len: float) -> float:
        return 2.0 * sum(prod(spec.shape) for slot, spec in specs.items() if slot.endswith("weight"))

    def _kernel(self, context: Context) -> Callable[..., Tensor | None]:
        return context.backend.fused.get(self.name, _no_kernel)


def _no_kernel(*_: object) -> None:
    return None


class LinearOnto(_Fused):
    """y = onto + (x W^T + b), rounded before the sum, too; x [n, in], weight [out, in], bias [out], onto [n, out].

    Kernel: (x, weight, bias or None, onto) -> y.
    """

    name = "linear_onto"
    inputs = ("x", "weight", "bias", "onto")
    optional = frozenset({"bias"})
    needs: ClassVar = dict.fromkeys(inputs)

    def infer(self, shapes: Mapping[str, Shape], attributes: Attributes) -> Shapes:
        return {"y": (shapes["onto"], None)}

    def forward(self, values: Values, attributes: Attributes, context: Context) -> dict[str, Tensor]:
        x, weight, bias, onto = values["x"], as_weight(values["weight"]), values.get("bias"), values["onto"]
        if (dense := as_dense(weight)) is not None:
            found = self._kernel(context)(x, dense, bias, onto)
            if found is not None:
                return {"y": found}
        return {"y": onto + weight.product(context.backend, x, bias)}


class GatedLinear(_Fused):
    """y = silu(x G^T + b) * (x U^T + c), as `silu_mul` of two `linear`; x [n, in], gate_weight and up_weight [width,
    in], their biases [width].

    Kernel: (x, G's rows and then U's [2 width, in], b and then c or None) -> y.
    """

    name = "gated_linear"
    inputs = ("x", "gate_weight", "gate_bias", "up_weight", "up_bias")
    optional = frozenset({"gate_bias", "up_bias"})
    needs: ClassVar = dict.fromkeys(inputs)

    def infer(self, shapes: Mapping[str, Shape], attributes: Attributes) -> Shapes:
        return {"y": ((shapes["gate_weight"][0],), None)}

    def forward(self, values: Values, attributes: Attributes, context: Context) -> dict[str, Tensor]:
        weights = [as_weight(values[slot]) for slot in ("gate_weight", "up_weight")]
        biases = [values.get(slot) for slot in ("gate_bias", "up_bias")]
        whole, bias = join_again(weights, biases)
        if whole is not None and (dense := as_dense(whole)) is not None:
            found = self._kernel(context)(values["x"], dense, bias)
            if found is not None:
                return {"y": found}
        gate, up = weights[0].products(context.backend, values["x"], weights, biases)
        return {"y": context.backend.silu_mul(gate, up)}


class LinearBesideLowRank(Operator):
    """y = x W^T + b and narrow = x F^T, of which only the gradient of x is taken: dx = dy W + dnarrow F; x [n, in],
    weight [out, in], factor [rank, in].

    Kernel: (dy, weight, `LowRankGradient` of dnarrow and factor, rows that the result is added to or None) -> dx,
    rounded once.
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

    def forward(self, values: Values, attributes: Attributes, context: Context) -> dict[str, Tensor]:
        raise AssertionError(f"{self.name} runs backward only")

    def vjp(
        self, wanted: Collection[str], values: Values, gradients: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        return {"x": self._gradient(None, values, gradients, context)}

    def vjp_onto(
        self, total: Factor, slot: str, values: Values, gradients: Values, attributes: Attributes, context: Context
    ) -> None:
        assert isinstance(total, Tensor), "rows"
        self._gradient(total, values, gradients, context)

    def _gradient(self, total: Tensor | None, values: Values, gradients: Values, context: Context) -> Tensor:
        weight, factor, dy, narrow = as_weight(values["weight"]), values["factor"], gradients["y"], gradients["narrow"]
        kernel, dense = context.backend.fused.get(self.name), as_dense(weight)
        if kernel is not None and dense is not None and isinstance(factor, Tensor):
            found = kernel(dy, dense, LowRankGradient(narrow=narrow, a=factor), total)
            if found is not None:
                return found
        total = context.backend.low_rank_input_gradient(narrow, factor, total)
        return weight.input_gradient(context.backend, dy, total)

    def flops_per_row(self, specs: Mapping[str, TensorSpec], attributes: Attributes, mean_context_len: float) -> float:
        return 2.0 * (prod(specs["weight"].shape) + prod(specs["factor"].shape))

"""Activation functions, and the signs of a tensor as bits."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from coserve.graph.operators.base import Attributes, Context, RowWise, Shape, Shapes, Values
from coserve.kernels.bits import packed_width


class Silu(RowWise):
    """y = x * sigmoid(x)."""

    name = "silu"
    inputs = ("x",)
    needs = {"x": ("x",)}
    restores = ("y",)
    flops_per_element = 4
    by_columns = True

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        return {"y": torch.nn.functional.silu(values["x"])}

    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> dict[str, Tensor]:
        result = {"x": torch.ops.aten.silu_backward(gradients["y"], values["x"])}
        return result | self.forward(values, attributes, context) if "y" in wanted else result


class Gelu(RowWise):
    """y = x * Phi(x), exact or by tanh (attribute `approximate`: "none" or "tanh"). Source: arXiv
    1606.08415.
    """

    name = "gelu"
    inputs = ("x",)
    needs = {"x": ("x",)}
    restores = ("y",)
    flops_per_element = 8
    by_columns = True

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        return {"y": torch.nn.functional.gelu(values["x"], approximate=attributes["approximate"])}

    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> dict[str, Tensor]:
        grad = torch.ops.aten.gelu_backward(
            gradients["y"], values["x"], approximate=attributes["approximate"]
        )
        result = {"x": grad}
        return result | self.forward(values, attributes, context) if "y" in wanted else result


class Relu(RowWise):
    """y = max(x, 0). The gradient needs only where y > 0, so packed signs of y do as well (FlexLLM
    section 5.2).
    """

    name = "relu"
    inputs = ("x",)
    needs = {"x": ("y",)}
    sign_suffices = ("y",)
    by_columns = True

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        return {"y": torch.relu(values["x"])}

    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> dict[str, Tensor]:
        y, dy = values["y"], gradients["y"]
        # uint8: `compress` had packed signs saved in place of y.
        positive = context.backend.unpack_signs(y, dy.shape[1]) if y.dtype == torch.uint8 else y > 0
        return {"x": dy * positive}


class SiluMul(RowWise):
    """y = silu(gate) * up, the gated unit of Llama's MLP (arXiv 2002.05202), as one operator.

    One operator and not two, because then two tensors of the MLP's width are enough for the whole
    backward pass: its VJP rebuilds silu(gate) on the way to both gradients, and has y for one
    multiplication more.
    """

    name = "silu_mul"
    inputs = ("gate", "up")
    needs = {"gate": ("gate", "up"), "up": ("gate",)}
    restores = ("y",)
    flops_per_element = 5
    by_columns = True

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        return {"y": context.backend.silu_mul(values["gate"], values["up"])}

    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> dict[str, Tensor]:
        dy, gate = gradients["y"], values["gate"]
        if "gate" in wanted:
            found = context.backend.silu_mul_gradients(dy, gate, values["up"], with_y="y" in wanted)
            return {slot: gradient for slot, gradient in found._asdict().items() if slot in wanted}
        result = {"up": context.backend.silu_mul(gate, dy)} if "up" in wanted else {}
        return result | self.forward(values, attributes, context) if "y" in wanted else result


class ClampedSwiglu(RowWise):
    """y = (u + 1) * g * sigmoid(alpha * g), where g = min(gate, limit) and u = up within [-limit,
    limit].

    The gated unit of gpt-oss (arXiv 2508.10925).
    """

    name = "clamped_swiglu"
    inputs = ("gate", "up")
    needs = {"gate": ("gate", "up"), "up": ("gate", "up")}
    flops_per_element = 8
    by_columns = True

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        gate, up = self._clamped(values, attributes)
        return {"y": torch.sigmoid(attributes["alpha"] * gate).mul_(gate).mul_(up + 1)}

    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> dict[str, Tensor]:
        dy, limit, alpha, result = gradients["y"], attributes["limit"], attributes["alpha"], {}
        gate, up = self._clamped(values, attributes)
        slope = torch.sigmoid(alpha * gate)
        if "gate" in wanted:
            whole = slope * (1 + alpha * gate * (1 - slope))
            # No gradient where the clamp was active; the gate is clamped from above only.
            result["gate"] = dy * (up + 1) * whole * (values["gate"] <= limit)
        if "up" in wanted:
            result["up"] = dy * gate * slope * (values["up"].abs() <= limit)
        return result

    def _clamped(self, values: Values, attributes: Attributes) -> tuple[Tensor, Tensor]:
        limit = attributes["limit"]
        return values["gate"].clamp(max=limit), values["up"].clamp(-limit, limit)


class SignBits(RowWise):
    """Bits of x > 0, eight to a byte; x [n, width] -> uint8 [n, ceil(width / 8)]."""

    name = "sign_bits"
    inputs = ("x",)
    needs = {"x": None}

    def infer(self, shapes: Mapping[str, Shape], attributes: Attributes) -> Shapes:
        return {"y": ((packed_width(shapes["x"][0]),), torch.uint8)}

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        return {"y": context.backend.pack_signs(values["x"])}

    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> dict[str, Tensor]:
        raise AssertionError("sign_bits has no gradient")

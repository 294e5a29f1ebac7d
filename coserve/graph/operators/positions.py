"""Rotary position embedding."""

from collections.abc import Collection

from torch import Tensor

from coserve.graph.operators.base import Attributes, Context, RowWise, Values


class Rope(RowWise):
    """Rotate each head of x by its row's angles; x [n, heads * D], cos and sin [n, D] with equal halves."""

    name = "rope"
    inputs = ("x", "cos", "sin")
    needs = {"x": ("cos", "sin"), "cos": None, "sin": None}
    flops_per_element = 3

    def forward(self, values: Values, attributes: Attributes, context: Context) -> dict[str, Tensor]:
        return {"y": context.backend.rope(values["x"], values["cos"], values["sin"])}

    def vjp(
        self, wanted: Collection[str], values: Values, gradients: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        return {"x": context.backend.rope_gradient(gradients["y"], values["cos"], values["sin"])}

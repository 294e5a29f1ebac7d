"""Sums, products and dropout."""

from collections.abc import Collection
from typing import Any

from torch import Tensor

from coserve.graph.operators.base import Attributes, RowWise, Values
from coserve.kernels.dropout import dropout_mask


class Add(RowWise):
    """y = a + b, both [n, width]."""

    name = "add"
    inputs = ("a", "b")
    needs = {"a": (), "b": ()}

    def forward(self, values: Values, attributes: Attributes, context: Any) -> dict[str, Tensor]:
        return {"y": values["a"] + values["b"]}

    def vjp(
        self, wanted: Collection[str], values: Values, gradients: Values, attributes: Attributes, context: Any
    ) -> dict[str, Tensor]:
        return dict.fromkeys(wanted, gradients["y"])


class Mul(RowWise):
    """y = x * factor; x [n, width], factor [width] (a vector shared by all rows) or [n, width]."""

    name = "mul"
    inputs = ("x", "factor")
    needs = {"x": ("factor",), "factor": ("x",)}
    restores = ("y",)

    def forward(self, values: Values, attributes: Attributes, context: Any) -> dict[str, Tensor]:
        return {"y": values["x"] * values["factor"]}

    def vjp(
        self, wanted: Collection[str], values: Values, gradients: Values, attributes: Attributes, context: Any
    ) -> dict[str, Tensor]:
        dy, result = gradients["y"], {}
        if "x" in wanted:
            result["x"] = dy * values["factor"]
        if "factor" in wanted:
            product = dy * values["x"]
            result["factor"] = product if attributes["per_row"] else product.float().sum(0)
        if "y" in wanted:
            result["y"] = values["x"] * values["factor"]
        return result


class Scale(RowWise):
    """y = factor * x, with a fixed number."""

    name = "scale"
    inputs = ("x",)
    needs = {"x": ()}

    def forward(self, values: Values, attributes: Attributes, context: Any) -> dict[str, Tensor]:
        return {"y": values["x"] * attributes["factor"]}

    def vjp(
        self, wanted: Collection[str], values: Values, gradients: Values, attributes: Attributes, context: Any
    ) -> dict[str, Tensor]:
        return {"x": gradients["y"] * attributes["factor"]}


class Dropout(RowWise):
    """Drop features with probability p, scale the rest by 1 / (1 - p); row_keys int64 [n]. The mask is computed again
    in the VJP.
    """

    name = "dropout"
    inputs = ("x", "row_keys")
    needs = {"x": ("row_keys",), "row_keys": None}
    flops_per_element = 8

    def _drop(self, x: Tensor, values: Values, attributes: Attributes) -> Tensor:
        mask = dropout_mask(values["row_keys"], x.shape[1], p=attributes["p"], salt=attributes["salt"])
        scale: float = 1 / (1 - attributes["p"])
        return x * mask * scale

    def forward(self, values: Values, attributes: Attributes, context: Any) -> dict[str, Tensor]:
        return {"y": self._drop(values["x"], values, attributes)}

    def vjp(
        self, wanted: Collection[str], values: Values, gradients: Values, attributes: Attributes, context: Any
    ) -> dict[str, Tensor]:
        return {"x": self._drop(gradients["y"], values, attributes)}

"""Sums, products and bounds."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from coserve.graph.operators.base import Attributes, Context, Cost, Load, RowWise, Values
from coserve.graph.tensors import TensorSpec


class Add(RowWise):
    """y = a + b, both [n, width]."""

    name = "add"
    inputs = ("a", "b")
    needs = {"a": (), "b": ()}
    by_columns = True
    linear_in = (frozenset({"a", "b"}),)

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        return {"y": values["a"] + values["b"]}

    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> dict[str, Tensor]:
        dy: Tensor = gradients["y"]
        return dict.fromkeys(wanted, dy)

    def vjp_cost(
        self,
        wanted: Collection[str],
        specs: Mapping[str, TensorSpec],
        attributes: Attributes,
        load: Load,
    ) -> Cost:
        """Return no cost: both gradients are the output's."""
        return Cost()


class Mul(RowWise):
    """y = x * factor; x [n, width], factor [width] (a vector shared by all rows) or [n, width]."""

    name = "mul"
    inputs = ("x", "factor")
    needs = {"x": ("factor",), "factor": ("x",)}
    restores = ("y",)
    by_columns = True
    linear_in = (frozenset({"x"}), frozenset({"factor"}))

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        return {"y": values["x"] * values["factor"]}

    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
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
    """y = factor * x, with a fixed number. Attribute rounded: the factor is rounded to the dtype of
    x, as in models that keep it in a tensor.
    """

    name = "scale"
    inputs = ("x",)
    needs = {"x": ()}
    by_columns = True
    linear_in = (frozenset({"x"}),)

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        return {"y": values["x"] * _factor(attributes, values["x"].dtype)}

    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> dict[str, Tensor]:
        return {"x": gradients["y"] * _factor(attributes, gradients["y"].dtype)}


def _factor(attributes: Attributes, dtype: torch.dtype) -> float:
    factor: float = attributes["factor"]
    return torch.tensor(factor, dtype=dtype).item() if attributes.get("rounded") else factor


class Clamp(RowWise):
    """y = x within [-most, most]."""

    name = "clamp"
    inputs = ("x",)
    needs = {"x": ("x",)}
    by_columns = True

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        return {"y": values["x"].clamp(-attributes["most"], attributes["most"])}

    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> dict[str, Tensor]:
        return {"x": gradients["y"] * (values["x"].abs() <= attributes["most"])}


class SoftCap(RowWise):
    """y = cap * tanh(x / cap), with a fixed number. Source: arXiv 2408.00118, section 2."""

    name = "soft_cap"
    inputs = ("x",)
    needs = {"x": ("y",)}
    flops_per_element = 8
    by_columns = True

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        return {"y": torch.tanh(values["x"] / attributes["cap"]).mul_(attributes["cap"])}

    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> dict[str, Tensor]:
        # 1 - tanh^2, from the saved result.
        slope = (values["y"] / attributes["cap"]).square_().neg_().add_(1)
        return {"x": slope.mul_(gradients["y"])}

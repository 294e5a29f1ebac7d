"""Parts of what a fused projection gives."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from coserve.graph.operators.base import Attributes, Context, Operator, Shape, Shapes, Values
from coserve.graph.tensors import TensorSpec
from coserve.kernels.base import Factor


class Columns(Operator):
    """Some columns of each group of x's columns: x [n, groups * g] -> y [n, groups * width], those from `start` on.

    Attributes: groups, of (g), start, width. One node for each part, so that each is a place for adapters; the
    gradients of all parts are written into one tensor.
    """

    name = "columns"
    inputs = ("x",)
    needs = {"x": ()}
    sums = frozenset({"x"})

    def infer(self, shapes: Mapping[str, Shape], attributes: Attributes) -> Shapes:
        return {"y": ((attributes["groups"] * attributes["width"],), None)}

    def forward(self, values: Values, attributes: Attributes, context: Context) -> dict[str, Tensor]:
        return {"y": _part(values["x"], attributes).flatten(1)}

    def vjp(
        self, wanted: Collection[str], values: Values, gradients: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        dy = gradients["y"]
        total = dy.new_zeros(dy.shape[0], attributes["groups"] * attributes["of"])
        self.vjp_onto(total, "x", values, gradients, attributes, context)
        return {"x": total}

    def vjp_onto(
        self, total: Factor, slot: str, values: Values, gradients: Values, attributes: Attributes, context: Context
    ) -> None:
        assert isinstance(total, Tensor)
        part = _part(total, attributes)
        part += gradients["y"].reshape(part.shape)

    def flops_per_row(self, specs: Mapping[str, TensorSpec], attributes: Attributes, mean_context_len: float) -> float:
        return 0.0


class Regroup(Columns):
    """Several parts of each group of x's columns, part by part: x [n, groups * g] -> y [n, groups * sum(widths)], of
    all groups the first part, then of all the second.

    Attributes: groups, of (g), start, widths: of the parts, which stand one after another.
    """

    name = "regroup"

    def infer(self, shapes: Mapping[str, Shape], attributes: Attributes) -> Shapes:
        return {"y": ((attributes["groups"] * sum(attributes["widths"]),), None)}

    def forward(self, values: Values, attributes: Attributes, context: Context) -> dict[str, Tensor]:
        return {"y": torch.cat([_part(values["x"], each).flatten(1) for each in _parts(attributes)], 1)}

    def vjp_onto(
        self, total: Factor, slot: str, values: Values, gradients: Values, attributes: Attributes, context: Context
    ) -> None:
        parts, dy = _parts(attributes), gradients["y"]
        sizes = [attributes["groups"] * each["width"] for each in parts]
        for each, grad in zip(parts, torch.split(dy, sizes, 1), strict=True):
            super().vjp_onto(total, slot, values, {"y": grad}, each, context)


def _parts(attributes: Attributes) -> list[Attributes]:
    """Those of `Columns` for each part."""
    start, found = attributes["start"], list[Attributes]()
    for width in attributes["widths"]:
        found.append({**attributes, "start": start, "width": width})
        start += width
    return found


def _part(x: Tensor, attributes: Attributes) -> Tensor:
    """[n, groups * g] -> a view [n, groups, width]."""
    start, groups = attributes["start"], attributes["groups"]
    return x.view(x.shape[0], groups, attributes["of"])[..., start : start + attributes["width"]]

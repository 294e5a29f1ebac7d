"""Rotary position embedding. Source: arXiv 2104.09864, in the half-split layout of the Hugging Face checkpoints."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from coserve.graph.operators.base import Attributes, RowWise, Values


class Rope(RowWise):
    """Rotate each head of x by its row's angles; x [n, heads * D], cos and sin [n, D] with equal halves."""

    name = "rope"
    inputs = ("x", "cos", "sin")
    needs = {"x": ("cos", "sin"), "cos": None, "sin": None}
    flops_per_element = 3

    def forward(self, values: Values, attributes: Attributes, context: Any) -> dict[str, Tensor]:
        x, cos, sin = _by_head(values["x"], values)
        first, second = x.chunk(2, -1)
        return {"y": (x * cos + torch.cat((-second, first), -1) * sin).flatten(1)}

    def vjp(
        self, wanted: Collection[str], values: Values, gradients: Values, attributes: Attributes, context: Any
    ) -> dict[str, Tensor]:
        dy, cos, sin = _by_head(gradients["y"], values)
        first, second = (dy * sin).chunk(2, -1)
        return {"x": (dy * cos + torch.cat((second, -first), -1)).flatten(1)}


def _by_head(x: Tensor, values: Values) -> tuple[Tensor, Tensor, Tensor]:
    cos, sin = values["cos"], values["sin"]
    return x.view(x.shape[0], -1, cos.shape[1]), cos[:, None], sin[:, None]

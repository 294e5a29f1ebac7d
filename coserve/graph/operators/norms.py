"""Normalisation over the last `weight.shape[0]` features: the whole row, or each head of it (Qwen3's query and key
norms).

Statistics and gradients are computed in float32 and rounded to the input's dtype, as transformers does.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from coserve.graph.operators.base import Attributes, RowWise, Values


def _grouped(x: Tensor, weight: Tensor) -> Tensor:
    """x [n, width] as float32 [n, width / features, features]."""
    return x.float().view(x.shape[0], -1, weight.shape[0])


class RmsNorm(RowWise):
    """y = weight * x / rms(x); x [n, width], weight [features]. Source: arXiv 1910.07467."""

    name = "rms_norm"
    inputs = ("x", "weight")
    needs = {"x": ("x", "weight"), "weight": ("x", "weight")}
    restores = ("y",)
    flops_per_element = 4

    def _normalized(self, values: Values, attributes: Attributes) -> tuple[Tensor, Tensor]:
        x = _grouped(values["x"], values["weight"])
        # As fast as PyTorch gets it on a CPU: one pass, where the mean of the squares takes two.
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        scale = mean_square.add_(attributes["eps"]).rsqrt_()
        return x * scale, scale

    def forward(self, values: Values, attributes: Attributes, context: Any) -> dict[str, Tensor]:
        normalized, _ = self._normalized(values, attributes)
        return {"y": self._scaled(normalized, values)}

    def _scaled(self, normalized: Tensor, values: Values) -> Tensor:
        return (normalized.to(values["x"].dtype) * values["weight"]).flatten(-2)

    def vjp(
        self, wanted: Collection[str], values: Values, gradients: Values, attributes: Attributes, context: Any
    ) -> dict[str, Tensor]:
        result = {}
        normalized, scale = self._normalized(values, attributes)
        dy = _grouped(gradients["y"], values["weight"])
        if "x" in wanted:
            weighted = dy * values["weight"].float()
            mean = (weighted * normalized).mean(-1, keepdim=True)
            result["x"] = weighted.addcmul_(normalized, mean, value=-1).mul_(scale).flatten(-2).to(values["x"].dtype)
        if "weight" in wanted:
            result["weight"] = (dy * normalized).sum((0, 1))
        if "y" in wanted:
            result["y"] = self._scaled(normalized, values)
        return result


class LayerNorm(RowWise):
    """y = weight * (x - mean) / std + bias; x [n, width], weight and bias [width]. Source: arXiv 1607.06450."""

    name = "layer_norm"
    inputs = ("x", "weight", "bias")
    needs = {"x": ("x", "weight"), "weight": ("x",), "bias": ()}
    restores = ("y",)
    flops_per_element = 6

    def forward(self, values: Values, attributes: Attributes, context: Any) -> dict[str, Tensor]:
        x, weight, bias = values["x"], values["weight"], values["bias"]
        return {"y": torch.nn.functional.layer_norm(x, weight.shape, weight, bias, attributes["eps"])}

    def vjp(
        self, wanted: Collection[str], values: Values, gradients: Values, attributes: Attributes, context: Any
    ) -> dict[str, Tensor]:
        result = {}
        dy = gradients["y"].float()
        if "bias" in wanted:
            result["bias"] = dy.sum(0)
        if "x" in wanted or "weight" in wanted:
            x = values["x"].float()
            scale = torch.rsqrt(x.var(-1, correction=0, keepdim=True) + attributes["eps"])
            normalized = (x - x.mean(-1, keepdim=True)) * scale
            if "x" in wanted:
                weighted = dy * values["weight"].float()
                mean = (weighted * normalized).mean(-1, keepdim=True)
                centred = weighted - weighted.mean(-1, keepdim=True)
                result["x"] = ((centred - normalized * mean) * scale).to(values["x"].dtype)
            if "weight" in wanted:
                result["weight"] = (dy * normalized).sum(0)
        if "y" in wanted:
            result |= self.forward(values, attributes, context)
        return result

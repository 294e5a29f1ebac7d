"""Normalisation over the last `weight.shape[0]` features: the whole row, or each head of it
(Qwen3's query and key norms).

Statistics and gradients are computed in float32 and rounded to the input's dtype, as transformers
does.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from coserve.graph.layouts import WHOLE, AnyState, Given, Layout
from coserve.graph.operators.base import Attributes, Context, RowWise, Values
from coserve.kernels.cuts import Cut


class RmsNorm(RowWise):
    """y = weight * x / rms(x); x [n, width], weight [features]. Source: arXiv 1910.07467.

    Attribute plus_one, where it is set: the stored tensor is the weight less one (Gemma).
    """

    name = "rms_norm"
    inputs = ("x", "weight")
    needs = {"x": ("x", "weight"), "weight": ("x", "weight")}
    restores = ("y",)
    flops_per_element = 4

    def layouts(self, given: Given) -> Sequence[Layout]:
        """Return the layouts by whole heads, or with a sum of squares over the ranks
        (`rank_rms_norm`).
        """
        features, found = given.specs["weight"].shape[0], list[Layout]()
        for cut in given.cuts_of("x"):
            # The norm spans the whole row, so ranks have to add up their sums of squares.
            if features == cut.width:
                if len(set(cut.copies)) > 1:
                    continue  # the sum of squares would count some columns more often than others
                inputs = {"x": cut, "weight": cut}
                found.append(Layout(inputs=inputs, outputs={"y": cut}, op="rank_rms_norm", link=2))
            elif all(
                run.start % features == 0 == run.stop % features
                for runs in cut.runs
                for run in runs
            ):
                # A norm per head on whole heads needs nothing of other ranks.
                found.append(Layout(inputs={"x": cut}, outputs={"y": cut}))
        return found

    def demands(self, given: Given) -> dict[str, Cut]:
        cut = given.cuts.get("y")
        return {} if cut is None else {"x": cut}

    def localized(
        self, attributes: Attributes, states: Mapping[str, AnyState], rank: int
    ) -> Attributes:
        cut = states["x"]
        if not isinstance(cut, Cut) or states["weight"] is WHOLE:
            return attributes
        # Columns of all ranks with their copies, as many as the summed squares count.
        return {**attributes, "width": cut.local * cut.size}

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        return {
            "y": context.backend.rms_norm(
                values["x"], _whole(values["weight"], attributes), attributes["eps"]
            )
        }

    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> dict[str, Tensor]:
        x, weight, eps, result = (
            values["x"],
            _whole(values["weight"], attributes),
            attributes["eps"],
            {},
        )
        if "weight" in wanted:
            result["weight"] = context.backend.rms_norm_weight_gradient(
                gradients["y"], x, weight, eps
            )
        if "x" in wanted:
            result["x"], y = context.backend.rms_norm_gradient(
                gradients["y"], x, weight, eps, with_y="y" in wanted
            )
            return result if y is None else result | {"y": y}
        return result | self.forward(values, attributes, context) if "y" in wanted else result


def _whole(weight: Tensor, attributes: Attributes) -> Tensor:
    """Return the weight itself; in float32 where one is added, as transformers does."""
    return weight.float() + 1 if attributes.get("plus_one") else weight


class LayerNorm(RowWise):
    """y = weight * (x - mean) / std (+ bias); x [n, width], weight and bias [width]. Source: arXiv
    1607.06450.
    """

    name = "layer_norm"
    inputs = ("x", "weight", "bias")
    optional = frozenset({"bias"})
    needs = {"x": ("x", "weight"), "weight": ("x",), "bias": ()}
    restores = ("y",)
    flops_per_element = 6

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        x, weight, bias = values["x"], values["weight"], values.get("bias")
        return {
            "y": torch.nn.functional.layer_norm(x, weight.shape, weight, bias, attributes["eps"])
        }

    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> dict[str, Tensor]:
        result = {}
        dy = gradients["y"].float()
        if "bias" in wanted:
            result["bias"] = dy.sum(0)
        if "x" in wanted or "weight" in wanted:
            x = values["x"].float()
            # With n = (x - mean) * scale: dx = scale * (w dy - mean(w dy) - n * mean(w dy n)).
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

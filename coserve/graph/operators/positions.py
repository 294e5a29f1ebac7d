"""Rotary position embedding."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from coserve.graph.layouts import Given, Layout
from coserve.graph.operators.base import Attributes, Context, RowWise, Values
from coserve.kernels.cuts import Cut


class Rope(RowWise):
    """A rotation of each head of x by its row's angles; x [n, heads * D], cos and sin [n, R] with
    equal halves.

    Attributes, only where they differ from Llama's: head_dim (D, of which the first R features are
    rotated and the rest stays) and interleaved (features 2i and 2i + 1 are a pair, as in GPT-J, and
    not i and i + R / 2).
    """

    name = "rope"
    inputs = ("x", "cos", "sin")
    needs = {"x": ("cos", "sin"), "cos": None, "sin": None}
    flops_per_element = 3

    def layouts(self, given: Given) -> Sequence[Layout]:
        width = given.attributes.get("head_dim", given.specs["cos"].shape[0])
        return [
            Layout(inputs={"x": cut}, outputs={"y": cut})
            for cut in given.cuts_of("x")
            if all(run.start % width == 0 == run.stop % width for runs in cut.runs for run in runs)
        ]

    def demands(self, given: Given) -> dict[str, Cut]:
        cut = given.cuts.get("y")
        return {} if cut is None else {"x": cut}

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        return {"y": _turned(context.backend.rope, values["x"], values, attributes)}

    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> dict[str, Tensor]:
        return {"x": _turned(context.backend.rope_gradient, gradients["y"], values, attributes)}


def _turned(
    turn: Callable[[Tensor, Tensor, Tensor], Tensor],
    x: Tensor,
    values: Values,
    attributes: Attributes,
) -> Tensor:
    """Apply a rotation of whole heads to the features that are rotated, with pairs half a width
    apart.
    """
    cos, sin = values["cos"], values["sin"]
    # Llama's layout: whole heads, halves a width apart, which kernels take as they are.
    if "head_dim" not in attributes:
        return turn(x, cos, sin)
    num_rotated: int = cos.shape[1]
    heads = x.view(x.shape[0], -1, attributes["head_dim"])
    part, half = heads[..., :num_rotated], num_rotated // 2
    # [n, heads, half, 2] -> [n, heads, 2, half]: pairs (2i, 2i + 1) move half a width apart.
    if attributes["interleaved"]:
        part = part.reshape(*heads.shape[:2], half, 2).mT
    part = turn(part.reshape(x.shape[0], -1), cos, sin).view(*heads.shape[:2], num_rotated)
    if attributes["interleaved"]:
        part = part.view(*heads.shape[:2], 2, half).mT.flatten(-2)
    return torch.cat((part, heads[..., num_rotated:]), -1).flatten(1)

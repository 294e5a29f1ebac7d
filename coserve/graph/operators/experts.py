"""Mixtures of experts: the choice of a row's experts, products with their matrices, and the
weighted sum.

A row goes to k of E experts; its values there stand side by side, [n, k * width]. Products are
grouped: rows are sorted by expert, and each expert's rows are multiplied by its matrix in one call.
"""

from collections.abc import Collection, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from coserve.graph.layouts import FIRST, PART, Given, Layout
from coserve.graph.operators.base import (
    Attributes,
    Context,
    Operator,
    RowWise,
    Shape,
    Shapes,
    Values,
)
from coserve.graph.tensors import TensorSpec
from coserve.kernels.cuts import Cut, even_cut, pattern, repeated
from coserve.kernels.weights import as_weight


class Route(Operator):
    """The k experts of the largest scores x W^T + b, and their shares, the softmax of those scores;
    x [n, width], weight [E, width], bias [E].

    Attribute: top_k. Outputs: shares [n, k], experts int64 [n, k].
    """

    name = "route"
    inputs = ("x", "weight", "bias")
    optional = frozenset({"bias"})
    outputs = ("shares", "experts")
    needs = {
        "x": ("weight", "shares", "experts"),
        "weight": ("x", "weight", "shares", "experts"),
        "bias": ("weight", "shares", "experts"),
    }

    def infer(self, shapes: Mapping[str, Shape], attributes: Attributes) -> Shapes:
        chosen = (attributes["top_k"],)
        return {"shares": (chosen, None), "experts": (chosen, torch.int64)}

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        scores = _scores(values, context)
        largest, experts = scores.topk(attributes["top_k"])
        return {"shares": largest.softmax(-1).to(values["x"].dtype), "experts": experts}

    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> dict[str, Tensor]:
        return _score_gradients(
            wanted, self._of_scores(values, gradients["shares"].float(), context), values, context
        )

    def _of_scores(self, values: Values, grad: Tensor, context: Context) -> Tensor:
        """Return the gradient of all scores, float32 [n, E]."""
        shares: Tensor = values["shares"].float()
        # The softmax's VJP, p * (g - sum(p g)), over the k chosen scores; all others have none.
        chosen = shares * (grad - (shares * grad).sum(-1, keepdim=True))
        return chosen.new_zeros(len(chosen), values["weight"].shape[0]).scatter_(
            1, values["experts"], chosen
        )

    def flops_per_row(
        self, specs: Mapping[str, TensorSpec], attributes: Attributes, mean_context_len: float
    ) -> float:
        return 2 * prod(specs["weight"].shape)


class RouteOfAll(Route):
    """A `route` whose shares are of a softmax over the scores of all experts."""

    name = "route_of_all"
    needs = dict.fromkeys(("x", "weight", "bias"), ("x", "weight", "bias", "experts"))

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        shares, experts = _scores(values, context).softmax(-1).topk(attributes["top_k"])
        return {"shares": shares.to(values["x"].dtype), "experts": experts}

    def _of_scores(self, values: Values, grad: Tensor, context: Context) -> Tensor:
        # Shares of all experts are needed here, of which only k were kept: hence the product again.
        shares = _scores(values, context).softmax(-1)
        of_shares = torch.zeros_like(shares).scatter_(1, values["experts"], grad)
        return shares * (of_shares - (shares * of_shares).sum(-1, keepdim=True))


class ExpertLinear(Operator):
    """y = x W_e^T + b_e for each of a row's experts e; x [n, in] (for all of them) or [n, k * in]
    (a part for each), experts int64 [n, k], weight [E, out, in], bias [E, out] -> y [n, k * out].

    Attribute: shared, whether x is for all of them.
    """

    name = "expert_linear"
    inputs = ("x", "experts", "weight", "bias")
    optional = frozenset({"bias"})
    needs = {
        "x": ("experts", "weight"),
        "experts": None,
        "weight": ("x", "experts", "weight"),
        "bias": ("experts", "bias"),
    }
    linear_in = (frozenset({"x"}),)
    added = frozenset({"bias"})

    def infer(self, shapes: Mapping[str, Shape], attributes: Attributes) -> Shapes:
        return {"y": ((shapes["experts"][0] * shapes["weight"][1],), None)}

    def layouts(self, given: Given) -> Sequence[Layout]:
        """Return the layouts with some rows of each expert's matrix on a rank, or some columns."""
        found, num_chosen = list(super().layouts(given)), given.specs["experts"].shape[0]
        y = given.cuts.get("y")
        if y is not None and (rows := pattern(y, num_chosen)) is not None:
            found.append(Layout(inputs={"weight": rows.along(-2), "bias": rows}, outputs={"y": y}))
        # A shared x has no cut per expert, so only rows of the matrices can be divided.
        if not given.attributes["shared"]:
            columns = {x: pattern(x, num_chosen) for x in given.cuts_of("x") if x.is_disjoint}
            found += [
                Layout(inputs={"x": x, "weight": cut, "bias": FIRST}, outputs={"y": PART})
                for x, cut in columns.items()
                if cut is not None
            ]
        return found

    def demands(self, given: Given) -> dict[str, Cut]:
        cut = even_cut(given.specs["weight"].shape[2], given.size)
        if cut is None or given.attributes["shared"]:
            return {}
        return {"x": repeated(cut, given.specs["experts"].shape[0])}

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        experts, weight, bias = values["experts"], as_weight(values["weight"]), values.get("bias")
        # Sort by expert, multiply group by group, and put the results back in the rows' order.
        groups = _Groups(experts, weight.shape[0])
        y = weight.grouped_product(
            context.backend, groups.take(values["x"], weight.shape[2]), groups.ends
        )
        if bias is not None:
            y = y + bias[groups.experts]
        return {"y": groups.put(y)}

    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> dict[str, Tensor]:
        experts, result = values["experts"], {}
        dy = gradients["y"]
        if "bias" in wanted:
            total = torch.zeros(values["bias"].shape, dtype=torch.float32, device=dy.device)
            parts = dy.float().view(experts.numel(), -1)
            result["bias"] = total.index_add_(0, experts.flatten(), parts)
        if "x" in wanted or "weight" in wanted:
            weight = as_weight(values["weight"])
            groups = _Groups(experts, weight.shape[0])
            grad = groups.take(dy, weight.shape[1])
            if "x" in wanted:
                dx = groups.put(weight.grouped_input_gradient(context.backend, grad, groups.ends))
                # [n, k, in]: a shared x went to all k experts, so their gradients add up.
                result["x"] = dx.view(*experts.shape, -1).sum(1) if attributes["shared"] else dx
            if "weight" in wanted:
                x = groups.take(values["x"], weight.shape[2])
                result["weight"] = context.backend.grouped_weight_gradient(grad, x, groups.ends)
        return result

    def flops_per_row(
        self, specs: Mapping[str, TensorSpec], attributes: Attributes, mean_context_len: float
    ) -> float:
        return 2 * prod(specs["experts"].shape) * prod(specs["weight"].shape[1:])


class Mixture(RowWise):
    """The sum of the results of a row's experts, weighted by their shares: x [n, k * width], shares
    [n, k] -> y [n, width].
    """

    name = "mixture"
    inputs = ("x", "shares")
    needs = {"x": ("shares",), "shares": ("x",)}
    flops_per_element = 2
    linear_in = (frozenset({"x"}),)

    def infer(self, shapes: Mapping[str, Shape], attributes: Attributes) -> Shapes:
        return {"y": ((shapes["x"][0] // shapes["shares"][0],), None)}

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        x, shares = values["x"], values["shares"]
        return {"y": torch.bmm(shares[:, None], x.view(*shares.shape, -1))[:, 0]}

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
            result["x"] = (values["shares"][..., None] * dy[:, None]).flatten(1)
        if "shares" in wanted:
            x = values["x"].view(dy.shape[0], -1, dy.shape[1])
            result["shares"] = torch.bmm(x, dy[..., None])[..., 0]
        return result


class _Groups:
    """The k places of each row, sorted by expert.

    Args:
        experts: the experts of each row, int64 [n, k].
        num_experts: number of experts (E).
    """

    def __init__(self, experts: Tensor, num_experts: int) -> None:
        self._shape = experts.shape
        # Place i * k + j of row i's j-th expert. Stable: an expert's rows stay in the batch's
        # order.
        self.experts, self._order = experts.flatten().sort(stable=True)
        """The expert of each sorted place, int64 [n * k]."""
        counts = torch.bincount(self.experts, minlength=num_experts)
        self.ends = counts.cumsum(0).to(torch.int32)
        """Ends of the experts' places, int32 [E]."""

    def take(self, x: Tensor, width: int) -> Tensor:
        """Return rows [n, width] or [n, k * width] as those of the sorted places [n * k, width]."""
        # With k = 1 both layouts are the same, and places are rows.
        is_shared = x.shape[1] == width and self._shape[1] > 1
        places = self._order // self._shape[1] if is_shared else self._order
        return x.reshape(-1, width).index_select(0, places)

    def put(self, y: Tensor) -> Tensor:
        """Return the sorted places [n * k, width] as rows [n, k * width]."""
        rows = torch.empty_like(y).index_copy_(0, self._order, y)
        return rows.view(self._shape[0], -1)


def _scores(values: Values, context: Context) -> Tensor:
    scores: Tensor = context.backend.product(values["x"], values["weight"], values.get("bias"))
    return scores.float()


def _score_gradients(
    wanted: Collection[str], grad: Tensor, values: Values, context: Context
) -> dict[str, Tensor]:
    """Return the wanted gradients, from that of all scores, float32 [n, E]."""
    result = {}
    if "x" in wanted:
        weight: Tensor = values["weight"]
        result["x"] = context.backend.input_gradient(grad.to(weight.dtype), weight)
    if "weight" in wanted:
        result["weight"] = context.backend.weight_gradient(grad.to(values["x"].dtype), values["x"])
    if "bias" in wanted:
        result["bias"] = grad.sum(0)
    return result

"""Collectives between the ranks of a tensor-parallel group, and operators that contain one.

Every rank runs the same nodes in the same order, so that collectives meet. A gradient is as wide as
its tensor; what a collective does to it is the transpose of what it does to the tensor
(Megatron-LM, arXiv 1909.08053, section 3).
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from coserve.graph.operators.base import (
    Attributes,
    Context,
    Cost,
    Load,
    RowWise,
    Shape,
    Shapes,
    Values,
)
from coserve.graph.operators.linear import Linear
from coserve.graph.operators.loss import LinearCrossEntropy
from coserve.graph.tensors import TensorSpec
from coserve.kernels.cuts import Cut

# Memory traffic that an element of a collective stands for: links are slower than memory, and a sum
# that is repeated to save memory costs its latency again.
_TRAFFIC_PER_ELEMENT = 16


class _Collective(RowWise):
    """A base of collectives of rows. Attribute: tensor, the name for messages."""

    inputs = ("x",)
    needs = {"x": ()}
    flops_per_element = 0

    def moved_bytes_per_row(self, specs: Mapping[str, TensorSpec], dtype: torch.dtype) -> int:
        return specs["y"].num_bytes(dtype)

    def cost(self, specs: Mapping[str, TensorSpec], attributes: Attributes, load: Load) -> Cost:
        return self._cost(specs, load, moves=self.moves)

    def vjp_cost(
        self,
        wanted: Collection[str],
        specs: Mapping[str, TensorSpec],
        attributes: Attributes,
        load: Load,
    ) -> Cost:
        return self._cost(specs, load, moves=self.moves_gradient)

    def _cost(self, specs: Mapping[str, TensorSpec], load: Load, *, moves: bool) -> Cost:
        num_bytes = load.rows * specs["y"].num_bytes(load.compute_dtype)
        return Cost(bytes=(_TRAFFIC_PER_ELEMENT if moves else 1) * num_bytes)


class RankSum(_Collective):
    """y = the sum of all ranks' x; the gradient of each is that of y."""

    name = "rank_sum"
    moves = True

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        return {"y": _summed(values["x"], attributes, context)}

    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> dict[str, Tensor]:
        return {"x": gradients["y"]}


class RankCopy(_Collective):
    """y = x, which every rank has; its gradient is the sum of what all ranks give."""

    name = "rank_copy"
    is_alias = True
    moves_gradient = True

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        return {"y": values["x"]}

    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> dict[str, Tensor]:
        return {"x": _summed(gradients["y"], attributes, context)}


class RankGather(_Collective):
    """y = the whole row, of which every rank has some columns. Attribute: cut, a `Cut` of y's
    columns.
    """

    name = "rank_gather"
    moves = True

    def infer(self, shapes: Mapping[str, Shape], attributes: Attributes) -> Shapes:
        return {"y": ((attributes["cut"].width,), None)}

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        x, cut = values["x"], attributes["cut"]
        # Columns beyond the whole width (padding of the last ranks) are left out by `put`.
        y = x.new_empty(x.shape[0], cut.width)
        pieces = context.group.all_gather(x, attributes["tensor"])
        for rank in reversed(
            range(cut.size)
        ):  # what several ranks have comes from the first of them
            cut.put(y, pieces[rank], rank)
        return {"y": y}

    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> dict[str, Tensor]:
        cut, rank = attributes["cut"], context.group.rank
        # Gradients of the copies of an entry add up to that of the entry: the first of them has all
        # of it.
        return {"x": cut.owned(cut.take(gradients["y"], rank), rank)}


class RankTake(_Collective):
    """y = a rank's columns of x, which every rank has; its gradient is the sum of what all ranks
    give, which the `rank_copy` before it adds up. Attribute: cut, a `Cut` of x's columns.
    """

    name = "rank_take"

    def infer(self, shapes: Mapping[str, Shape], attributes: Attributes) -> Shapes:
        return {"y": ((attributes["cut"].local,), None)}

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        cut: Cut = attributes["cut"]
        return {"y": cut.take(values["x"], context.group.rank)}

    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> dict[str, Tensor]:
        dy, cut = gradients["y"], attributes["cut"]
        # Zeros in other ranks' columns, so that the sum over the ranks is the whole gradient.
        dx = dy.new_zeros(dy.shape[0], cut.width)
        cut.put(dx, dy, context.group.rank)
        return {"x": dx}


class RankFirst(_Collective):
    """y = x, which every rank has, on rank 0, and zeros on all others: x as a part of a sum."""

    name = "rank_first"

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        return {"y": torch.zeros_like(values["x"]) if context.group.rank else values["x"]}

    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> dict[str, Tensor]:
        return {"x": gradients["y"]}


class RankRmsNorm(RowWise):
    """y = weight * x / rms(the whole row), where a rank has some columns of the row: x [n, local],
    weight [local].

    Attributes: eps, width (columns of all ranks, copies counted), and `plus_one` as in `rms_norm`.
    Forward and VJP sum one float32 of each row over the ranks.
    """

    name = "rank_rms_norm"
    inputs = ("x", "weight")
    needs = {"x": ("x", "weight"), "weight": ("x",)}
    flops_per_element = 4
    moves = moves_gradient = True

    def moved_bytes_per_row(self, specs: Mapping[str, TensorSpec], dtype: torch.dtype) -> int:
        return torch.float32.itemsize

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        x = values["x"].float()
        # As `rms_norm`: the normalised row is rounded before it meets the weight, unless that is in
        # float32.
        normalised = x * _scale(x, attributes, context)
        weight = values["weight"]
        if attributes.get("plus_one"):
            return {"y": (normalised * (weight.float() + 1)).to(values["x"].dtype)}
        return {"y": weight * normalised.to(values["x"].dtype)}

    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> dict[str, Tensor]:
        x, dy, result = values["x"].float(), gradients["y"].float(), {}
        scale = _scale(x, attributes, context)
        if "weight" in wanted:
            result["weight"] = (dy * x * scale).sum(0)
        if "x" in wanted:
            weight = values["weight"].float()
            weighted = dy * (weight + 1 if attributes.get("plus_one") else weight)
            # dx = scale * (w dy - x * scale^2 * mean(w dy x)), the mean over the columns of all
            # ranks.
            along = (weighted * x).sum(-1, keepdim=True)
            mean = context.group.sum_(along, "rank_rms_norm gradient") / attributes["width"]
            result["x"] = (scale * (weighted - x * scale.square() * mean)).to(values["x"].dtype)
        return result


class RankLinearCrossEntropy(LinearCrossEntropy):
    """`linear_cross_entropy` where each rank has some rows of the weight: x [n, in], weight [local,
    in], bias [local].

    Attribute: cut, a `Cut` of the vocabulary into neighbouring pieces, the last of which may end in
    tokens that nobody has. Three floats of each row are gathered: the rank's log-sum, its largest
    logit, and the target's where it is.
    """

    name = "rank_linear_cross_entropy"
    moves = True

    def moved_bytes_per_row(self, specs: Mapping[str, TensorSpec], dtype: torch.dtype) -> int:
        return 3 * torch.float32.itemsize

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        logits = _LINEAR.forward(values, attributes, context)["y"]
        # Padding of the last rank's vocabulary must not count in any sum or maximum.
        logits[:, attributes["cut"].num_held(context.group.rank) :] = -torch.inf
        targets, is_here = _local_targets(values["targets"], attributes, context)
        # The kernel goes once through the logits, where `logsumexp` would make a float32 copy of
        # them.
        _, _, log_sum = context.backend.cross_entropy(logits, targets)
        largest = logits.gather(1, context.backend.argmax(logits)[:, None])[:, 0].float()
        log_sum = log_sum.masked_fill_(
            largest == -torch.inf, -torch.inf
        )  # of a rank without tokens
        of_targets = logits.gather(1, targets[:, None])[:, 0].float().masked_fill_(~is_here, 0)
        # [rows, 3], float32: one collective for all that the loss needs.
        own = torch.stack([log_sum, largest, of_targets], -1)
        log_sums, largest, found = context.group.all_gather(own, "loss").unbind(-1)
        # Exactly one rank has a row's target, and the others gave 0, so the sum is its logit.
        log_sum, of_target = log_sums.logsumexp(0), found.sum(0)
        correct = largest.amax(0) <= of_target
        return {
            "loss": log_sum - of_target,
            "correct": correct,
            "log_sum": log_sum,
            "logits": logits,
        }

    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> dict[str, Tensor]:
        logits, log_sum, loss_grad = values["logits"], values["log_sum"], gradients["loss"]
        targets, is_here = _local_targets(values["targets"], attributes, context)
        # A row whose target another rank has takes any target here, whose gradient is then put
        # right.
        elsewhere = (~is_here).nonzero()[:, 0]
        at = targets[elsewhere]
        # softmax * gradient, without the -1 of a target; read before the logits are overwritten.
        right = (logits[elsewhere, at].float() - log_sum[elsewhere]).exp_() * loss_grad[elsewhere]
        dy = context.backend.cross_entropy_gradient(
            logits, targets, log_sum, loss_grad, overwrites=True
        )
        dy[elsewhere, at] = right.to(dy.dtype)
        return _LINEAR.vjp(wanted, values, {"y": dy}, attributes, context)


_LINEAR = Linear()


def _summed(x: Tensor, attributes: Attributes, context: Context) -> Tensor:
    """Return the sum of all ranks' rows, a new tensor."""
    return context.group.sum(x, attributes["tensor"])


def _scale(x: Tensor, attributes: Attributes, context: Context) -> Tensor:
    """Return 1 / rms of the whole rows, float32 [n, 1]."""
    squares = x.square().sum(-1, keepdim=True)
    mean = context.group.sum_(squares, "rank_rms_norm") / attributes["width"]
    return torch.rsqrt(mean + attributes["eps"])


def _local_targets(
    targets: Tensor, attributes: Attributes, context: Context
) -> tuple[Tensor, Tensor]:
    """Return each row's target as an entry of this rank (any entry where another has it), and
    whether it is here.
    """
    # One run: `even_cut` gives each rank neighbouring tokens.
    [run] = attributes["cut"].runs[context.group.rank]
    local = targets - run.start
    last = run.stop - run.start - 1
    return local.clamp(0, last), (local >= 0) & (local <= last)

"""Next-token loss."""

from collections.abc import Collection, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coserve.graph.operators.base import Attributes, Operator, Shape, Shapes, Values

if TYPE_CHECKING:
    from coserve.graph.ir import TensorSpec


class CrossEntropy(Operator):
    """Loss of each row, and whether its most likely token is the target; logits [n, vocabulary], targets int64 [n].

    Computed in float32. Outputs: loss float32 [n], correct bool [n], log_sum (of the exponentials of all logits)
    float32 [n].
    """

    name = "cross_entropy"
    inputs = ("logits", "targets")
    outputs = ("loss", "correct", "log_sum")
    needs = {"logits": ("logits", "targets", "log_sum"), "targets": None}

    def infer(self, shapes: Mapping[str, Shape], attributes: Attributes) -> Shapes:
        return {"loss": ((), torch.float32), "correct": ((), torch.bool), "log_sum": ((), torch.float32)}

    def forward(self, values: Values, attributes: Attributes, context: Any) -> dict[str, Tensor]:
        logits, targets = values["logits"], values["targets"]
        wide = logits.to(torch.float32, copy=True)  # the one copy, changed in place
        most, likeliest = wide.max(-1)
        target = wide.gather(1, targets[:, None])[:, 0]
        log_sum = wide.sub_(most[:, None]).exp_().sum(-1).log_().add_(most)
        return {"loss": log_sum - target, "correct": likeliest == targets, "log_sum": log_sum}

    def vjp(
        self, wanted: Collection[str], values: Values, gradients: Values, attributes: Attributes, context: Any
    ) -> dict[str, Tensor]:
        logits = values["logits"]
        grad = logits.to(torch.float32, copy=True).sub_(values["log_sum"][:, None]).exp_()
        grad.scatter_add_(1, values["targets"][:, None], grad.new_full((), -1.0).expand(grad.shape[0], 1))
        return {"logits": grad.mul_(gradients["loss"][:, None]).to(logits.dtype)}

    def flops_per_row(self, specs: Mapping[str, "TensorSpec"], attributes: Attributes, keys: float) -> float:
        return 4 * prod(specs["logits"].shape)

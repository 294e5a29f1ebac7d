"""Next-token loss."""

from collections.abc import Collection, Mapping
from math import prod

import torch
from torch import Tensor

from coserve.graph.operators.base import Attributes, Context, Operator, Shape, Shapes, Values
from coserve.graph.tensors import TensorSpec


class CrossEntropy(Operator):
    """Loss of each row, and whether no token is likelier than the target; logits [n, vocabulary], targets int64 [n].

    Computed in float32. Outputs: loss float32 [n], correct bool [n], log_sum (of the exponentials of all logits)
    float32 [n].
    """

    name = "cross_entropy"
    inputs = ("logits", "targets")
    outputs = ("loss", "correct", "log_sum")
    needs = {"logits": ("logits", "targets", "log_sum"), "targets": None}

    def infer(self, shapes: Mapping[str, Shape], attributes: Attributes) -> Shapes:
        return {"loss": ((), torch.float32), "correct": ((), torch.bool), "log_sum": ((), torch.float32)}

    def forward(self, values: Values, attributes: Attributes, context: Context) -> dict[str, Tensor]:
        loss, correct, log_sum = context.backend.cross_entropy(values["logits"], values["targets"])
        return {"loss": loss, "correct": correct, "log_sum": log_sum}

    def vjp(
        self, wanted: Collection[str], values: Values, gradients: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        gradient = context.backend.cross_entropy_gradient(
            values["logits"], values["targets"], values["log_sum"], gradients["loss"]
        )
        return {"logits": gradient}

    def flops_per_row(self, specs: Mapping[str, TensorSpec], attributes: Attributes, mean_context_len: float) -> float:
        return 4 * prod(specs["logits"].shape)

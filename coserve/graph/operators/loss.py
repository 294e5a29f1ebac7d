"""Next-token loss, of logits or of the rows that the head's product turns into logits."""

from collections.abc import Collection, Mapping
from math import prod

import torch
from torch import Tensor

from coserve.graph.operators.base import Attributes, Context, Operator, Shape, Shapes, Values
from coserve.graph.operators.linear import Linear
from coserve.graph.tensors import TensorSpec
from coserve.kernels.weights import as_dense, as_weight

_READ_BY_GRADIENT = ("logits", "targets", "log_sum")


class CrossEntropy(Operator):
    """Loss of each row, and whether no token is likelier than the target; logits [n, vocabulary],
    targets int64 [n].

    Computed in float32. Outputs: loss float32 [n], correct bool [n], log_sum (of the exponentials
    of all logits) float32 [n].
    """

    name = "cross_entropy"
    inputs = ("logits", "targets")
    outputs = ("loss", "correct", "log_sum")
    needs = {"logits": _READ_BY_GRADIENT, "targets": None}

    def infer(self, shapes: Mapping[str, Shape], attributes: Attributes) -> Shapes:
        return {
            "loss": ((), torch.float32),
            "correct": ((), torch.bool),
            "log_sum": ((), torch.float32),
        }

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        loss, correct, log_sum = context.backend.cross_entropy(values["logits"], values["targets"])
        return {"loss": loss, "correct": correct, "log_sum": log_sum}

    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> dict[str, Tensor]:
        gradient = context.backend.cross_entropy_gradient(
            values["logits"], values["targets"], values["log_sum"], gradients["loss"]
        )
        return {"logits": gradient}

    def flops_per_row(
        self, specs: Mapping[str, TensorSpec], attributes: Attributes, mean_context_len: float
    ) -> float:
        return 4 * prod(specs["logits"].shape)


class LinearCrossEntropy(Operator):
    """`cross_entropy` of logits = x W^T + b, as in `linear`, which nothing else reads: x [n, in],
    weight [vocabulary, in], bias [vocabulary].

    One operator and not two, so that the gradient of the logits may take their place in memory, and
    a backend may compute the gradient of x from the logits without storing theirs.

    Kernel (`Backend.fused`), of that gradient: (logits, which it may overwrite, targets, log_sum,
    gradient of the loss, weight) -> gradient of x.
    """

    name = "linear_cross_entropy"
    inputs = ("x", "weight", "bias", "targets")
    outputs = ("loss", "correct", "log_sum", "logits")
    optional = frozenset({"bias"})
    needs = {
        "x": ("weight", *_READ_BY_GRADIENT),
        "weight": ("x", *_READ_BY_GRADIENT),
        "bias": _READ_BY_GRADIENT,
        "targets": None,
    }
    overwrites = frozenset({"logits"})

    def infer(self, shapes: Mapping[str, Shape], attributes: Attributes) -> Shapes:
        return {**_LOSS.infer(shapes, attributes), "logits": ((shapes["weight"][0],), None)}

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        logits = _LINEAR.forward(values, attributes, context)["y"]
        return {
            **_LOSS.forward({**values, "logits": logits}, attributes, context),
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
        given = (values["logits"], values["targets"], values["log_sum"], gradients["loss"])
        # The usual case, a frozen head; gradients of weight or bias need the logits' gradient
        # stored.
        if set(wanted) == {"x"} and (kernel := context.backend.fused.get(self.name)) is not None:
            weight = as_dense(as_weight(values["weight"]))
            if weight is not None and (found := kernel(*given, weight)) is not None:
                return {"x": found}
        # The logits' gradient takes their place in memory (`overwrites`).
        dy = context.backend.cross_entropy_gradient(*given, overwrites=True)
        return _LINEAR.vjp(wanted, values, {"y": dy}, attributes, context)

    def flops_per_row(
        self, specs: Mapping[str, TensorSpec], attributes: Attributes, mean_context_len: float
    ) -> float:
        return sum(
            rule.flops_per_row(specs, attributes, mean_context_len) for rule in (_LINEAR, _LOSS)
        )

    def vjp_flops_per_row(
        self,
        wanted: Collection[str],
        specs: Mapping[str, TensorSpec],
        attributes: Attributes,
        mean_context_len: float,
    ) -> float:
        of_loss = _LOSS.vjp_flops_per_row(("logits",), specs, attributes, mean_context_len)
        return of_loss + _LINEAR.vjp_flops_per_row(wanted, specs, attributes, mean_context_len)


_LINEAR, _LOSS = Linear(), CrossEntropy()

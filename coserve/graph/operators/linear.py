"""Matrix product with a weight, and table look-up."""

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from coserve.graph.operators.base import Attributes, Load, Operator, Shape, Shapes, Values
from coserve.graph.tensors import TensorSpec
from coserve.kernels.dropout import dropout_mask
from coserve.kernels.linear import add_input_gradient, add_product, input_gradient, product, products, weight_gradient


class _Product(Operator):
    """What all products with a weight [out, in] have in common."""

    def infer(self, shapes: Mapping[str, Shape], attributes: Attributes) -> Shapes:
        return {"y": ((shapes["weight"][0],), None)}

    def flops_per_row(self, specs: Mapping[str, TensorSpec], attributes: Attributes, mean_context_len: float) -> float:
        return 2 * prod(specs["weight"].shape)

    def vjp_flops_per_row(
        self,
        wanted: Collection[str],
        specs: Mapping[str, TensorSpec],
        attributes: Attributes,
        mean_context_len: float,
    ) -> float:
        return sum(2 * prod(specs["weight"].shape) if slot != "bias" else specs["bias"].shape[0] for slot in wanted)


class Linear(_Product):
    """y = x W^T + b; x [n, in], weight [out, in], bias [out]."""

    name = "linear"
    inputs = ("x", "weight", "bias")
    optional = frozenset({"bias"})
    needs = {"x": ("weight",), "weight": ("x",), "bias": ()}
    shared: ClassVar[str | None] = "x"
    sums: ClassVar[frozenset[str]] = frozenset({"x"})

    def forward(self, values: Values, attributes: Attributes, context: Any) -> dict[str, Tensor]:
        return {"y": product(values["x"], values["weight"], values.get("bias"))}

    def forward_onto(self, total: Tensor, values: Values, attributes: Attributes, context: Any) -> None:
        if "bias" in values:
            super().forward_onto(total, values, attributes, context)
        else:
            add_product(total, values["x"], values["weight"])

    def forward_all(self, runs: Sequence[tuple[Values, Attributes]], context: Any) -> list[dict[str, Tensor]]:
        weights, biases = [values["weight"] for values, _ in runs], [values.get("bias") for values, _ in runs]
        return [{"y": y} for y in products(runs[0][0]["x"], weights, biases)]

    def vjp(
        self, wanted: Collection[str], values: Values, gradients: Values, attributes: Attributes, context: Any
    ) -> dict[str, Tensor]:
        dy, result = gradients["y"], {}
        if "x" in wanted:
            result["x"] = input_gradient(dy, values["weight"])
        if "weight" in wanted:
            result["weight"] = weight_gradient(dy, values["x"])
        if "bias" in wanted:
            result["bias"] = dy.float().sum(0)
        return result

    def vjp_onto(
        self, total: Tensor, slot: str, values: Values, gradients: Values, attributes: Attributes, context: Any
    ) -> None:
        add_input_gradient(total, gradients["y"], values["weight"])


class DropoutLinear(_Product):
    """y = dropout(x) W^T; x [n, in], dropout_row_ids int64 [n], weight [out, in].

    Attributes: p, salt (see `kernels.dropout`).

    One operator and not two, so that the dropped copy of x is never saved: forward and VJP make its mask again.
    """

    name = "dropout_linear"
    inputs = ("x", "weight", "dropout_row_ids")
    needs = {"x": ("weight", "dropout_row_ids"), "weight": ("x", "dropout_row_ids"), "dropout_row_ids": None}

    def _drop(self, x: Tensor, values: Values, attributes: Attributes) -> Tensor:
        mask = dropout_mask(values["dropout_row_ids"], x.shape[1], p=attributes["p"], salt=attributes["salt"])
        scale: float = 1 / (1 - attributes["p"])
        return x * mask * scale

    def forward(self, values: Values, attributes: Attributes, context: Any) -> dict[str, Tensor]:
        x = self._drop(values["x"], values, attributes)
        return {"y": product(x, values["weight"])}

    def vjp(
        self, wanted: Collection[str], values: Values, gradients: Values, attributes: Attributes, context: Any
    ) -> dict[str, Tensor]:
        dy, result = gradients["y"], {}
        if "x" in wanted:
            result["x"] = self._drop(input_gradient(dy, values["weight"]), values, attributes)
        if "weight" in wanted:
            result["weight"] = weight_gradient(dy, self._drop(values["x"], values, attributes))
        return result


class Embedding(Operator):
    """y = weight[ids + offset]; ids int64 [n], weight [entries, width]. A negative id gives a row of zeros.

    Negative ids are virtual tokens: id -1 - j is the j-th. With the attribute `virtual` they are what is looked up
    (at j), and the rows of all others are zeros.
    """

    name = "embedding"
    inputs = ("ids", "weight")
    needs = {"ids": None, "weight": ("ids", "weight")}

    def infer(self, shapes: Mapping[str, Shape], attributes: Attributes) -> Shapes:
        return {"y": ((shapes["weight"][1],), None)}

    def _entries(self, values: Values, attributes: Attributes) -> tuple[Tensor, Tensor]:
        """Which entry each row looks up, and which rows look up nothing."""
        ids = -1 - values["ids"] if attributes.get("virtual") else values["ids"]
        return ids.clamp(min=0) + attributes["offset"], ids < 0

    def forward(self, values: Values, attributes: Attributes, context: Any) -> dict[str, Tensor]:
        entries, absent = self._entries(values, attributes)
        rows = torch.nn.functional.embedding(entries.masked_fill(absent, 0), values["weight"])
        return {"y": rows.masked_fill_(absent[:, None], 0)}

    def vjp(
        self, wanted: Collection[str], values: Values, gradients: Values, attributes: Attributes, context: Any
    ) -> dict[str, Tensor]:
        entries, absent = self._entries(values, attributes)
        gradient = torch.zeros(values["weight"].shape, dtype=torch.float32, device=entries.device)
        return {"weight": gradient.index_add_(0, entries[~absent], gradients["y"][~absent].float())}

    def flops_per_row(self, specs: Mapping[str, TensorSpec], attributes: Attributes, mean_context_len: float) -> float:
        return 0.0

    def bytes_moved(self, specs: Mapping[str, TensorSpec], attributes: Attributes, load: Load) -> int:
        """Only the rows that are looked up are read."""
        return 2 * load.rows * specs["y"].num_bytes(load.compute_dtype)

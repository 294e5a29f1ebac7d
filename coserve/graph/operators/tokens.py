"""Operators of adapters that have rows of their own for some tokens, in the embeddings and in the
head.
"""

from collections.abc import Collection, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from coserve.graph.operators.base import Attributes, Context, Operator, Shape, Shapes, Values
from coserve.graph.tensors import TensorSpec
from coserve.kernels.weights import as_weight


class OtherRows(Operator):
    """y = weight[i] - base in rows whose id is the i-th of the tokens, zero elsewhere; base [n,
    width], ids int64 [n], weight [tokens, width]. Attribute: tokens, their ids.
    """

    name = "other_rows"
    inputs = ("base", "weight", "ids")
    needs = {"base": ("ids",), "weight": ("ids",), "ids": None}

    def infer(self, shapes: Mapping[str, Shape], attributes: Attributes) -> Shapes:
        return {"y": (shapes["base"], None)}

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        places, is_there = _places(values["ids"], attributes["tokens"])
        change = values["weight"][places] - values["base"]
        return {"y": change.masked_fill_(~is_there[:, None], 0)}

    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> dict[str, Tensor]:
        places, is_there = _places(values["ids"], attributes["tokens"])
        dy, result = gradients["y"], {}
        if "base" in wanted:
            result["base"] = (-dy).masked_fill_(~is_there[:, None], 0)
        if "weight" in wanted:
            total = torch.zeros(
                len(attributes["tokens"]), dy.shape[1], dtype=torch.float32, device=dy.device
            )
            result["weight"] = total.index_add_(0, places[is_there], dy[is_there].float())
        return result

    def flops_per_row(
        self, specs: Mapping[str, TensorSpec], attributes: Attributes, mean_context_len: float
    ) -> float:
        return specs["base"].shape[0]


class OtherColumns(Operator):
    """y = x weight^T - base in the columns given, zero elsewhere; base [n, vocab_size], x [n,
    width], weight [columns, width]. Attribute: columns, their numbers.
    """

    name = "other_columns"
    inputs = ("base", "x", "weight")
    needs = {"base": (), "x": ("weight",), "weight": ("x",)}

    def infer(self, shapes: Mapping[str, Shape], attributes: Attributes) -> Shapes:
        return {"y": (shapes["base"], None)}

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        base, columns = values["base"], _tensor(attributes["columns"], values["base"].device)
        change = torch.zeros_like(base)
        change[:, columns] = (
            as_weight(values["weight"]).product(context.backend, values["x"], None)
            - base[:, columns]
        )
        return {"y": change}

    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> dict[str, Tensor]:
        columns = _tensor(attributes["columns"], gradients["y"].device)
        dy, result = gradients["y"][:, columns].contiguous(), {}
        if "base" in wanted:
            result["base"] = torch.zeros_like(gradients["y"])
            result["base"][:, columns] = -dy
        if "x" in wanted:
            result["x"] = as_weight(values["weight"]).input_gradient(context.backend, dy)
        if "weight" in wanted:
            result["weight"] = context.backend.weight_gradient(dy, values["x"])
        return result

    def flops_per_row(
        self, specs: Mapping[str, TensorSpec], attributes: Attributes, mean_context_len: float
    ) -> float:
        return 2 * specs["weight"].shape[0] * specs["weight"].shape[1]


@lru_cache(maxsize=64)
def _tensor(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)


@lru_cache(maxsize=64)
def _sorted(tokens: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the tokens in order, and where each stands among those given."""
    found = _tensor(tokens, device).sort()
    return found.values, found.indices


def _places(ids: Tensor, tokens: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return each row's place among the tokens (of rows without one: any), and which rows have
    one.
    """
    in_order, places = _sorted(tokens, ids.device)
    # Ids above the largest token would point past the end; the comparison below sorts them out.
    found = torch.searchsorted(in_order, ids).clamp_(max=len(tokens) - 1)
    return places[found], in_order[found] == ids

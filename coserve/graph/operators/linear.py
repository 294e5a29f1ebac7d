"""Matrix products with a weight, and table look-up."""

from collections.abc import Collection, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from coserve.graph.layouts import FIRST, PART, AnyState, Given, Layout
from coserve.graph.operators.base import Attributes, Context, Load, Operator, Shape, Shapes, Values
from coserve.graph.tensors import TensorSpec
from coserve.kernels.base import Factor
from coserve.kernels.cuts import Cut, even_cut
from coserve.kernels.weights import as_weight


class _Product(Operator):
    """A base of products with a weight [out, in]."""

    takes_any_cut = True

    def infer(self, shapes: Mapping[str, Shape], attributes: Attributes) -> Shapes:
        return {"y": ((shapes["weight"][0],), None)}

    def flops_per_row(
        self, specs: Mapping[str, TensorSpec], attributes: Attributes, mean_context_len: float
    ) -> float:
        return 2 * prod(specs["weight"].shape)

    def layouts(self, given: Given) -> Sequence[Layout]:
        """Return the products of parts of sums, with rows of the weight (columns of y), and with
        its columns.

        The products with columns add up only if each column of x is on one rank.
        """
        found = list(super().layouts(given))
        if (cut := given.cuts.get("y")) is not None:
            found.append(Layout(inputs={"weight": cut.along(-2), "bias": cut}, outputs={"y": cut}))
        # A weight cut by columns takes x in the same cut; each rank gives a part of the sum.
        found += [
            Layout(inputs={"x": cut, "weight": cut, "bias": FIRST}, outputs={"y": PART})
            for cut in given.cuts_of("x")
            if cut.is_disjoint
        ]
        return found

    def demands(self, given: Given) -> dict[str, Cut]:
        cut = even_cut(given.specs["x"].shape[0], given.size)
        # x cut evenly serves the layout by columns, whose only collective is the sum of y.
        return {} if cut is None else {"x": cut}

    def vjp_flops_per_row(
        self,
        wanted: Collection[str],
        specs: Mapping[str, TensorSpec],
        attributes: Attributes,
        mean_context_len: float,
    ) -> float:
        return sum(
            2 * prod(specs["weight"].shape) if slot != "bias" else specs["bias"].shape[0]
            for slot in wanted
        )


class Linear(_Product):
    """y = x W^T + b; x [n, in], weight [out, in] (a `Weight` of the backbone, or a tensor), bias
    [out].
    """

    name = "linear"
    inputs = ("x", "weight", "bias")
    optional = frozenset({"bias"})
    needs = {"x": ("weight",), "weight": ("x",), "bias": ()}
    joins_rows = True
    linear_in = (frozenset({"x"}),)
    added = frozenset({"bias"})

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        return {
            "y": as_weight(values["weight"]).product(
                context.backend, values["x"], values.get("bias")
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
        dy, result = gradients["y"], {}
        if "x" in wanted:
            result["x"] = as_weight(values["weight"]).input_gradient(context.backend, dy)
        if "weight" in wanted:
            result["weight"] = context.backend.weight_gradient(dy, values["x"])
        if "bias" in wanted:
            result["bias"] = dy.float().sum(0)
        return result


class LowRank(_Product):
    """y = x F^T with a factor F [out, in] of low rank, a parameter of an adapter: one of out and in
    is the rank.
    """

    name = "low_rank"
    inputs = ("x", "weight")
    needs = {"x": ("weight",), "weight": ("x",)}
    grouped = frozenset({"weight"})
    apart = frozenset({"x"})
    linear_in = (frozenset({"x"}),)

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        return {"y": context.backend.low_rank_product(values["x"], values["weight"])}

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
            result["x"] = context.backend.low_rank_input_gradient(dy, values["weight"])
        if "weight" in wanted:
            result["weight"] = _low_rank_gradient(dy, values["x"], context)
        return result


class DropoutLowRank(_Product):
    """y = dropout(x) F^T; x [n, in], dropout_row_ids int64 [n], weight [out, in] as in `low_rank`.

    Attributes: p, salt (see `kernels.dropout`).

    One operator and not two, so that the dropped copy of x is never saved: forward and VJP make its
    mask again.
    """

    name = "dropout_low_rank"
    inputs = ("x", "weight", "dropout_row_ids")
    needs = {
        "x": ("weight", "dropout_row_ids"),
        "weight": ("x", "dropout_row_ids"),
        "dropout_row_ids": None,
    }
    grouped = frozenset({"weight"})
    linear_in = (frozenset({"x"}),)

    def layouts(self, given: Given) -> Sequence[Layout]:
        return [each for each in super().layouts(given) if has_one_run(each.inputs.get("x"))]

    def localized(
        self, attributes: Attributes, states: Mapping[str, AnyState], rank: int
    ) -> Attributes:
        return with_first_feature(attributes, states["x"], rank)

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        x = dropped(values["x"], values, attributes, context)
        return {"y": context.backend.low_rank_product(x, values["weight"])}

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
            x_grad = context.backend.low_rank_input_gradient(dy, values["weight"])
            result["x"] = dropped(x_grad, values, attributes, context)
        if "weight" in wanted:
            # The mask follows from row ids and salt alone, so it is made again instead of saved.
            kept = dropped(values["x"], values, attributes, context)
            result["weight"] = _low_rank_gradient(dy, kept, context)
        return result


def add_input_gradient(
    total: Factor, values: Values, gradients: Values, attributes: Attributes, context: Context
) -> None:
    """Add a `linear`'s gradient of x to rows, in place."""
    assert isinstance(total, Tensor)
    as_weight(values["weight"]).input_gradient(context.backend, gradients["y"], total)


def add_low_rank_product(
    total: Tensor, values: Values, attributes: Attributes, context: Context
) -> None:
    """Add the result of a `low_rank` to rows, in place."""
    context.backend.low_rank_product(values["x"], values["weight"], total)


def add_low_rank_input_gradient(
    total: Factor, values: Values, gradients: Values, attributes: Attributes, context: Context
) -> None:
    """Add a `low_rank`'s gradient of x to rows, in place."""
    assert isinstance(total, Tensor)
    context.backend.low_rank_input_gradient(gradients["y"], values["weight"], total)


def add_low_rank_gradient(
    total: Factor, values: Values, gradients: Values, attributes: Attributes, context: Context
) -> None:
    """Add a `low_rank`'s gradient of its factor to the sum of each adapter, in place."""
    context.backend.add_low_rank_gradient(gradients["y"], values["x"], total)


def add_dropout_low_rank_gradient(
    total: Factor, values: Values, gradients: Values, attributes: Attributes, context: Context
) -> None:
    """Add a `dropout_low_rank`'s gradient of its factor to the sum of each adapter, in place."""
    kept = dropped(values["x"], values, attributes, context)
    context.backend.add_low_rank_gradient(gradients["y"], kept, total)


def dropped(x: Tensor, values: Values, attributes: Attributes, context: Context) -> Tensor:
    """Return x without the features that its rows drop (`dropout_row_ids`), scaled up for them."""
    return context.backend.dropped(
        x, values["dropout_row_ids"], p=attributes["p"], salt=attributes["salt"]
    )


def has_one_run(state: AnyState | None) -> bool:
    """Return whether a rank's columns stand side by side in the whole row, so that dropout can
    count its features.
    """
    return not isinstance(state, Cut) or all(len(runs) == 1 for runs in state.runs)


def with_first_feature(attributes: Attributes, state: AnyState, rank: int) -> Attributes:
    """Return dropout's attributes on a rank: features count from the salt, which moves to the
    rank's first feature.
    """
    if not isinstance(state, Cut):
        return attributes
    return {**attributes, "salt": (attributes["salt"] + state.runs[rank][0].start) % 2**32}


def _low_rank_gradient(dy: Tensor, x: Tensor, context: Context) -> Tensor:
    """Return dF of one adapter, float32 [out, in]."""
    total = torch.zeros(dy.shape[1], x.shape[1], dtype=torch.float32, device=x.device)
    context.backend.add_low_rank_gradient(dy, x, total)
    return total


class Embedding(Operator):
    """y = weight[ids + offset]; ids int64 [n], weight [entries, width].

    - Negative ids are virtual tokens: id -1 - j is the j-th. They give rows of zeros.
    - With the attribute `virtual` only they are looked up (at j), and all other rows are zeros.
    - Attribute `first`, on a rank that has a part of a table: the number of its first entry. Ids of
      entries that other ranks have give rows of zeros.
    - An id beyond the table belongs to a row whose adapter has a larger table. It looks up any
      entry, and the result is not used. Ids that no table has are refused where requests and
      examples come in.
    """

    name = "embedding"
    inputs = ("ids", "weight")
    needs = {"ids": None, "weight": ("ids", "weight")}

    def infer(self, shapes: Mapping[str, Shape], attributes: Attributes) -> Shapes:
        return {"y": ((shapes["weight"][1],), None)}

    def layouts(self, given: Given) -> Sequence[Layout]:
        """Return the layout with some entries on each rank; of a table of virtual tokens, with some
        columns.
        """
        if given.attributes.get("virtual"):
            cut = given.cuts.get("y")
            return [] if cut is None else [Layout(inputs={"weight": cut}, outputs={"y": cut})]
        entries = even_cut(given.specs["weight"].shape[0], given.size, padded=True)
        assert entries is not None
        return [Layout(inputs={"weight": entries.along(-2)}, outputs={"y": PART})]

    def localized(
        self, attributes: Attributes, states: Mapping[str, AnyState], rank: int
    ) -> Attributes:
        cut = states["weight"]
        if not isinstance(cut, Cut) or cut.dim != -2:
            return attributes
        return {**attributes, "first": cut.runs[rank][0].start}

    def _entries(self, values: Values, attributes: Attributes) -> tuple[Tensor, Tensor]:
        """Return the entry that each row looks up, and whether it looks up nothing."""
        ids = -1 - values["ids"] if attributes.get("virtual") else values["ids"]
        # A rank with a part of the table: ids of other ranks' entries look up nothing here.
        if "first" in attributes:
            entries = ids + (attributes["offset"] - attributes["first"])
            num_entries = values["weight"].shape[0]
            return entries.clamp(0, num_entries - 1), (ids < 0) | (entries < 0) | (
                entries >= num_entries
            )
        # Clamped, since ids beyond the table must not fault; such a row's result is not used.
        last = values["weight"].shape[0] - 1 - attributes["offset"]
        return ids.clamp(0, last) + attributes["offset"], ids < 0

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        entries, absent = self._entries(values, attributes)
        # Any valid entry where there is none; those rows are zeroed right after.
        rows = torch.nn.functional.embedding(entries.masked_fill(absent, 0), values["weight"])
        return {"y": rows.masked_fill_(absent[:, None], 0)}

    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> dict[str, Tensor]:
        entries, absent = self._entries(values, attributes)
        gradient = torch.zeros(values["weight"].shape, dtype=torch.float32, device=entries.device)
        return {"weight": gradient.index_add_(0, entries[~absent], gradients["y"][~absent].float())}

    def flops_per_row(
        self, specs: Mapping[str, TensorSpec], attributes: Attributes, mean_context_len: float
    ) -> float:
        return 0.0

    def bytes_moved(
        self, specs: Mapping[str, TensorSpec], attributes: Attributes, load: Load
    ) -> int:
        """Return the memory traffic of the rows that are looked up."""
        return 2 * load.rows * specs["y"].num_bytes(load.compute_dtype)

"""Operators of adapters beyond products: vectors, dropout, and DoRA's magnitudes."""

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from coserve.graph.layouts import AnyState, Given, Layout
from coserve.graph.operators.base import Attributes, Context, RowWise, Values
from coserve.graph.operators.linear import dropped, has_one_run, with_first_feature
from coserve.kernels.cuts import Cut


class AddVector(RowWise):
    """y = x + factor * vector; x [n, width], vector [width]. Attribute: factor, a fixed number."""

    name = "add_vector"
    inputs = ("x", "vector")
    needs = {"x": (), "vector": ()}
    by_columns = True
    linear_in = (frozenset({"x"}),)
    added = frozenset({"vector"})

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        return {"y": values["x"] + attributes["factor"] * values["vector"]}

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
            result["x"] = dy
        if "vector" in wanted:
            result["vector"] = attributes["factor"] * dy.float().sum(0)
        return result


class OtherVector(RowWise):
    """y = new - old in every row: the change where one added vector replaces another; like [n,
    width] only gives the shape, new and old are [width].
    """

    name = "other_vector"
    inputs = ("like", "new", "old")
    needs = {"like": None, "new": (), "old": None}
    by_columns = True
    linear_in = (frozenset({"like"}),)
    added = frozenset({"new", "old"})

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        return {"y": (values["new"] - values["old"]).expand_as(values["like"]).clone()}

    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> dict[str, Tensor]:
        return {"new": gradients["y"].float().sum(0)}


class OnVirtualRows(RowWise):
    """y = other - x on rows of virtual tokens (negative ids), zero elsewhere, so that x + y is
    `other` there; x, other [n, width], tokens int64 [n].
    """

    name = "on_virtual_rows"
    inputs = ("x", "other", "tokens")
    needs = {"x": ("tokens",), "other": ("tokens",), "tokens": None}
    by_columns = True
    linear_in = (frozenset({"x", "other"}),)

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        return {"y": (values["other"] - values["x"]) * (values["tokens"] < 0)[:, None]}

    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> dict[str, Tensor]:
        masked = gradients["y"] * (values["tokens"] < 0)[:, None]
        return {slot: {"x": -masked, "other": masked}[slot] for slot in wanted}


class Gain(RowWise):
    """y = x * (factor - 1): the change where x is multiplied by a vector (arXiv 2205.05638, section
    3.3); x [n, width], factor of width elements in any shape.
    """

    name = "gain"
    inputs = ("x", "factor")
    needs = {"x": ("factor",), "factor": ("x", "factor")}
    by_columns = True
    linear_in = (frozenset({"x"}),)

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        return {"y": values["x"] * (values["factor"].flatten() - 1)}

    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> dict[str, Tensor]:
        dy, factor, result = gradients["y"], values["factor"], {}
        if "x" in wanted:
            result["x"] = dy * (factor.flatten() - 1)
        if "factor" in wanted:
            result["factor"] = (dy.float() * values["x"]).sum(0).view(factor.shape)
        return result


class Dropout(RowWise):
    """y = dropout(x); x [n, width], dropout_row_ids int64 [n]. Attributes: p, salt (see
    `kernels.dropout`).
    """

    name = "dropout"
    inputs = ("x", "dropout_row_ids")
    needs = {"x": ("dropout_row_ids",), "dropout_row_ids": None}
    linear_in = (frozenset({"x"}),)

    def layouts(self, given: Given) -> Sequence[Layout]:
        cuts = [
            Layout(inputs={"x": cut}, outputs={"y": cut})
            for cut in given.cuts_of("x")
            if has_one_run(cut)
        ]
        return [*super().layouts(given), *cuts]

    def demands(self, given: Given) -> dict[str, Cut]:
        cut = given.cuts.get("y")
        return {} if cut is None else {"x": cut}

    def localized(
        self, attributes: Attributes, states: Mapping[str, AnyState], rank: int
    ) -> Attributes:
        return with_first_feature(attributes, states["x"], rank)

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        return {"y": dropped(values["x"], values, attributes, context)}

    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> dict[str, Tensor]:
        return {"x": dropped(gradients["y"], values, attributes, context)}


class Magnitude(RowWise):
    """y = (g - 1) * (base - bias) + g * change with g = magnitude / norm: what DoRA adds to base
    where `change` is what LoRA would add (arXiv 2402.09353, equation 5; the norm is a constant, as
    in section 4.3).

    base, change [n, width]; magnitude, norm, bias [width].
    """

    name = "magnitude"
    inputs = ("base", "change", "magnitude", "norm", "bias")
    optional = frozenset({"bias"})
    needs = {
        "base": ("magnitude", "norm"),
        "change": ("magnitude", "norm"),
        "magnitude": ("base", "change", "norm", "bias"),
        "norm": None,
        "bias": None,
    }
    flops_per_element = 5
    by_columns = True
    linear_in = (frozenset({"base", "change"}),)
    added = frozenset({"bias"})

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        # base * gain - base, since the site's own result is added unchanged; the bias is not
        # scaled.
        gain = values["magnitude"] / values["norm"]
        return {"y": (gain - 1) * self._base(values) + gain * values["change"]}

    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> dict[str, Tensor]:
        dy, result = gradients["y"], {}
        if "magnitude" in wanted:
            product = dy.float() * (self._base(values) + values["change"])
            result["magnitude"] = product.sum(0) / values["norm"].float()
        if "base" in wanted or "change" in wanted:
            gain = values["magnitude"] / values["norm"]
            found = {"base": dy * (gain - 1), "change": dy * gain}
            result |= {slot: gradient for slot, gradient in found.items() if slot in wanted}
        return result

    def _base(self, values: Values) -> Tensor:
        base: Tensor = values["base"]
        return base if values.get("bias") is None else base - values["bias"]

"""Operators that take apart the result of a fused projection."""

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from coserve.graph.layouts import AnyState, Given, Layout
from coserve.graph.operators.base import Attributes, Context, Operator, Shape, Shapes, Values
from coserve.graph.tensors import TensorSpec
from coserve.kernels.base import Factor
from coserve.kernels.cuts import Cut, mapped


class Columns(Operator):
    """Some columns of each group of x's columns: x [n, groups * g] -> y [n, groups * width], those
    from `start` on.

    Attributes: groups, of (g), start, width. One node for each part, so that each is a place for
    adapters; the gradients of all parts are written into one tensor.
    """

    name = "columns"
    inputs = ("x",)
    needs = {"x": ()}
    reads_some_columns = True
    linear_in = (frozenset({"x"}),)

    def infer(self, shapes: Mapping[str, Shape], attributes: Attributes) -> Shapes:
        return {"y": ((attributes["groups"] * attributes["width"],), None)}

    def layouts(self, given: Given) -> Sequence[Layout]:
        layouts = list(super().layouts(given))
        place = _place(given.attributes)
        for cut in given.cuts_of("x"):
            y = mapped(cut, len(place), {column: own for own, column in place.items()})
            if y is not None and _local_attributes(given.attributes, cut) is not None:
                layouts.append(Layout(inputs={"x": cut}, outputs={"y": y}))
        return layouts

    def demands(self, given: Given) -> dict[str, Cut]:
        cut = given.cuts.get("y")
        mapped_cut = cut and mapped(cut, given.specs["x"].shape[0], _place(given.attributes))
        return {"x": mapped_cut} if mapped_cut else {}

    def localized(
        self, attributes: Attributes, states: Mapping[str, AnyState], rank: int
    ) -> Attributes:
        cut = states["x"]
        local = _local_attributes(attributes, cut) if isinstance(cut, Cut) else attributes
        assert local is not None, "a layout of this operator"
        return local

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        return {"y": _part(values["x"], attributes).flatten(1)}

    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> dict[str, Tensor]:
        dy = gradients["y"]
        # Zeros in the columns of other parts, whose own nodes add their gradients.
        total = dy.new_zeros(dy.shape[0], attributes["groups"] * attributes["of"])
        add_to_columns(total, values, gradients, attributes, context)
        return {"x": total}

    def flops_per_row(
        self, specs: Mapping[str, TensorSpec], attributes: Attributes, mean_context_len: float
    ) -> float:
        return 0.0


class Regroup(Columns):
    """Several parts of each group of x's columns, part by part: x [n, groups * g] -> y [n, groups *
    sum(widths)], of all groups the first part, then of all the second.

    Attributes: groups, of (g), start, widths: of the parts, which stand one after another.
    """

    name = "regroup"

    def infer(self, shapes: Mapping[str, Shape], attributes: Attributes) -> Shapes:
        return {"y": ((attributes["groups"] * sum(attributes["widths"]),), None)}

    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        return {
            "y": torch.cat([_part(values["x"], each).flatten(1) for each in _parts(attributes)], 1)
        }


def add_to_columns(
    total: Factor, values: Values, gradients: Values, attributes: Attributes, context: Context
) -> None:
    """Add the gradient of a `columns` or `regroup` to the columns of x that it reads, in place."""
    assert isinstance(total, Tensor)
    dy = gradients["y"]
    if "widths" not in attributes:
        _add_to_part(total, dy, attributes)
        return
    parts = _parts(attributes)
    sizes = [attributes["groups"] * each["width"] for each in parts]
    for each, grad in zip(parts, torch.split(dy, sizes, 1), strict=True):
        _add_to_part(total, grad, each)


def _add_to_part(total: Tensor, dy: Tensor, attributes: Attributes) -> None:
    part = _part(total, attributes)
    part += dy.reshape(part.shape)


def _parts(attributes: Attributes) -> list[Attributes]:
    """Return the attributes of a `columns` for each part of a `regroup`."""
    start, parts = attributes["start"], list[Attributes]()
    for width in attributes["widths"]:
        parts.append({**attributes, "start": start, "width": width})
        start += width
    return parts


def _place(attributes: Attributes) -> dict[int, int]:
    """Return, by column of y, the column of x that it is."""
    parts = _parts(attributes) if "widths" in attributes else [attributes]
    columns = [
        group * attributes["of"] + each["start"] + column
        for each in parts
        for group in range(attributes["groups"])
        for column in range(each["width"])
    ]
    return dict(enumerate(columns))


def _local_attributes(attributes: Attributes, cut: Cut) -> Attributes | None:
    """Return the attributes where x is cut; None where a rank's columns form no equal groups.

    What a rank has of a group stands together, and has to have every part in the same width as in
    other groups.
    """
    parts = _parts(attributes) if "widths" in attributes else [attributes]
    # Where parts begin and end within a group of the whole tensor.
    bounds = [parts[0]["start"], *(each["start"] + each["width"] for each in parts)]
    shapes = set[tuple[int, ...]]()
    for runs in cut.runs:
        # By group: columns of it that this rank has, counted within the group.
        held: dict[int, list[int]] = {}
        for run in runs:
            for column in range(run.start, run.stop):
                held.setdefault(column // attributes["of"], []).append(column % attributes["of"])
        # A group's shape on the rank: how many columns lie before each bound is the local bound.
        of_groups = {
            (len(held), len(each), *(sum(c < bound for c in each) for bound in bounds))
            for each in held.values()
        }
        shapes |= of_groups
    # One shape for all groups of all ranks, or a single set of attributes does not describe it.
    if len(shapes) != 1:
        return None
    [(groups, of, start, *ends)] = shapes
    widths = tuple(end - before for before, end in pairwise((start, *ends)))
    if 0 in widths:
        return None
    width = {"widths": widths} if "widths" in attributes else {"width": widths[0]}
    return {"groups": groups, "of": of, "start": start, **width}


def _part(x: Tensor, attributes: Attributes) -> Tensor:
    """Return a view [n, groups, width] of x [n, groups * g]."""
    start, groups = attributes["start"], attributes["groups"]
    return x.view(x.shape[0], groups, attributes["of"])[..., start : start + attributes["width"]]

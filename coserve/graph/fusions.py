"""The table of fast paths: calls that run as one. `graph/fuse.py` applies it.

There is one kind of row for each way in which calls can become one:

| rows | calls that become one |
|---|---|
| `FUSIONS` | operators that read each other's results |
| `LOSS_FUSIONS` | the same, for a training pass's head and its loss |
| `GRADIENT_FUSIONS` | the gradients that two nodes give of the rows that both read |
| `SIBLING_FUSIONS` | one operator on several weights and the same rows |
| `FORWARD_SUMS`, `GRADIENT_SUMS` | a result, and the sum that it is added to |

A new fast path is a row and a kernel. Operators themselves have a forward pass, a VJP and costs,
and no faster variants of these.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from coserve.graph.operators.base import Attributes, Context, Values
from coserve.graph.operators.columns import add_to_columns
from coserve.graph.operators.fused import add_gradient_beside_low_rank, products_of_same_rows
from coserve.graph.operators.linear import (
    add_dropout_low_rank_gradient,
    add_input_gradient,
    add_low_rank_gradient,
    add_low_rank_input_gradient,
    add_low_rank_product,
)
from coserve.kernels.base import Factor


@dataclass(frozen=True)
class Pattern:
    """A node to look for, and the nodes that make what it reads."""

    ops: tuple[str, ...]
    """Operators that the node may have."""
    inputs: Mapping[str, "str | Pattern"]
    """By slot: the slot in which the fused operator takes that tensor, or the node that makes it,
    which no other node may read. A name that occurs twice stands for one tensor."""
    output: str = ""
    """The fused operator's output slot for what this node makes, where that is kept; "": it must
    not be kept."""
    is_output: bool = field(default=False, kw_only=True)
    """Whether the fused operator makes `output` in any case, as a tensor of its own."""
    attributes: tuple[str, ...] | None = field(default=None, kw_only=True)
    """Attributes that the fused operator takes over from the node; None: the node must not have
    any."""


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """A row for a pattern of operators."""

    fused: str
    """Name of the operator that replaces the nodes."""
    pattern: Pattern
    """The nodes that it replaces."""


def _half(name: str) -> Pattern:
    """Return the pattern of one factor of a gated unit."""
    slots = {slot: f"{name}_{slot}" for slot in ("weight", "bias", "narrow", "factor")}
    return Pattern(("linear", "linear_and_low_rank"), {"x": "x", **slots}, output=name)


_LINEAR_INPUTS = {"x": "x", "weight": "weight", "bias": "bias"}
_LINEAR = Pattern(("linear",), _LINEAR_INPUTS)
_LOW_RANK = Pattern(("low_rank",), {"x": "narrow", "weight": "factor"})
# A row may match what an earlier row produced.
FUSIONS = (
    Fusion(fused="linear_and_low_rank", pattern=Pattern(("add",), {"a": _LINEAR, "b": _LOW_RANK})),
    Fusion(fused="linear_onto", pattern=Pattern(("add",), {"a": "onto", "b": _LINEAR})),
    Fusion(fused="linear_onto", pattern=Pattern(("add",), {"a": _LINEAR, "b": "onto"})),
    Fusion(
        fused="gated_linear",
        pattern=Pattern(("silu_mul",), {"gate": _half("gate"), "up": _half("up")}),
    ),
)

_LOGITS = Pattern(("linear",), _LINEAR_INPUTS, output="logits", is_output=True)
# Rows for any backend: the gradient of the logits then takes their place in memory.
LOSS_FUSIONS = (
    Fusion(
        fused="linear_cross_entropy",
        pattern=Pattern(("cross_entropy",), {"logits": _LOGITS, "targets": "targets"}),
    ),
    # Each rank has the logits of some tokens, which the loss does not need together.
    Fusion(
        fused="rank_linear_cross_entropy",
        pattern=Pattern(
            ("cross_entropy",),
            {
                "logits": Pattern(("rank_gather",), {"x": _LOGITS}, attributes=("cut",)),
                "targets": "targets",
            },
        ),
    ),
)


@dataclass(frozen=True, kw_only=True)
class GradientFusion:
    """A row for backward passes: two nodes that read the same rows x, whose gradients of x become
    one.
    """

    fused: str
    """Name of the operator that does what both nodes do."""
    first: str
    """Operator of the node that is reversed first."""
    slots: Mapping[str, str]
    """Names of the first node's slots in the fused operator, which has those of the other node as
    they are."""
    then: str
    """Operator of the node that is reversed right after."""


GRADIENT_FUSIONS = (
    GradientFusion(
        fused="linear_beside_low_rank",
        first="low_rank",
        slots={"weight": "factor", "y": "narrow"},
        then="linear",
    ),
)


@dataclass(frozen=True, kw_only=True)
class SiblingFusion:
    """A row for neighbouring nodes of one operator that read the same tensor, and none of each
    other's results.
    """

    shared: str
    """The input slot in which they read the same tensor."""
    general: str
    """The operator that all of them become if one of them has it. Without its optional inputs it
    computes the same."""
    run: Callable[[Sequence[Values], Context], Sequence[dict[str, Tensor]]]
    """Computes all outputs, from the values of each node by slot."""


_PRODUCTS = SiblingFusion(shared="x", general="linear_and_low_rank", run=products_of_same_rows)
# Rows by the nodes' operator.
SIBLING_FUSIONS: Mapping[str, SiblingFusion] = {
    "linear": _PRODUCTS,
    "linear_and_low_rank": _PRODUCTS,
}

# Functions that add the result of a forward pass, whose one output has the sum's shape, to the sum
# in place; by operator. No input is the sum itself.
FORWARD_SUMS: Mapping[str, Callable[[Tensor, Values, Attributes, Context], None]] = {
    "low_rank": add_low_rank_product,
}

AddGradient = Callable[[Factor, Values, Values, Attributes, Context], None]
# Functions that add a gradient to a sum in place; by operator and input slot. The arguments are the
# sum, the operator's values, the gradients of its outputs, its attributes and the context. The sum
# is one of rows, or a parameter's, or that of each of several adapters where the slot is one of
# `Operator.grouped`. The operator's own VJP gives a new tensor in such a slot.
GRADIENT_SUMS: Mapping[tuple[str, str], AddGradient] = {
    ("columns", "x"): add_to_columns,
    ("dropout_low_rank", "weight"): add_dropout_low_rank_gradient,
    ("linear", "x"): add_input_gradient,
    ("linear_beside_low_rank", "x"): add_gradient_beside_low_rank,
    ("low_rank", "weight"): add_low_rank_gradient,
    ("low_rank", "x"): add_low_rank_input_gradient,
    ("regroup", "x"): add_to_columns,
}

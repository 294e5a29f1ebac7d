"""What an operator is: forward, vector-Jacobian product (VJP), what the VJP needs, and cost,
written once.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from coserve.errors import GraphError
from coserve.graph.layouts import FIRST, PART, AnyState, Given, Layout
from coserve.graph.states import StateRows
from coserve.graph.tensors import TensorSpec
from coserve.kernels.attention import AttentionBatch
from coserve.kernels.base import Backend, Factor
from coserve.kernels.cuts import Cut
from coserve.kernels.groups.base import RankGroup, SingleRank

# Tensors by name; a backbone's linear weights are `kernels.weights.Weight`, parameters of several
# adapters `Grouped`.
Values = Mapping[str, Any]
Attributes = Mapping[str, Any]
Shape = tuple[int, ...]
Shapes = dict[str, tuple[Shape, torch.dtype | None]]


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionRows:
    """Some rows of a batch, whom they attend to, and where their keys and values lie (those of the
    rows themselves must be there before attention runs): stores [num_pages, block_tokens, Hkv * D].

    key_grads, value_grads: float32, of the stores' shapes (one page), added to in the backward
    pass. place: where the rows themselves lie in them, a slice or int64 [n]. Windows run from the
    last to the first, so once a window's own attention has been reversed, the gradients of its keys
    and values are complete (FlexLLM section 6.1, figure 8).
    """

    rows: slice
    batch: AttentionBatch
    keys: Tensor
    values: Tensor
    key_grads: Tensor | None = None
    value_grads: Tensor | None = None
    place: slice | Tensor = field(default_factory=lambda: slice(None))


@dataclass(frozen=True, kw_only=True, eq=False)
class Context:
    """What operators need beside their tensors: the kernels, what attention looks at beyond its
    rows, and the states that sequences carry.

    attention, states: for all rows, in their order. block_rows: forward, row-wise operators run on
    this many rows at a time (None: on all at once), so that a row's results do not depend on which
    others there are.
    """

    backend: Backend
    block_rows: int | None = None
    attention: tuple[AttentionRows, ...] = ()
    states: tuple[StateRows, ...] = ()
    group: RankGroup = field(default_factory=SingleRank)
    """The ranks that run the same graph together, among which collectives run."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What an operator is run on: rows of one sequence, and the mean number of keys that each
    attends to.
    """

    rows: int
    mean_context_len: float
    compute_dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Arithmetic and memory traffic of one execution."""

    flops: int = 0
    bytes: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(flops=self.flops + other.flops, bytes=self.bytes + other.bytes)


class Operator(ABC):
    """One entry of the operator table.

    Slots are the operator's own names for its inputs and outputs. `needs` has a key for every input
    slot: the slots (of inputs and outputs) that its gradient reads, or None where there is no
    gradient. An operator is row-wise unless it names slots in `whole`.

    An operator with a state (`state_size`) takes its rows in order, sequence by sequence, and
    carries it along.

    Ranks that divide a model run an operator in one of its `layouts`, or on whole tensors. An
    operator by columns, or linear in some inputs, has only to say so.

    forward(values, attributes, context): values by input slot -> values by output slot. The results
    are new tensors. vjp(wanted, values, gradients, attributes, context): `gradients` by output slot
    -> gradients by wanted input slot. `values` holds what `needs` lists for the wanted slots. An
    output slot listed in `restores` may be wanted too: then the forward value is handed back, for a
    product or two per element of what the VJP holds already.
    """

    name: ClassVar[str]
    inputs: ClassVar[tuple[str, ...]]
    outputs: ClassVar[tuple[str, ...]] = ("y",)
    optional: ClassVar[frozenset[str]] = frozenset()
    needs: ClassVar[Mapping[str, tuple[str, ...] | None]]
    # Input slots read beyond the rows that the operator runs on; the context supplies them.
    whole: ClassVar[tuple[str, ...]] = ()
    # Input slots of which the VJP reads rows before its own, too, from the last state that was kept
    # on.
    lead: ClassVar[tuple[str, ...]] = ()
    # Output slots that the VJP can hand back once it holds all row inputs.
    restores: ClassVar[tuple[str, ...]] = ()
    # An input slot: neighbours that read the same tensor there, and nothing else of each other's,
    # may run at once.
    shared: ClassVar[str | None] = None
    # Inputs whose gradient can be added to a sum as it is made (`vjp_onto`): to what other readers
    # of the same rows gave, or to the sums of a parameter. `vjp` gives a new tensor for them.
    sums: ClassVar[frozenset[str]] = frozenset()
    # Whether its gradient for x alone reads nothing but a weight of the backbone, so that rows of
    # other programs may be among its own.
    joins_rows: ClassVar[bool] = False
    # Slots in which forward and VJP accept the parameters of several adapters
    # (kernels.base.Grouped), each for its own rows.
    grouped: ClassVar[frozenset[str]] = frozenset()
    # Slots in which the VJP accepts rows of several owners that lie apart
    # (kernels.base.JoinedRows).
    apart: ClassVar[frozenset[str]] = frozenset()
    # Output slots that the VJP may overwrite: no other operator may read them.
    overwrites: ClassVar[frozenset[str]] = frozenset()
    # Slots for which the VJP accepts packed signs (`Backend.pack_signs`) in place of the values.
    sign_suffices: ClassVar[tuple[str, ...]] = ()
    # Whether a column of the result depends on the same column of its inputs alone (vectors count
    # as rows do), so that ranks may each have some columns. Narrower rows are whole.
    by_columns: ClassVar[bool] = False
    # Sets of row inputs in which the result is linear (in all of a set at once): of parts of sums
    # it gives a part.
    linear_in: ClassVar[tuple[frozenset[str], ...]] = ()
    # Inputs that are added to the result: with parts of sums, one rank alone may add them.
    added: ClassVar[frozenset[str]] = frozenset()
    # Whether it can use its input in any cut, so that other readers of that choose one.
    takes_any_cut: ClassVar[bool] = False
    # Whether it reads some columns of its input and leaves the others to other readers.
    reads_some_columns: ClassVar[bool] = False
    # Whether the result is the input itself, so that nothing is computed where it is made again.
    is_alias: ClassVar[bool] = False
    # Whether forward, and whether the VJP, moves something between ranks.
    moves: ClassVar[bool] = False
    moves_gradient: ClassVar[bool] = False

    @abstractmethod
    def infer(self, shapes: Mapping[str, Shape], attributes: Attributes) -> Shapes:
        """Output slot -> (shape per row, dtype or None for the compute dtype), from the input
        shapes.
        """

    def state_size(self, attributes: Attributes) -> int:
        """Elements (float32) of what a sequence carries from row to row; 0 for nothing."""
        return 0

    @abstractmethod
    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]: ...

    def forward_all(
        self, runs: Sequence[tuple[Values, Attributes]], context: Context
    ) -> list[dict[str, Tensor]]:
        """`forward` of several neighbours that share their slot `shared`."""
        return [self.forward(values, attributes, context) for values, attributes in runs]

    def forward_onto(
        self, total: Tensor, values: Values, attributes: Attributes, context: Context
    ) -> None:
        """Add the result of `forward`, whose one output has `total`'s shape, to it in place; no
        input is `total`.
        """
        (result,) = self.forward(values, attributes, context).values()
        total += result

    @abstractmethod
    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> dict[str, Tensor]: ...

    def vjp_onto(
        self,
        total: Factor,
        slot: str,
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> None:
        """Add the gradient of one of the slots in `sums` to `total` in place: rows, or the sums of
        a parameter, of each of several adapters if it is one of those in `grouped`.
        """
        assert isinstance(total, Tensor), f"operator {self.name} keeps no adapters apart"
        total += self.vjp((slot,), values, gradients, attributes, context)[slot]

    @abstractmethod
    def flops_per_row(
        self, specs: Mapping[str, TensorSpec], attributes: Attributes, mean_context_len: float
    ) -> float:
        """Forward FLOPs of one row; `mean_context_len` is the mean number of keys that a row
        attends to.
        """

    def vjp_flops_per_row(
        self,
        wanted: Collection[str],
        specs: Mapping[str, TensorSpec],
        attributes: Attributes,
        mean_context_len: float,
    ) -> float:
        """Backward FLOPs of one row; by default the forward's for every wanted gradient."""
        return len(wanted) * self.flops_per_row(specs, attributes, mean_context_len)

    def cost(self, specs: Mapping[str, TensorSpec], attributes: Attributes, load: Load) -> Cost:
        """Cost of one forward execution."""
        flops = round(load.rows * self.flops_per_row(specs, attributes, load.mean_context_len))
        return Cost(flops=flops, bytes=self.bytes_moved(specs, attributes, load))

    def vjp_cost(
        self,
        wanted: Collection[str],
        specs: Mapping[str, TensorSpec],
        attributes: Attributes,
        load: Load,
    ) -> Cost:
        """Cost of one VJP: reads what it needs and the output gradients, writes the wanted
        gradients.
        """
        touched = [
            specs[slot]
            for slot in (*self.reads(wanted, specs), *self.outputs, *wanted)
            if slot in specs
        ]
        flops = round(
            load.rows * self.vjp_flops_per_row(wanted, specs, attributes, load.mean_context_len)
        )
        return Cost(flops=flops, bytes=_traffic(touched, load))

    def layouts(self, given: Given) -> Sequence[Layout]:
        """Return the ways in which ranks may run this operator, beside all of them running it on
        whole tensors.

        What is not listed is never done: an operator without layouts runs on whole tensors.
        """
        found = [
            Layout(
                inputs={**dict.fromkeys(slots, PART), **dict.fromkeys(self.added, FIRST)},
                outputs=_parts(self),
            )
            for slots in self.linear_in
            if all(PART in given.states.get(slot, ()) for slot in slots)
        ]
        if self.by_columns:
            slots = wide_rows(given)
            cuts = dict.fromkeys(cut for slot in slots for cut in given.cuts_of(slot))
            for cut in cuts:
                vectors = {
                    slot: own
                    for slot in given.specs
                    if (own := vector_cut(given.specs[slot], cut)) is not None
                }
                found.append(
                    Layout(
                        inputs=dict.fromkeys(slots, cut) | vectors, outputs={self.outputs[0]: cut}
                    )
                )
        return found

    def demands(self, given: Given) -> dict[str, Cut]:
        """Return the cuts of row inputs that go with the cuts of the outputs (`Given.cuts`)."""
        cut = given.cuts.get(self.outputs[0])
        return dict.fromkeys(wide_rows(given), cut) if self.by_columns and cut is not None else {}

    def localized(
        self, attributes: Attributes, states: Mapping[str, AnyState], rank: int
    ) -> Attributes:
        """Return the attributes of this operator on a rank, by the states of its tensors; here: the
        same.
        """
        return attributes

    def bytes_moved(
        self, specs: Mapping[str, TensorSpec], attributes: Attributes, load: Load
    ) -> int:
        """Memory traffic of one forward execution; by default every tensor is read or written
        once.
        """
        return _traffic(specs.values(), load)

    def moved_bytes_per_row(self, specs: Mapping[str, TensorSpec], dtype: torch.dtype) -> int:
        """Return the bytes of a row that move between ranks in a direction in which something does.

        Args:
            specs: the rank's tensors, by slot.
            dtype: the compute dtype.
        """
        return 0

    def reads(
        self, wanted: Collection[str], given: Collection[str] | Mapping[str, Any]
    ) -> tuple[str, ...]:
        """The slots that the VJP reads for these gradients, of those that the node has.

        Raises GraphError for a slot without a rule, or one whose rule says that there is no
        gradient.
        """
        found: dict[str, None] = {}
        for slot in wanted:
            if slot not in self.needs:
                raise GraphError(f"operator {self.name} has no gradient rule for {slot}")
            rule = self.needs[slot]
            if rule is None:
                raise GraphError(f"operator {self.name} has no gradient with respect to {slot}")
            found.update(dict.fromkeys(need for need in rule if need in given))
        return tuple(found)


class RowWise(Operator):
    """Base of elementwise operators: the output has the shape of the first input, and a row costs a
    few FLOPs per element.
    """

    flops_per_element: ClassVar[int] = 1

    def infer(self, shapes: Mapping[str, Shape], attributes: Attributes) -> Shapes:
        return {self.outputs[0]: (shapes[self.inputs[0]], None)}

    def flops_per_row(
        self, specs: Mapping[str, TensorSpec], attributes: Attributes, mean_context_len: float
    ) -> float:
        return self.flops_per_element * prod(specs[self.inputs[0]].shape)


def wide_rows(given: Given) -> list[str]:
    """Return the slots of the row inputs that are as wide as the first output."""
    widths = {
        slot: spec.shape[-1] for slot, spec in given.specs.items() if spec.per_row and spec.shape
    }
    output = widths.get("y")
    return [slot for slot in given.states if widths.get(slot) == output]


def vector_cut(spec: TensorSpec, cut: Cut) -> Cut | None:
    """Return a cut of rows as one of a vector that goes with their columns; None for any other
    tensor.
    """
    if spec.per_row or prod(spec.shape) != cut.width or cut.width not in spec.shape:
        return None
    return cut.along(spec.shape.index(cut.width) - len(spec.shape))


def _parts(operator: Operator) -> dict[str, AnyState]:
    return dict.fromkeys(operator.outputs, PART)


def _traffic(specs: Collection[TensorSpec], load: Load) -> int:
    return sum(
        spec.num_bytes(load.compute_dtype) * (load.rows if spec.per_row else 1) for spec in specs
    )

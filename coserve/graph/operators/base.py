"""The interface of operators: forward pass, vector-Jacobian product (VJP), what the VJP reads, and
cost, each written once.
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
from coserve.kernels.base import Backend
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
    """Some rows of a batch, the keys and values that they attend to, and where these lie.

    The keys and values of the rows themselves must be stored before attention runs. Windows run
    backward from the last to the first, so once a window's own attention has been reversed, the
    gradients of its keys and values are complete (FlexLLM section 6.1, figure 8).
    """

    rows: slice
    """These rows, among those of the batch."""
    batch: AttentionBatch
    """Their segments, as the backend prepared them."""
    keys: Tensor
    """Store of keys [num_pages, block_tokens, Hkv * D]."""
    values: Tensor
    """Store of values [num_pages, block_tokens, Hkv * D]."""
    key_grads: Tensor | None = None
    """Sum of the gradients of the keys, float32 of the store's shape (one page); None in a forward
    pass.
    """
    value_grads: Tensor | None = None
    """Sum of the gradients of the values, float32 of the store's shape (one page); None in a
    forward pass.
    """
    place: slice | Tensor = field(default_factory=lambda: slice(None))
    """Place of the rows' own keys and values in the stores: a slice, or int64 [n]."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Context:
    """Everything that operators use beside their tensors: kernels, the keys and values that
    attention reads, states of sequences, and the other ranks.
    """

    backend: Backend
    """Kernels of the device."""
    block_rows: int | None = None
    """Number of rows on which row-wise operators run at a time in a forward pass, so that a row's
    results do not depend on the other rows of the batch; None: all at once.
    """
    attention: tuple[AttentionRows, ...] = ()
    """The rows of the batch, in their order, with what they attend to."""
    states: tuple[StateRows, ...] = ()
    """The rows of the batch, in their order, with the states of their sequences."""
    group: RankGroup = field(default_factory=SingleRank)
    """The ranks that run the same graph together, among which collectives run."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """The rows that a cost is for: rows of one sequence."""

    rows: int
    """Number of rows."""
    mean_context_len: float
    """Mean number of keys that a row attends to."""
    compute_dtype: torch.dtype
    """Dtype of the tensors that have none of their own."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Arithmetic and memory traffic of one execution."""

    flops: int = 0
    """Floating-point operations."""
    bytes: int = 0
    """Bytes read and written."""

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(flops=self.flops + other.flops, bytes=self.bytes + other.bytes)


class Operator(ABC):
    """One entry of the operator table.

    Slots are the operator's own names for its inputs and outputs. An operator is row-wise unless it
    names slots in `whole`.

    An operator with a state (`state_size`) reads its rows in order, sequence by sequence, and
    carries the state along.

    Ranks that divide a model run an operator in one of its `layouts`, or on whole tensors. An
    operator that works by columns, or is linear in some inputs, only declares that.

    Faster ways to run several operators as one call are rows of `graph/fusions.py`, not methods.
    """

    name: ClassVar[str]
    """Name in the table."""
    inputs: ClassVar[tuple[str, ...]]
    """Input slots."""
    outputs: ClassVar[tuple[str, ...]] = ("y",)
    """Output slots."""
    optional: ClassVar[frozenset[str]] = frozenset()
    """Input slots that may stay empty."""
    needs: ClassVar[Mapping[str, tuple[str, ...] | None]]
    """By input slot, the slots (of inputs and outputs) that its gradient reads; None: it has no
    gradient. Every input slot has an entry.
    """
    whole: ClassVar[tuple[str, ...]] = ()
    """Input slots read beyond the rows that the operator runs on. The context supplies them."""
    lead: ClassVar[tuple[str, ...]] = ()
    """Input slots of which the VJP also reads rows before its own, from the last state that was
    kept.
    """
    restores: ClassVar[tuple[str, ...]] = ()
    """Output slots that the VJP can return once it holds all row inputs."""
    joins_rows: ClassVar[bool] = False
    """Whether the gradient of x alone reads nothing but a weight of the backbone. Rows of other
    programs may then be among its own.
    """
    grouped: ClassVar[frozenset[str]] = frozenset()
    """Slots in which forward pass and VJP accept the parameters of several adapters
    (`kernels.base.Grouped`), each for its own rows.
    """
    apart: ClassVar[frozenset[str]] = frozenset()
    """Slots in which the VJP accepts rows of several owners that lie apart
    (`kernels.base.JoinedRows`).
    """
    overwrites: ClassVar[frozenset[str]] = frozenset()
    """Output slots that the VJP may overwrite. No other operator may read them."""
    sign_suffices: ClassVar[tuple[str, ...]] = ()
    """Slots for which the VJP accepts packed signs (`Backend.pack_signs`) in place of the values.
    """
    by_columns: ClassVar[bool] = False
    """Whether a column of the result depends on the same column of its inputs alone (vectors count
    as rows do), so that each rank may have some columns. Narrower rows are whole.
    """
    linear_in: ClassVar[tuple[frozenset[str], ...]] = ()
    """Sets of row inputs in which the result is linear, in all of a set at once: parts of sums give
    a part of the sum.
    """
    added: ClassVar[frozenset[str]] = frozenset()
    """Inputs that are added to the result. Where the others are parts of sums, only one rank may
    add them.
    """
    takes_any_cut: ClassVar[bool] = False
    """Whether it can read its input in any cut, so that other readers of the input choose one."""
    reads_some_columns: ClassVar[bool] = False
    """Whether it reads some columns of its input and leaves the others to other readers."""
    is_alias: ClassVar[bool] = False
    """Whether the result is the input itself, so that recomputing it costs nothing."""
    moves: ClassVar[bool] = False
    """Whether the forward pass moves data between ranks."""
    moves_gradient: ClassVar[bool] = False
    """Whether the VJP moves data between ranks."""

    @abstractmethod
    def infer(self, shapes: Mapping[str, Shape], attributes: Attributes) -> Shapes:
        """Return, by output slot, the shape per row and the dtype (None: the compute dtype), from
        the input shapes.
        """

    def state_size(self, attributes: Attributes) -> int:
        """Return the float32 elements that a sequence carries from row to row; 0: none."""
        return 0

    @abstractmethod
    def forward(
        self, values: Values, attributes: Attributes, context: Context
    ) -> dict[str, Tensor]:
        """Compute the outputs by slot, new tensors, from the inputs by slot."""

    @abstractmethod
    def vjp(
        self,
        wanted: Collection[str],
        values: Values,
        gradients: Values,
        attributes: Attributes,
        context: Context,
    ) -> dict[str, Tensor]:
        """Compute gradients of inputs from those of the outputs.

        Args:
            wanted: input slots whose gradients are wanted. An output slot that is listed in
                `restores` may be wanted, too: its forward value is then returned, for a product or
                two per element of what the VJP holds already.
            values: tensors by slot, those that `needs` lists for the wanted slots.
            gradients: gradients of the outputs by slot.

        Returns:
            Gradients (and restored values) by wanted slot.
        """

    @abstractmethod
    def flops_per_row(
        self, specs: Mapping[str, TensorSpec], attributes: Attributes, mean_context_len: float
    ) -> float:
        """Return the forward FLOPs of one row.

        Args:
            specs: the tensors by slot.
            mean_context_len: mean number of keys that a row attends to.
        """

    def vjp_flops_per_row(
        self,
        wanted: Collection[str],
        specs: Mapping[str, TensorSpec],
        attributes: Attributes,
        mean_context_len: float,
    ) -> float:
        """Return the backward FLOPs of a row: by default the forward's for each wanted gradient."""
        return len(wanted) * self.flops_per_row(specs, attributes, mean_context_len)

    def cost(self, specs: Mapping[str, TensorSpec], attributes: Attributes, load: Load) -> Cost:
        """Return the cost of one forward execution."""
        flops = round(load.rows * self.flops_per_row(specs, attributes, load.mean_context_len))
        return Cost(flops=flops, bytes=self.bytes_moved(specs, attributes, load))

    def vjp_cost(
        self,
        wanted: Collection[str],
        specs: Mapping[str, TensorSpec],
        attributes: Attributes,
        load: Load,
    ) -> Cost:
        """Return the cost of one VJP, which reads what it needs and the output gradients, and
        writes the wanted gradients.
        """
        # `self.outputs` stand for the output gradients, which have the outputs' shapes.
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

        Only listed layouts are used: an operator without any runs on whole tensors.
        """
        # Linear inputs: parts of sums give a part of the sum, as long as one rank alone adds
        # constants.
        layouts = [
            Layout(
                inputs={**dict.fromkeys(slots, PART), **dict.fromkeys(self.added, FIRST)},
                outputs=_parts(self),
            )
            for slots in self.linear_in
            if all(PART in given.states.get(slot, ()) for slot in slots)
        ]
        # Column by column: every cut in which a row input is available works, vectors cut along.
        if self.by_columns:
            slots = wide_rows(given)
            cuts = dict.fromkeys(cut for slot in slots for cut in given.cuts_of(slot))
            for cut in cuts:
                vectors = {
                    slot: own
                    for slot in given.specs
                    if (own := vector_cut(given.specs[slot], cut)) is not None
                }
                layouts.append(
                    Layout(
                        inputs=dict.fromkeys(slots, cut) | vectors, outputs={self.outputs[0]: cut}
                    )
                )
        return layouts

    def demands(self, given: Given) -> dict[str, Cut]:
        """Return the cuts of row inputs that go with the cuts of the outputs (`Given.cuts`)."""
        cut = given.cuts.get(self.outputs[0])
        return dict.fromkeys(wide_rows(given), cut) if self.by_columns and cut is not None else {}

    def localized(
        self, attributes: Attributes, states: Mapping[str, AnyState], rank: int
    ) -> Attributes:
        """Return the attributes of this operator on a rank, by the states of its tensors; by
        default the same.
        """
        return attributes

    def bytes_moved(
        self, specs: Mapping[str, TensorSpec], attributes: Attributes, load: Load
    ) -> int:
        """Return the memory traffic of one forward execution: by default every tensor is read or
        written once.
        """
        return _traffic(specs.values(), load)

    def moved_bytes_per_row(self, specs: Mapping[str, TensorSpec], dtype: torch.dtype) -> int:
        """Return the bytes of a row that move between ranks, in each direction (forward, backward)
        that moves data.

        Args:
            specs: the rank's tensors, by slot.
            dtype: the compute dtype.
        """
        return 0

    def reads(
        self, wanted: Collection[str], given: Collection[str] | Mapping[str, Any]
    ) -> tuple[str, ...]:
        """Return the slots that the VJP reads for the wanted gradients.

        Args:
            wanted: input slots.
            given: slots that the node has.

        Raises:
            GraphError: a slot has no rule, or its rule says that there is no gradient.
        """
        slots: dict[str, None] = {}
        for slot in wanted:
            if slot not in self.needs:
                raise GraphError(f"operator {self.name} has no gradient rule for {slot}")
            rule = self.needs[slot]
            if rule is None:
                raise GraphError(f"operator {self.name} has no gradient with respect to {slot}")
            slots.update(dict.fromkeys(need for need in rule if need in given))
        return tuple(slots)


class RowWise(Operator):
    """A base of elementwise operators: the output has the shape of the first input, and a row costs
    a few FLOPs per element.
    """

    flops_per_element: ClassVar[int] = 1
    """FLOPs per element of the first input."""

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
    # Narrower rows, such as one gate per row, are the same for all columns and stay whole.
    return [slot for slot in given.states if widths.get(slot) == output]


def vector_cut(spec: TensorSpec, cut: Cut) -> Cut | None:
    """Return a cut of rows as the cut of a vector that goes with their columns; None for any other
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

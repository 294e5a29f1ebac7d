"""Division of the rows that all ranks of a group hold alike: each rank saves some columns.

Between a block's sum and the next divided product every rank has the whole row: the block's input,
the inputs of the norms. Saved whole, these would be the larger part of what a rank saves once the
rest is divided. Each rank may save its columns of them alone, and the backward pass gathers the row
in front of its first reader. For the forward pass only the number of copied bytes changes.

Columns rather than rows, as Megatron-LM's sequence parallelism (Korthikanti et al., arXiv
2205.05198, section 4.2.2) and FlexLLM's partition of the token dimension (arXiv 2402.18789, section
5.1) have it: the bytes are the same, and windows, which are any runs of rows and others backward
than forward, then need not be a multiple of the ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

from coserve.graph.ir import Graph, GraphBuilder, Node
from coserve.graph.layouts import COPIED, WHOLE, AnyState
from coserve.graph.tensors import TensorSpec
from coserve.kernels.cuts import Cut, even_cut


@dataclass(frozen=True, kw_only=True)
class Division:
    """Row tensors of which a rank may save its columns, and what gathering them costs."""

    size: int = 1
    """Number of ranks."""
    tensors: frozenset[str] = frozenset()
    """Names of the tensors, which all ranks have alike."""
    flops_per_byte: float = 0.0
    """FLOPs that a rank computes while a gather moves a byte of the whole row."""

    def cut(self, spec: TensorSpec) -> Cut:
        """Return which columns each rank saves of one of the tensors."""
        cut = even_cut(spec.shape[0], self.size)
        assert cut is not None, f"{spec.name} is not among those that are divided"
        return cut

    def saved_bytes(self, spec: TensorSpec, compute_dtype: torch.dtype) -> int:
        """Return the bytes of a row that a rank saves of a divided tensor."""
        return spec.num_bytes(compute_dtype) // self.size

    def gather_flops(self, spec: TensorSpec, compute_dtype: torch.dtype) -> float:
        """Return the cost of gathering a row of a divided tensor, in FLOPs of the same time."""
        return self.flops_per_byte * spec.num_bytes(compute_dtype)

    def link_flops(self, graph: Graph, node: Node, compute_dtype: torch.dtype) -> float:
        """Return the cost of a row that a collective moves in one direction, in FLOPs of the same
        time.

        A sum is a gather after a scatter of as many bytes.
        """
        num_bytes = node.operator.moved_bytes_per_row(graph.slot_specs(node), compute_dtype)
        return self.flops_per_byte * num_bytes * (1 if node.op == "rank_gather" else 2)


UNDIVIDED = Division()


def dividable(graph: Graph, states: Mapping[str, AnyState], size: int) -> frozenset[str]:
    """Return the tensors of which each rank may save its columns: those that all ranks have alike
    and whole.

    Rows narrower than the graph's output are left out, since a collective of their own costs more
    than they take. So are tensors that are read of other rows than a window's own.

    Args:
        graph: a block's graph, of any rank.
        states: state of each tensor; one without is not divided.
        size: number of ranks.
    """
    width = prod(graph.spec[graph.outputs[0]].shape)
    # Other windows read these, or rows before their own, for which no gather is scheduled.
    others = {*graph.kv_tensors, *graph.lead_tensors}
    return frozenset(
        spec.name
        for spec in graph.with_kind("row")
        if size > 1 and spec.name not in others and states.get(spec.name) in (WHOLE, COPIED)
        if (spec.dtype is None or spec.dtype.is_floating_point) and len(spec.shape) == 1
        if spec.shape[0] >= width and spec.shape[0] % size == 0
    )


def piece_name(tensor: str) -> str:
    """Return the name of the columns that a rank saves of a tensor."""
    return f"{tensor}.piece"


def with_pieces(graph: Graph, tensors: frozenset[str], division: Division) -> Graph:
    """Return a graph that makes the columns of some tensors that a rank saves."""
    if not tensors:
        return graph
    b = GraphBuilder(*graph.tensors, nodes=graph.nodes)
    for spec in graph.tensors:
        if spec.name in tensors:
            b.apply(
                "rank_take",
                piece_name(spec.name),
                {"x": spec.name},
                cut=division.cut(spec),
                tensor=spec.name,
            )
    return b.build(*graph.outputs)


def gathering(spec: TensorSpec, division: Division) -> Node:
    """Return the node that makes a whole row of the columns that ranks have saved of it."""
    return Node(
        name=f"{spec.name}.gather",
        op="rank_gather",
        inputs=(("x", piece_name(spec.name)),),
        outputs=(("y", spec.name),),
        attributes=(("cut", division.cut(spec)), ("tensor", spec.name)),
    )

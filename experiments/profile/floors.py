"""Floors of the parts of a step: bytes read once at the bandwidth, or FLOPs at the peak, whichever
takes longer.

FLOPs are counted from the graphs. Of bytes, products count their weights, attention its keys and
values, adapters their parameters, sampling the logits, and all else the rows that it reads and
writes.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from coserve.adapters.base import Adapter
from coserve.graph.ir import Graph
from coserve.graph.operators.base import Load
from coserve.graph.program import Program
from coserve.models.backbone import Backbone
from coserve.models.base import Part
from coserve.models.weights import weight_tensors
from coserve.tuning.programs import training_programs

_PART_OF_OPERATOR = {
    "linear": "products",
    "low_rank": "adapters",
    "dropout_low_rank": "adapters",
    "attention": "attention",
    "cross_entropy": "head and loss",
    "linear_cross_entropy": "head and loss",
}
# Whose bytes are those that are read once, whatever runs.
_READ_ONCE = ("products", "adapters", "head and loss")


@dataclass(kw_only=True)
class Work:
    """Minimum work of a part of a step."""

    flops: float = 0.0
    """FLOPs."""
    bytes: float = 0.0
    """Bytes read."""

    def seconds(self, *, flops_per_s: float, bytes_per_s: float) -> float:
        """Return the seconds at these speeds."""
        return max(self.flops / flops_per_s, self.bytes / bytes_per_s)


class Floors:
    """Work of the steps of one model, in which one adapter is trained."""

    def __init__(self, adapter: Adapter) -> None:
        self._backbone = adapter.backbone
        self._programs = training_programs(adapter)
        blocks = self._backbone.local.parts[1:-1]
        parameters = (
            sum(master.numel() for master in adapter.masters.values())
            * self._backbone.dtype.itemsize
        )
        self._read_once = {
            "products": _weight_bytes(self._backbone, blocks),
            "adapters": parameters,
            "head and loss": _weight_bytes(self._backbone, ("head",)),
        }

    def forward(self, contexts: Sequence[int], window_rows: int) -> dict[str, Work]:
        """Return the work of a forward pass of requests that decode with this many keys each, and
        of a window of a sequence's first rows.
        """
        parts: dict[str, Work] = defaultdict(Work)
        graphs = self._backbone.local.graphs
        for part in self._backbone.local.parts[:-1]:
            for context in contexts:
                self._add_graph(parts, graphs[part], self._load(1, context))
            if window_rows:
                self._add_graph(
                    parts,
                    self._programs.program[part].graph,
                    self._load(window_rows, window_rows / 2),
                )
        head = graphs["head"].cost(self._load(len(contexts), 0))
        parts["head and loss"].flops += head.flops if contexts else 0
        parts["sampling"].bytes += (
            len(contexts) * self._backbone.architecture.vocab_size * self._backbone.dtype.itemsize
        )
        used = [
            *(["adapters"] if window_rows else []),
            "products",
            *(["head and loss"] if contexts else []),
        ]
        return self._with_read_once(parts, used)

    def backward(self, rows: int) -> dict[str, Work]:
        """Return the work of the loss of a sequence and of the backward pass through all blocks."""
        parts: dict[str, Work] = defaultdict(Work)
        load = self._load(rows, rows / 2)
        loss = self._programs.loss
        parts["head and loss"].flops += (
            loss.forward_cost(load).flops + loss.backward_cost(load).flops
        )
        for part in self._programs.parts:
            self._add_backward(parts, self._programs.program[part], load)
        return self._with_read_once(parts, _READ_ONCE)

    def _load(self, rows: int, keys: float) -> Load:
        return Load(rows=rows, mean_context_len=keys, compute_dtype=self._backbone.dtype)

    def _add_graph(self, parts: dict[str, Work], graph: Graph, load: Load) -> None:
        for node in graph.nodes:
            cost = graph.node_cost(node, load)
            work = parts[_PART_OF_OPERATOR.get(node.op, "elementwise")]
            work.flops += cost.flops
            work.bytes += cost.bytes

    def _add_backward(self, parts: dict[str, Work], program: Program, load: Load) -> None:
        for step in (part for each in program.backward for part in each.parts or (each,)):
            node, graph = step.node, program.graph
            if step.kind == "recompute":
                cost = graph.node_cost(node, load)
            else:
                wanted = [slot for slot in step.wanted if slot in node.input]
                cost = node.operator.vjp_cost(wanted, graph.slot_specs(node), node.attribute, load)
            work = parts[_PART_OF_OPERATOR.get(node.op, "elementwise")]
            work.flops += cost.flops
            work.bytes += cost.bytes

    def _with_read_once(self, parts: dict[str, Work], used: Collection[str]) -> dict[str, Work]:
        for part in _READ_ONCE:
            if part in parts or part in used:
                parts[part].bytes = self._read_once[part] if part in used else 0.0
        return dict(parts)


def _weight_bytes(backbone: Backbone, parts: Sequence[Part]) -> int:
    tensors = {
        tensor.data_ptr(): tensor
        for part in parts
        for tensor in weight_tensors(backbone.weights[part])
    }
    return sum(tensor.nbytes for tensor in tensors.values())

"""A view of how ranks would divide a model, for `coserve inspect --tensor-parallel`."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from coserve.graph.layouts import AnyState, State
from coserve.kernels.cuts import Cut

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from coserve.adapters.base import AdapterConfig
    from coserve.adapters.layout import AdapterLayout
    from coserve.graph.ir import Graph, Node
    from coserve.graph.program import Program
    from coserve.graph.rematerialize import Weighing
    from coserve.models.local import LocalModel

_WORDS = {
    State.WHOLE: "whole",
    State.COPIED: "whole",
    State.PART: "part of a sum",
    State.FIRST: "rank 0",
}


def rank_layout(
    config: "AdapterConfig",
    layout: "AdapterLayout",
    size: int,
    layer: int,
    program: "Program",
    by: "Weighing",
) -> dict[str, Any]:
    """Return how ranks divide a model: a block in full, with the adapter on it, and the bytes of
    one rank.

    Args:
        config: Method of the adapter.
        layout: The adapter on the whole model.
        size: Number of ranks.
        layer: Block that is shown.
        program: Program with which one rank trains that block.
        by: Weights of the choice between saving and recomputing.

    Raises:
        UnsupportedModelError: The model cannot be divided among the ranks.
        AdapterError: The adapter cannot be divided.
    """
    from coserve.adapters.attached import AdapterGraphs
    from coserve.kernels.groups.base import Ranks
    from coserve.models.local import local_model

    dtype = by.compute_dtype
    local = local_model(layout.architecture, Ranks(rank=0, size=size))
    whole = local_model(layout.architecture, Ranks())
    attached = AdapterGraphs.of(config, layout, local)
    graph = attached.by_training[True][layer].graph
    prefix = layout.architecture.prefix(layer)
    states: Mapping[str, AnyState] = attached.divided[layer].states if attached.divided else {}
    rows = {
        node: node.operator.moved_bytes_per_row(graph.slot_specs(node), dtype)
        for node in graph.nodes
    }
    forward = [node for node in graph.nodes if node.operator.moves]
    backward = [node for node in graph.nodes if node.operator.moves_gradient]
    return {
        "size": size,
        "weight_bytes": _weight_bytes(local, dtype),
        "whole_weight_bytes": _weight_bytes(whole, dtype),
        "kv_bytes_per_token": len(local.kv_layers) * sum(local.kv_widths) * dtype.itemsize,
        "saved": _saved(graph, states, size, program.asked, by),
        "forward": [{"node": node.name, "bytes_per_row": rows[node]} for node in forward],
        "backward": [{"node": node.name, "bytes_per_row": rows[node]} for node in backward],
        "nodes": [_node_row(node, graph, states) for node in graph.nodes],
        "summed": sorted(
            name.removeprefix(prefix) for name in attached.summed if name.startswith(prefix)
        ),
    }


def _node_row(node: "Node", graph: "Graph", states: Mapping[str, AnyState]) -> dict[str, Any]:
    """Return a node with the states of its weights and of its result."""
    result = node.outputs[0][1]
    weights = [
        name for name in node.input.values() if graph.spec[name].kind in ("weight", "parameter")
    ]
    return {
        "node": node.name,
        "operator": node.op,
        "weights": {name: _words(states.get(name, State.WHOLE)) for name in weights},
        "shape": list(graph.spec[result].shape),
        "gives": _words(states.get(result, State.WHOLE)),
    }


def _saved(
    graph: "Graph",
    states: Mapping[str, AnyState],
    size: int,
    asked: Collection[str],
    by: "Weighing",
) -> dict[str, Any]:
    """Return the bytes that a rank saves per row of a block, with rows that all ranks save whole or
    in pieces, and the tensors that are gathered then.
    """
    from coserve.graph.division import Division, dividable
    from coserve.graph.program import compile_program

    whole = compile_program(graph, asked, by)
    division = Division(size=size, tensors=dividable(graph, states, size))
    divided = compile_program(graph, asked, replace(by, division=division))
    return {
        "whole_bytes_per_token": whole.saved_bytes_per_token(by.compute_dtype),
        "divided_bytes_per_token": divided.saved_bytes_per_token(by.compute_dtype),
        "gathered": [
            {"tensor": name, "bytes_per_row": graph.spec[name].num_bytes(by.compute_dtype)}
            for name in graph.spec
            if name in divided.retention.divided
        ],
    }


def _weight_bytes(local: "LocalModel", dtype: "torch.dtype") -> int:
    """Return the bytes of a rank's weights in the compute dtype; a tied head is the table of
    embeddings.
    """
    from coserve.models.base import HEAD

    return sum(
        spec.num_bytes(dtype)
        for graph in local.graphs.values()
        for spec in graph.with_kind("weight")
        if not (local.architecture.tied and spec.name == HEAD)
    )


def _words(state: AnyState) -> str:
    """Return a state in words; for a cut, the number of entries per rank, of how many, and the
    dimension.
    """
    if not isinstance(state, Cut):
        return _WORDS[state]
    dim = {-1: "", -2: " rows", -3: " channels"}[state.dim]
    fewest, num_copies = state.copies
    some = "some of them " if fewest < num_copies else ""
    copies = f", {some}on {num_copies} ranks" if num_copies > 1 else ""
    return f"{state.local:,} of {state.width:,}{dim}{copies}"


def layout_table(layout: dict[str, Any], layer: int, wide: bool) -> "Table":
    """Return a table of the block's nodes on a rank; a narrow terminal gets no weights."""
    from coserve.cli.tables import table

    shown = table(
        *("operator", "node", *(["weights"] * wide), "gives"),
        title=f"Block {layer} on each of {layout['size']} ranks",
    )
    for node in layout["nodes"]:
        weights = "; ".join(dict.fromkeys(node["weights"].values()))
        shown.add_row(node["operator"], node["node"], *([weights] * wide), node["gives"])
    return shown


def layout_words(layout: dict[str, Any]) -> str:
    """Return what a rank holds and sends, in sentences."""
    share = layout["weight_bytes"] / layout["whole_weight_bytes"]
    sums = [
        f"{len(layout[way])} collectives of {sum(each['bytes_per_row'] for each in layout[way]):,} "
        f"bytes per row {way}"
        for way in ("forward", "backward")
    ]
    saved, gathered = layout["saved"], layout["saved"]["gathered"]
    num_bytes = sum(each["bytes_per_row"] for each in gathered)
    words = (
        f"It saves {saved['whole_bytes_per_token']:,} bytes per token of this block for the "
        f"backward pass"
    )
    if gathered:
        words += (
            f"; {saved['divided_bytes_per_token']:,} where ranks save columns of what all of them "
            f"have "
            f"({', '.join(each['tensor'] for each in gathered)}), for {len(gathered)} gathers of "
            f"{num_bytes:,} bytes "
            "per row backward, unless their link is too slow for that"
        )
    return (
        f"A rank holds {layout['weight_bytes'] / 2**20:,.1f} MiB of weights, {share:.1%} of the "
        f"model, and "
        f"{layout['kv_bytes_per_token']:,} bytes of K and V per token. In this block: "
        f"{' and '.join(sums)}. {words}."
    )

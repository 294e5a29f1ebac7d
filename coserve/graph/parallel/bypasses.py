"""Bypasses on a rank's graph: dependent parallelisation (FlexLLM, arXiv 2402.18789, section 5.1).

The backbone's states are given; those of a bypass's tensors are found by `search`. A bypass whose
result can be a part of a sum is added before the site's sum, and needs no collective of its own.
One that cannot, such as a bottleneck, is added after it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from coserve.errors import GraphError
from coserve.graph.bypass import AttachedGraph, Bypass, attach
from coserve.graph.ir import Graph
from coserve.graph.layouts import WHOLE, AnyState
from coserve.graph.parallel.placement import GraphPlacement, LocalGraph, local_spec
from coserve.graph.parallel.search import Search, link_first
from coserve.kernels.cuts import Cut
from coserve.kernels.groups.base import Ranks


@dataclass(frozen=True, kw_only=True)
class PlacedBypass:
    """A bypass at a site of a rank's graph."""

    at: str
    """The node after which it is added: the site, or the sum of the site's result."""
    placement: GraphPlacement | None
    """Placement of its graph; None: it has no graph."""


@dataclass(frozen=True, kw_only=True)
class AttachedLocalGraph:
    """A rank's graph with its bypasses."""

    attached: AttachedGraph
    """The graph with its bypasses attached."""
    states: Mapping[str, AnyState]
    """State of every tensor, by its name in the graph; constants are whole."""
    summed: tuple[str, ...]
    """Parameters of whose gradient each rank has a part; see `LocalGraph.summed`."""


def place_bypass(
    local: LocalGraph,
    site: str,
    bypass: Bypass,
    size: int,
    fixed: Mapping[str, AnyState] | None = None,
) -> PlacedBypass:
    """Find how ranks run a bypass at a node, so that they send as little as possible.

    Args:
        local: the graph of any rank.
        site: the node.
        bypass: the whole bypass.
        size: number of ranks.
        fixed: states of parameters that are no choice, by their names in the bypass.

    Raises:
        GraphError: there is no way to run it there.
    """
    node = local.graph.node[site]
    if bypass.graph is None:
        return PlacedBypass(at=site, placement=None)
    output = node.outputs[0][1]
    start: dict[str, tuple[AnyState, ...]] = {
        tensor.name: (local.states[node.input[tensor.name]],)
        for tensor in bypass.graph.with_kind("weight")
        if tensor.name in node.input
    }
    start |= {name: (state,) for name, state in (fixed or {}).items()}
    # The bypass reads x as the site has it: the backbone's placement is fixed by now.
    start["x"] = (local.states[node.inputs[0][1]],)
    # Two candidates: at the site, or after the sum of its parts, where the result is whole.
    places = [(site, local.states[output])]
    readers = [each for each in local.graph.nodes if output in each.input.values()]
    # After the sum the site's input may be gone.
    reads_input = {"x", "experts"} & set(bypass.rows)
    if [each.op for each in readers] == ["rank_sum"] and not bypass.own and not reads_input:
        places.append((readers[0].name, WHOLE))
    # By score; of equal ones, the site (index 0) wins.
    found = [
        (score, index, PlacedBypass(at=at, placement=placement))
        for index, (at, state) in enumerate(places)
        for score, placement in _searched(bypass.graph, size, {**start, "y": (state,)}, state)
    ]
    if not found:
        raise GraphError(f"the bypass at {site} cannot be divided among {size} ranks")
    return min(found, key=lambda each: each[:2])[2]


def _searched(
    graph: Graph, size: int, start: Mapping[str, tuple[AnyState, ...]], end: AnyState
) -> list[tuple[object, GraphPlacement]]:
    [output] = graph.outputs
    wanted = {output: end} if isinstance(end, Cut) else {}
    known = {name: states for name, states in start.items() if name in graph.spec}
    search = Search(graph, size, score=link_first, start=known, wanted=wanted, may_take=True)
    found = search.run({output: (end,)})
    return [] if found is None else [found]


def attach_local(
    local: LocalGraph,
    bypasses: Mapping[str, Bypass],
    ranks: Ranks,
    *,
    fixed: Mapping[str, AnyState],
) -> AttachedLocalGraph:
    """Attach each bypass where it is best added to a rank's graph; see `attach`.

    Args:
        local: the rank's graph.
        bypasses: whole bypasses by site.
        ranks: the ranks, and which of them has this graph.
        fixed: states of parameters and derived tensors that are no choice, by their names in the
            graph.

    Raises:
        GraphError: a bypass cannot be divided.
    """
    own, at = dict[str, Bypass](), dict[str, str]()
    states, summed = dict(local.states), set[str]()
    for site, bypass in bypasses.items():
        known = {
            name.removeprefix(f"{site}."): state
            for name, state in fixed.items()
            if name.startswith(f"{site}.")
        }
        placed, node = place_bypass(local, site, bypass, ranks.size, known), local.graph.node[site]
        at[site], graph = placed.at, None
        if placed.placement is not None:
            found = placed.placement.local(ranks.rank)
            graph = found.graph
            states |= {f"{site}.{name}": state for name, state in found.states.items()}
            # `attach` renames the output of the node at which the bypass is added.
            states[f"{site}.base"] = local.states[local.graph.node[placed.at].outputs[0][1]]
            summed |= {
                f"{site}.{name}" for name in found.summed if graph.spec[name].kind == "parameter"
            }
        specs = {}
        # Weights that replace the site's are cut, and summed, just as the site's own are.
        for slot, spec in bypass.own.items():
            state = local.states[node.input[slot]]
            specs[slot] = local_spec(spec, state)
            states[f"{site}.{spec.name}"] = state
            if node.input[slot] in local.summed and spec.kind == "parameter":
                summed.add(f"{site}.{spec.name}")
        own[site] = replace(bypass, graph=graph, own=specs)
    attached = attach(local.graph, own, at=at)
    return AttachedLocalGraph(attached=attached, states=states, summed=tuple(sorted(summed)))

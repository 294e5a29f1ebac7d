"""Bypasses: additions of an adapter to a graph, which stays as it is (FlexLLM section 4.1, MuxTune
section 3.2).

A bypass reads tensors at one node of the backbone, the site, and gives one tensor that is added to
the site's output: ``y = backbone(x) + bypass(x, y, weights)``. A bypass may also bring weights of
its own for the site: its rows then run the site's operator with these in place of the backbone's,
and its result is added to that. Rows without an adapter run the backbone's graph as it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from coserve.errors import GraphError
from coserve.graph.ir import Graph, GraphBuilder, Node, renamed
from coserve.graph.tensors import Kind, TensorSpec

# Names that a bypass's graph has for the tensors that it may read of its site.
_SITE_INPUT, _SITE_OUTPUT, _SITE_EXPERTS = "x", "y", "experts"


@dataclass(frozen=True, kw_only=True)
class Bypass:
    """A small graph with parameters (and tensors that are derived from them) of its own, any
    constants, and one output as wide as the site's.

    It declares what it reads of the site:

    - rows "x", the site's input (LoRA);
    - rows "y", the site's output before the sum (IA3, bottleneck adapters);
    - rows "experts", the experts that each row goes to (LoRA at the experts of a mixture);
    - weights, by the site's own names for them, such as "weight" and "bias" (DoRA).
    """

    graph: Graph | None = None
    """The graph whose output is added; None: nothing is added to what the site gives with `own`."""
    own: Mapping[str, TensorSpec] = field(default_factory=dict)
    """Tensors ("parameter" or "derived") that take the place of the site's weights, by the site's
    slot.
    """

    def __post_init__(self) -> None:
        if self.graph is None:
            if not self.own:
                raise GraphError("a bypass adds something, or has weights of its own")
            return
        if len(self.graph.outputs) != 1:
            raise GraphError("a bypass has one output")
        if others := [
            name for name in self.rows if name not in (_SITE_INPUT, _SITE_OUTPUT, _SITE_EXPERTS)
        ]:
            raise GraphError(
                f"a bypass reads the rows x, y and experts of its site, not {', '.join(others)}"
            )

    @property
    def rows(self) -> tuple[str, ...]:
        """Return the row inputs that the graph reads of its site."""
        if self.graph is None:
            return ()
        rows = (tensor.name for tensor in self.graph.with_kind("row"))
        return tuple(name for name in rows if name not in self.graph.producer)

    def with_kind(self, kind: Kind) -> tuple[TensorSpec, ...]:
        """Return the tensors of a kind: those of the graph, and the weights of its own."""
        inside = () if self.graph is None else self.graph.with_kind(kind)
        return (*(spec for spec in self.own.values() if spec.kind == kind), *inside)


@dataclass(frozen=True, kw_only=True)
class AttachedBypass:
    """A bypass at its site, with the tensor names of the host graph."""

    nodes: tuple[Node, ...]
    """Nodes of the bypass, in execution order."""
    source: str
    """The site's input."""
    base: str
    """The site's own result, before the sum; its output, if nothing is added."""
    result: str
    """The tensor that is added."""
    weights: tuple[str, ...] = ()
    """The site's weights that the bypass reads."""
    instead: Node | None = None
    """The site with the adapter's weights, which rows run in place of the site; None: it has none.
    """

    @cached_property
    def last_low_rank(self) -> Node | None:
        """Return the last node, if all nodes but that one may run before the site.

        That is so where the last node is a low-rank product whose result the bypass adds, and no
        node reads the site's result or a weight of the site.
        """
        if self.instead is not None:
            return None
        last = self.nodes[-1]
        reads = {name for node in self.nodes for name in node.input.values()}
        # The site's own product can then include the last one (see `models.bypass_runs`).
        is_before = (
            last.op == "low_rank" and last.outputs[0][1] == self.result and self.base not in reads
        )
        return last if is_before and not self.weights else None


@dataclass(frozen=True, kw_only=True)
class AttachedGraph:
    """A graph with its bypasses."""

    graph: Graph
    """The graph with the bypasses as nodes, which is differentiated."""
    bypasses: Mapping[str, AttachedBypass]
    """The bypasses by site, which rows of the adapter run."""


def combined(first: Graph, second: Graph) -> Graph:
    """Return the graph of a bypass that adds what two graphs of one site add. They read the same
    rows by the same names, and have no other name in common.
    """
    tensors = {tensor.name: tensor for tensor in (*first.tensors, *second.tensors)}
    b = GraphBuilder(*tensors.values(), nodes=(*first.nodes, *second.nodes))
    return b.build(b.apply("add", "both", {"a": first.outputs[0], "b": second.outputs[0]}))


def attach(
    graph: Graph, bypasses: Mapping[str, Bypass], at: Mapping[str, str] | None = None
) -> AttachedGraph:
    """Attach each bypass to the node that its key, the site, names.

    Tensors and nodes of a bypass get the site's name in front (parameter `lora_A.weight` at
    `self_attn.q_proj` becomes `self_attn.q_proj.lora_A.weight`); constants keep theirs. The sum
    takes over the name of the site's output.

    Args:
        at: by site, the node to whose output the result is added, where that is another. The bypass
            reads the site's tensors, and its tensors are named after the site, either way.

    Raises:
        GraphError: a site is not a node, or does not have what a bypass reads.
    """
    if unknown := [site for site in bypasses if site not in graph.node]:
        raise GraphError(f"no node {', '.join(unknown)} to attach a bypass to")
    tensors, nodes, attached_bypasses = dict(graph.spec), list[Node](), {}
    # By the node that the result is added at, which the loop meets in the graph's order.
    sites = {(at or {}).get(site, site): site for site in bypasses}
    for node in graph.nodes:
        if (site := sites.get(node.name)) is None:
            nodes.append(node)
        else:
            replacement, attached_bypasses[node.name] = _attach_at(
                graph, node, graph.node[site], bypasses[site], tensors
            )
            nodes += replacement
    attached = Graph(tensors=tuple(tensors.values()), nodes=tuple(nodes), outputs=graph.outputs)
    return AttachedGraph(graph=attached, bypasses=attached_bypasses)


def _attach_at(
    graph: Graph, node: Node, site_node: Node, bypass: Bypass, tensors: dict[str, TensorSpec]
) -> tuple[list[Node], AttachedBypass]:
    """Return the nodes that take the place of a node, and the bypass.

    Args:
        node: the node to whose output the bypass is added.
        site_node: the node whose tensors the bypass reads.
        bypass: the bypass.
        tensors: the graph's tensors, to which those of the new nodes are added.
    """
    site, (slot, output), source = site_node.name, node.outputs[0], site_node.inputs[0][1]
    assert node is site_node or not bypass.own, "weights of its own take the place of the site's"
    host = _with_own_weights(node, bypass, tensors)
    instead = host if bypass.own else None
    if bypass.graph is None:
        return [host], AttachedBypass(
            nodes=(), source=source, base=output, result=output, instead=instead
        )
    # The site's result moves to a new name, and the sum takes the old one: readers stay as they
    # are.
    base = f"{site}.base"
    tensors[base] = replace(graph.spec[output], name=base)
    host = replace(host, outputs=((slot, base), *node.outputs[1:]))
    read = {
        _SITE_INPUT: source,
        _SITE_OUTPUT: base,
        _SITE_EXPERTS: site_node.input.get(_SITE_EXPERTS, ""),
    }
    names = {}
    for tensor in bypass.graph.tensors:
        is_site_weight = tensor.kind == "weight"
        if tensor.name in bypass.rows or is_site_weight:
            # `host` may have the adapter's own weights in its slots; a bypass at a later sum reads
            # the site's.
            given = host if node is site_node else site_node
            read_name = given.input.get(tensor.name, "") if is_site_weight else read[tensor.name]
            _check_is_read(tensor, tensors.get(read_name), site)
            names[tensor.name] = read_name
            continue
        # Constants, such as row ids for dropout, are the same for all bypasses of a batch.
        name = tensor.name if tensor.kind == "constant" else f"{site}.{tensor.name}"
        names[tensor.name] = name
        tensors[name] = replace(tensor, name=name)
    result = names[bypass.graph.outputs[0]]
    if tensors[result].shape != graph.spec[output].shape:
        raise GraphError(
            f"the bypass at {site} gives rows of {tensors[result].shape}, not "
            f"{graph.spec[output].shape}"
        )
    inner = tuple(renamed(member, names, prefix=f"{site}.") for member in bypass.graph.nodes)
    total = Node(
        name=f"{site}.sum", op="add", inputs=(("a", base), ("b", result)), outputs=(("y", output),)
    )
    weights = tuple(
        names[tensor.name]
        for tensor in bypass.graph.with_kind("weight")
        if tensor.name not in bypass.own
    )
    instead = None if instead is None else host
    attached = AttachedBypass(
        nodes=inner, source=source, base=base, result=result, weights=weights, instead=instead
    )
    return [host, *inner, total], attached


def _with_own_weights(node: Node, bypass: Bypass, tensors: dict[str, TensorSpec]) -> Node:
    """Return the site's node with the bypass's own weights in the slots that they are for."""
    own = {}
    for slot, spec in bypass.own.items():
        if slot not in node.input:
            raise GraphError(
                f"the bypass at {node.name} has a {slot} of its own, which the site does not have"
            )
        own[slot] = f"{node.name}.{spec.name}"
        tensors[own[slot]] = replace(spec, name=own[slot])
    return replace(node, inputs=tuple((slot, own.get(slot, name)) for slot, name in node.inputs))


def _check_is_read(tensor: TensorSpec, host: TensorSpec | None, site: str) -> None:
    if host is None:
        raise GraphError(f"the bypass at {site} reads {tensor.name}, which the site does not have")
    if tensor.shape != host.shape:
        raise GraphError(
            f"the bypass at {site} takes {tensor.name} of {tensor.shape}, the site has {host.shape}"
        )

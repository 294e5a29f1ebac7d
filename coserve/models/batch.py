"""The forward pass over a mixed batch: decode tokens, prefill chunks and fine-tuning windows as rows of one matrix.

Every node of the backbone runs once on all rows. Only three things look at whom a row belongs to: attention
(segments), adapters (their bypass runs on their rows, and adds to the site's output), and saving. Saving is one
mechanism for all: a training window keeps its program's saved set, and a request keeps K and V, which is its KV cache.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from coserve.graph.bypass import Network
from coserve.graph.execute import run_graph, run_node
from coserve.graph.ir import Graph, Node
from coserve.graph.operators.attention import AttentionContext, Segment
from coserve.kernels.dropout import keys_of_part
from coserve.models.backbone import Backbone
from coserve.models.base import Part


@dataclass(frozen=True, kw_only=True)
class BoundNetwork:
    """A bypass at a site, with its parameters (tensors in the compute dtype, by name)."""

    network: Network
    parameters: Mapping[str, Tensor]


# What an adapter adds to a model: for each part, its networks by site.
Bypasses = Mapping[Part, Mapping[str, BoundNetwork]]


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Where a span's rows of some tensors go: name -> tensor [rows of the span, ...].

    packed_signs: the nodes that make those of them that exist only to be kept.
    """

    rows: Mapping[str, Tensor] = field(default_factory=dict)
    packed_signs: Mapping[str, Node] = field(default_factory=dict)


class Span(ABC):
    """Consecutive rows of a batch that belong to one request or one training window.

    tokens, positions: int64 [n]. row_keys: int64 [n] for dropout, or None. bypasses: of the adapter that the rows
    use, or None.
    """

    tokens: Tensor
    positions: Tensor
    row_keys: Tensor | None = None
    bypasses: Bypasses | None = None

    @abstractmethod
    def keep(self, part: Part) -> Keep:
        """What to save of this part. Must hold the tensors that the part's graph carries (K and V)."""

    @abstractmethod
    def segments(self, layer: int) -> Sequence[Segment]:
        """Who attends to what in a block; rows count from the start of the span."""


def forward(backbone: Backbone, spans: Sequence[Span]) -> Tensor:
    """Run the spans through the embedding and all blocks: rows in the order of the spans -> [n, hidden_size] for the
    head.
    """
    architecture = backbone.architecture
    slices = _slices(spans)
    constants = backbone.constants(torch.cat([s.tokens for s in spans]), torch.cat([s.positions for s in spans]))
    keys = torch.cat([span.row_keys if span.row_keys is not None else torch.zeros_like(span.tokens) for span in spans])
    drops = any(span.row_keys is not None for span in spans)
    x = None
    for index, part in enumerate(architecture.parts[:-1]):
        if drops:
            constants["row_keys"] = keys_of_part(keys, index)
        segments = _segments(spans, slices, part) if isinstance(part, int) else ()
        context = AttentionContext(kernel=backbone.attention, segments=segments)
        x = run_part(backbone, part, x, constants, spans, context)
    assert x is not None
    return x


def logits(backbone: Backbone, hidden: Tensor, bypasses: Bypasses | None = None) -> Tensor:
    """The head on rows of one adapter (or none): [n, hidden_size] -> [n, vocab_size] in the compute dtype."""
    span = _HeadRows(bypasses, hidden.shape[0])
    return run_part(backbone, "head", hidden, {}, [span], AttentionContext(kernel=backbone.attention))


def run_part(
    backbone: Backbone,
    part: Part,
    x: Tensor | None,
    constants: Mapping[str, Tensor],
    spans: Sequence[Span],
    context: AttentionContext,
) -> Tensor:
    """One part on all rows; x [n, hidden_size] (None for the embedding). Returns the part's output."""
    graph = backbone.architecture.graphs[part]
    groups = [_Group(span, rows, part) for span, rows in zip(spans, _slices(spans), strict=True)]
    values: dict[str, Tensor] = dict(constants)
    if x is not None:
        values["x"] = x
        for group in groups:
            group.save("x", x[group.rows])
    run_graph(graph, values, backbone.weights[part], context, partial(_after, graph, _merged(groups), groups))
    return values[graph.outputs[0]]


def _slices(spans: Sequence[Span]) -> list[slice]:
    ends = torch.tensor([span.tokens.shape[0] for span in spans]).cumsum(0).tolist()
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _segments(spans: Sequence[Span], slices: Sequence[slice], layer: int) -> tuple[Segment, ...]:
    return tuple(
        Segment(
            rows=slice(rows.start + segment.rows.start, rows.start + segment.rows.stop),
            keys=segment.keys,
            values=segment.values,
        )
        for span, rows in zip(spans, slices, strict=True)
        for segment in span.segments(layer)
    )


class _Group:
    """A span's rows in one part: which bypasses they take, and what is saved of them."""

    def __init__(self, span: Span, rows: slice, part: Part) -> None:
        self.rows = rows
        self.networks = span.bypasses.get(part, {}) if span.bypasses is not None else {}
        self._keep = span.keep(part)

    def save(self, name: str, value: Tensor) -> None:
        """Save the span's rows of a tensor, if it is wanted."""
        if name in self._keep.rows:
            self._keep.rows[name].copy_(value)
        for sign, node in self._keep.packed_signs.items():
            if name in node.input.values():
                self._keep.rows[sign].copy_(run_node(node, {name: value}, None)[sign])


def _merged(groups: Sequence[_Group]) -> list[list[_Group]]:
    """Neighbours that take the same bypasses, so that these run once on their rows together."""
    runs: list[list[_Group]] = []
    for group in groups:
        if (
            group.networks
            and runs
            and runs[-1][-1].networks is group.networks
            and runs[-1][-1].rows.stop == group.rows.start
        ):
            runs[-1].append(group)
        elif group.networks:
            runs.append([group])
    return runs


def _after(
    graph: Graph,
    bypassed: Sequence[Sequence[_Group]],
    groups: Sequence[_Group],
    node: Node,
    values: MutableMapping[str, Tensor],
) -> None:
    """Behind each node: bypasses add to its output, then the spans save what they keep of it."""
    for run in bypassed:
        if (bound := run[0].networks.get(node.name)) is not None:
            _run_network(bound, run, graph, node, values)
    for name in node.output.values():
        for group in groups:
            group.save(name, values[name][group.rows])


def _run_network(
    bound: BoundNetwork, run: Sequence[_Group], graph: Graph, node: Node, values: MutableMapping[str, Tensor]
) -> None:
    """Run a bypass on the rows of neighbours that share it, save what they keep of its inside, and add its result in
    place.
    """
    network, rows = bound.network, slice(run[0].rows.start, run[-1].rows.stop)
    output = values[node.outputs[0][1]]
    local: dict[str, Tensor] = {network.base: output[rows], network.source: output[rows]}
    if network.source != network.base:
        local[network.source] = values[network.source][rows]
    for inner in network.nodes:
        for name in inner.input.values():
            if name not in local:
                local[name] = bound.parameters[name] if name in bound.parameters else values[name][rows]
        local.update(run_node(inner, local, None))
    for group in run:
        within = slice(group.rows.start - rows.start, group.rows.stop - rows.start)
        for name in (network.base, *(name for inner in network.nodes for name in inner.output.values())):
            group.save(name, local[name][within])
    output[rows] += local[network.result]


class _HeadRows(Span):
    """Rows that only pass the head: they attend to nothing and keep nothing."""

    def __init__(self, bypasses: Bypasses | None, num_rows: int) -> None:
        self.tokens = self.positions = torch.empty(num_rows, dtype=torch.int64)
        self.bypasses = bypasses

    def keep(self, part: Part) -> Keep:
        return Keep()

    def segments(self, layer: int) -> Sequence[Segment]:
        return ()

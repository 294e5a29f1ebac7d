"""The forward pass over a mixed batch: decode tokens, prefill chunks and fine-tuning windows as rows of one matrix.

Every node of the backbone runs once on all rows. Only three things look at whom a row belongs to: attention
(segments), adapters (their bypass runs on their rows, and adds to the site's output), and saving. Saving is one
mechanism for all: a training window keeps its program's saved set, and a request keeps K and V, which is its KV cache.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Any, Protocol

import torch
from torch import Tensor

from coserve.graph.bypass import AttachedBypass
from coserve.graph.execute import add_node, run_graph, run_node
from coserve.graph.ir import Node
from coserve.graph.operators.attention import AttentionContext, PagedSegment, Segment
from coserve.models.backbone import Backbone
from coserve.models.base import Part


@dataclass(frozen=True, kw_only=True)
class BoundBypass:
    """A bypass at a site, with its parameters (tensors in the compute dtype, by name)."""

    bypass: AttachedBypass
    parameters: Mapping[str, Tensor]


# What an adapter adds to a model: for each part, its bypasses by site.
Bypasses = Mapping[Part, Mapping[str, BoundBypass]]


class Destination(Protocol):
    """Room for some rows of one tensor."""

    def copy_(self, src: Tensor, /) -> object:
        """Fill it."""
        ...


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Where a span's rows of some tensors go: name -> a tensor [rows of the span, ...], or what else can be copied
    into.

    packed_signs: the nodes that make those of them that exist only to be kept.
    """

    rows: Mapping[str, "Destination"] = field(default_factory=dict)
    packed_signs: Mapping[str, Node] = field(default_factory=dict)


class Span(ABC):
    """Consecutive rows of a batch that belong to one request or one training window.

    tokens (negative: virtual), positions: int64 [n]. bypasses: of the adapter that the rows use, or None.
    """

    tokens: Tensor
    positions: Tensor
    bypasses: Bypasses | None = None

    @abstractmethod
    def keep(self, part: Part) -> Keep:
        """What to save of this part. Must hold the tensors that the part's graph carries (K and V)."""

    def constants(self, part: Part) -> Mapping[str, Tensor]:
        """What its bypasses read beside the constants of all rows, by name: [n, ...]."""
        return {}

    @abstractmethod
    def segments(self, layer: int) -> Sequence[Segment | PagedSegment]:
        """Who attends to what in a block; rows count from the start of the span."""

    @property
    def kin(self) -> Hashable:
        """Neighbours of equal kin are kept, and attend, as one span (`joined`), whatever bypasses each takes; None:
        alone.
        """
        return None

    def joined(self, others: Sequence[Any]) -> "Span":
        """One span, without bypasses, for this one's rows and those of its kin behind them."""
        raise NotImplementedError


def forward(backbone: Backbone, spans: Sequence[Span]) -> Tensor:
    """Run the spans through the embedding and all blocks: [n, hidden_size] for the head, rows in the spans' order."""
    assert spans, "a batch has at least one span"
    rows = _slices(spans)
    kept = _joined(spans)
    constants = backbone.constants(torch.cat([s.tokens for s in spans]), torch.cat([s.positions for s in spans]))
    x = None
    for part in backbone.architecture.parts[:-1]:
        takers = [_Taker(span, own, part) for span, own in zip(spans, rows, strict=True) if span.bypasses]
        x = _run_part(backbone, part, x, constants, takers, [_Keeper(span, own, part) for span, own in kept])
    assert x is not None
    return x


def logits(backbone: Backbone, hidden: Tensor, users: Sequence[tuple[int, Bypasses | None]] = ()) -> Tensor:
    """The head on rows of any adapters: [n, hidden_size] -> [n, vocab_size] in the compute dtype.

    users: (number of rows, their adapter's bypasses or None), in the order of the rows; none: all rows use the bare
    model.
    """
    spans = [_HeadRows(num_rows, bypasses) for num_rows, bypasses in users or [(hidden.shape[0], None)]]
    rows = _slices(spans)
    assert rows[-1].stop == hidden.shape[0], "the users' rows are all the rows"
    takers = [_Taker(span, own, "head") for span, own in zip(spans, rows, strict=True) if span.bypasses]
    return _run_part(backbone, "head", hidden, {}, takers, ())


def _slices(spans: Sequence[Span]) -> list[slice]:
    ends = list(accumulate(span.tokens.shape[0] for span in spans))
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _joined(spans: Sequence[Span]) -> list[tuple[Span, slice]]:
    """The spans with their rows, neighbours of equal kin as one."""
    result = []
    pairs = zip(spans, _slices(spans), strict=True)
    for _, members in groupby(pairs, key=lambda pair: id(pair[0]) if pair[0].kin is None else pair[0].kin):
        (first, rows), *others = members
        if first.kin is not None:
            first = first.joined([span for span, _ in others])
        result.append((first, slice(rows.start, others[-1][1].stop if others else rows.stop)))
    return result


def _run_part(
    backbone: Backbone,
    part: Part,
    x: Tensor | None,
    constants: Mapping[str, Tensor],
    takers: Sequence["_Taker"],
    keepers: Sequence["_Keeper"],
) -> Tensor:
    """One part on all rows; x [n, hidden_size] (None for the embedding). Returns the part's output."""
    graph = backbone.architecture.graphs[part]
    segments = tuple(segment for keeper in keepers for segment in keeper.segments)
    context = AttentionContext(kernel=backbone.attention, segments=segments)
    after = _AfterNode(takers, keepers)
    values: dict[str, Tensor] = dict(constants)
    if x is not None:
        values["x"] = x
        after.save("x", x)
    run_graph(graph, values, backbone.weights[part], context, after)
    return values[graph.outputs[0]]


class _Taker:
    """A span's rows in one part, and which bypasses they take."""

    def __init__(self, span: Span, rows: slice, part: Part) -> None:
        assert span.bypasses is not None
        self.rows, self.bypasses, self.constants = rows, span.bypasses.get(part, {}), span.constants(part)


class _Keeper:
    """A span's rows in one part, what is kept of them, and whom they attend to (rows from the start of the batch)."""

    def __init__(self, span: Span, rows: slice, part: Part) -> None:
        self.rows, self.keep = rows, span.keep(part)
        self.segments = [segment.moved(rows.start) for segment in span.segments(part)] if isinstance(part, int) else []


class _AfterNode:
    """What happens behind each node of a part: bypasses add to its output, then the spans save what they keep of it."""

    def __init__(self, takers: Sequence[_Taker], keepers: Sequence[_Keeper]) -> None:
        self._bypassed = _neighbours(takers)
        self._savers: dict[str, list[_Keeper]] = {}
        self._signs: dict[str, list[tuple[_Keeper, str, Node]]] = {}
        for keeper in keepers:
            for name in keeper.keep.rows:
                self._savers.setdefault(name, []).append(keeper)
            for sign, node in keeper.keep.packed_signs.items():
                self._signs.setdefault(node.inputs[0][1], []).append((keeper, sign, node))

    def __call__(self, node: Node, values: MutableMapping[str, Tensor]) -> None:
        for run in self._bypassed:
            if (bound := run[0].bypasses.get(node.name)) is not None:
                self._run_bypass(bound, run, node, values)
        for _, name in node.outputs:
            if self._is_kept(name):
                self.save(name, values[name])

    def _is_kept(self, name: str) -> bool:
        return name in self._savers or name in self._signs

    def save(self, name: str, value: Tensor, first_row: int = 0) -> None:
        """Copy a tensor's rows to every span that keeps them; `value` begins at row `first_row` of the batch."""
        last_row = first_row + value.shape[0]
        for keeper in self._savers.get(name, ()):
            if first_row <= keeper.rows.start < last_row:
                keeper.keep.rows[name].copy_(value[keeper.rows.start - first_row : keeper.rows.stop - first_row])
        for keeper, sign, node in self._signs.get(name, ()):
            packed = run_node(
                node, {name: value[keeper.rows.start - first_row : keeper.rows.stop - first_row]}, {}, None
            )
            keeper.keep.rows[sign].copy_(packed[sign])

    def _run_bypass(
        self, bound: BoundBypass, run: Sequence[_Taker], node: Node, values: MutableMapping[str, Tensor]
    ) -> None:
        """Run a bypass on the rows of neighbours that share it, save what they keep of its inside, add its result in
        place.
        """
        bypass, rows = bound.bypass, slice(run[0].rows.start, run[-1].rows.stop)
        output = values[node.outputs[0][1]]
        local: dict[str, Tensor] = {bypass.base: output[rows]}
        self.save(bypass.base, output[rows], rows.start)
        # The last node's result goes right into the sum, unless somebody wants it for itself, or it reads the base.
        last = bypass.nodes[-1]
        is_sum = last.outputs[0][1] == bypass.result and not self._is_kept(bypass.result)
        is_sum &= bypass.base not in last.input.values()
        for inner in bypass.nodes:
            for name in inner.input.values():
                if name in local or name in bound.parameters:
                    continue
                if name in values:
                    local[name] = values[name][rows]
                else:
                    local[name] = torch.cat([taker.constants[name] for taker in run])
            if is_sum and inner is last:
                add_node(output[rows], inner, local, bound.parameters, None)
                return
            made = run_node(inner, local, bound.parameters, None)
            local.update(made)
            for name, value in made.items():
                self.save(name, value, rows.start)
        output[rows] += local[bypass.result]


def _neighbours(takers: Sequence[_Taker]) -> list[list[_Taker]]:
    """Spans that take bypasses, those that stand side by side and take the same ones together."""
    runs: list[list[_Taker]] = []
    for taker in takers:
        if not taker.bypasses:
            continue
        last = runs[-1][-1] if runs else None
        if last is not None and last.bypasses is taker.bypasses and last.rows.stop == taker.rows.start:
            runs[-1].append(taker)
        else:
            runs.append([taker])
    return runs


class _HeadRows(Span):
    """Rows that only pass the head: they attend to nothing and keep nothing."""

    def __init__(self, num_rows: int, bypasses: Bypasses | None) -> None:
        self.tokens = self.positions = torch.empty(num_rows, dtype=torch.int64)
        self.bypasses = bypasses

    def keep(self, part: Part) -> Keep:
        return Keep()

    def segments(self, layer: int) -> Sequence[Segment]:
        return ()

"""The forward pass over a mixed batch: decode tokens, prefill chunks and fine-tuning windows as
rows of one matrix.

Every node of the backbone runs once on all rows. Only three operations depend on whom a row belongs
to: attention, adapters (their bypasses run on their rows, and add to the site's output), and
saving. Saving is one mechanism for all: a training window saves its program's activations, and a
request saves K and V, which is its KV cache. What these three need is prepared once per step, for
all layers, and none of them loops over requests: the rows of all requests of a cache are one group
(`RowGroup`), and the contributions of LoRAs of any ranks to sites that read the same rows are one
call.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor

from coserve.graph.execute import run_graph, run_node
from coserve.graph.ir import Graph, Node
from coserve.graph.operators.base import AttentionRows, Context
from coserve.graph.states import StateRows
from coserve.kernels.attention import AttentionBatch, Segment
from coserve.kernels.base import Backend
from coserve.models.backbone import Backbone
from coserve.models.base import Part
from coserve.models.bypass_runs import BypassRuns
from coserve.models.bypasses import Bypasses, BypassGroup, RowAdapters
from coserve.models.local import PlaceRun
from coserve.models.traced import InPages, InWindow, run_at_once


class Destination(Protocol):
    """Memory for some rows of one tensor."""

    def copy_(self, src: Tensor, /) -> object:
        """Copy a tensor into it."""
        ...


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Destinations of rows that are saved."""

    rows: Mapping[str, "Destination"] = field(default_factory=dict)
    """Destination of some rows by tensor: a tensor [n, ...], or anything else that can be copied
    into.
    """
    only_kept: Mapping[str, Node] = field(default_factory=dict)
    """Nodes that make those of these tensors that exist only to be saved: packed signs, a rank's
    columns.
    """


class RowGroup(ABC):
    """Neighbouring rows of a batch, of one span or of several, with what they need in every part of
    the model.
    """

    tokens: Tensor
    """Token ids, int64 [n]; virtual tokens are negative."""
    positions: Tensor
    """Positions, int64 [n]."""
    segments: Sequence[Segment]
    """Segments in which rows attend to keys, in stores of pages of `block_tokens` keys."""
    block_tokens: int
    """Number of keys in a page."""
    keeps_inside: bool = False
    """Whether activations within bypasses are saved, or bypasses read constants of these rows."""

    def attention(self, backend: Backend) -> AttentionBatch:
        """Return the prepared attention of these rows, for the kernels."""
        return backend.prepare_attention(self.segments, block_tokens=self.block_tokens)

    @abstractmethod
    def keep(self, part: Part) -> Keep:
        """Return what is saved of a part. It must include the tensors that the part's graph carries
        (K and V).
        """

    @abstractmethod
    def stores(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a block's keys and values, [num_pages, block_tokens, Hkv * D] each."""

    @property
    def in_pages(self) -> InPages | None:
        """Return the places of their keys and values, if nothing else is saved, so that all blocks
        may run as one call.
        """
        return None

    @property
    def in_window(self) -> InWindow | None:
        """Return what is saved of a training window's rows, if all blocks may run as one call with
        other rows'.
        """
        return None

    def states(self, layer: int) -> StateRows:
        """Return the recurrent states of a block that has some, and which rows belong to each
        sequence, except for `rows`, which is not set.
        """
        raise NotImplementedError

    def constants(self, part: Part) -> Mapping[str, Tensor]:
        """Return what bypasses in a part read beside the rows' constants, by name: [n, ...]."""
        return {}


class RowSpan(ABC):
    """Consecutive rows of a batch that belong to one request or one training window."""

    num_rows: int
    """Number of rows."""
    bypasses: Bypasses | None = None
    """Bypasses of the adapter that the rows use, or None."""
    group: Hashable = None
    """Key by which neighbouring spans form one `RowGroup`; None: alone."""

    @abstractmethod
    def gather(self, others: Sequence[Any]) -> RowGroup:
        """Return the group of this span's rows and those of others of its group after it."""

    def run_captured(self) -> Tensor | None:
        """Run these rows alone through the embedding and all blocks, by captured calls, and return
        [n, hidden_size]; None where they cannot.
        """
        return None


def forward(backbone: Backbone, spans: Sequence[RowSpan]) -> Tensor:
    """Run the spans through the embedding and all blocks, and return [n, hidden_size] for the head,
    rows in the spans' order.
    """
    assert spans, "a batch has at least one span"
    if not backbone.backend.captures:
        return _forward(backbone, spans)
    # Each span that has captured calls runs alone; what is left runs together as one batch.
    found = [span.run_captured() for span in spans]
    if not (others := [span for span, rows in zip(spans, found, strict=True) if rows is None]):
        return torch.cat([rows for rows in found if rows is not None])
    together = _forward(backbone, others)
    if len(others) == len(spans):
        return together
    # Back into the order of the spans.
    own = iter(torch.split(together, [span.num_rows for span in others]))
    return torch.cat([next(own) if rows is None else rows for rows in found])


def _forward(backbone: Backbone, spans: Sequence[RowSpan]) -> Tensor:
    """Run the spans as one batch."""
    batch = _Batch(backbone, spans)
    # The embedding and the blocks; the last part is the head, which reads only some rows.
    first, *blocks = backbone.local.parts[:-1]
    x = batch.run(first, None)
    if (traced := batch.run_traced(x)) is not None:
        return traced
    for part in blocks:
        x = batch.run(part, x)
    return x


def forward_part(
    backbone: Backbone, spans: Sequence[RowSpan], part: Part, x: Tensor | None
) -> Tensor:
    """Run the spans through one part before the head: x [n, hidden_size] (None: the embedding) ->
    [n, hidden_size].
    """
    return _Batch(backbone, spans).run(part, x)


def row_context(backbone: Backbone) -> Context:
    """Return what row-wise operators need."""
    return Context(backend=backbone.backend, block_rows=backbone.block_rows, group=backbone.group)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Keeper:
    """A group's rows in a batch, with their attention."""

    own: RowGroup
    """The group."""
    rows: slice
    """Its rows in the batch."""
    attention: AttentionBatch
    """Their attention, prepared for the kernels."""


class _Batch:
    """A batch of spans, with all that does not depend on the part of the model."""

    def __init__(self, backbone: Backbone, spans: Sequence[RowSpan]) -> None:
        self._backbone = backbone
        self._keepers: list[_Keeper] = []
        users: list[tuple[int, Bypasses | None, RowGroup | None]] = []
        start = 0
        # Only neighbours form a group: its rows must be a slice of the batch.
        for _, found in groupby(
            spans, key=lambda span: id(span) if span.group is None else span.group
        ):
            first, *others = found
            own = first.gather(others)
            rows = slice(start, start + own.tokens.shape[0])
            attention = own.attention(backbone.backend)
            self._keepers.append(_Keeper(own=own, rows=rows, attention=attention))
            # Adapters go by span, for those of one group may differ.
            users += [(span.num_rows, span.bypasses, own) for span in (first, *others)]
            start = rows.stop
        self._adapters = RowAdapters(users, backbone.device, apart=bool(backbone.block_rows))
        tokens, positions = (
            _cat([getattr(k.own, name) for k in self._keepers]) for name in ("tokens", "positions")
        )
        self._constants = backbone.constants(tokens, positions)

    def run(self, part: Part, x: Tensor | None) -> Tensor:
        """Run one part on all rows: x [n, hidden_size] (None for the embedding) to the part's
        output.
        """
        backbone, graph = self._backbone, self._backbone.local.graphs[part]
        context = Context(
            backend=backbone.backend,
            block_rows=backbone.block_rows,
            group=backbone.group,
            attention=self._attention(part) if graph.kv_tensors else (),
            states=self._states(part) if graph.state_size else (),
        )
        runs, weights = backbone.local.place_runs[part], backbone.weights[part]
        num_rows = self._keepers[-1].rows.stop
        after = AfterNode(
            part, graph, self._keepers, self._adapters, runs, weights, context, num_rows
        )
        values: dict[str, Tensor] = dict(self._constants)
        if x is not None:
            values["x"] = x
            # The part's input is made by no node of it, so nothing else saves it.
            after.savers.save("x", x)
        after.run(values, context)
        return values[graph.outputs[0]]

    def run_traced(self, x: Tensor) -> Tensor | None:
        """Run all blocks on all rows as one call; return None where they must run one by one."""
        (first, *others), backbone = self._keepers, self._backbone
        requests = first.own.in_pages
        windows = [window for keeper in others if (window := keeper.own.in_window) is not None]
        # One call takes requests' rows first and training windows after them, and nothing else.
        if requests is None or len(windows) < len(others) or backbone.block_rows is not None:
            return None
        # Tokens and positions, which are integers, have done their part in x and the rotary tables.
        inputs = {
            name: rows for name, rows in self._constants.items() if rows.dtype == backbone.dtype
        } | {"x": x}

        def attention(rows_apart: bool) -> AttentionBatch:
            # Some calls take each row of a prompt as a segment of its own
            # (`TracedCalls.rows_apart`).
            if requests.segments is None or not rows_apart:
                return first.attention
            return backbone.backend.prepare_attention(
                requests.segments(), block_tokens=first.own.block_tokens
            )

        return run_at_once(backbone, inputs, requests, attention, windows, self._adapters)

    def _states(self, part: Part) -> tuple[StateRows, ...]:
        assert isinstance(part, int)
        return tuple(replace(keeper.own.states(part), rows=keeper.rows) for keeper in self._keepers)

    def _attention(self, part: Part) -> tuple[AttentionRows, ...]:
        assert isinstance(part, int)
        stores = [keeper.own.stores(part) for keeper in self._keepers]
        return tuple(
            AttentionRows(rows=keeper.rows, batch=keeper.attention, keys=keys, values=values)
            for keeper, (keys, values) in zip(self._keepers, stores, strict=True)
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Saved:
    """The saved rows of a group in a part."""

    own: RowGroup
    """The group."""
    rows: slice
    """Its rows in the batch."""
    keep: Keep
    """Destinations of what is saved."""


class _Savers:
    """A copier of a part's saved tensors to their destinations."""

    def __init__(self, part: Part, keepers: Sequence[_Keeper], context: Context) -> None:
        self._context = context
        self._num_rows = keepers[-1].rows.stop if keepers else 0
        self._savers: dict[str, list[_Saved]] = {}
        self._made: dict[str, list[tuple[_Saved, str, Node]]] = {}
        for keeper in keepers:
            saved = _Saved(own=keeper.own, rows=keeper.rows, keep=keeper.own.keep(part))
            for name in saved.keep.rows:
                self._savers.setdefault(name, []).append(saved)
            for made, node in saved.keep.only_kept.items():
                # By the tensor that they are made of: they run as soon as it is there.
                self._made.setdefault(node.inputs[0][1], []).append((saved, made, node))

    @property
    def names(self) -> set[str]:
        """Return the tensors of which rows are saved."""
        return {*self._savers, *self._made}

    def keeps(self, name: str) -> bool:
        """Return whether rows of a tensor are saved."""
        return name in self._savers or name in self._made

    def room(self, name: str) -> Tensor | None:
        """Return the destination of a tensor's rows, if it is one place for the whole batch."""
        if name in self._made or len(self._savers.get(name, ())) != 1:
            return None
        place = self._savers[name][0].keep.rows[name]
        # A kernel writes all rows of the batch, so only a destination for all of them will do.
        return place if isinstance(place, Tensor) and place.shape[0] == self._num_rows else None

    def save(self, name: str, value: Tensor, group: BypassGroup | None = None) -> None:
        """Copy a tensor's rows to their destinations; the rows of `value` are those of a group, or
        of the batch.
        """
        for saved in self._savers.get(name, ()):
            if (rows := _rows_in(saved, group)) is not None:
                # PyTorch copies nothing where the rows are in place already (`room`).
                saved.keep.rows[name].copy_(value[rows])
        for saved, made, node in self._made.get(name, ()):
            if (rows := _rows_in(saved, group)) is not None:
                found = run_node(node, {name: value[rows]}, {}, self._context)
                saved.keep.rows[made].copy_(found[made])


class AfterNode:
    """Actions after each node of a part: bypasses add to its output (of nodes that run at once,
    after the first of them), then it is saved.
    """

    def __init__(
        self,
        part: Part,
        graph: Graph,
        keepers: Sequence[_Keeper],
        adapters: RowAdapters,
        runs: Sequence[PlaceRun],
        weights: Mapping[str, Any],
        context: Context,
        num_rows: int,
    ) -> None:
        """Prepare a part.

        Args:
            graph: Graph of the part.
            weights: Weights of the part.
            num_rows: Number of rows in the batch.
        """
        self._backend = context.backend
        self._low_rank = batch = adapters.low_rank
        # Places where no adapter of this batch sits cost nothing.
        self._runs = {run.node: run for run in runs if run.mask & batch.mask} if batch else {}
        self.savers = _Savers(part, keepers, context)
        # Fusion must leave these tensors as they are: adapters read and add to them after the node.
        read = {name for run in self._runs.values() for name in (run.source, *run.outputs)}
        self.bypasses = BypassRuns(
            part, graph, adapters.groups, num_rows, weights, context, self.savers, read
        )

        # Nodes after which there is anything to do.
        producer = self.bypasses.graph.producer
        self._nodes = {*self._runs, *self.bypasses.sites}
        self._nodes |= {producer[name].name for name in self.savers.names if name in producer}

    def run(self, values: dict[str, Tensor], context: Context) -> None:
        """Run the part, in place on `values`."""
        bypasses = self.bypasses
        values.update(bypasses.constants(values))
        instead = bypasses.run_nodes if bypasses.run_any else None
        run_graph(bypasses.graph, values, bypasses.weights, context, self, instead)

    def __call__(self, node: Node, values: MutableMapping[str, Tensor]) -> None:
        if node.name not in self._nodes:
            return
        if (run := self._runs.get(node.name)) is not None:
            assert self._low_rank is not None
            outputs = [values[name] for name in run.outputs]
            self._backend.add_adapters(values[run.source], outputs, run.first, self._low_rank)
        self.bypasses.add(node, values)
        for _, name in node.outputs:
            if self.savers.keeps(name):
                self.savers.save(name, values[name])


def _rows_in(saved: _Saved, group: BypassGroup | None) -> slice | None:
    """Return the place of saved rows among those of a group (None: none) or of the batch."""
    return saved.rows if group is None else group.rows_of(saved.own)


def _cat(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

"""Execution of all blocks as one call, where a backend supports it (`coserve.kernels.trace`).

A trace belongs to a page pool, whose addresses it holds, to the places at which some adapter of the
step sits, and to steps with training windows or without. It is made at the first step that can use
it.
"""

from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from coserve.graph.division import dividable, piece_name
from coserve.graph.execute import run_graph
from coserve.graph.fuse import fuse
from coserve.graph.ir import Node
from coserve.graph.operators.base import AttentionRows, Context
from coserve.kernels.attention import AttentionBatch, Segment
from coserve.kernels.base import Backend
from coserve.kernels.low_rank import KeptRows, LowRankAdapter
from coserve.kernels.trace import (
    Trace,
    TracedCalls,
    TracedPiece,
    TracedStep,
    TracedWindow,
    UntraceableError,
)
from coserve.models.backbone import Backbone
from coserve.models.base import Part
from coserve.models.bypasses import Bypasses, RowAdapters

# Most traces that a pool keeps: users of many adapters have few targets.
_MAX_TRACES = 32


class _Traced(NamedTuple):
    """Key of a trace."""

    places: int
    """A bit for each place at which an adapter sits."""
    has_windows: bool
    """Whether there are training windows."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PageStores:
    """Keys and values by block with attention, and the traces of blocks that use them."""

    layers: Mapping[Part, tuple[Tensor, Tensor]]
    """Stores of keys and values, [num_pages, block_tokens, Hkv * D] each."""
    traces: dict[_Traced, TracedCalls | None] = field(default_factory=dict)
    """Traces by key; None: the blocks cannot be traced for it."""

    @property
    def most_rows(self) -> int:
        """Return the maximum number of rows of a step that runs as one call, by the traces made so
        far; 0 without any.
        """
        return max(
            [calls.max_rows for calls in self.traces.values() if calls is not None], default=0
        )

    @property
    def most_prompt_pairs(self) -> int:
        """Return the maximum number of pairs of a row and a key of prompts in such a step."""
        return max(
            [calls.max_prompt_pairs for calls in self.traces.values() if calls is not None],
            default=0,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class InPages:
    """Places of rows in the stores of keys and values of every block."""

    stores: PageStores
    """The stores."""
    pages: Tensor
    """Page of each row, int64 [n]."""
    offsets: Tensor
    """Entry of each row in its page, int64 [n]."""
    pieces: Sequence[TracedPiece] = ()
    """Rows that belong together."""
    segments: Callable[[], Sequence[Segment]] | None = None
    """With pieces, a function that makes a segment for each row (`TracedCalls.rows_apart`)."""


class KeptTensors:
    """Saved activations of a pack by part, a row of each tensor for each row of the pack; their
    memory does not move between forward and backward.
    """

    def __init__(
        self, tensors: Mapping[Part, Mapping[str, Tensor]], bypasses: Bypasses | None
    ) -> None:
        """Refer to the tensors. bypasses: those of the trained adapter."""
        self._tensors, self.bypasses = tensors, bypasses
        self._found: dict[TracedCalls, tuple[Tensor, Tensor] | None] = {}

    def addresses(self, calls: TracedCalls, first_row: int) -> tuple[Tensor, Tensor] | None:
        """Return the addresses at which rows from `first_row` on are saved, int64: in the calls'
        tensors, and in those that the adapter's factors B multiply, by place; None if the pack
        saves others.
        """
        if calls not in self._found:
            self._found[calls] = self._find(calls)
        if (found := self._found[calls]) is None:
            return None
        starts, steps = found
        kept, narrow = (starts + first_row * steps).tensor_split([len(calls.kept)])
        return kept, narrow

    def _find(self, calls: TracedCalls) -> tuple[Tensor, Tensor] | None:
        """Return the address of each tensor's first row, and the bytes from row to row: first of
        the calls' tensors, then of those within the adapter.
        """
        numbers: dict[Hashable, int] = {name: number for number, name in enumerate(calls.kept)}
        num_places = 0
        if self.bypasses is not None and self.bypasses.low_rank is not None:
            num_places = len(self.bypasses.low_rank.places)
            numbers.update(
                {name: len(calls.kept) + place for name, place in self.bypasses.narrow.items()}
            )
        starts = torch.zeros(len(calls.kept) + num_places, dtype=torch.int64)
        steps = torch.zeros_like(starts)
        for part, tensors in self._tensors.items():
            for name, tensor in tensors.items() if isinstance(part, int) else ():
                number, row_bytes = numbers.get((part, name)), tensor[:1].nbytes
                if number is None or not tensor.is_contiguous():
                    return None
                if calls.kept.get((part, name), row_bytes) != row_bytes:
                    return None
                starts[number], steps[number] = tensor.data_ptr(), row_bytes
        return starts, steps


@dataclass(frozen=True, kw_only=True, eq=False)
class InWindow:
    """Rows of a training window."""

    kept: KeptTensors
    """Saved activations of its pack."""
    first_row: int
    """First of the pack's rows that is in the window."""
    segments: Sequence[Segment]
    """Segments in which the rows attend."""
    dropout_row_ids: Tensor
    """Keys of the rows' dropout, int64 [n]."""

    @property
    def num_rows(self) -> int:
        return sum([segment.num_rows for segment in self.segments])

    @property
    def adapter(self) -> LowRankAdapter | None:
        """Return the trained adapter, if it is of low rank."""
        bypasses = self.kept.bypasses
        return None if bypasses is None else bypasses.low_rank

    @property
    def may_run_at_once(self) -> bool:
        """Return whether the rows' adapter, if there is one, can be part of the call."""
        return self.kept.bypasses is None or self.adapter is not None


def run_at_once(
    backbone: Backbone,
    inputs: Mapping[str, Tensor],
    requests: InPages,
    attention: Callable[[bool], AttentionBatch],
    windows: Sequence[InWindow],
    adapters: RowAdapters,
) -> Tensor | None:
    """Run all blocks as one call; return None where they must run one by one.

    Args:
        inputs: "x", rows after the embedding, and the model's constants in the compute dtype.
        requests: The first of these rows.
        attention: Makes the attention of requests; its argument is whether each row of a prompt is
            a segment of its own.
        windows: All other rows, in their order.
        adapters: Adapters of all rows.
    """
    if adapters.have_requests_apart or not all(window.may_run_at_once for window in windows):
        return None
    if windows and not backbone.backend.traces_windows:
        return None
    places = 0 if adapters.low_rank is None else adapters.low_rank.mask
    for window in windows:
        places |= 0 if window.adapter is None else window.adapter.mask
    calls = _traced_calls(backbone, requests.stores, inputs, _Traced(places, bool(windows)))
    if calls is None or inputs["x"].shape[0] > calls.max_rows:
        return None
    if sum([piece.num_pairs for piece in requests.pieces]) > calls.max_prompt_pairs:
        return None
    traced, with_adapters, row = [], [], requests.pages.shape[0]
    for window in windows:
        addresses = window.kept.addresses(calls, window.first_row)
        if addresses is None:
            return None
        kept, narrow = addresses
        rows = range(row, row + window.num_rows)
        traced.append(
            TracedWindow(
                num_rows=len(rows),
                first_in_pack=window.first_row,
                segments=window.segments,
                kept=kept,
            )
        )
        if window.adapter is not None:
            own = KeptRows(narrow=narrow, dropout_row_ids=window.dropout_row_ids)
            with_adapters.append((window.adapter, rows, own))
        row = rows.stop
    step = TracedStep(
        inputs=inputs,
        attention=attention(calls.rows_apart),
        pieces=requests.pieces,
        pages=requests.pages,
        offsets=requests.offsets,
        adapters=adapters.with_windows(with_adapters),
        windows=traced,
    )
    return calls.run(step) if calls.fit(step) else None


def _traced_calls(
    backbone: Backbone, stores: PageStores, inputs: Mapping[str, Tensor], what: _Traced
) -> TracedCalls | None:
    """Return the calls of all blocks; None where they must run one by one."""
    if what not in stores.traces:
        if len(stores.traces) >= _MAX_TRACES:
            stores.traces.clear()
        widths = {name: rows.shape[1] for name, rows in inputs.items()}
        found = _trace(backbone, stores, widths, what)
        # Ranks run a step alike: as one call on all of them, or block by block on all.
        stores.traces[what] = found if backbone.group.agree_all(is_so=found is not None) else None
    return stores.traces[what]


def _trace(
    backbone: Backbone, stores: PageStores, widths: dict[str, int], what: _Traced
) -> TracedCalls | None:
    """Trace all blocks. widths: widths of the inputs."""
    if backbone.backend.captures and backbone.ranks.size > 1:
        return None  # captured calls that contain NCCL's have hung when they were run again
    layers = stores.layers  # without the traces, which would hold themselves

    def run(trace: Trace[Backend]) -> Tensor:
        constants = {name: trace.input(name, width) for name, width in widths.items()}
        x = constants.pop("x")
        for layer, (keys, values) in layers.items():
            x = _trace_block(backbone, trace, layer, {**constants, "x": x}, keys, values, what)
        return x

    try:
        return backbone.backend.trace(backbone.dtype, run)
    except UntraceableError:
        return None


def _trace_block(
    backbone: Backbone,
    trace: Trace[Backend],
    layer: Part,
    values: dict[str, Tensor],
    keys: Tensor,
    key_values: Tensor,
    what: _Traced,
) -> Tensor:
    """Trace a block, and return its output. values: the block's inputs."""
    graph = backbone.local.graphs[layer]
    runs = {run.node: run for run in backbone.local.place_runs[layer] if run.mask & what.places}
    stores = dict(zip(graph.kv_tensors, (keys, key_values), strict=True))
    ranks = backbone.local.ranks
    in_pieces = (
        dividable(graph, backbone.local.divided[layer].states, ranks.size)
        if ranks.size > 1
        else frozenset()
    )

    def keep(name: str, rows: Tensor) -> None:
        if what.has_windows:
            trace.keep((layer, name), rows)
            if name in in_pieces:
                widths = [graph.spec[name].shape[0] // ranks.size] * ranks.size
                trace.keep((layer, piece_name(name)), rows.split_with_sizes(widths, -1)[ranks.rank])

    keep("x", values["x"])

    def after(node: Node, found: MutableMapping[str, Tensor]) -> None:
        if (run := runs.get(node.name)) is not None:
            outputs = [found[name] for name in run.outputs]
            trace.backend.add_adapters(found[run.source], outputs, run.first, trace.adapters)
        for _, name in node.outputs:
            keep(name, found[name])
            if name in stores:
                trace.store((layer, name), found[name], stores[name])

    if not what.has_windows:  # windows save activations between operators
        read = {name for run in runs.values() for name in (run.source, *run.outputs)}
        graph = fuse(graph, trace.backend.fused, read | stores.keys())
    attention = AttentionRows(rows=slice(None), batch=trace.attention, keys=keys, values=key_values)
    context = Context(
        backend=trace.backend, attention=(attention,), group=trace.group(backbone.group)
    )
    run_graph(graph, values, backbone.weights[layer], context, after)
    return values[graph.outputs[0]]

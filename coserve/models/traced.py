"""All blocks as one call, for steps of requests alone (`coserve.kernels.trace`).

A trace belongs to a page pool, whose addresses it holds, and to the places at which some adapter of the step sits. It
is made at the first step that can use it.
"""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field

from torch import Tensor

from coserve.graph.execute import run_graph
from coserve.graph.ir import Node
from coserve.graph.operators.base import AttentionRows, Context
from coserve.kernels.base import Backend
from coserve.kernels.low_rank import AdapterBatch
from coserve.kernels.trace import Trace, TracedCalls, UntraceableError
from coserve.models.backbone import Backbone
from coserve.models.base import Part

# Most sets of places for which a pool keeps traces: users of many adapters have few targets.
_MOST_TRACES = 16


@dataclass(frozen=True, kw_only=True, eq=False)
class PageStores:
    """The stores of keys and values by block with attention, [num_pages, block_tokens, Hkv * D] each, and their traces
    by the places of adapters (None: the blocks cannot be traced with these).
    """

    layers: Mapping[Part, tuple[Tensor, Tensor]]
    traces: dict[int, TracedCalls | None] = field(default_factory=dict)

    @property
    def most_rows(self) -> int:
        """Of a step that runs as one call, as far as traces have been made; 0 without any."""
        return max([calls.most_rows for calls in self.traces.values() if calls is not None], default=0)


def traced_calls(
    backbone: Backbone, stores: PageStores, inputs: Mapping[str, Tensor], adapters: AdapterBatch | None
) -> TracedCalls | None:
    """The calls of all blocks on rows after the embedding; None where they must run one by one. inputs: of a step: "x",
    and the model's constants in the compute dtype.
    """
    places = 0 if adapters is None else adapters.mask
    if places not in stores.traces:
        if len(stores.traces) >= _MOST_TRACES:
            stores.traces.clear()
        widths = {name: rows.shape[1] for name, rows in inputs.items()}
        stores.traces[places] = _trace(backbone, stores, widths, places)
    return stores.traces[places]


def _trace(backbone: Backbone, stores: PageStores, widths: dict[str, int], places: int) -> TracedCalls | None:
    """places: a bit for each place at which an adapter may sit. widths: of the inputs."""
    try:
        trace = backbone.backend.trace(backbone.dtype)
        if trace is None:
            return None
        constants = {name: trace.input(name, width) for name, width in widths.items()}
        x = constants.pop("x")
        for layer, (keys, values) in stores.layers.items():
            x = _trace_block(backbone, trace, layer, {**constants, "x": x}, keys, values, places)
        return trace.end(x)
    except UntraceableError:
        return None


def _trace_block(
    backbone: Backbone,
    trace: Trace[Backend],
    layer: Part,
    values: dict[str, Tensor],
    keys: Tensor,
    key_values: Tensor,
    places: int,
) -> Tensor:
    """values: the block's inputs. Returns its output."""
    graph = backbone.architecture.graphs[layer]
    runs = {run.node: run for run in backbone.architecture.place_runs[layer] if run.mask & places}
    stores = dict(zip(graph.kv_tensors, (keys, key_values), strict=True))

    def after(node: Node, found: MutableMapping[str, Tensor]) -> None:
        if (run := runs.get(node.name)) is not None:
            outputs = [found[name] for name in run.outputs]
            trace.backend.add_adapters(found[run.source], outputs, run.first, trace.adapters)
        for _, name in node.outputs:
            if name in stores:
                trace.store(found[name], stores[name])

    attention = AttentionRows(rows=slice(None), batch=trace.attention, keys=keys, values=key_values)
    context = Context(backend=trace.backend, attention=(attention,))
    run_graph(graph, values, backbone.weights[layer], context, after)
    return values[graph.outputs[0]]

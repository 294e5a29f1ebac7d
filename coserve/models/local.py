"""The part of a model that runs on one rank: its graphs, and the sizes that follow from them.

An `Architecture` is the whole model: names, files, the shapes of adapters. A `LocalModel` is what
one rank executes of it. With one rank the two have the same graphs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from coserve.errors import GraphError, UnsupportedModelError
from coserve.graph.ir import Graph
from coserve.graph.layouts import WHOLE, AnyState
from coserve.graph.parallel.placement import LocalGraph
from coserve.graph.parallel.search import place_backbone
from coserve.kernels.cuts import Cut, even_cut
from coserve.kernels.groups.base import Ranks
from coserve.models.base import HEAD, Architecture, Part


@dataclass(frozen=True, kw_only=True)
class PlaceRun:
    """Neighbouring linear layers that read the same rows, as places of adapters."""

    node: str
    """Node of the first layer."""
    source: str
    """Tensor that the layers read."""
    outputs: tuple[str, ...]
    """Tensors that the layers give, in order."""
    first: int
    """Number of the first layer among all linear layers of the whole model
    (`Architecture.linear_sites`)."""

    @cached_property
    def mask(self) -> int:
        """Return a bit for each layer."""
        return ((1 << len(self.outputs)) - 1) << self.first


@dataclass(frozen=True, kw_only=True)
class LocalModel:
    """The parts of a model that run here, with their graphs and the sizes of what they keep."""

    architecture: Architecture
    """The whole model."""
    ranks: Ranks
    """Which rank this is."""
    graphs: Mapping[Part, Graph]
    """Graph of each part as it is executed; blocks that are alike share one object."""
    divided: Mapping[Part, LocalGraph]
    """Of several ranks: by part, how the tensors of its graph are divided; empty for one rank."""

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Return the parts that run here, in forward order."""
        return self.architecture.parts

    @cached_property
    def kv_layers(self) -> tuple[int, ...]:
        """Return the blocks with attention: those that have keys and values."""
        return tuple(layer for layer in self._layers if self.graphs[layer].kv_tensors)

    @cached_property
    def kv_widths(self) -> tuple[int, ...]:
        """Return the number of elements of a row's keys, and of its values, in each block with
        attention.
        """
        graph = self.graphs[self.kv_layers[0]]
        return tuple(graph.spec[name].shape[0] for name in graph.kv_tensors)

    @cached_property
    def state_sizes(self) -> dict[int, int]:
        """Return the number of float32 elements that a sequence carries from row to row, by block
        that has such.
        """
        sizes = {layer: self.graphs[layer].state_size for layer in self._layers}
        return {layer: size for layer, size in sizes.items() if size}

    @cached_property
    def place_runs(self) -> dict[Part, tuple[PlaceRun, ...]]:
        """Return, by part, its linear layers in runs of those that read the same rows.

        Each layer is one place. Places are numbered through the whole model, so that tables of
        adapters' factors are alike whatever runs where.
        """
        numbers = {
            site: number for number, site in enumerate(self.architecture.linear_sites.values())
        }
        runs: dict[Part, tuple[PlaceRun, ...]] = {}
        for part in self.parts:
            part_runs: list[PlaceRun] = []
            for nodes in self.graphs[part].runs:
                if nodes[0].op != "linear":
                    continue
                outputs = tuple(node.outputs[0][1] for node in nodes)
                first = numbers[part, nodes[0].name]
                part_runs.append(
                    PlaceRun(
                        node=nodes[0].name,
                        source=nodes[0].input["x"],
                        outputs=outputs,
                        first=first,
                    )
                )
            runs[part] = tuple(part_runs)
        return runs

    @cached_property
    def own_head(self) -> tuple[Graph, Cut]:
        """Return the head's graph up to the logits of this rank's tokens, and how ranks divide the
        vocabulary.

        It is for several ranks, whose graph of the head ends with a gather of these logits.
        """
        head = self.graphs["head"]
        *nodes, gather = head.nodes
        assert gather.op == "rank_gather" and gather.outputs[0][1] == head.outputs[0], (
            "ranks divide the vocabulary"
        )
        own, whole = gather.input["x"], head.outputs[0]
        tensors = tuple(tensor for tensor in head.tensors if tensor.name != whole)
        return Graph(tensors=tensors, nodes=tuple(nodes), outputs=(own,)), gather.attribute["cut"]

    @property
    def _layers(self) -> tuple[int, ...]:
        return tuple(part for part in self.parts if isinstance(part, int))

    def state(self, part: Part, tensor: str) -> AnyState:
        """Return the state of a part's weight."""
        return self.divided[part].states[tensor] if self.divided else WHOLE


def local_model(
    architecture: Architecture, ranks: Ranks, *, like: LocalModel | None = None
) -> LocalModel:
    """Return what of a model runs on a rank.

    The head is divided by the vocabulary, and so is the table of embeddings that is the head, too.

    Args:
        architecture: the whole model.
        ranks: the rank.
        like: what runs on the rank of a model with the same blocks, which are not placed again.

    Raises:
        UnsupportedModelError: the model cannot be divided among the ranks.
    """
    if ranks.size == 1:
        return LocalModel(
            architecture=architecture, ranks=ranks, graphs=architecture.graphs, divided={}
        )
    shared: dict[Graph, LocalGraph] = {}
    if like is not None:
        shared = {graph: like.divided[part] for part, graph in like.architecture.graphs.items()}
    divided: dict[Part, LocalGraph] = {}
    for part, graph in architecture.graphs.items():
        if graph not in shared:
            try:
                shared[graph] = place_backbone(
                    graph, ranks.size, fixed=_fixed(architecture, part, ranks)
                ).local(ranks.rank)
            except GraphError as error:
                raise UnsupportedModelError(f"{architecture.config.model_type}: {error}") from None
        divided[part] = shared[graph]
    graphs = {part: local.graph for part, local in divided.items()}
    return LocalModel(architecture=architecture, ranks=ranks, graphs=graphs, divided=divided)


def _fixed(
    architecture: Architecture, part: Part, ranks: Ranks
) -> tuple[tuple[str, AnyState], ...]:
    """Return the weights of a part whose states are no choice."""
    name = {"head": HEAD, "embed": f"{architecture.embedding_name}.weight"}.get(str(part))
    if name is None or (part == "embed" and not architecture.tied):
        return ()
    cut = even_cut(architecture.vocab_size, ranks.size, padded=True)
    assert cut is not None
    return ((name, cut.along(-2)),)

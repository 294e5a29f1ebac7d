"""The interface of a model family: graphs (embedding, blocks, head), the layout of its checkpoints,
and rotary tables.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch

from coserve.errors import UnsupportedModelError
from coserve.graph.ir import Graph, GraphBuilder
from coserve.models.rope import RotaryTable
from coserve.models.stored import AsItIs, Stored
from coserve.settings import is_whole

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# The head's weight; that of a tied model is the table of embeddings.
HEAD = "lm_head.weight"
# A model runs as "embed", then the blocks 0 to num_layers - 1, then "head".
Part = int | Literal["embed", "head"]


class Architecture(ABC):
    """A family, built for one configuration.

    Subclasses give the graphs. A node is named after the module that it stands for, so that
    `prefix(part) + node name` is the module's name in transformers, `… + ".weight"` the weight's
    name there, and PEFT's target patterns match as they are; where a checkpoint differs,
    `stored_as` maps the names. The row input of a block or the head is called "x"; constants that a
    graph may declare are "tokens" and "positions" (int64), "cos" and "sin" of each rotary table,
    "targets" and "dropout_row_ids".
    """

    def __init__(self, config: "PretrainedConfig") -> None:
        self.config = config
        self.num_layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.max_positions: int = getattr(config, self.max_positions_name)
        self.num_heads: int = config.num_attention_heads
        self.num_key_value_heads: int = self._head_field("num_key_value_heads") or self.num_heads
        self.head_dim: int = self._head_field("head_dim") or self.hidden_size // max(
            1, self.num_heads
        )
        self.tied: bool = bool(config.tie_word_embeddings)
        self._check_sizes()

    # -- what a family gives --------------------------------------------------

    embedding_name: ClassVar[str] = "model.embed_tokens"
    """Module of the token embedding."""
    block_prefix: ClassVar[str] = "model.layers"
    """Module of the list of blocks."""
    has_head_fields: ClassVar[bool] = False
    """Whether the configuration's `num_key_value_heads` and `head_dim` are read. For other
    families, transformers derives them from `hidden_size` and the number of heads, whatever these
    fields say.
    """
    max_positions_name: ClassVar[str] = "max_position_embeddings"
    """Field of the configuration with the length of the longest sequence."""
    depends_on: ClassVar[str] = ""
    """What else a row's results depend on, in the words of `Backbone.deterministic`, which refuses
    the family; "": nothing.
    """
    unread: ClassVar[str] = r"(.*\.)?rotary_emb\.inv_freq"
    """Regular expression of tensors in checkpoints that nothing reads: buffers of older versions of
    transformers.
    """

    def embed(self) -> Graph:
        """Return the graph from "tokens" (and "positions") to the first block's rows [hidden_size]:
        a table of embeddings, unless the family has more.
        """
        b = GraphBuilder()
        weight = b.weight(f"{self.embedding_name}.weight", self.vocab_size, self.hidden_size)
        inputs = {"ids": tokens_input(b), "weight": weight}
        return b.build(b.apply("embedding", self.embedding_name, inputs, offset=0))

    @abstractmethod
    def block(self, layer: int) -> Graph:
        """Return the graph of one block, from "x" [hidden_size] to its output [hidden_size]."""

    @abstractmethod
    def head(self) -> Graph:
        """Return the graph from "x" [hidden_size] to logits [vocab_size]."""

    def rotary_tables(self) -> Mapping[str, RotaryTable]:
        """Return the tables of the constants "cos" and "sin", by the prefix of these names, which
        is "" for most.
        """
        return {}

    def stored_as(self, name: str) -> Stored:
        """Return how a checkpoint stores a weight, by its full name."""
        return AsItIs(name)

    # -- what follows from that -----------------------------------------------

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Return all parts in forward order."""
        return ("embed", *range(self.num_layers), "head")

    @cached_property
    def graphs(self) -> dict[Part, Graph]:
        """Return the graph of every part; equal blocks share one object."""
        shared: dict[Graph, Graph] = {}
        graphs: dict[Part, Graph] = {"embed": self.embed(), "head": self.head()}
        for layer in range(self.num_layers):
            graph = self.block(layer)
            graphs[layer] = shared.setdefault(graph, graph)
        return graphs

    def prefix(self, part: Part) -> str:
        """Return the prefix of a part's names in a checkpoint."""
        return f"{self.block_prefix}.{part}." if isinstance(part, int) else ""

    @cached_property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every weight, by full name; a tied head has none of its own."""
        shapes = {
            self.prefix(part) + tensor.name: tensor.shape
            for part in self.parts
            for tensor in self.graphs[part].with_kind("weight")
        }
        if self.tied:
            shapes.pop(HEAD)
        return shapes

    @cached_property
    def stored(self) -> dict[str, Stored]:
        """Return how a checkpoint stores each of `weight_shapes`."""
        return {name: self.stored_as(name) for name in self.weight_shapes}

    @cached_property
    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor of a checkpoint, by name."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, stored in self.stored.items():
            views = stored.views(torch.empty(self.weight_shapes[name], device="meta"))
            shapes |= {
                each: tuple(view.shape) for each, view in zip(stored.names, views, strict=True)
            }
        return shapes

    @property
    def embedded(self) -> str:
        """Return the node of "embed" whose output transformers calls `inputs_embeds`."""
        return self.embedding_name

    @property
    def bare_prefix(self) -> str:
        """Return the prefix of a whole model's tensor names that is missing where a model was saved
        without its head.
        """
        return self.embedding_name.split(".")[0] + "."

    @cached_property
    def linear_sites(self) -> dict[str, tuple[Part, str]]:
        """Return the (part, node) of every linear layer by full module name: where adapters can
        sit.
        """
        return {
            self.prefix(part) + node.name: (part, node.name)
            for part in self.parts
            for node in self.graphs[part].nodes
            if node.op == "linear"
        }

    @cached_property
    def expert_sites(self) -> dict[str, tuple[Part, str]]:
        """Return the (part, node) of every product with experts' matrices, by transformers' name
        for all of them.
        """
        return {
            self.prefix(part) + node.name: (part, node.name)
            for part in self.parts
            for node in self.graphs[part].nodes
            if node.op == "expert_linear"
        }

    def is_tied_table(self, name: str) -> bool:
        """Return whether this weight is the table of embeddings, and the head too."""
        return self.tied and name == f"{self.embedding_name}.weight"

    def with_vocabulary(self, vocab_size: int) -> Self:
        """Return the architecture of a model whose vocabulary was resized: other embeddings and
        another head, the same blocks.
        """
        if vocab_size == self.vocab_size:
            return self
        found = copy(self)
        for name in [
            each
            for each in vars(found)
            if isinstance(getattr(type(self), each, None), cached_property)
        ]:
            del vars(found)[name]
        found.config = copy(self.config)
        found.config.vocab_size = found.vocab_size = vocab_size
        found.graphs = {**self.graphs, "embed": found.embed(), "head": found.head()}
        return found

    # -- shared by families ---------------------------------------------------

    def _attention(
        self,
        b: GraphBuilder,
        q: str,
        k: str,
        v: str,
        sliding_window: int | None = None,
        *,
        sinks: str | None = None,
        **attributes: Any,
    ) -> str:
        """Add attention. attributes: what differs from the defaults (see `AttentionSpec`)."""
        usual = {
            "num_heads": self.num_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "scale": self.head_dim**-0.5,
            "sliding_window": sliding_window,
        }
        return b.apply(
            "attention", "attention", {"q": q, "k": k, "v": v, "sinks": sinks}, **usual | attributes
        )

    def _check_sizes(self) -> None:
        """Refuse sizes that are not valid, before anything is built from them."""
        sizes = {
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            self.max_positions_name: self.max_positions,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "intermediate_size": getattr(self.config, "intermediate_size", 1),
            "ffn_dim": getattr(self.config, "ffn_dim", 1),
            "sliding_window": 1
            if (window := getattr(self.config, "sliding_window", None)) is None
            else window,
        }
        for name, size in sizes.items():
            if not is_whole(size, 1):
                raise UnsupportedModelError(
                    f"{name}={size!r} is not valid; it must be a whole number of at least 1"
                )
        if self.num_heads % self.num_key_value_heads:
            raise UnsupportedModelError(
                f"num_attention_heads={self.num_heads} must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if not self._head_field("head_dim") and self.hidden_size % self.num_heads:
            raise UnsupportedModelError(
                f"hidden_size={self.hidden_size} must be a multiple of "
                f"num_attention_heads={self.num_heads}"
            )

    def _head_field(self, name: str) -> int | None:
        return getattr(self.config, name, None) if self.has_head_fields else None

    def _require(self, setting: str, *allowed: object) -> None:
        """Refuse a configuration whose `setting` is present and not one of `allowed`."""
        value = getattr(self.config, setting, allowed[0])
        if value not in allowed:
            options = " or ".join(str(option) for option in allowed)
            raise UnsupportedModelError(
                f"{self.config.model_type} with {setting}={value!r} is not supported; {setting} "
                f"must be {options}"
            )


def tokens_input(b: GraphBuilder) -> str:
    """Declare the constant "tokens": int64, one per row."""
    return b.constant("tokens", dtype=torch.int64)

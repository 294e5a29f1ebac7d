"""The decoder of Llama and its relatives: RMS norms at attention and a gated MLP, rotary positions,
grouped key heads.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from coserve.errors import UnsupportedModelError
from coserve.graph.ir import Graph, GraphBuilder
from coserve.models.base import Architecture, tokens_input
from coserve.models.pieces import activation, angles, rotated, scaled
from coserve.models.rope import RotaryTable, rotary_table

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class RotaryDecoder(Architecture):
    """A Llama-like decoder.

    A family sets how it differs: biases, norms on queries and keys, norms before or after attention
    and MLP, sliding windows and rotary tables by layer, factors, or another `norm`, `mlp`, or
    `queries_keys_values`.
    """

    has_head_fields = True
    norm_name: ClassVar[str] = "model.norm"
    """Module of the norm before the head."""
    hidden_acts: ClassVar[tuple[str, ...]] = ("silu",)
    """Activation functions of the MLP that the family may have."""
    hidden_act_name: ClassVar[str] = "hidden_act"
    """Field of the configuration with the activation function."""
    attention_norms: ClassVar[tuple[str | None, str | None]] = ("input_layernorm", None)
    """Modules of the norms before and after attention; None: there is none."""
    mlp_norms: ClassVar[tuple[str | None, str | None]] = ("post_attention_layernorm", None)
    """Modules of the norms before and after the MLP; None: there is none."""
    qkv_bias: bool = False
    """Whether the projections to queries, keys and values have biases."""
    output_bias: bool = False
    """Whether the output projection of attention has a bias."""
    mlp_bias: bool = False
    """Whether the projections of the MLP have biases."""
    norm_queries_and_keys: bool = False
    """Whether each head of queries and keys is normed."""
    turns_a_part: ClassVar[bool] = False
    """Whether `partial_rotary_factor` is read."""
    embedding_factor: float = 1.0
    """Factor on the rows after the embedding."""
    embedding_factor_is_rounded: ClassVar[bool] = False
    """Whether this factor is rounded to the rows' dtype."""
    residual_factor: float = 1.0
    """Factor on what attention and MLP add to the rows."""

    def sliding_window(self, layer: int) -> int | None:
        """Return the number of keys that a query of this layer sees, or None for all."""
        return None

    def window_by_type(self, layer: int) -> int | None:
        """Return the `sliding_window` of a layer, where the configuration has a type for each."""
        types = ("full_attention", "sliding_attention")
        if (kind := self.config.layer_types[layer]) not in types:
            raise UnsupportedModelError(
                f"layer_types {kind!r} is not supported; supported: {', '.join(types)}"
            )
        window: int | None = self.config.sliding_window if kind == "sliding_attention" else None
        return window

    def rotary_prefix(self, layer: int) -> str | None:
        """Return the prefix of the rotary table that rotates the keys of this layer; None: it
        rotates none.
        """
        return ""

    def query_rotary_prefix(self, layer: int) -> str | None:
        """Return the prefix of the rotary table that rotates the queries of this layer."""
        return self.rotary_prefix(layer)

    def __init__(self, config: "PretrainedConfig") -> None:
        super().__init__(config)
        self._require(self.hidden_act_name, *self.hidden_acts)

    def rotary_tables(self) -> Mapping[str, RotaryTable]:
        return {"": rotary_table(self.config, self.head_dim, of_a_part=self.turns_a_part)}

    def embed(self) -> Graph:
        b = GraphBuilder()
        weight = b.weight(f"{self.embedding_name}.weight", self.vocab_size, self.hidden_size)
        x = b.apply(
            "embedding", self.embedding_name, {"ids": tokens_input(b), "weight": weight}, offset=0
        )
        rounded = self.embedding_factor_is_rounded
        return b.build(scaled(b, "embedding_factor", x, self.embedding_factor, rounded=rounded))

    def block(self, layer: int) -> Graph:
        b = GraphBuilder()
        x, tables = b.rows("x", self.hidden_size), self._angles(b, layer)
        y = self.attend(b, self._normed(b, self.attention_norms[0], x), layer, tables)
        x = self._added(b, "attention", x, self._normed(b, self.attention_norms[1], y))
        y = self.feed_forward(b, self._normed(b, self.mlp_norms[0], x), layer)
        return b.build(self._added(b, "mlp", x, self._normed(b, self.mlp_norms[1], y)))

    def head(self) -> Graph:
        b = GraphBuilder()
        x = self.norm(b, self.norm_name, b.rows("x", self.hidden_size), self.hidden_size)
        return b.build(self.logits(b, b.linear("lm_head", x, self.vocab_size)))

    def queries_keys_values(self, b: GraphBuilder, x: str) -> tuple[str, str, str]:
        """Add the projections, from rows [hidden_size]; return their outputs' names."""
        width, kv_width = self.num_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        q = b.linear("self_attn.q_proj", x, width, bias=self.qkv_bias)
        k = b.linear("self_attn.k_proj", x, kv_width, bias=self.qkv_bias)
        v = b.linear("self_attn.v_proj", x, kv_width, bias=self.qkv_bias)
        if self.norm_queries_and_keys:
            q = self.norm(b, "self_attn.q_norm", q, self.head_dim)
            k = self.norm(b, "self_attn.k_norm", k, self.head_dim)
        return q, k, v

    def attention(self, b: GraphBuilder, q: str, k: str, v: str, layer: int) -> str:
        """Add attention itself; return its output's name."""
        return self._attention(b, q, k, v, self.sliding_window(layer))

    def feed_forward(self, b: GraphBuilder, x: str, layer: int) -> str:
        """Add the MLP, or what a block has instead; return its output's name."""
        return self.mlp(b, x)

    def mlp(self, b: GraphBuilder, x: str) -> str:
        """Add the block's MLP, from rows [hidden_size] to rows [hidden_size]; return its output's
        name.
        """
        gate = b.linear("mlp.gate_proj", x, self.config.intermediate_size, bias=self.mlp_bias)
        up = b.linear("mlp.up_proj", x, self.config.intermediate_size, bias=self.mlp_bias)
        return b.linear(
            "mlp.down_proj", self.gated(b, gate, up), self.hidden_size, bias=self.mlp_bias
        )

    def gated(self, b: GraphBuilder, gate: str, up: str, module: str = "mlp") -> str:
        """Add activation(gate) * up; return its output's name. module: prefix of the nodes."""
        name: str = getattr(self.config, self.hidden_act_name)
        if name == "silu":
            return b.apply("silu_mul", f"{module}.act", {"gate": gate, "up": up})
        return b.apply(
            "mul",
            f"{module}.gated",
            {"x": up, "factor": activation(b, f"{module}.act", name, gate)},
            per_row=True,
        )

    def norm(self, b: GraphBuilder, name: str, x: str, features: int) -> str:
        """Add a norm of rows [features] or of their heads [features]; return its output's name."""
        weight = b.weight(f"{name}.weight", features)
        return b.apply("rms_norm", name, {"x": x, "weight": weight}, eps=self.config.rms_norm_eps)

    def logits(self, b: GraphBuilder, logits: str) -> str:
        """Add what follows the head's products; return its output's name."""
        return logits

    def attend(
        self, b: GraphBuilder, x: str, layer: int, tables: Mapping[str, tuple[str, str]]
    ) -> str:
        """Add attention with its projections, from rows [hidden_size] to rows [hidden_size]; return
        its output's name.

        Args:
            tables: Names of the angles' constants, by the prefix of the rotary table.
        """
        q, k, v = self.queries_keys_values(b, x)
        if (prefix := self.query_rotary_prefix(layer)) is not None:
            q = rotated(b, "rope_q", q, tables[prefix], self.head_dim)
        if (prefix := self.rotary_prefix(layer)) is not None:
            k = rotated(b, "rope_k", k, tables[prefix], self.head_dim)
        y = self.attention(b, q, k, v, layer)
        return b.linear("self_attn.o_proj", y, self.hidden_size, bias=self.output_bias)

    def _angles(self, b: GraphBuilder, layer: int) -> dict[str, tuple[str, str]]:
        """Declare the constants of the rotary tables that a block uses."""
        prefixes = dict.fromkeys((self.rotary_prefix(layer), self.query_rotary_prefix(layer)))
        return {
            prefix: angles(b, self._num_rotated[prefix], prefix)
            for prefix in prefixes
            if prefix is not None
        }

    @cached_property
    def _num_rotated(self) -> dict[str, int]:
        """Return the number of features of a head that each table rotates."""
        return {
            prefix: 2 * len(table.inverse_frequencies)
            for prefix, table in self.rotary_tables().items()
        }

    def _normed(self, b: GraphBuilder, name: str | None, x: str) -> str:
        return x if name is None else self.norm(b, name, x, self.hidden_size)

    def _added(self, b: GraphBuilder, what: str, x: str, y: str) -> str:
        y = scaled(b, f"{what}_factor", y, self.residual_factor)
        return b.apply("add", f"{what}_residual", {"a": x, "b": y})

"""What Llama and its relatives share: RMS norms before attention and a gated MLP, rotary positions, grouped key
heads.
"""

from typing import TYPE_CHECKING, ClassVar

from coserve.graph.ir import Graph, GraphBuilder
from coserve.models.base import Architecture, tokens_input
from coserve.models.rope import RotaryTable, rotary_table

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class RotaryDecoder(Architecture):
    """A family says how it differs: biases, norms on queries and keys, sliding windows by layer, or another `norm` or
    `mlp`.
    """

    hidden_acts: ClassVar[tuple[str, ...]] = ("silu",)
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    norm_queries_and_keys: bool = False

    def sliding_window(self, layer: int) -> int | None:
        """Number of keys that a query of this layer sees, or None for all."""
        return None

    def __init__(self, config: "PretrainedConfig") -> None:
        super().__init__(config)
        self._require("hidden_act", *self.hidden_acts)

    def rotary_table(self) -> RotaryTable:
        return rotary_table(self.config, self.head_dim)

    def embed(self) -> Graph:
        b = GraphBuilder()
        weight = b.weight(f"{self.embedding_name}.weight", self.vocab_size, self.hidden_size)
        return b.build(b.apply("embedding", self.embedding_name, {"ids": tokens_input(b), "weight": weight}, offset=0))

    def block(self, layer: int) -> Graph:
        b = GraphBuilder()
        x = b.rows("x", self.hidden_size)
        cos, sin = b.constant("cos", self.head_dim), b.constant("sin", self.head_dim)
        width, kv_width = self.num_heads * self.head_dim, self.num_key_value_heads * self.head_dim

        h = self.norm(b, "input_layernorm", x, self.hidden_size)
        q = b.linear("self_attn.q_proj", h, width, bias=self.qkv_bias)
        k = b.linear("self_attn.k_proj", h, kv_width, bias=self.qkv_bias)
        v = b.linear("self_attn.v_proj", h, kv_width, bias=self.qkv_bias)
        if self.norm_queries_and_keys:
            q = self.norm(b, "self_attn.q_norm", q, self.head_dim)
            k = self.norm(b, "self_attn.k_norm", k, self.head_dim)
        q = b.apply("rope", "rope_q", {"x": q, "cos": cos, "sin": sin})
        k = b.apply("rope", "rope_k", {"x": k, "cos": cos, "sin": sin})
        y = self._attention(b, q, k, v, self.sliding_window(layer))
        y = b.linear("self_attn.o_proj", y, self.hidden_size, bias=self.output_bias)
        x = b.apply("add", "attention_residual", {"a": x, "b": y})

        h = self.norm(b, "post_attention_layernorm", x, self.hidden_size)
        return b.build(b.apply("add", "mlp_residual", {"a": x, "b": self.mlp(b, h)}))

    def head(self) -> Graph:
        b = GraphBuilder()
        x = self.norm(b, "model.norm", b.rows("x", self.hidden_size), self.hidden_size)
        return b.build(b.linear("lm_head", x, self.vocab_size))

    def mlp(self, b: GraphBuilder, x: str) -> str:
        """Add the block's MLP, from rows [hidden_size] to rows [hidden_size]; its output's name."""
        gate = b.linear("mlp.gate_proj", x, self.config.intermediate_size, bias=self.mlp_bias)
        up = b.linear("mlp.up_proj", x, self.config.intermediate_size, bias=self.mlp_bias)
        y = b.apply("silu_mul", "mlp.act", {"gate": gate, "up": up})
        return b.linear("mlp.down_proj", y, self.hidden_size, bias=self.mlp_bias)

    def norm(self, b: GraphBuilder, name: str, x: str, features: int) -> str:
        """Add a norm of rows [features], or of each of their heads [features]; its output's name."""
        weight = b.weight(f"{name}.weight", features)
        return b.apply("rms_norm", name, {"x": x, "weight": weight}, eps=self.config.rms_norm_eps)

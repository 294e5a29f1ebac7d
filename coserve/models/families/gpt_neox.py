"""GPT-NeoX (and Pythia): attention and MLP side by side, rotary positions on a part of each head, a
fused projection in which queries, keys and values of a head stand together. Source: arXiv
2204.06745.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from coserve.graph.ir import Graph, GraphBuilder
from coserve.models.base import HEAD, Architecture
from coserve.models.pieces import ACTIVATIONS, activation, added, angles, layer_norm, rotated
from coserve.models.rope import RotaryTable, rotary_table
from coserve.models.stored import AsItIs, Stored

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class GptNeox(Architecture):
    """A GPT-NeoX."""

    embedding_name = "gpt_neox.embed_in"
    block_prefix = "gpt_neox.layers"
    unread = r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"

    def __init__(self, config: "PretrainedConfig") -> None:
        super().__init__(config)
        self._require("hidden_act", *ACTIVATIONS)

    def stored_as(self, name: str) -> Stored:
        return AsItIs("embed_out.weight" if name == HEAD else name)

    def rotary_tables(self) -> Mapping[str, RotaryTable]:
        return {"": rotary_table(self.config, self.head_dim, of_a_part=True)}

    def block(self, layer: int) -> Graph:
        b, config, eps = GraphBuilder(), self.config, self.config.layer_norm_eps
        x = b.rows("x", self.hidden_size)
        table = angles(b, 2 * len(self.rotary_tables()[""].inverse_frequencies))

        h = layer_norm(b, "input_layernorm", x, eps)
        h = b.linear(
            "attention.query_key_value", h, 3 * self.hidden_size, bias=config.attention_bias
        )
        each = {f"attention.{part}": self.head_dim for part in ("query", "key", "value")}
        q, k, v = b.split(h, each, groups=self.num_heads)
        q, k = (
            rotated(b, f"rope_{name}", y, table, self.head_dim) for name, y in (("q", q), ("k", k))
        )
        y = b.linear(
            "attention.dense",
            self._attention(b, q, k, v),
            self.hidden_size,
            bias=config.attention_bias,
        )
        if not config.use_parallel_residual:
            x = added(b, "attention_residual", x, y)

        h = layer_norm(b, "post_attention_layernorm", x, eps)
        h = b.linear("mlp.dense_h_to_4h", h, config.intermediate_size, bias=True)
        h = b.linear(
            "mlp.dense_4h_to_h",
            activation(b, "mlp.act", config.hidden_act, h),
            self.hidden_size,
            bias=True,
        )
        return b.build(
            added(b, "residual", h, y, x)
            if config.use_parallel_residual
            else added(b, "residual", h, x)
        )

    def head(self) -> Graph:
        b = GraphBuilder()
        x = layer_norm(
            b,
            "gpt_neox.final_layer_norm",
            b.rows("x", self.hidden_size),
            self.config.layer_norm_eps,
        )
        return b.build(b.linear("lm_head", x, self.vocab_size))

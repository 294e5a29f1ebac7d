"""MPT: ALiBi, norms and projections without biases, one fused projection. Source:
https://www.databricks.com/blog/mpt-7b.
"""

from math import ceil, log2
from typing import TYPE_CHECKING

from coserve.errors import UnsupportedModelError
from coserve.graph.ir import Graph, GraphBuilder
from coserve.models.base import Architecture
from coserve.models.pieces import activation, added, layer_norm

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Settings that transformers does not read: it runs every model as if they had these values.
_NOT_READ = {
    "attn_type": "multihead_attention",
    "alibi": True,
    "alibi_bias_max": 8,
    "qk_ln": False,
    "prefix_lm": False,
}


class Mpt(Architecture):
    """An MPT."""

    embedding_name = "transformer.wte"
    block_prefix = "transformer.blocks"
    max_positions_name = "max_seq_len"

    def __init__(self, config: "PretrainedConfig") -> None:
        super().__init__(config)
        self._require("no_bias", True)
        for setting, value in _NOT_READ.items():
            if (found := getattr(config.attn_config, setting)) != value:
                raise UnsupportedModelError(
                    f"mpt with {setting}={found!r} is not supported; {setting} must be {value}"
                )

    def block(self, layer: int) -> Graph:
        b, eps, width = GraphBuilder(), self.config.layer_norm_epsilon, self.hidden_size
        attention = self.config.attn_config
        x = b.rows("x", width)

        h = b.linear("attn.Wqkv", layer_norm(b, "norm_1", x, eps, bias=False), 3 * width)
        if attention.clip_qkv:
            h = b.apply("clamp", "attn.clip", {"x": h}, most=attention.clip_qkv)
        q, k, v = b.split(h, {"attn.query": width, "attn.key": width, "attn.value": width})
        scale = self.head_dim**-0.5 if attention.softmax_scale is None else attention.softmax_scale
        y = b.linear(
            "attn.out_proj",
            self._attention(b, q, k, v, scale=scale, alibi_slopes=_slopes(self.num_heads)),
            width,
        )
        x = added(b, "attention_residual", x, y)

        h = b.linear("ffn.up_proj", layer_norm(b, "norm_2", x, eps, bias=False), 4 * width)
        h = b.linear("ffn.down_proj", activation(b, "ffn.act", "gelu", h), width)
        return b.build(added(b, "mlp_residual", x, h))

    def head(self) -> Graph:
        b = GraphBuilder()
        eps = self.config.layer_norm_epsilon
        x = layer_norm(b, "transformer.norm_f", b.rows("x", self.hidden_size), eps, bias=False)
        return b.build(b.linear("lm_head", x, self.vocab_size))


def _slopes(num_heads: int) -> tuple[float, ...]:
    """Return MPT's slopes of ALiBi: those of the next power of two, every second one first."""
    power = 2 ** ceil(log2(num_heads))
    slopes = [2 ** -(8 * (head + 1) / power) for head in range(power)]
    return tuple(slopes if power == num_heads else (slopes[1::2] + slopes[::2])[:num_heads])

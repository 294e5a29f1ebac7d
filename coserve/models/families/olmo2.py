"""OLMo 2: norms after attention and after the MLP alone, and norms of all queries, and of all keys,
of a row together. Source: arXiv 2501.00656.
"""

from typing import TYPE_CHECKING

from coserve.graph.ir import GraphBuilder
from coserve.models.rotary_decoder import RotaryDecoder

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Olmo2(RotaryDecoder):
    """An OLMo 2."""

    attention_norms = (None, "post_attention_layernorm")
    mlp_norms = (None, "post_feedforward_layernorm")

    def __init__(self, config: "PretrainedConfig") -> None:
        super().__init__(config)
        self.qkv_bias = self.output_bias = bool(config.attention_bias)

    def queries_keys_values(self, b: GraphBuilder, x: str) -> tuple[str, str, str]:
        q, k, v = super().queries_keys_values(b, x)
        q = self.norm(b, "self_attn.q_norm", q, b.width(q))
        return q, self.norm(b, "self_attn.k_norm", k, b.width(k)), v

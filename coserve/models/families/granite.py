"""Granite 3 and 4 (dense): Llama with factors on embeddings, scores, residuals and logits."""

from typing import TYPE_CHECKING

from coserve.graph.ir import GraphBuilder
from coserve.models.pieces import scaled
from coserve.models.rotary_decoder import RotaryDecoder

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Granite(RotaryDecoder):
    """A dense Granite."""

    def __init__(self, config: "PretrainedConfig") -> None:
        super().__init__(config)
        self.qkv_bias = self.output_bias = bool(config.attention_bias)
        self.mlp_bias = bool(config.mlp_bias)
        self.embedding_factor = config.embedding_multiplier
        self.residual_factor = config.residual_multiplier

    def attention(self, b: GraphBuilder, q: str, k: str, v: str, layer: int) -> str:
        return self._attention(b, q, k, v, scale=self.config.attention_multiplier)

    def logits(self, b: GraphBuilder, logits: str) -> str:
        return scaled(b, "logits_factor", logits, 1 / self.config.logits_scaling)

"""Llama 2, 3, 3.1 to 3.3, and models of that shape (SmolLM2)."""

from typing import TYPE_CHECKING

from coserve.models.rotary_decoder import RotaryDecoder

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Llama(RotaryDecoder):
    """A Llama."""

    def __init__(self, config: "PretrainedConfig") -> None:
        super().__init__(config)
        self.qkv_bias = self.output_bias = bool(config.attention_bias)
        self.mlp_bias = bool(config.mlp_bias)

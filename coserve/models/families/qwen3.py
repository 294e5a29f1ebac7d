"""Qwen3: Qwen2 without its biases, and with an RMS norm on every query and key head."""

from typing import TYPE_CHECKING

from coserve.models.families.qwen2 import Qwen2

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Qwen3(Qwen2):
    """A dense Qwen3."""

    norm_queries_and_keys = True

    def __init__(self, config: "PretrainedConfig") -> None:
        super().__init__(config)
        self.qkv_bias = self.output_bias = bool(config.attention_bias)

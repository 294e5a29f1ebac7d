"""SmolLM3: Llama, with layers that have no rotary positions. Source: arXiv 2501.18795 (NoPE on
every fourth layer).
"""

from typing import TYPE_CHECKING

from coserve.models.rotary_decoder import RotaryDecoder

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Smollm3(RotaryDecoder):
    """A SmolLM3."""

    def __init__(self, config: "PretrainedConfig") -> None:
        super().__init__(config)
        self.qkv_bias = self.output_bias = bool(config.attention_bias)
        self.mlp_bias = bool(config.mlp_bias)

    def sliding_window(self, layer: int) -> int | None:
        return self.window_by_type(layer)

    def rotary_prefix(self, layer: int) -> str | None:
        return "" if self.config.no_rope_layers[layer] else None

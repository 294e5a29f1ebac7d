"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and sliding windows on the layers that say so."""

from coserve.errors import UnsupportedModelError
from coserve.models.rotary_decoder import RotaryDecoder


class Qwen2(RotaryDecoder):
    qkv_bias = True

    def sliding_window(self, layer: int) -> int | None:
        kind = self.config.layer_types[layer]
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(
                f"layer_types {kind!r} is not supported; supported: full_attention, sliding_attention"
            )
        slides = kind == "sliding_attention"
        window: int | None = self.config.sliding_window if slides else None
        return window

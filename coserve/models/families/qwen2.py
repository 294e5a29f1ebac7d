"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and sliding windows on the
layers that say so.
"""

from coserve.models.rotary_decoder import RotaryDecoder


class Qwen2(RotaryDecoder):
    """A Qwen2 or Qwen2.5."""

    qkv_bias = True

    def sliding_window(self, layer: int) -> int | None:
        return self.window_by_type(layer)

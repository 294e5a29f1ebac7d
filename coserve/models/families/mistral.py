"""Mistral: Llama with an optional sliding window on every layer."""

from coserve.models.rotary_decoder import RotaryDecoder


class Mistral(RotaryDecoder):
    """A Mistral."""

    def sliding_window(self, layer: int) -> int | None:
        window: int | None = self.config.sliding_window
        return window

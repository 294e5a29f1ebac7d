"""Ministral (8B, 2410): Mistral with sliding windows on the layers that say so."""

from coserve.models.rotary_decoder import RotaryDecoder


class Ministral(RotaryDecoder):
    """A Ministral."""

    def sliding_window(self, layer: int) -> int | None:
        return self.window_by_type(layer)

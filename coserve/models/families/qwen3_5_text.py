"""Qwen3.5, its text models: gated delta layers (linear attention, whose state has a fixed size)
with gated attention on every fourth layer; rotary positions on a part of each head, norms whose
weights are stored less one. Source: arXiv 2412.06464 (the gated delta rule).
"""

from coserve.models.gated_delta_decoder import GatedDeltaDecoder


class Qwen35Text(GatedDeltaDecoder):
    """A text model of Qwen3.5."""

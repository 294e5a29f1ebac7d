"""Qwen3.5's mixtures of experts, their text models: Qwen3.5 with experts in place of the MLP, one of them shared by all
rows.
"""

from coserve.models.families.qwen3_moe import Qwen3Moe
from coserve.models.gated_delta_decoder import GatedDeltaDecoder


class Qwen35MoeText(GatedDeltaDecoder, Qwen3Moe):
    depends_on = f"{GatedDeltaDecoder.depends_on}, and {Qwen3Moe.depends_on}"

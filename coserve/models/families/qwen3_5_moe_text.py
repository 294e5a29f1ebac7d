"""Qwen3.5's mixtures of experts, their text models: Qwen3.5 with experts in place of the MLP, one
of them shared by all rows.
"""

from typing import TYPE_CHECKING

from coserve.graph.ir import GraphBuilder
from coserve.models.families.qwen3_moe import Qwen3Moe
from coserve.models.gated_delta_decoder import GatedDeltaDecoder

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Qwen35MoeText(GatedDeltaDecoder, Qwen3Moe):
    """A text model of Qwen3.5 with experts."""

    has_shared_expert = True
    depends_on = f"{GatedDeltaDecoder.depends_on}, and {Qwen3Moe.depends_on}"

    def __init__(self, config: "PretrainedConfig") -> None:
        super().__init__(config)
        self.all_scores = False  # transformers does not read norm_topk_prob of this family

    def feed_forward(self, b: GraphBuilder, x: str, layer: int) -> str:
        """Add the experts, which all blocks have: of this family, transformers does not read which
        blocks have none.
        """
        return self.experts(b, x)

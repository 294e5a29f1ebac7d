"""Mixtral: Mistral with experts in place of the MLP. Source: arXiv 2401.04088."""

from typing import TYPE_CHECKING

from coserve.graph.ir import GraphBuilder
from coserve.models.mixture import MixtureDecoder
from coserve.models.stored import AsItIs, PerExpert, Stored

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Names in checkpoints, by the names of the fused weights here.
_EXPERTS = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}


class Mixtral(MixtureDecoder):
    """A Mixtral."""

    def __init__(self, config: "PretrainedConfig") -> None:
        super().__init__(config)
        self.num_experts = config.num_local_experts
        self.experts_per_row = config.num_experts_per_tok
        self.expert_width = config.intermediate_size
        self.check_experts()

    def sliding_window(self, layer: int) -> int | None:
        window: int | None = self.config.sliding_window
        return window

    def feed_forward(self, b: GraphBuilder, x: str, layer: int) -> str:
        return self.experts(b, x)

    def stored_as(self, name: str) -> Stored:
        block, _, rest = name.partition(".mlp.")
        if not rest:
            return AsItIs(name)
        block += ".block_sparse_moe."
        if not rest.startswith("experts."):
            return AsItIs(block + rest)
        parts = _EXPERTS[rest.split(".")[1]]
        return PerExpert(
            tuple(f"{block}experts.{{}}.{part}.weight" for part in parts), self.num_experts
        )

"""Qwen3's mixtures of experts (30B-A3B, 235B-A22B, Coder): Qwen3 with experts in the blocks that
have them. Source: arXiv 2505.09388.
"""

from typing import TYPE_CHECKING, ClassVar

from coserve.graph.ir import GraphBuilder
from coserve.models.mixture import MixtureDecoder
from coserve.models.stored import AsItIs, PerExpert, Stored

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Names in checkpoints, by the names of the fused weights here.
_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class Qwen3Moe(MixtureDecoder):
    """A Qwen3 with experts."""

    norm_queries_and_keys = True
    has_shared_expert: ClassVar[bool] = False
    """Whether the configuration's width of a shared expert is read: Qwen3's own models have none,
    whatever it says.
    """

    def __init__(self, config: "PretrainedConfig") -> None:
        super().__init__(config)
        self.qkv_bias = self.output_bias = bool(config.attention_bias)
        self.num_experts, self.experts_per_row = config.num_experts, config.num_experts_per_tok
        self.expert_width = config.moe_intermediate_size
        self.all_scores = not getattr(config, "norm_topk_prob", True)
        self.shared_width = config.shared_expert_intermediate_size if self.has_shared_expert else 0
        self.check_experts()

    def sliding_window(self, layer: int) -> int | None:
        window: int | None = (
            self.config.sliding_window
            if getattr(self.config, "use_sliding_window", False)
            else None
        )
        return window

    def feed_forward(self, b: GraphBuilder, x: str, layer: int) -> str:
        dense_layers = getattr(self.config, "mlp_only_layers", None) or ()
        every = getattr(self.config, "decoder_sparse_step", 1)
        if layer in dense_layers or (layer + 1) % every:
            return self.mlp(b, x)
        return self.experts(b, x)

    def stored_as(self, name: str) -> Stored:
        block, _, rest = name.partition(".mlp.experts.")
        if not rest:
            return AsItIs(name)
        module, experts = rest.split(".")[0], f"{block}.mlp.experts"
        patterns = tuple(f"{experts}.{{}}.{part}.weight" for part in _EXPERTS[module])
        return PerExpert(patterns, self.num_experts, whole=f"{experts}.{module}")

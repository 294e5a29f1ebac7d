"""gpt-oss: experts with clamped gates, gate and up interleaved; a sink for each head; sliding
windows on every second layer. Source: arXiv 2508.10925.
"""

from typing import TYPE_CHECKING

from coserve.graph.ir import GraphBuilder
from coserve.models.mixture import MixtureDecoder
from coserve.models.stored import AsItIs, Stored, Transposed

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class GptOss(MixtureDecoder):
    """A gpt-oss."""

    router = "mlp.router"
    router_bias = expert_bias = True

    def __init__(self, config: "PretrainedConfig") -> None:
        super().__init__(config)
        self.qkv_bias = self.output_bias = bool(config.attention_bias)
        self.num_experts = config.num_local_experts
        self.experts_per_row = config.num_experts_per_tok
        self.expert_width = config.intermediate_size
        self.check_experts()

    def sliding_window(self, layer: int) -> int | None:
        return self.window_by_type(layer)

    def attention(self, b: GraphBuilder, q: str, k: str, v: str, layer: int) -> str:
        sinks = b.weight("self_attn.sinks", self.num_heads)
        return self._attention(b, q, k, v, self.sliding_window(layer), sinks=sinks)

    def feed_forward(self, b: GraphBuilder, x: str, layer: int) -> str:
        return self.experts(b, x)

    def expert_gate(self, b: GraphBuilder, fused: str) -> str:
        each = {"mlp.experts.gate": 1, "mlp.experts.up": 1}
        gate, up = b.split(fused, each, groups=self.experts_per_row * self.expert_width)
        limit, alpha = self.config.swiglu_limit, self.config.swiglu_alpha
        return b.apply(
            "clamped_swiglu", "mlp.experts.act", {"gate": gate, "up": up}, limit=limit, alpha=alpha
        )

    def stored_as(self, name: str) -> Stored:
        block, _, rest = name.partition(".mlp.experts.")
        if not rest:
            return AsItIs(name)
        module, _, kind = rest.partition(".")
        return (
            Transposed(f"{block}.mlp.experts.{module}")
            if kind == "weight"
            else AsItIs(f"{name.removesuffix('.bias')}_bias")
        )

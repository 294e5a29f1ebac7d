"""Phi-3, Phi-3.5 and Phi-4 (with and without mini): Llama with fused projections, and rotary
positions on a part of each head. Source: arXiv 2404.14219.
"""

from typing import TYPE_CHECKING

from coserve.graph.ir import GraphBuilder
from coserve.models.rotary_decoder import RotaryDecoder

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Phi3(RotaryDecoder):
    """A Phi-3, Phi-3.5 or Phi-4."""

    turns_a_part = True

    def __init__(self, config: "PretrainedConfig") -> None:
        super().__init__(config)
        self._intermediate: int = config.intermediate_size

    def sliding_window(self, layer: int) -> int | None:
        window: int | None = self.config.sliding_window
        return window

    def queries_keys_values(self, b: GraphBuilder, x: str) -> tuple[str, str, str]:
        kv_width = self.num_key_value_heads * self.head_dim
        widths = {"query": self.num_heads * self.head_dim, "key": kv_width, "value": kv_width}
        fused = b.linear("self_attn.qkv_proj", x, sum(widths.values()))
        q, k, v = b.split(fused, {f"self_attn.{name}": width for name, width in widths.items()})
        return q, k, v

    def mlp(self, b: GraphBuilder, x: str) -> str:
        fused = b.linear("mlp.gate_up_proj", x, 2 * self._intermediate)
        gate, up = b.split(fused, {"mlp.gate": self._intermediate, "mlp.up": self._intermediate})
        return b.linear("mlp.down_proj", self.gated(b, gate, up), self.hidden_size)

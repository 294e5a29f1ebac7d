"""Qwen3-Next (80B-A3B): gated delta layers with gated attention on every fourth layer, and experts
in place of the MLP, one of them shared by all rows; the projections into a gated delta layer are
fused, by key heads.
"""

from coserve.graph.ir import GraphBuilder
from coserve.models.families.qwen3_moe import Qwen3Moe
from coserve.models.gated_delta_decoder import GatedDeltaDecoder


class Qwen3Next(GatedDeltaDecoder, Qwen3Moe):
    """A Qwen3-Next."""

    has_shared_expert = True
    depends_on = f"{GatedDeltaDecoder.depends_on}, and {Qwen3Moe.depends_on}"

    def delta_projections(self, b: GraphBuilder, x: str) -> tuple[str, str, str, str]:
        """Add the fused projections and take them apart: each key head is followed by the values,
        gates and all else of its value heads.
        """
        config = self.config
        groups, num_heads = config.linear_num_key_heads, config.linear_num_value_heads
        shared = num_heads // groups
        key, value = config.linear_key_head_dim, shared * config.linear_value_head_dim
        layout = {"groups": groups, "of": 2 * key + 2 * value}
        fused = b.linear("linear_attn.in_proj_qkvz", x, groups * layout["of"])
        qkv = b.apply(
            "regroup", "linear_attn.qkv", {"x": fused}, start=0, widths=(key, key, value), **layout
        )
        z = b.apply(
            "columns", "linear_attn.z", {"x": fused}, start=2 * key + value, width=value, **layout
        )
        gates = b.linear("linear_attn.in_proj_ba", x, 2 * num_heads)
        beta, decay = b.split(
            gates, {"linear_attn.b": shared, "linear_attn.a": shared}, groups=groups
        )
        return qkv, beta, decay, z

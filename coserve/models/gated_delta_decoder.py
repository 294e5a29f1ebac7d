"""The decoder of Qwen3-Next and Qwen3.5: gated delta layers (linear attention, whose state has a
fixed size) beside gated attention, rotary positions on a part of each head, and norms whose weights
are stored less one. Source: arXiv 2412.06464 (the gated delta rule).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from coserve.errors import UnsupportedModelError
from coserve.graph.ir import GraphBuilder
from coserve.models.rotary_decoder import RotaryDecoder
from coserve.settings import is_whole

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_LINEAR, _FULL = "linear_attention", "full_attention"


class GatedDeltaDecoder(RotaryDecoder):
    """A decoder with gated delta layers. A family may have other projections into these:
    `delta_projections`.
    """

    depends_on = "how its prompts are cut, in gated delta layers"
    norm_queries_and_keys = True
    turns_a_part = True
    # Layers that predict the token after the next one.
    unread = rf"{RotaryDecoder.unread}|mtp\..*"

    def __init__(self, config: "PretrainedConfig") -> None:
        super().__init__(config)
        self.qkv_bias = self.output_bias = bool(config.attention_bias)
        self._check_layers()

    def rotary_prefix(self, layer: int) -> str | None:
        # Gated delta layers have no positions: their state carries the order.
        return "" if self.config.layer_types[layer] == _FULL else None

    def attend(
        self, b: GraphBuilder, x: str, layer: int, tables: Mapping[str, tuple[str, str]]
    ) -> str:
        return (
            super().attend(b, x, layer, tables)
            if self.config.layer_types[layer] == _FULL
            else self._delta(b, x)
        )

    def queries_keys_values(self, b: GraphBuilder, x: str) -> tuple[str, str, str]:
        """Add the projections; each query head is followed by its gate."""
        kv_width, heads = self.num_key_value_heads * self.head_dim, self.num_heads
        fused = b.linear("self_attn.q_proj", x, 2 * heads * self.head_dim, bias=self.qkv_bias)
        k = b.linear("self_attn.k_proj", x, kv_width, bias=self.qkv_bias)
        v = b.linear("self_attn.v_proj", x, kv_width, bias=self.qkv_bias)
        widths = {"self_attn.query": self.head_dim, "self_attn.gate": self.head_dim}
        # The gates keep their name, by which `attention` finds them.
        q, _ = b.split(fused, widths, groups=heads)
        q, k = (
            self.norm(b, name, rows, self.head_dim)
            for name, rows in (("self_attn.q_norm", q), ("self_attn.k_norm", k))
        )
        return q, k, v

    def attention(self, b: GraphBuilder, q: str, k: str, v: str, layer: int) -> str:
        y = super().attention(b, q, k, v, layer)
        return b.apply("sigmoid_mul", "self_attn.gated", {"gate": "self_attn.gate", "x": y})

    def norm(self, b: GraphBuilder, name: str, x: str, features: int) -> str:
        weight = b.weight(f"{name}.weight", features)
        return b.apply(
            "rms_norm",
            name,
            {"x": x, "weight": weight},
            eps=self.config.rms_norm_eps,
            plus_one=True,
        )

    def delta_projections(self, b: GraphBuilder, x: str) -> tuple[str, str, str, str]:
        """Add the projections into a gated delta layer, from rows [hidden_size].

        Returns:
            Names of queries, keys and values (one tensor), of both gates (b, a), and of the
            output's gate (z).
        """
        config = self.config
        num_heads, width = config.linear_num_value_heads, config.linear_value_head_dim
        qkv = b.linear("linear_attn.in_proj_qkv", x, self.num_channels)
        beta, decay = (b.linear(f"linear_attn.in_proj_{name}", x, num_heads) for name in "ba")
        return qkv, beta, decay, b.linear("linear_attn.in_proj_z", x, num_heads * width)

    @property
    def num_channels(self) -> int:
        """Return the number of channels of queries, keys and values of a gated delta layer
        together.
        """
        config = self.config
        keys, values = config.linear_num_key_heads, config.linear_num_value_heads
        return int(2 * keys * config.linear_key_head_dim + values * config.linear_value_head_dim)

    def _delta(self, b: GraphBuilder, x: str) -> str:
        config = self.config
        num_heads, width = config.linear_num_value_heads, config.linear_value_head_dim
        qkv, beta, decay, z = self.delta_projections(b, x)
        rows = {"x": qkv, "b": beta, "a": decay}
        weights = {
            "conv": b.weight(
                "linear_attn.conv1d.weight", self.num_channels, 1, config.linear_conv_kernel_dim
            ),
            "a_log": b.weight("linear_attn.A_log", num_heads),
            "dt_bias": b.weight("linear_attn.dt_bias", num_heads),
        }
        y = b.apply(
            "gated_delta",
            "linear_attn.delta",
            rows | weights,
            num_key_heads=config.linear_num_key_heads,
            num_value_heads=num_heads,
            key_dim=config.linear_key_head_dim,
            value_dim=width,
            kernel_size=config.linear_conv_kernel_dim,
        )
        # Unlike the other norms, this weight is stored as it is, not less one.
        norm = {"x": y, "weight": b.weight("linear_attn.norm.weight", width)}
        y = b.apply("rms_norm", "linear_attn.norm", norm, eps=config.rms_norm_eps)
        # The gated norm of Qwen3-Next: the norm of each head, times silu(z).
        y = b.apply("silu_mul", "linear_attn.gated", {"gate": z, "up": y})
        return b.linear("linear_attn.out_proj", y, self.hidden_size)

    def _check_layers(self) -> None:
        config, types = self.config, self.config.layer_types
        if len(types) != self.num_layers or not {_FULL} <= {*types} <= {_FULL, _LINEAR}:
            raise UnsupportedModelError(
                f"layer_types must say {_LINEAR} or {_FULL} of each of the {self.num_layers} "
                f"layers, and the latter of "
                f"one at least, not {types}"
            )
        names = [
            f"linear_{name}"
            for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        ]
        for name in (*names, "linear_conv_kernel_dim"):
            if not is_whole(size := getattr(config, name), 1):
                raise UnsupportedModelError(
                    f"{name}={size!r} is not valid; it must be a whole number of at least 1"
                )
        # Each key head serves as many value heads.
        if config.linear_num_value_heads % config.linear_num_key_heads:
            raise UnsupportedModelError(
                f"linear_num_value_heads={config.linear_num_value_heads} must be a multiple of "
                f"linear_num_key_heads={config.linear_num_key_heads}"
            )

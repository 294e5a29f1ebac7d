"""Gemma 2: norms before and after attention and MLP, whose weights are stored less one; soft caps
on scores and logits; sliding windows on every second layer. Source: arXiv 2408.00118.
"""

from math import sqrt
from typing import TYPE_CHECKING, ClassVar

from coserve.graph.ir import GraphBuilder
from coserve.models.rotary_decoder import RotaryDecoder

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Gemma2(RotaryDecoder):
    """A Gemma 2."""

    hidden_acts = ("gelu_pytorch_tanh", "gelu")
    hidden_act_name = "hidden_activation"
    attention_norms = ("input_layernorm", "post_attention_layernorm")
    mlp_norms = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
    embedding_factor_is_rounded = True
    caps_scores: ClassVar[bool] = True
    """Whether the configuration's soft cap on attention scores is read."""
    caps_logits: ClassVar[bool] = True
    """Whether the configuration's soft cap on logits is read."""

    def __init__(self, config: "PretrainedConfig") -> None:
        super().__init__(config)
        self._require("use_bidirectional_attention", False, None)
        self.qkv_bias = self.output_bias = bool(config.attention_bias)
        self.embedding_factor = sqrt(self.hidden_size)

    @property
    def embedded(self) -> str:
        """Return the node after the scaling, which the module of the embeddings does itself (in
        other families, such as Granite, the model scales its input).
        """
        return self.graphs["embed"].nodes[-1].name

    def sliding_window(self, layer: int) -> int | None:
        return self.window_by_type(layer)

    def attention(self, b: GraphBuilder, q: str, k: str, v: str, layer: int) -> str:
        cap = self.config.attn_logit_softcapping if self.caps_scores else None
        extra = {} if cap is None else {"soft_cap": cap}
        scale = self.config.query_pre_attn_scalar**-0.5
        return self._attention(b, q, k, v, self.sliding_window(layer), scale=scale, **extra)

    def norm(self, b: GraphBuilder, name: str, x: str, features: int) -> str:
        weight = b.weight(f"{name}.weight", features)
        return b.apply(
            "rms_norm",
            name,
            {"x": x, "weight": weight},
            eps=self.config.rms_norm_eps,
            plus_one=True,
        )

    def logits(self, b: GraphBuilder, logits: str) -> str:
        cap = self.config.final_logit_softcapping if self.caps_logits else None
        return logits if cap is None else b.apply("soft_cap", "logits_cap", {"x": logits}, cap=cap)

"""OPT: LayerNorm, biases, ReLU, learned positions; the norms stand before or (350m) after each half
of a block.
"""

from typing import TYPE_CHECKING

import torch

from coserve.graph.ir import Graph, GraphBuilder
from coserve.models.base import Architecture, tokens_input

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_POSITION_OFFSET = 2  # the first two entries of the checkpoints' position table are unused
_EPS = 1e-5


class Opt(Architecture):
    """An OPT."""

    embedding_name = "model.decoder.embed_tokens"
    block_prefix = "model.decoder.layers"

    def __init__(self, config: "PretrainedConfig") -> None:
        super().__init__(config)
        self._require("activation_function", "relu", "gelu")
        self._require("layer_norm_elementwise_affine", True)
        self._bias: bool = config.enable_bias
        self._norm_first: bool = config.do_layer_norm_before
        self._word_width: int = config.word_embed_proj_dim

    def embed(self) -> Graph:
        b = GraphBuilder()
        words = b.weight(f"{self.embedding_name}.weight", self.vocab_size, self._word_width)
        entries = self.max_positions + _POSITION_OFFSET
        places = b.weight("model.decoder.embed_positions.weight", entries, self.hidden_size)
        ids = b.constant("positions", dtype=torch.int64)
        x = b.apply(
            "embedding", self.embedding_name, {"ids": tokens_input(b), "weight": words}, offset=0
        )
        if self._word_width != self.hidden_size:
            x = b.linear("model.decoder.project_in", x, self.hidden_size)
        position = b.apply(
            "embedding",
            "model.decoder.embed_positions",
            {"ids": ids, "weight": places},
            offset=_POSITION_OFFSET,
        )
        return b.build(b.apply("add", "position_sum", {"a": x, "b": position}))

    def block(self, layer: int) -> Graph:
        b = GraphBuilder()
        x = b.rows("x", self.hidden_size)

        h = self._norm(b, "self_attn_layer_norm", x) if self._norm_first else x
        q, k, v = (
            b.linear(f"self_attn.{name}_proj", h, self.hidden_size, bias=self._bias)
            for name in "qkv"
        )
        y = b.linear(
            "self_attn.out_proj", self._attention(b, q, k, v), self.hidden_size, bias=self._bias
        )
        x = b.apply("add", "attention_residual", {"a": x, "b": y})
        if not self._norm_first:
            x = self._norm(b, "self_attn_layer_norm", x)

        h = self._norm(b, "final_layer_norm", x) if self._norm_first else x
        h = self._activation(b, b.linear("fc1", h, self.config.ffn_dim, bias=self._bias))
        y = b.linear("fc2", h, self.hidden_size, bias=self._bias)
        x = b.apply("add", "mlp_residual", {"a": x, "b": y})
        return b.build(x if self._norm_first else self._norm(b, "final_layer_norm", x))

    def head(self) -> Graph:
        b = GraphBuilder()
        x = b.rows("x", self.hidden_size)
        if self._norm_first and not self.config._remove_final_layer_norm:
            x = self._norm(b, "model.decoder.final_layer_norm", x)
        if self._word_width != self.hidden_size:
            x = b.linear("model.decoder.project_out", x, self._word_width)
        return b.build(b.linear("lm_head", x, self.vocab_size))

    def _norm(self, b: GraphBuilder, name: str, x: str) -> str:
        weight = b.weight(f"{name}.weight", self.hidden_size)
        bias = b.weight(f"{name}.bias", self.hidden_size)
        return b.apply("layer_norm", name, {"x": x, "weight": weight, "bias": bias}, eps=_EPS)

    def _activation(self, b: GraphBuilder, x: str) -> str:
        if self.config.activation_function == "relu":
            return b.apply("relu", "activation", {"x": x})
        return b.apply("gelu", "activation", {"x": x}, approximate="none")

"""GPT-2: LayerNorm, learned positions, one fused projection for queries, keys and values, weights
as [in, out].
"""

from typing import TYPE_CHECKING

import torch

from coserve.graph.ir import Graph, GraphBuilder
from coserve.models.base import Architecture, tokens_input
from coserve.models.pieces import ACTIVATIONS, activation, added, layer_norm
from coserve.models.stored import AsItIs, Stored, Transposed

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Weights that transformers' Conv1D stores transposed.
_TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


class Gpt2(Architecture):
    """A GPT-2."""

    embedding_name = "transformer.wte"
    block_prefix = "transformer.h"
    unread = r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias"

    def __init__(self, config: "PretrainedConfig") -> None:
        super().__init__(config)
        self._require("activation_function", *ACTIVATIONS)
        self._require("add_cross_attention", False)

    def stored_as(self, name: str) -> Stored:
        return Transposed(name) if name.endswith(_TRANSPOSED) else AsItIs(name)

    def embed(self) -> Graph:
        b = GraphBuilder()
        words = b.weight(f"{self.embedding_name}.weight", self.vocab_size, self.hidden_size)
        places = b.weight("transformer.wpe.weight", self.max_positions, self.hidden_size)
        ids = b.constant("positions", dtype=torch.int64)
        x = b.apply(
            "embedding", self.embedding_name, {"ids": tokens_input(b), "weight": words}, offset=0
        )
        position = b.apply("embedding", "transformer.wpe", {"ids": ids, "weight": places}, offset=0)
        return b.build(added(b, "position_sum", x, position))

    def block(self, layer: int) -> Graph:
        b, config, width = GraphBuilder(), self.config, self.hidden_size
        x = b.rows("x", width)
        scale = self.head_dim**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            scale /= layer + 1

        h = layer_norm(b, "ln_1", x, config.layer_norm_epsilon)
        h = b.linear("attn.c_attn", h, 3 * width, bias=True)
        q, k, v = b.split(h, {"attn.query": width, "attn.key": width, "attn.value": width})
        y = b.linear("attn.c_proj", self._attention(b, q, k, v, scale=scale), width, bias=True)
        x = added(b, "attention_residual", x, y)

        h = layer_norm(b, "ln_2", x, config.layer_norm_epsilon)
        h = b.linear("mlp.c_fc", h, config.n_inner or 4 * width, bias=True)
        h = activation(b, "mlp.act", config.activation_function, h)
        return b.build(added(b, "mlp_residual", x, b.linear("mlp.c_proj", h, width, bias=True)))

    def head(self) -> Graph:
        b = GraphBuilder()
        x = layer_norm(
            b, "transformer.ln_f", b.rows("x", self.hidden_size), self.config.layer_norm_epsilon
        )
        return b.build(b.linear("lm_head", x, self.vocab_size))

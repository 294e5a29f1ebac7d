"""GPT-J: attention and MLP side by side after one norm, rotary positions on neighbouring pairs of a
part of each head, a bias on the head.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from coserve.graph.ir import Graph, GraphBuilder
from coserve.models.base import Architecture
from coserve.models.pieces import ACTIVATIONS, activation, added, angles, layer_norm, rotated
from coserve.models.rope import RotaryTable

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Gptj(Architecture):
    """A GPT-J."""

    embedding_name = "transformer.wte"
    block_prefix = "transformer.h"
    unread = r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias"

    def __init__(self, config: "PretrainedConfig") -> None:
        super().__init__(config)
        self._require("activation_function", *ACTIVATIONS)
        self._num_rotated: int = config.rotary_dim or self.head_dim

    def rotary_tables(self) -> Mapping[str, RotaryTable]:
        exponents = torch.arange(0, self._num_rotated, 2, dtype=torch.float32) / self._num_rotated
        return {"": RotaryTable(inverse_frequencies=1.0 / (10000**exponents))}

    def block(self, layer: int) -> Graph:
        b, config, width = GraphBuilder(), self.config, self.hidden_size
        x = b.rows("x", width)
        table = angles(b, self._num_rotated)

        h = layer_norm(b, "ln_1", x, config.layer_norm_epsilon)
        q, k, v = (b.linear(f"attn.{name}_proj", h, width) for name in "qkv")
        q, k = (
            rotated(b, f"rope_{name}", each, table, self.head_dim, interleaved=True)
            for name, each in (("q", q), ("k", k))
        )
        y = b.linear("attn.out_proj", self._attention(b, q, k, v), width)
        h = b.linear("mlp.fc_in", h, config.n_inner or 4 * width, bias=True)
        h = b.linear(
            "mlp.fc_out", activation(b, "mlp.act", config.activation_function, h), width, bias=True
        )
        return b.build(added(b, "residual", y, h, x))

    def head(self) -> Graph:
        b = GraphBuilder()
        x = layer_norm(
            b, "transformer.ln_f", b.rows("x", self.hidden_size), self.config.layer_norm_epsilon
        )
        return b.build(b.linear("lm_head", x, self.vocab_size, bias=True))

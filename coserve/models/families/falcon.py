"""Falcon in its forms: the new decoder (40B, 180B, 11B: key heads in groups, one norm or two in
parallel), the old one (7B: one key head, attention and MLP side by side) and RefinedWeb's (ALiBi,
one after another).

Source: arXiv 2311.16867.
"""

from collections.abc import Mapping
from math import floor, log2
from typing import TYPE_CHECKING, Any

import torch

from coserve.graph.ir import Graph, GraphBuilder
from coserve.models.base import Architecture
from coserve.models.pieces import ACTIVATIONS, activation, added, angles, layer_norm, rotated
from coserve.models.rope import RotaryTable, rotary_table

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Falcon(Architecture):
    """A Falcon, whose configuration says which form it has."""

    embedding_name = "transformer.word_embeddings"
    block_prefix = "transformer.h"
    unread = r".*\.self_attention\.rotary_emb\.inv_freq"

    def __init__(self, config: "PretrainedConfig") -> None:
        super().__init__(config)
        self._require("activation", *ACTIVATIONS)
        self._is_new = bool(config.new_decoder_architecture)
        self._is_parallel = self._is_new or bool(config.parallel_attn)
        if self._is_new:
            self._require("parallel_attn", True)
            self.num_key_value_heads = config.num_kv_heads
        elif config.multi_query:
            self.num_key_value_heads = 1
        if self.num_heads % self.num_key_value_heads:
            self._require(
                "num_kv_heads",
                *(n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0),
            )

    def rotary_tables(self) -> Mapping[str, RotaryTable]:
        return {} if self.config.alibi else {"": rotary_table(self.config, self.head_dim)}

    def block(self, layer: int) -> Graph:
        b = GraphBuilder()
        config = self.config
        eps = self.config.layer_norm_epsilon
        width = self.hidden_size
        x = b.rows("x", width)
        has_two_norms = self._is_new and config.num_ln_in_parallel_attn in (None, 2)

        before = layer_norm(b, "ln_attn" if has_two_norms else "input_layernorm", x, eps)
        y = b.linear("self_attention.dense", self._attend(b, before), width, bias=config.bias)
        if not self._is_parallel:
            x = added(b, "attention_residual", x, y)
        if has_two_norms:
            before = layer_norm(b, "ln_mlp", x, eps)
        elif not self._is_parallel:
            before = layer_norm(b, "post_attention_layernorm", x, eps)
        h = b.linear("mlp.dense_h_to_4h", before, config.ffn_hidden_size, bias=config.bias)
        h = activation(b, "mlp.act", config.activation, h)
        h = b.linear("mlp.dense_4h_to_h", h, width, bias=config.bias)
        return b.build(
            added(b, "residual", h, y, x) if self._is_parallel else added(b, "residual", x, h)
        )

    def head(self) -> Graph:
        b = GraphBuilder()
        x = layer_norm(
            b, "transformer.ln_f", b.rows("x", self.hidden_size), self.config.layer_norm_epsilon
        )
        return b.build(b.linear("lm_head", x, self.vocab_size))

    def _attend(self, b: GraphBuilder, x: str) -> str:
        """Add the fused projection and attention, and return its output's name.

        In the projection, the queries of a key head, its key and its value stand together.
        """
        kv_heads, head_dim = self.num_key_value_heads, self.head_dim
        widths = {
            "query": self.num_heads // kv_heads * head_dim,
            "key": head_dim,
            "value": head_dim,
        }
        fused = b.linear(
            "self_attention.query_key_value",
            x,
            kv_heads * sum(widths.values()),
            bias=self.config.bias,
        )
        named = {f"self_attention.{name}": width for name, width in widths.items()}
        q, k, v = b.split(fused, named, groups=kv_heads)
        extra: dict[str, Any] = {}
        if self.config.alibi:
            extra["alibi_slopes"] = _slopes(self.num_heads, head_dim)
        else:
            table = angles(b, 2 * len(self.rotary_tables()[""].inverse_frequencies))
            q, k = (
                rotated(b, f"rope_{name}", each, table, head_dim)
                for name, each in (("q", q), ("k", k))
            )
        return self._attention(b, q, k, v, **extra)


def _slopes(num_heads: int, head_dim: int) -> tuple[float, ...]:
    """Return Falcon's slopes of ALiBi: rounded to bfloat16, and scaled as the scores are."""
    power = 2 ** floor(log2(num_heads))
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    slopes += [2 ** (-4 * (2 * head + 1) / power) for head in range(num_heads - power)]
    return tuple((torch.tensor(slopes).bfloat16().float() * head_dim**-0.5).tolist())

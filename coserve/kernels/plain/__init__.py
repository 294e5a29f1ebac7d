"""The backend of PyTorch operations alone: the reference of all others, on any device.

How many operations a step runs does not depend on how many requests, adapters or sequences its rows
belong to.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from coserve.kernels.attention import AttentionBatch, AttentionSpec, Segment
from coserve.kernels.base import Backend, Factor, Grouped, JoinedRows, SiluMulGradients
from coserve.kernels.bits import pack_signs, unpack_signs
from coserve.kernels.dropout import dropped
from coserve.kernels.gated_delta import (
    GatedDeltaGradients,
    GatedDeltaRows,
    GatedDeltaSpec,
    GatedDeltaWeights,
)
from coserve.kernels.low_rank import AdapterBatch
from coserve.kernels.plain import (
    adapters,
    cross_entropy,
    draws,
    experts,
    gated_delta,
    products,
    rows,
)
from coserve.kernels.plain.attention import Part, PlainAttentionBatch, backward, forward


class PlainBackend(Backend):
    """The backend of PyTorch operations alone."""

    @classmethod
    def is_available(cls, device: torch.device) -> bool:
        return True

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.nn.functional.linear(x, weight, bias)

    def input_gradient(self, grad: Tensor, weight: Tensor, onto: Tensor | None = None) -> Tensor:
        return grad @ weight if onto is None else onto.addmm_(grad, weight)

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        return grad.T @ x

    def int8_product(
        self, x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        return products.int8_product(x, values, scales, bias)

    def int8_input_gradient(
        self, grad: Tensor, values: Tensor, scales: Tensor, onto: Tensor | None = None
    ) -> Tensor:
        return products.int8_input_gradient(grad, values, scales, onto)

    def grouped_product(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return experts.grouped_product(x, weight, ends)

    def int8_grouped_product(
        self, x: Tensor, values: Tensor, scales: Tensor, ends: Tensor
    ) -> Tensor:
        return experts.int8_grouped_product(x, values, scales, ends)

    def int8_grouped_input_gradient(
        self, grad: Tensor, values: Tensor, scales: Tensor, ends: Tensor
    ) -> Tensor:
        return experts.int8_grouped_input_gradient(grad, values, scales, ends)

    def grouped_weight_gradient(self, grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
        return experts.grouped_weight_gradient(grad, x, ends)

    def low_rank_product(self, x: Tensor, factor: Factor, onto: Tensor | None = None) -> Tensor:
        if isinstance(factor, Grouped):
            y = adapters.grouped_product(x, factor, transposed=True)
            return y if onto is None else onto.add_(y)
        return self.product(x, factor) if onto is None else onto.addmm_(x, factor.T)

    def add_adapters(
        self, x: Tensor, outputs: Sequence[Tensor], first_place: int, batch: AdapterBatch
    ) -> None:
        if len(batch.adapters) == 1:
            adapters.add_one_by_one(self, x, outputs, first_place, batch)
        else:
            adapters.add_at_once(x, outputs, first_place, batch)

    def low_rank_input_gradient(
        self, grad: Tensor, factor: Factor, onto: Tensor | None = None
    ) -> Tensor:
        if isinstance(factor, Grouped):
            dx = adapters.grouped_product(grad, factor, transposed=False)
            return dx if onto is None else onto.add_(dx)
        return self.input_gradient(grad, factor, onto)

    def add_low_rank_gradient(self, grad: Tensor, x: Tensor | JoinedRows, onto: Factor) -> None:
        if isinstance(onto, Grouped):
            adapters.add_grouped_gradient(grad, x, onto)
        else:
            assert isinstance(x, Tensor), "rows of one adapter"
            onto.add_(self.weight_gradient(grad, x))

    def dropped(self, x: Tensor, row_ids: Tensor, *, p: float, salt: int) -> Tensor:
        return dropped(x, row_ids, p=p, salt=salt)

    def prepare_attention(
        self, segments: Sequence[Segment], *, block_tokens: int
    ) -> AttentionBatch:
        return PlainAttentionBatch(segments, block_tokens, self.device)

    def attention(
        self, q: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(batch, PlainAttentionBatch)
        out, lse = batch.run(lambda part, q: self._attend(q, keys, values, part, spec), q)
        return out, lse

    def attention_gradient(
        self,
        grad: Tensor,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        lse: Tensor,
        batch: AttentionBatch,
        spec: AttentionSpec,
        *,
        key_grads: Tensor,
        value_grads: Tensor,
    ) -> Tensor:
        assert isinstance(batch, PlainAttentionBatch) and keys.shape[0] == 1

        def reverse(part: Part, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor]:
            return (
                self._reverse(grad, q, out, lse, keys, values, part, spec, key_grads, value_grads),
            )

        (dq,) = batch.run(reverse, grad, q, out, lse)
        return dq

    def _attend(
        self, q: Tensor, keys: Tensor, values: Tensor, part: Part, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        """Attend with one part of a batch."""
        return forward(q, keys, values, part, spec)

    def _reverse(
        self,
        grad: Tensor,
        q: Tensor,
        out: Tensor,
        lse: Tensor,
        keys: Tensor,
        values: Tensor,
        part: Part,
        spec: AttentionSpec,
        key_grads: Tensor,
        value_grads: Tensor,
    ) -> Tensor:
        """Return the gradient of one part's queries."""
        return backward(grad, q, out, lse, keys, values, part, spec, key_grads, value_grads)

    def gated_delta(
        self, rows: GatedDeltaRows, weights: GatedDeltaWeights, state: Tensor, spec: GatedDeltaSpec
    ) -> tuple[Tensor, Tensor]:
        return gated_delta.forward(rows, weights, state, spec)

    def gated_delta_gradient(
        self,
        grad: Tensor,
        state_grad: Tensor,
        rows: GatedDeltaRows,
        weights: GatedDeltaWeights,
        state: Tensor,
        spec: GatedDeltaSpec,
    ) -> GatedDeltaGradients:
        return gated_delta.backward(grad, state_grad, rows, weights, state, spec)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rows.rms_norm(x, weight, eps)

    def rms_norm_gradient(
        self, grad: Tensor, x: Tensor, weight: Tensor, eps: float, *, with_y: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        return rows.rms_norm_gradient(grad, x, weight, eps, with_y=with_y)

    def rms_norm_weight_gradient(
        self, grad: Tensor, x: Tensor, weight: Tensor, eps: float
    ) -> Tensor:
        return rows.rms_norm_weight_gradient(grad, x, weight, eps)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return torch.nn.functional.silu(gate) * up

    def silu_mul_gradients(
        self, grad: Tensor, gate: Tensor, up: Tensor, *, with_y: bool = False
    ) -> SiluMulGradients:
        return rows.silu_mul_gradients(grad, gate, up, with_y=with_y)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rows.rope(x, cos, sin)

    def rope_gradient(self, grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rows.rope_gradient(grad, cos, sin)

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return cross_entropy.cross_entropy(logits, targets)

    def cross_entropy_gradient(
        self,
        logits: Tensor,
        targets: Tensor,
        log_sum: Tensor,
        loss_grad: Tensor,
        *,
        overwrites: bool = False,
    ) -> Tensor:
        return cross_entropy.cross_entropy_gradient(
            logits, targets, log_sum, loss_grad, overwrites=overwrites
        )

    def argmax(self, logits: Tensor) -> Tensor:
        return logits.argmax(-1)

    def draw(
        self, scores: Tensor, uniform: Sequence[float], top_k: Sequence[int], top_p: Sequence[float]
    ) -> Tensor:
        return draws.draw(scores, uniform, top_k, top_p)

    def pack_signs(self, x: Tensor) -> Tensor:
        return pack_signs(x)

    def unpack_signs(self, bits: Tensor, width: int) -> Tensor:
        return unpack_signs(bits, width)


BACKEND = PlainBackend

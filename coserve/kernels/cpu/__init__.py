"""The backend for CPUs: compiled kernels (C++) where PyTorch would take many passes or rearrange
tensors first, PyTorch's own products for the rest, and the plain backend for everything else (other
dtypes and layouts, unusual attention).

It is available where the kernels' library is prebuilt or g++ compiles it
(`coserve.kernels.cpu_library`); elsewhere `plain/` runs, and `why_unavailable` says why.
"""

from collections.abc import Callable, Sequence
from copy import copy

import torch
from torch import Tensor

from coserve.kernels.attention import AttentionBatch, AttentionSpec, Segment
from coserve.kernels.base import Backend, Factor, JoinedRows, SiluMulGradients
from coserve.kernels.cpu import adapters, rows
from coserve.kernels.cpu.attention import CpuAttention, CpuAttentionBatch, CpuPart
from coserve.kernels.cpu.compiled import compiled_kernels, why_not_compiled
from coserve.kernels.cpu.products import CpuProducts
from coserve.kernels.cpu.tile_products import TileProducts
from coserve.kernels.cpu.trace import CpuTrace
from coserve.kernels.cpu_library import Progress, own_flags
from coserve.kernels.low_rank import AdapterBatch
from coserve.kernels.plain import PlainBackend
from coserve.kernels.plain.attention import Part
from coserve.kernels.trace import Trace, TracedCalls


class CpuBackend(PlainBackend):
    """The backend for CPUs."""

    priority = 10
    traces_windows = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        kernels = compiled_kernels()
        assert kernels is not None, "asked for where it is available"
        self._kernels = kernels
        self._products = CpuProducts(kernels)
        self._attention = CpuAttention(kernels)
        self._for_losses = self
        if kernels.has_amx:
            self.fused = {
                **TileProducts(kernels).fused,
                "linear_cross_entropy": self._head_gradient,
            }
            self._for_losses = copy(self)
            self._for_losses._products = CpuProducts(kernels, may_lie_by_columns=True)

    @classmethod
    def is_available(cls, device: torch.device) -> bool:
        return device.type == "cpu" and compiled_kernels() is not None

    @classmethod
    def why_unavailable(cls, device: torch.device) -> str:
        return why_not_compiled() if device.type == "cpu" else ""

    @classmethod
    def prepare(cls, device: torch.device, progress: Progress | None = None) -> None:
        if device.type == "cpu":
            compiled_kernels(progress)

    @property
    def identity(self) -> str:
        built = [] if self._kernels.build == "native" else [self._kernels.build]
        return " ".join([super().identity, *built, *own_flags()])

    @property
    def for_losses(self) -> "CpuBackend":
        return self._for_losses

    def trace(
        self, dtype: torch.dtype, run: Callable[[Trace[Backend]], Tensor]
    ) -> TracedCalls | None:
        trace = CpuTrace(self._kernels, self.device, dtype)
        return trace.end(run(trace))

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._products.product(x, weight, bias)

    def input_gradient(self, grad: Tensor, weight: Tensor, onto: Tensor | None = None) -> Tensor:
        return self._products.input_gradient(grad, weight, onto)

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        return self._products.weight_gradient(grad, x)

    def int8_product(
        self, x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        return self._products.int8_product(x, values, scales, bias)

    def int8_input_gradient(
        self, grad: Tensor, values: Tensor, scales: Tensor, onto: Tensor | None = None
    ) -> Tensor:
        return self._products.int8_input_gradient(grad, values, scales, onto)

    def low_rank_product(self, x: Tensor, factor: Factor, onto: Tensor | None = None) -> Tensor:
        return self._products.low_rank_product(x, factor, onto)

    def add_adapters(
        self, x: Tensor, outputs: Sequence[Tensor], first_place: int, batch: AdapterBatch
    ) -> None:
        if adapters.fit(x, outputs, batch):
            adapters.add_adapters(self._kernels, x, outputs, first_place, batch)
        else:
            super().add_adapters(x, outputs, first_place, batch)

    def low_rank_input_gradient(
        self, grad: Tensor, factor: Factor, onto: Tensor | None = None
    ) -> Tensor:
        return self._products.low_rank_input_gradient(grad, factor, onto)

    def add_low_rank_gradient(self, grad: Tensor, x: Tensor | JoinedRows, onto: Factor) -> None:
        self._products.add_low_rank_gradient(grad, x, onto)

    def prepare_attention(
        self, segments: Sequence[Segment], *, block_tokens: int
    ) -> AttentionBatch:
        return CpuAttentionBatch(segments, block_tokens, self.device)

    def _attend(
        self, q: Tensor, keys: Tensor, values: Tensor, part: Part, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(part, CpuPart)
        found = self._attention.forward(q, keys, values, part, spec)
        return super()._attend(q, keys, values, part, spec) if found is None else found

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
        assert isinstance(part, CpuPart)
        reverse = self._attention.backward if spec.is_basic else super()._reverse
        return reverse(grad, q, out, lse, keys, values, part, spec, key_grads, value_grads)

    def dropped(self, x: Tensor, row_ids: Tensor, *, p: float, salt: int) -> Tensor:
        if rows.fit(x):
            return rows.dropped(self._kernels, x, row_ids, p=p, salt=salt)
        return super().dropped(x, row_ids, p=p, salt=salt)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        fits = rows.fit(x, weight)
        return (
            rows.rms_norm(self._kernels, x, weight, eps)
            if fits
            else super().rms_norm(x, weight, eps)
        )

    def rms_norm_gradient(
        self, grad: Tensor, x: Tensor, weight: Tensor, eps: float, *, with_y: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        if not rows.fit(grad, x, weight):
            return super().rms_norm_gradient(grad, x, weight, eps, with_y=with_y)
        return rows.rms_norm_gradient(self._kernels, grad, x, weight, eps, with_y=with_y)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return (
            rows.silu_mul(self._kernels, gate, up)
            if rows.fit(gate, up)
            else super().silu_mul(gate, up)
        )

    def silu_mul_gradients(
        self, grad: Tensor, gate: Tensor, up: Tensor, *, with_y: bool = False
    ) -> SiluMulGradients:
        if not rows.fit(grad, gate, up):
            return super().silu_mul_gradients(grad, gate, up, with_y=with_y)
        return rows.silu_mul_gradients(self._kernels, grad, gate, up, with_y=with_y)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        fits = rows.fit(x, cos, sin)
        return (
            rows.rope(self._kernels, x, cos, sin, reverse=False)
            if fits
            else super().rope(x, cos, sin)
        )

    def rope_gradient(self, grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        fits = rows.fit(grad, cos, sin)
        return (
            rows.rope(self._kernels, grad, cos, sin, reverse=True)
            if fits
            else super().rope_gradient(grad, cos, sin)
        )

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fits = rows.fit(logits) or rows.fit_by_columns(self._kernels, logits)
        return (
            rows.cross_entropy(self._kernels, logits, targets)
            if fits
            else super().cross_entropy(logits, targets)
        )

    def cross_entropy_gradient(
        self,
        logits: Tensor,
        targets: Tensor,
        log_sum: Tensor,
        loss_grad: Tensor,
        *,
        overwrites: bool = False,
    ) -> Tensor:
        given = (logits, targets, log_sum, loss_grad)
        if not (rows.fit(logits) or rows.fit_by_columns(self._kernels, logits)):
            return super().cross_entropy_gradient(*given, overwrites=overwrites)
        return rows.cross_entropy_gradient(self._kernels, *given, overwrites=overwrites)

    def _head_gradient(
        self, logits: Tensor, targets: Tensor, log_sum: Tensor, loss_grad: Tensor, weight: Tensor
    ) -> Tensor | None:
        """Run the kernel of `linear_cross_entropy`; None where it is not for these tensors."""
        if not rows.fit_head_by_columns(self._kernels, logits, weight):
            return None
        return rows.cross_entropy_input_gradient(
            self._kernels, logits, targets, log_sum, loss_grad, weight
        )

    def argmax(self, logits: Tensor) -> Tensor:
        fits = rows.fit(logits) and logits.shape[1]  # an empty vocabulary is PyTorch's error
        return rows.argmax(self._kernels, logits) if fits else super().argmax(logits)

    def draw(
        self, scores: Tensor, uniform: Sequence[float], top_k: Sequence[int], top_p: Sequence[float]
    ) -> Tensor:
        if not (rows.fit(scores) and scores.dtype == torch.float32 and scores.shape[1]):
            return super().draw(scores, uniform, top_k, top_p)
        return rows.draw(self._kernels, scores, uniform, top_k, top_p)


BACKEND = CpuBackend

"""The backend of GPUs: kernels in Triton, and CUDA graphs for steps of requests (`graphs.py`).

Triton comes with PyTorch's builds for GPUs. Where the environment has TRITON_INTERPRET=1 its
kernels run on a CPU, slowly: so they are tested without a GPU.
"""

import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coserve.kernels.attention import AttentionBatch, AttentionRoom, AttentionSpec, Segment
from coserve.kernels.base import Backend, SiluMulGradients
from coserve.kernels.low_rank import AdapterBatch
from coserve.kernels.plain import PlainBackend
from coserve.kernels.row_copies import RowCopies
from coserve.kernels.trace import Trace, TracedCalls, UntraceableError

if TYPE_CHECKING:
    from coserve.kernels.triton.capturing import Capturing


# Rows that graphs of decode steps are captured for: steps of fewer are filled up to the next. More
# have room among prompts; beyond that, a step takes long enough on the GPU for its launches to be
# made meanwhile.
DECODE_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
# Rows of steps with pieces of prompts. Few, since each is captured at the start or when it first
# comes; what a size has too much of costs little: some ten rows take a GPU as long as one, and
# programs without rows end at once.
PROMPT_ROWS = (32, 64, 128, 192, 256, 384, 512)


class TritonBackend(PlainBackend):
    """The backend of GPUs. Whatever the kernels are not for runs as in the plain backend."""

    priority = 20
    captures = True

    @classmethod
    def is_available(cls, device: torch.device) -> bool:
        is_interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
        return (device.type == "cuda" or is_interpreted) and find_spec("triton") is not None

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        from coserve.kernels.triton import (
            adapters,
            attention,
            attention_tables,
            flash,
            rows,
        )  # these need Triton

        self._adapters, self._attention, self._flash, self._rows = adapters, attention, flash, rows
        self._tables = attention_tables
        self._capturing: Capturing | None = None
        self.captured_rows, self.captured_prompts = DECODE_ROWS, PROMPT_ROWS

    def trace(
        self, dtype: torch.dtype, run: Callable[[Trace[Backend]], Tensor]
    ) -> TracedCalls | None:
        from coserve.kernels.triton.graphs import GraphCalls

        return GraphCalls(self, dtype, run)

    def capture(self, run: Callable[[], None]) -> Callable[[], None] | None:
        if self._capturing is None:
            from coserve.kernels.triton.capturing import Capturing

            self._capturing = Capturing(self.device)
        return self._capturing.capture(run)

    def attention_room(
        self, *, num_rows: int, num_keys: int, num_segments: int
    ) -> AttentionRoom | None:
        return self._tables.TritonAttentionRoom(num_rows, num_keys, num_segments, self.device)

    def row_copies(
        self, tensors: Sequence[Tensor], *, in_place: bool, max_rows: int
    ) -> RowCopies | None:
        return self._rows.AddressedCopies(tensors, in_place=in_place, max_rows=max_rows)

    def add_adapters(
        self, x: Tensor, outputs: Sequence[Tensor], first_place: int, batch: AdapterBatch
    ) -> None:
        if self._rows.fit(x, *outputs) and self._adapters.fit(batch, x.dtype):
            self._adapters.add_adapters(x, outputs, first_place, batch)
        elif isinstance(batch, self._adapters.StaticAdapters):
            raise UntraceableError
        else:
            super().add_adapters(x, outputs, first_place, batch)

    def prepare_attention(
        self, segments: Sequence[Segment], *, block_tokens: int
    ) -> AttentionBatch:
        return self._tables.TritonAttentionBatch(segments, block_tokens, self.device)

    def attention(
        self, q: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        fits = self._attention.fit(q, keys, values)
        # Stand-ins for the segments of any step have no form for the plain backend.
        if not isinstance(batch, self._tables.TritonAttentionBatch) and not fits:
            raise UntraceableError
        if isinstance(batch, self._tables.StaticSingleRows):
            return self._attention.forward_single(q, keys, values, batch.rows, spec)
        if isinstance(batch, self._tables.TritonAttentionRoom | self._tables.StaticSegments):
            return self._attention.forward(q, keys, values, batch, spec)
        assert isinstance(batch, self._tables.TritonAttentionBatch)
        # PyTorch's own is the faster one for what it is for.
        if (segments := self._flash.segments_for(q, keys, batch, spec)) is not None:
            return self._flash.forward(q, keys, values, segments, spec)
        if not fits:
            return super().attention(q, keys, values, batch.plain, spec)
        return self._attention.forward(q, keys, values, batch, spec)

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
        # Only jobs run backward, and the keys of a pack are a store of one page.
        assert keys.shape[0] == 1
        sums = {"key_grads": key_grads, "value_grads": value_grads}
        fits = all(self._attention.fit(rows, keys, values) for rows in (q, grad, out))
        fits &= keys.stride() == key_grads.stride()
        if isinstance(batch, self._tables.TritonAttentionRoom):
            if not fits:
                raise UntraceableError
            return self._attention.backward(grad, q, keys, values, out, lse, batch, spec, **sums)
        assert isinstance(batch, self._tables.TritonAttentionBatch)
        if (segments := self._flash.segments_for(q, keys, batch, spec)) is not None:
            return self._flash.backward(grad, q, keys, values, out, lse, segments, spec, **sums)
        # The kernels add a key's gradients without atomics, so no two segments may have the same
        # key.
        if not fits or not batch.keys_are_apart:
            return super().attention_gradient(
                grad, q, keys, values, out, lse, batch.plain, spec, **sums
            )
        return self._attention.backward(grad, q, keys, values, out, lse, batch, spec, **sums)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not self._rows.fit(x, weight):
            return super().rms_norm(x, weight, eps)
        return self._rows.rms_norm(x, weight, eps)

    def rms_norm_gradient(
        self, grad: Tensor, x: Tensor, weight: Tensor, eps: float, *, with_y: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        if not self._rows.fit(grad, x, weight):
            return super().rms_norm_gradient(grad, x, weight, eps, with_y=with_y)
        return self._rows.rms_norm_gradient(grad, x, weight, eps, with_y=with_y)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return (
            self._rows.silu_mul(gate, up)
            if self._rows.fit(gate, up)
            else super().silu_mul(gate, up)
        )

    def silu_mul_gradients(
        self, grad: Tensor, gate: Tensor, up: Tensor, *, with_y: bool = False
    ) -> SiluMulGradients:
        if not self._rows.fit(grad, gate, up):
            return super().silu_mul_gradients(grad, gate, up, with_y=with_y)
        return self._rows.silu_mul_gradients(grad, gate, up, with_y=with_y)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return (
            self._rows.rope(x, cos, sin)
            if self._rows.fit(x, cos, sin)
            else super().rope(x, cos, sin)
        )

    def rope_gradient(self, grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if not self._rows.fit(grad, cos, sin):
            return super().rope_gradient(grad, cos, sin)
        return self._rows.rope(grad, cos, sin, reverse=True)


BACKEND = TritonBackend

"""PyTorch's own FlashAttention (arXiv 2307.08691), which is faster than ours for windows of jobs in
half precision whose scores have nothing but a scale and a sliding window.
"""

import torch
from torch import Tensor

from coserve.kernels.attention import AttentionSpec
from coserve.kernels.triton.attention_tables import Cumulative, TritonAttentionBatch

_WIDTH_UNIT, _MAX_WIDTH = 8, 256
# The first compute capability that it is for.
_MIN_CAPABILITY = (8, 0)


def segments_for(
    q: Tensor, keys: Tensor, batch: TritonAttentionBatch, spec: AttentionSpec
) -> Cumulative | None:
    """Return the segments as FlashAttention takes them; None where it is not for these queries [n,
    Hq, D] and keys.
    """
    if (
        q.device.type != "cuda"
        or keys.shape[0] > 1
        or not spec.is_basic
        or q.dtype not in (torch.bfloat16, torch.float16)
    ):
        return None
    width = q.shape[2]
    if (
        width % _WIDTH_UNIT
        or width > _MAX_WIDTH
        or torch.cuda.get_device_capability(q.device) < _MIN_CAPABILITY
    ):
        return None
    return batch.cumulative


def forward(
    q: Tensor, keys: Tensor, values: Tensor, segments: Cumulative, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Implement `Backend.attention`."""
    stores = (_own(keys, segments, q), _own(values, segments, q))
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(q, *stores, segments.rows, segments.keys, segments.max_rows, segments.max_keys),
        # No dropout, causal, no mask returned.
        *(0.0, True, False),
        scale=spec.scale,
        **_window(spec),
    )
    return out, lse.T


def backward(
    grad: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Cumulative,
    spec: AttentionSpec,
    *,
    key_grads: Tensor,
    value_grads: Tensor,
) -> Tensor:
    """Implement `Backend.attention_gradient`; gradients of keys and values are rounded to the dtype
    before they are added.
    """
    stores, nothing = (
        (_own(keys, segments, q), _own(values, segments, q)),
        lse.new_empty(0, dtype=torch.int64),
    )
    dq: Tensor
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        *(grad.contiguous(), q, *stores, out, lse.T.contiguous(), segments.rows, segments.keys),
        *(segments.max_rows, segments.max_keys, 0.0, True, nothing, nothing),
        scale=spec.scale,
        **_window(spec),
    )
    for total, found in ((key_grads, dk), (value_grads, dv)):
        # The store's keys of these segments are neighbours, in their order (`Cumulative`).
        total[0, segments.of_store] += found.flatten(1)
    return dq


def _own(store: Tensor, segments: Cumulative, q: Tensor) -> Tensor:
    """Return the segments' part of a store of one page, [keys, Hkv, D]."""
    own = store[0, segments.of_store]
    return own.view(own.shape[0], -1, q.shape[2])


def _window(spec: AttentionSpec) -> dict[str, int]:
    if spec.sliding_window is None:
        return {}
    # Keys to the left of a row's own; ours counts that one as well.
    return {"window_size_left": spec.sliding_window - 1, "window_size_right": 0}

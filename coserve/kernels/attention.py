"""Causal attention of one run of query rows over its keys, with the backward pass.

Shapes: n query rows, m keys, Hq query heads, Hkv key heads (Hq is a multiple of Hkv), D width of a head.
The n queries are the last n positions of the m keys: query i sees keys j <= m - n + i, and with a sliding window of w
only the last w of those.

`PlainAttention` is the reference, in float32, on any device. `CpuFlashAttention` is the tiled kernel that PyTorch
ships for CPUs. Both follow FlashAttention-2 (arXiv 2307.08691, section 3): the forward pass keeps the output and one
log-sum-exp per query and head, and the backward pass rebuilds the probabilities from them.
"""

from typing import Protocol

import torch
from torch import Tensor

# A tile of the plain kernel holds at most this many scores (float32), so that a long window never makes an n × m
# tensor.
_MAX_TILE_SCORES = 1 << 22


class AttentionKernel(Protocol):
    """What the attention operator asks of a kernel."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, sliding_window: int | None
    ) -> tuple[Tensor, Tensor]:
        """Attend. q [n, Hq, D], k and v [m, Hkv, D] -> output [n, Hq, D] in q's dtype, log-sum-exp [n, Hq] in
        float32.
        """
        ...

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Reverse. grad and out [n, Hq, D], lse [n, Hq] -> gradients of q [n, Hq, D], k and v [m, Hkv, D]."""
        ...


def hidden_keys(
    num_queries: int, num_keys: int, sliding_window: int | None, device: torch.device, first_query: int = 0
) -> Tensor:
    """Which keys a query must not see: bool [num_queries, num_keys].

    `first_query` is the index of the first query row among the keys.
    """
    query = torch.arange(first_query, first_query + num_queries, device=device)[:, None]
    key = torch.arange(num_keys, device=device)[None, :]
    hidden = key > query
    if sliding_window is not None:
        hidden |= key <= query - sliding_window
    return hidden


class PlainAttention:
    """The reference kernel: float32 arithmetic, tiles of whole query rows, any device."""

    def _tiles(self, q: Tensor, k: Tensor) -> list[slice]:
        n, num_heads, _ = q.shape
        rows = max(1, _MAX_TILE_SCORES // (num_heads * k.shape[0]))
        return [slice(start, min(start + rows, n)) for start in range(0, n, rows)]

    def _scores(
        self, q: Tensor, k: Tensor, tile: slice, scale: float, sliding_window: int | None
    ) -> tuple[Tensor, Tensor]:
        """Queries of a tile by key head [Hkv, G, t, D] and their masked scores [Hkv, G, t, m], both float32."""
        n, num_heads, width = q.shape
        m, num_key_heads, _ = k.shape
        grouped = q[tile].float().reshape(-1, num_key_heads, num_heads // num_key_heads, width).permute(1, 2, 0, 3)
        keys = k.float().permute(1, 2, 0)[:, None]
        scores = torch.matmul(grouped, keys) * scale
        hidden = hidden_keys(grouped.shape[2], m, sliding_window, q.device, m - n + tile.start)
        return grouped, scores.masked_fill_(hidden, float("-inf"))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, sliding_window: int | None
    ) -> tuple[Tensor, Tensor]:
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        values = v.float().permute(1, 0, 2)[:, None]
        for tile in self._tiles(q, k):
            _, scores = self._scores(q, k, tile, scale, sliding_window)
            norm = scores.logsumexp(-1)
            result = torch.matmul((scores - norm[..., None]).exp_(), values)
            out[tile] = result.permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)
            lse[tile] = norm.permute(2, 0, 1).flatten(1, 2)
        return out, lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_key_heads, group = k.shape[1], q.shape[1] // k.shape[1]
        dq = torch.empty_like(q)
        keys = k.float().permute(1, 0, 2)
        values = v.float().permute(1, 2, 0)[:, None]
        dk, dv = torch.zeros_like(keys), torch.zeros_like(keys)
        delta = (grad.float() * out.float()).sum(-1)

        def by_key_head(x: Tensor) -> Tensor:
            return x.reshape(x.shape[0], num_key_heads, group, *x.shape[2:]).transpose(0, 1).transpose(1, 2)

        for tile in self._tiles(q, k):
            queries, scores = self._scores(q, k, tile, scale, sliding_window)
            probabilities = (scores - by_key_head(lse[tile])[..., None]).exp_()
            out_grad = by_key_head(grad[tile].float())
            dv += torch.matmul(probabilities.transpose(-1, -2), out_grad).sum(1)
            score_grad = torch.matmul(out_grad, values).sub_(by_key_head(delta[tile])[..., None]).mul_(probabilities)
            dk += torch.matmul(score_grad.transpose(-1, -2), queries).sum(1) * scale
            tile_grad = torch.matmul(score_grad, keys[:, None]) * scale
            dq[tile] = tile_grad.permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)
        return dq, dk.transpose(0, 1).to(k.dtype), dv.transpose(0, 1).to(v.dtype)


class CpuFlashAttention:
    """PyTorch's tiled CPU kernel; the same results as `PlainAttention`, to rounding, and never an n × m tensor of
    scores.

    Its causal flag means "query i sees keys j <= i", which is right only for n = m; other windows pass an additive
    mask, made once for a shape and kept for the layers that follow.
    """

    def __init__(self) -> None:
        self._mask_key: tuple[object, ...] | None = None
        self._mask: Tensor | None = None

    def _visibility(self, q: Tensor, k: Tensor, sliding_window: int | None) -> tuple[bool, Tensor | None]:
        n, m = q.shape[0], k.shape[0]
        slides = sliding_window is not None and m > sliding_window
        if n == m and not slides:
            return True, None
        if n == 1 and not slides:
            return False, None
        key = (n, m, sliding_window, q.dtype)
        if key != self._mask_key:
            hidden = hidden_keys(n, m, sliding_window, q.device, m - n)
            self._mask = torch.zeros(n, m, dtype=q.dtype).masked_fill_(hidden, float("-inf"))[None, None]
            self._mask_key = key
        return False, self._mask

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, sliding_window: int | None
    ) -> tuple[Tensor, Tensor]:
        causal, mask = self._visibility(q, k, sliding_window)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(x.transpose(0, 1)[None] for x in (q, k, v)), 0.0, causal, attn_mask=mask, scale=scale
        )
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        causal, mask = self._visibility(q, k, sliding_window)
        grad, q, k, v, out, lse = (x.transpose(0, 1)[None] for x in (grad, q, k, v, out, lse))
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale
        )
        dq, dk, dv = (x[0].transpose(0, 1) for x in grads)
        return dq, dk, dv


def attention_kernel(device: torch.device) -> AttentionKernel:
    """The kernel for a device; called once, when the model is built."""
    return CpuFlashAttention() if device.type == "cpu" else PlainAttention()

"""Causal attention of one run of query rows over its keys, with the backward pass.

Shapes: n query rows, m keys, Hq query heads, Hkv key heads (Hq is a multiple of Hkv), D width of a head.
The n queries are the last n positions of the m keys: query i sees keys j <= m - n + i, and with a sliding window of w
only the last w of those.

`PlainAttention` is the reference, in float32, on any device. `CpuAttention` is for CPUs, of PyTorch's operations;
`CompiledAttention` has a kernel of its own for rows whose keys lie in pages, and `AmxAttention` one for the backward
pass too. All follow FlashAttention-2 (arXiv 2307.08691, section 3): the forward pass keeps the output and one
log-sum-exp per query and head, and the backward pass rebuilds the probabilities from them. Both cut a run into tiles of
query rows, each with the keys that it can see, so that scores or masks of n × m elements never exist.
"""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import cached_property, lru_cache
from itertools import accumulate, chain

import torch
from torch import Tensor

from coserve.kernels.cpu import Library, compiled_kernels
from coserve.kernels.linear import has_native_bf16, rounded_factors

# Most elements of a tile's scores or mask.
_MAX_TILE_ELEMENTS = 1 << 22
# Rows below which a tile is not worth cutting, forward and backward.
_MIN_TILE_ROWS, _MIN_BACKWARD_ROWS = 64, 128
# Rows below which arranging the keys for AMX takes longer than it saves.
_MIN_AMX_ROWS = 16
# Bytes that a thread holds for each element of a head's keys, and the most that all threads may hold.
_AMX_BYTES, _MOST_AMX_BYTES = 22, 1 << 30
# Elements of a tile's scores that a CPU core's cache holds.
_CACHED_TILE_ELEMENTS = 1 << 18


class PageTable:
    """Where the keys of rows lie that are each the last of a sequence of its own.

    pages: per row, the numbers of the pages with its keys, in order. lengths: per row, how many keys it has. What lies
    in a last page behind these must be finite.
    """

    def __init__(self, pages: Sequence[Sequence[int]], lengths: Sequence[int], device: torch.device) -> None:
        self._rows, self._device = pages, device
        self.lengths = tuple(lengths)

    @cached_property
    def flat(self) -> tuple[Tensor, Tensor, Tensor]:
        """All rows' pages one behind another, where each row's begin there, and the lengths; int64."""
        numbers = array("q", chain.from_iterable(self._rows))
        starts = list(accumulate(map(len, self._rows), initial=0))[:-1]
        return (
            torch.frombuffer(numbers, dtype=torch.int64).to(self._device),
            torch.tensor(starts, device=self._device),
            torch.tensor(self.lengths, device=self._device),
        )

    @cached_property
    def parts(self) -> list[tuple[Tensor | slice, "_GatheredRows"]]:
        """All rows, in parts of which each can be gathered without filling up much: of numbers of pages that are alike
        (to a factor of two).
        """
        sizes: dict[int, list[int]] = {}
        for row, pages in enumerate(self._rows):
            sizes.setdefault(len(pages).bit_length(), []).append(row)
        return [
            (
                slice(None) if len(sizes) == 1 else torch.tensor(rows, device=self._device),
                _GatheredRows([self._rows[i] for i in rows], [self.lengths[i] for i in rows], self._device),
            )
            for rows in sizes.values()
        ]


class _GatheredRows:
    """Rows of a page table, for kernels that want their keys in one piece."""

    def __init__(self, pages: Sequence[Sequence[int]], lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = tuple(lengths)
        width = max(len(row) for row in pages)
        # int64 [n * width], filled up with pages of the row's own
        filled = [[*row, *[row[0]] * (width - len(row))] for row in pages]
        self._pages = torch.tensor(filled, device=device).flatten()
        self._gathered: Tensor | None = None
        self._masks: dict[tuple[int, int | None, torch.dtype], Tensor] = {}

    def gather(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Two of [num_pages, block_tokens, Hkv * D] -> those of all rows [n, width * block_tokens, Hkv * D], valid
        until the next call.
        """
        # The layers of a step use the same memory: taking it anew for each costs more than filling it.
        shape = (2, self._pages.shape[0], *keys.shape[1:])
        if self._gathered is None or self._gathered.shape != shape or self._gathered.dtype != keys.dtype:
            self._gathered = torch.empty(shape, dtype=keys.dtype, device=keys.device)
        for pages, out in zip((keys, values), self._gathered, strict=True):
            torch.index_select(pages, 0, self._pages, out=out)
        found = self._gathered.view(2, len(self.lengths), -1, keys.shape[2])
        return found[0], found[1]

    def mask(self, num_keys: int, sliding_window: int | None, dtype: torch.dtype) -> Tensor:
        """0 where a row sees a gathered key and -inf elsewhere, [n, 1, 1, num_keys]; the layers of a step share it."""
        key = num_keys, sliding_window, dtype
        if key not in self._masks:
            lengths = torch.tensor(self.lengths, device=self._pages.device)[:, None]
            position = torch.arange(num_keys, device=self._pages.device)
            hidden = position >= lengths
            if sliding_window is not None:
                hidden |= position < lengths - sliding_window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
            self._masks[key] = mask[:, None, None]
        return self._masks[key]


class AttentionKernel(ABC):
    """What the attention operator asks of a kernel; subclasses do one tile."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, sliding_window: int | None
    ) -> tuple[Tensor, Tensor]:
        """Attend. q [n, Hq, D], k and v [m, Hkv, D] -> output [n, Hq, D] in q's dtype, log-sum-exp [n, Hq] in
        float32.
        """
        parts = [
            self._forward_tile(q[rows], k[keys], v[keys], scale, sliding_window)
            for rows, keys in self._tiles(q, k, sliding_window)
        ]
        if len(parts) == 1:
            return parts[0]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])

    def forward_paged(
        self, q: Tensor, keys: Tensor, values: Tensor, table: PageTable, *, scale: float, sliding_window: int | None
    ) -> tuple[Tensor, Tensor]:
        """`forward` for rows of n sequences: q [n, Hq, D], keys and values [num_pages, block_tokens, Hkv * D]."""
        if len(table.parts) == 1:
            return self._forward_gathered(q, keys, values, table.parts[0][1], scale, sliding_window)
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for rows, part in table.parts:
            out[rows], lse[rows] = self._forward_gathered(q[rows], keys, values, part, scale, sliding_window)
        return out, lse

    def _forward_gathered(
        self, q: Tensor, keys: Tensor, values: Tensor, rows: _GatheredRows, scale: float, sliding_window: int | None
    ) -> tuple[Tensor, Tensor]:
        """`forward_paged` for rows that are gathered together; here, one by one."""
        k, v = rows.gather(keys, values)
        parts = [
            self.forward(
                q[i : i + 1],
                *(x[i, :length].view(length, -1, q.shape[2]) for x in (k, v)),
                scale=scale,
                sliding_window=sliding_window,
            )
            for i, length in enumerate(rows.lengths)
        ]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])

    @abstractmethod
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
        key_grads: Tensor,
        value_grads: Tensor,
    ) -> Tensor:
        """Reverse. grad and out [n, Hq, D], lse [n, Hq] -> gradient of q [n, Hq, D].

        The gradients of k and v are added to key_grads and value_grads, float32 [m, Hkv, D].
        """

    def _tiles(
        self, q: Tensor, k: Tensor, sliding_window: int | None, *, backward: bool = False
    ) -> Iterator[tuple[slice, slice]]:
        """Query rows, and the keys that they see. A tile is a run of its own: its queries are the last of its keys."""
        n, m = q.shape[0], k.shape[0]
        span = m if sliding_window is None else min(m, 2 * sliding_window)
        size = (self._backward_rows if backward else self._forward_rows)(n, m, q.shape[1], span, sliding_window)
        if sliding_window is not None:  # a tile of more rows than the window would mostly score hidden keys
            size = min(size, max(sliding_window, _MIN_TILE_ROWS))
        for start in range(0, n, size):
            end = min(start + size, n)
            first_key = 0 if sliding_window is None else max(0, m - n + start - sliding_window + 1)
            yield slice(start, end), slice(first_key, m - n + end)

    @abstractmethod
    def _forward_rows(self, n: int, m: int, num_heads: int, span: int, sliding_window: int | None) -> int:
        """How many query rows to do at once, when a tile sees about `span` keys."""

    @abstractmethod
    def _backward_rows(self, n: int, m: int, num_heads: int, span: int, sliding_window: int | None) -> int:
        """The same for the backward pass."""

    @abstractmethod
    def _forward_tile(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, sliding_window: int | None
    ) -> tuple[Tensor, Tensor]: ...


def _hidden_keys(n: int, m: int, sliding_window: int | None, device: torch.device) -> Tensor:
    """Which keys a query must not see: bool [n, m]."""
    query = torch.arange(m - n, m, device=device)[:, None]
    key = torch.arange(m, device=device)[None, :]
    hidden = key > query
    if sliding_window is not None:
        hidden |= key <= query - sliding_window
    return hidden


def _by_key_head(x: Tensor, num_key_heads: int) -> Tensor:
    """[n, Hq, D] -> a new float32 tensor [Hkv, G * n, D]."""
    n, num_heads, width = x.shape
    made = torch.empty(num_key_heads, num_heads // num_key_heads, n, width, dtype=torch.float32, device=x.device)
    made.copy_(x.reshape(n, num_key_heads, -1, width).permute(1, 2, 0, 3))
    return made.view(num_key_heads, -1, width)


def _by_row(x: Tensor, n: int) -> Tensor:
    """The inverse: [Hkv, G * n, D] -> [n, Hq, D]."""
    return x.view(x.shape[0], -1, n, x.shape[2]).permute(2, 0, 1, 3).reshape(n, -1, x.shape[2])


class PlainAttention(AttentionKernel):
    """The reference kernel: float32 arithmetic on whole tiles of scores, any device."""

    def _forward_rows(self, n: int, m: int, num_heads: int, span: int, sliding_window: int | None) -> int:
        return max(1, _MAX_TILE_ELEMENTS // (num_heads * span))

    _backward_rows = _forward_rows

    def _scores(self, q: Tensor, k: Tensor, scale: float, sliding_window: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [Hkv, G * n, D] and keys [Hkv, m, D] by key head, and their masked scores [Hkv, G * n, m],
        float32.
        """
        queries, keys = _by_key_head(q, k.shape[1]), k.float().transpose(0, 1)
        scores = torch.matmul(queries, keys.transpose(1, 2)) * scale
        hidden = _hidden_keys(q.shape[0], k.shape[0], sliding_window, q.device)
        scores.view(k.shape[1], -1, *hidden.shape).masked_fill_(hidden, float("-inf"))
        return queries, keys, scores

    def _forward_tile(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, sliding_window: int | None
    ) -> tuple[Tensor, Tensor]:
        _, _, scores = self._scores(q, k, scale, sliding_window)
        lse = scores.logsumexp(-1, keepdim=True)
        out = torch.matmul((scores - lse).exp_(), v.float().transpose(0, 1))
        return _by_row(out, q.shape[0]).to(q.dtype), _by_row(lse, q.shape[0])[..., 0]

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
        key_grads: Tensor,
        value_grads: Tensor,
    ) -> Tensor:
        parts, heads = [], k.shape[1]
        delta = (grad.float() * out.float()).sum(-1, keepdim=True)
        for rows, seen in self._tiles(q, k, sliding_window, backward=True):
            queries, keys, scores = self._scores(q[rows], k[seen], scale, sliding_window)
            probabilities = (scores - _by_key_head(lse[rows, :, None], heads)).exp_()
            out_grad = _by_key_head(grad[rows], heads)
            score_grad = torch.matmul(out_grad, v[seen].float().permute(1, 2, 0))
            score_grad.sub_(_by_key_head(delta[rows], heads)).mul_(probabilities).mul_(scale)
            parts.append(_by_row(torch.matmul(score_grad, keys), rows.stop - rows.start).to(q.dtype))
            key_grads[seen] += torch.matmul(score_grad.transpose(1, 2), queries).transpose(0, 1)
            value_grads[seen] += torch.matmul(probabilities.transpose(1, 2), out_grad).transpose(0, 1)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class CpuAttention(AttentionKernel):
    """Forward, PyTorch's tiled kernel; backward, batched float32 products on tiles that stay in the caches, since
    PyTorch's own takes as long or several times as long; in bfloat16, the products of probabilities and of gradients
    of scores take both rounded to it, as FlashAttention does (arXiv 2205.14135), where the CPU has instructions for
    that. The same results as `PlainAttention`, to rounding.

    The forward kernel's causal flag means "query i sees keys j <= i", which is right only for n = m; other tiles pass
    an additive mask.
    """

    def _forward_rows(self, n: int, m: int, num_heads: int, span: int, sliding_window: int | None) -> int:
        needs_no_mask = n == m and (sliding_window is None or m <= sliding_window)
        return n if needs_no_mask else max(1, _MAX_TILE_ELEMENTS // span)

    def _backward_rows(self, n: int, m: int, num_heads: int, span: int, sliding_window: int | None) -> int:
        return max(_MIN_BACKWARD_ROWS, _CACHED_TILE_ELEMENTS // (num_heads * span))

    def _forward_gathered(
        self, q: Tensor, keys: Tensor, values: Tensor, rows: _GatheredRows, scale: float, sliding_window: int | None
    ) -> tuple[Tensor, Tensor]:
        """All rows in one call; the query heads of a key head stand as its rows, so that each key is read once.

        Sums depend, to rounding, on how far the longest row's keys reach. So in float32, where a row's result must be
        the same in any company, each runs alone.
        """
        if q.dtype == torch.float32:
            return super()._forward_gathered(q, keys, values, rows, scale, sliding_window)
        n, num_heads, width = q.shape
        k, v = (x.view(n, x.shape[1], -1, width).transpose(1, 2) for x in rows.gather(keys, values))
        mask = rows.mask(k.shape[2], sliding_window, q.dtype)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q.reshape(n, k.shape[1], -1, width), k, v, 0.0, False, attn_mask=mask, scale=scale
        )
        return out.reshape(n, num_heads, width), lse.reshape(n, num_heads)

    def _forward_tile(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, sliding_window: int | None
    ) -> tuple[Tensor, Tensor]:
        n, m = q.shape[0], k.shape[0]
        if n == 1:  # as in `forward_paged`; the tile has only keys that the row sees
            q, k, v = q.view(1, k.shape[1], -1, q.shape[2]), k.transpose(0, 1)[None], v.transpose(0, 1)[None]
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, scale=scale)
            return out.reshape(1, -1, q.shape[3]), lse.reshape(1, -1)
        slides = sliding_window is not None and m > sliding_window
        mask = None
        if slides or n < m:
            mask = _additive_mask(n, m, sliding_window if slides else None, q.dtype)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(x.transpose(0, 1)[None] for x in (q, k, v)), 0.0, mask is None and n == m, attn_mask=mask, scale=scale
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
        key_grads: Tensor,
        value_grads: Tensor,
    ) -> Tensor:
        n, num_heads, width = q.shape
        groups = num_heads // k.shape[1]
        delta = torch.matmul(grad.float()[:, :, None], out.float()[..., None])[..., 0]
        # By key head, the query heads of a row side by side: what a tile reads is then a run of each.
        queries, out_grad, less_lse, less_delta = (
            _heads_first(x.view(n, k.shape[1], groups, -1)).flatten(1, 2)
            for x in (q, grad, lse.neg()[..., None], delta.neg_()[..., None])
        )
        keys, values = _heads_first(k), _heads_first(v)
        dq = torch.empty_like(queries)
        with rounded_factors() if has_native_bf16(q) else nullcontext():
            for rows, seen in self._tiles(q, k, sliding_window, backward=True):
                own = slice(groups * rows.start, groups * rows.stop)
                num_rows, num_keys = rows.stop - rows.start, seen.stop - seen.start
                probabilities = torch.baddbmm(less_lse[:, own], queries[:, own], keys[:, seen].mT, alpha=scale)
                # Hidden are keys among the last `num_rows`, unless a sliding window hides early ones too.
                slides = sliding_window is not None and num_keys > sliding_window
                masked = num_keys if slides else num_rows
                hidden = _tile_mask(num_rows, masked, sliding_window if slides else None)
                by_row = probabilities.view(k.shape[1], num_rows, groups, num_keys)
                by_row[..., num_keys - masked :].masked_fill_(hidden, float("-inf"))
                probabilities.exp_()
                score_grad = torch.baddbmm(less_delta[:, own], out_grad[:, own], values[:, seen].mT).mul_(probabilities)
                dq[:, own] = torch.bmm(score_grad, keys[:, seen])
                key_grads[seen].transpose(0, 1).add_(torch.bmm(score_grad.mT, queries[:, own]), alpha=scale)
                value_grads[seen].transpose(0, 1).add_(torch.bmm(probabilities.mT, out_grad[:, own]))
        return dq.mul_(scale).view(-1, n, groups, width).transpose(0, 1).reshape(q.shape).to(q.dtype)


class CompiledAttention(CpuAttention):
    """Rows whose keys lie in pages read them there (`cpu/paged_attention.cpp`), and a row's result is the same in any
    company.
    """

    def __init__(self, kernels: Library) -> None:
        self._kernels = kernels
        self._forward_paged = {
            torch.bfloat16: kernels.paged_attention_bfloat16,
            torch.float32: kernels.paged_attention_float32,
        }

    def forward_paged(
        self, q: Tensor, keys: Tensor, values: Tensor, table: PageTable, *, scale: float, sliding_window: int | None
    ) -> tuple[Tensor, Tensor]:
        (n, num_heads, width), (_, block_tokens, row_width) = q.shape, keys.shape
        page_step, *within = keys.stride()
        if (
            (kernel := self._forward_paged.get(q.dtype)) is None
            or width % 16
            or within != [row_width, 1]
            or values.stride() != keys.stride()
        ):
            return super().forward_paged(q, keys, values, table, scale=scale, sliding_window=sliding_window)
        q = q.contiguous()
        out, lse = torch.empty_like(q), torch.empty(n, num_heads)
        pages, starts, lengths = table.flat
        kernel(
            *(q.data_ptr(), keys.data_ptr(), values.data_ptr()),
            *(pages.data_ptr(), starts.data_ptr(), lengths.data_ptr(), out.data_ptr(), lse.data_ptr()),
            *(n, num_heads, row_width // width, width, block_tokens, page_step),
            *(sliding_window or 0, scale, torch.get_num_threads()),
        )
        return out, lse


class AmxAttention(CompiledAttention):
    """In bfloat16 both passes are kernels (`cpu/attention_forward.cpp`, `cpu/attention_backward.cpp`), in half and a
    fifth of the time; for CPUs with AMX.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, sliding_window: int | None
    ) -> tuple[Tensor, Tensor]:
        (n, num_heads, width), (m, num_key_heads, _) = q.shape, k.shape
        if n < _MIN_AMX_ROWS or not self._fits(q, m):
            return super().forward(q, k, v, scale=scale, sliding_window=sliding_window)
        tensors = [x.contiguous() for x in (q, k, v)]
        out, lse = torch.empty_like(tensors[0]), torch.empty(n, num_heads)
        self._kernels.attention_forward(
            *(x.data_ptr() for x in (*tensors, out, lse)),
            *(n, m, num_heads, num_key_heads, width, sliding_window or 0),
            *(scale, torch.get_num_threads()),
        )
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
        key_grads: Tensor,
        value_grads: Tensor,
    ) -> Tensor:
        (n, num_heads, width), (m, num_key_heads, _) = q.shape, k.shape
        if not n:
            return torch.empty_like(q)
        if not self._fits(q, m):
            return super().backward(
                *(grad, q, k, v, out, lse),
                scale=scale,
                sliding_window=sliding_window,
                key_grads=key_grads,
                value_grads=value_grads,
            )
        assert key_grads.is_contiguous() and value_grads.is_contiguous()
        tensors = [x.contiguous() for x in (grad, q, k, v, out, lse)]
        q_grad = torch.empty_like(tensors[1])
        self._kernels.attention_backward(
            *(x.data_ptr() for x in (*tensors, q_grad, key_grads, value_grads)),
            *(n, m, num_heads, num_key_heads, width, sliding_window or 0),
            *(scale, torch.get_num_threads()),
        )
        return q_grad

    @staticmethod
    def _fits(q: Tensor, num_keys: int) -> bool:
        """Whether the kernels are for such queries, and each thread has room for a head's keys and their gradients."""
        held_bytes = num_keys * q.shape[2] * _AMX_BYTES * torch.get_num_threads()
        return q.dtype == torch.bfloat16 and q.shape[2] % 32 == 0 and held_bytes <= _MOST_AMX_BYTES


def _heads_first(x: Tensor) -> Tensor:
    """[n, heads, ...] -> a new float32 tensor [heads, n, ...]."""
    made = torch.empty(x.shape[1], x.shape[0], *x.shape[2:], dtype=torch.float32, device=x.device)
    return made.copy_(x.transpose(0, 1))


@lru_cache(maxsize=16)
def _tile_mask(n: int, m: int, sliding_window: int | None) -> Tensor:
    """Which of the keys a tile's queries must not see: bool [n, 1, m]."""
    return _hidden_keys(n, m, sliding_window, torch.device("cpu"))[:, None]


@lru_cache(maxsize=16)
def _additive_mask(n: int, m: int, sliding_window: int | None, dtype: torch.dtype) -> Tensor:
    """0 where a query sees a key and -inf elsewhere, [1, 1, n, m]; the layers of a step, and often its sequences,
    share it.
    """
    hidden = _hidden_keys(n, m, sliding_window, torch.device("cpu"))
    return torch.zeros(n, m, dtype=dtype).masked_fill_(hidden, float("-inf"))[None, None]


def attention_kernel(device: torch.device) -> AttentionKernel:
    """The kernel for a device; called once, when the model is built."""
    if device.type != "cpu":
        return PlainAttention()
    kernels = compiled_kernels()
    if kernels is None:
        return CpuAttention()
    return AmxAttention(kernels) if kernels.has_tiles else CompiledAttention(kernels)

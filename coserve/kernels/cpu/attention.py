"""Attention on CPUs: rows whose keys lie in pages read them there (`paged_attention.cpp`); runs of
rows have kernels in tiles (`attention_forward.cpp`, `attention_backward.cpp`: AMX, AMD's AVX-512),
and PyTorch's operations elsewhere.

All follow FlashAttention-2 (arXiv 2307.08691, section 3): the forward pass keeps the output and one
log-sum-exp per query and head, and the backward pass rebuilds the probabilities from them. A run is
cut into tiles of query rows, each with the keys that it can see, so that scores or masks of n x m
elements never exist.
"""

from array import array
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cached_property, lru_cache
from itertools import chain

import torch
from torch import Tensor

from coserve.kernels.attention import AttentionSpec
from coserve.kernels.cpu.compiled import Library
from coserve.kernels.cpu.products import has_native_bf16, is_widened, rounded_factors
from coserve.kernels.plain.attention import Part, PlainAttentionBatch

# Maximum elements of a tile's mask.
_MAX_TILE_ELEMENTS = 1 << 22
# Rows below which a tile is not worth cutting, forward and backward.
_MIN_TILE_ROWS, _MIN_BACKWARD_ROWS = 64, 128
# Rows below which arranging the keys in tiles takes longer than it saves.
_MIN_ROWS_BY_TILES = 16
# Bytes that a thread holds for each element of a head's keys, and the most that all threads may
# hold.
_TILE_BYTES, _MAX_TILE_BYTES = 22, 1 << 30
# Elements of a tile's scores that a CPU core's cache holds.
_CACHED_TILE_ELEMENTS = 1 << 18
# Rows and keys of a segment: (first row, number of rows, first key, number of keys).
_Run = tuple[int, int, int, int]


class CpuPart(Part):
    """Segments with the tables that the kernels read."""

    @property
    def paged(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the pages of single rows one after another, the place where each row's begin
        there, and the numbers of keys; int64.
        """
        return self.segments.pages, self.segments.first_page, self.segments.num_keys

    @property
    def pages(self) -> Tensor:
        """Return the pages of all segments one after another, int64."""
        return self.segments.pages

    @cached_property
    def begins_in_page(self) -> bool:
        """Return whether every segment's keys begin with a page."""
        return self.segments.first_key is None or not self.segments.first_key.any()

    def runs(self, *, gathered: bool) -> list[_Run]:
        """Return the segments as rows and keys, which were gathered (`pages` one after another) or
        stand in one page.
        """
        table = self.segments
        first_key = torch.zeros_like(table.num_keys) if table.first_key is None else table.first_key
        if gathered:
            first_key = first_key + table.first_page * self.block_tokens
        columns = (
            table.num_rows.cumsum(0) - table.num_rows,
            table.num_rows,
            first_key,
            table.num_keys,
        )
        return list(zip(*(each.tolist() for each in columns), strict=True))


class CpuAttentionBatch(PlainAttentionBatch):
    """A batch of segments with the tables that the kernels read."""

    part_type = CpuPart

    @cached_property
    def single(self) -> CpuPart | None:
        """Return the whole batch as one part, if every segment has one row, and its keys begin with
        a page.
        """
        part = self._parts[0][0]
        assert isinstance(part, CpuPart)
        return part if len(self._parts) == 1 and part.is_single and part.begins_in_page else None


class CpuAttention:
    """Both passes of attention, for the parts of a batch."""

    def __init__(self, kernels: Library) -> None:
        self._kernels = kernels
        self._paged = {
            dtype: getattr(kernels, name) for dtype, name in paged_kernels(kernels).items()
        }

    def forward(
        self, q: Tensor, keys: Tensor, values: Tensor, part: CpuPart, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor] | None:
        """Implement `Backend.attention`; return None where the plain backend is to run."""
        if not spec.is_basic:
            return None
        if part.is_single:
            return self._forward_paged(q, keys, values, part, spec)
        runs = part.runs(gathered=keys.shape[0] > 1)
        k, v = (
            _by_head(x[part.pages] if x.shape[0] > 1 else x, q.shape[2]) for x in (keys, values)
        )
        if not self._fit_tiles(q, runs):
            parts = [
                run_forward(q[row : row + n], k[key : key + m], v[key : key + m], spec)
                for row, n, key, m in runs
            ]
            out, lse = (x[0] if len(x) == 1 else torch.cat(x) for x in zip(*parts, strict=True))
            return out, lse
        out, lse = self._forward_by_tiles(
            q, k, v, [run for run in runs if run[1] >= _MIN_ROWS_BY_TILES], spec
        )
        for row, n, key, m in runs:
            if n < _MIN_ROWS_BY_TILES:
                own = slice(row, row + n)
                out[own], lse[own] = run_forward(q[own], k[key : key + m], v[key : key + m], spec)
        return out, lse

    def backward(
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
        """Implement `Backend.attention_gradient`."""
        assert isinstance(part, CpuPart)
        runs = part.runs(gathered=False)
        k, v, dk, dv = (_by_head(x, q.shape[2]) for x in (keys, values, key_grads, value_grads))
        if self._fit_tiles(q, runs):
            return self._backward_by_tiles(grad, q, k, v, out, lse, runs, spec, dk, dv)
        dq = torch.empty_like(q)
        for row, n, key, m in runs:
            rows, seen = slice(row, row + n), slice(key, key + m)
            dq[rows] = run_backward(
                *(grad[rows], q[rows], k[seen], v[seen], out[rows], lse[rows], spec),
                key_grads=dk[seen],
                value_grads=dv[seen],
            )
        return dq

    def _forward_paged(
        self, q: Tensor, keys: Tensor, values: Tensor, part: CpuPart, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor] | None:
        """Attend with rows that are each the last of a sequence. A row's result is the same in any
        company.
        """
        (n, num_heads, width), (_, block_tokens, row_width) = q.shape, keys.shape
        page_step, *within = keys.stride()
        kernel = self._paged.get(q.dtype)
        if (
            kernel is None
            or width % 16
            or within != [row_width, 1]
            or values.stride() != keys.stride()
        ):
            return None
        if not part.begins_in_page:
            return None
        q = q.contiguous()
        out, lse = torch.empty_like(q), torch.empty(n, num_heads)
        pages, starts, lengths = part.paged
        kernel(
            *(q.data_ptr(), keys.data_ptr(), values.data_ptr()),
            *(
                pages.data_ptr(),
                starts.data_ptr(),
                lengths.data_ptr(),
                out.data_ptr(),
                lse.data_ptr(),
            ),
            *(n, num_heads, row_width // width, width, block_tokens, page_step),
            *(spec.sliding_window or 0, spec.scale, torch.get_num_threads()),
        )
        return out, lse

    def _forward_by_tiles(
        self, q: Tensor, k: Tensor, v: Tensor, runs: list[_Run], spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        tensors = [x.contiguous() for x in (q, k, v)]
        out, lse = torch.empty_like(tensors[0]), torch.empty(q.shape[:2])
        segments = array("q", chain.from_iterable(runs))
        self._kernels.attention_forward(
            *(x.data_ptr() for x in (*tensors, out, lse)),
            *(
                segments.buffer_info()[0],
                len(runs),
                q.shape[1],
                k.shape[1],
                q.shape[2],
                spec.sliding_window or 0,
            ),
            *(spec.scale, torch.get_num_threads()),
        )
        return out, lse

    def _backward_by_tiles(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        runs: list[_Run],
        spec: AttentionSpec,
        key_grads: Tensor,
        value_grads: Tensor,
    ) -> Tensor:
        assert key_grads.is_contiguous() and value_grads.is_contiguous()
        tensors = [x.contiguous() for x in (grad, q, k, v, out, lse)]
        q_grad = torch.empty_like(tensors[1])
        segments = array("q", chain.from_iterable(runs))
        self._kernels.attention_backward(
            *(x.data_ptr() for x in (*tensors, q_grad, key_grads, value_grads)),
            *(
                segments.buffer_info()[0],
                len(runs),
                q.shape[1],
                k.shape[1],
                q.shape[2],
                spec.sliding_window or 0,
            ),
            *(spec.scale, torch.get_num_threads()),
        )
        return q_grad

    def _fit_tiles(self, q: Tensor, runs: list[_Run]) -> bool:
        """Return whether the kernels are for such queries, and each thread has room for a head's
        keys and their gradients.
        """
        if not self._kernels.has_tiles or q.dtype != torch.bfloat16 or q.shape[2] % 32:
            return False
        return has_room_for_tiles(max(run[3] for run in runs), q.shape[2])


def paged_kernels(kernels: Library) -> dict[torch.dtype, str]:
    """Return the names of the kernels for rows that are each the last of a sequence, by dtype."""
    bfloat16 = "paged_attention_by_tiles" if kernels.has_amx else "paged_attention_bfloat16"
    return {torch.bfloat16: bfloat16, torch.float32: "paged_attention_float32"}


def has_room_for_tiles(num_keys: int, width: int) -> bool:
    """Return whether each thread has room for as many keys of a head, and their gradients, in
    tiles.
    """
    return num_keys * width * _TILE_BYTES * torch.get_num_threads() <= _MAX_TILE_BYTES


def run_forward(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Attend in one run by PyTorch's tiled kernel: q [n, Hq, D], k and v [m, Hkv, D] -> [n, Hq, D],
    float32 [n, Hq].
    """
    if is_widened(q):
        out, lse = run_forward(q.float(), k.float(), v.float(), spec)
        return out.to(q.dtype), lse
    window = spec.sliding_window
    parts = [
        _tile_forward(q[rows], k[keys], v[keys], spec)
        for rows, keys in _tiles(
            q.shape[0], k.shape[0], window, _forward_rows(q.shape[0], k.shape[0], window)
        )
    ]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def run_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    spec: AttentionSpec,
    *,
    key_grads: Tensor,
    value_grads: Tensor,
) -> Tensor:
    """Reverse one run: batched float32 products on tiles that stay in the caches, since PyTorch's
    own takes as long or several times as long. In bfloat16, the products of probabilities and of
    gradients of scores take both rounded to it, as FlashAttention does (arXiv 2205.14135), where
    the CPU has instructions for that.
    """
    (n, num_heads, width), scale, window = q.shape, spec.scale, spec.sliding_window
    groups = num_heads // k.shape[1]
    # [n, heads]: sum(dy * y) over the width of a head.
    delta = torch.matmul(grad.float()[:, :, None], out.float()[..., None])[..., 0]
    # Queries lie by key head, with the query heads of a row side by side, so that a tile reads one
    # run of each.
    queries, out_grad, less_lse, less_delta = (
        _heads_first(x.view(n, k.shape[1], groups, -1)).flatten(1, 2)
        for x in (q, grad, lse.neg()[..., None], delta.neg_()[..., None])
    )
    keys, values = _heads_first(k), _heads_first(v)
    dq = torch.empty_like(queries)
    with rounded_factors() if has_native_bf16(q) else nullcontext():
        for rows, seen in _tiles(
            n, k.shape[0], window, _backward_rows(num_heads, k.shape[0], window)
        ):
            own = slice(groups * rows.start, groups * rows.stop)
            num_rows, num_keys = rows.stop - rows.start, seen.stop - seen.start
            # scale * q k^T - lse in one call; its exponential is the probability.
            probabilities = torch.baddbmm(
                less_lse[:, own], queries[:, own], keys[:, seen].mT, alpha=scale
            )
            # Hidden are keys among the last `num_rows`, unless a sliding window hides early ones
            # too.
            slides = window is not None and num_keys > window
            masked = num_keys if slides else num_rows
            hidden = _tile_mask(num_rows, masked, window if slides else None)
            by_row = probabilities.view(k.shape[1], num_rows, groups, num_keys)
            by_row[..., num_keys - masked :].masked_fill_(hidden, float("-inf"))
            probabilities.exp_()
            # (dy v^T - delta) * p, [key heads, rows * groups, keys].
            score_grad = torch.baddbmm(
                less_delta[:, own], out_grad[:, own], values[:, seen].mT
            ).mul_(probabilities)
            dq[:, own] = torch.bmm(score_grad, keys[:, seen])
            key_grads[seen].transpose(0, 1).add_(
                torch.bmm(score_grad.mT, queries[:, own]), alpha=scale
            )
            value_grads[seen].transpose(0, 1).add_(torch.bmm(probabilities.mT, out_grad[:, own]))
    return dq.mul_(scale).view(-1, n, groups, width).transpose(0, 1).reshape(q.shape).to(q.dtype)


def _tile_forward(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    n, m, scale, window = q.shape[0], k.shape[0], spec.scale, spec.sliding_window
    if (
        n == 1
    ):  # the query heads of a key head stand as its rows; the tile has only keys that the row sees
        q, k, v = (
            q.view(1, k.shape[1], -1, q.shape[2]),
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
        )
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, scale=scale
        )
        return out.reshape(1, -1, q.shape[3]), lse.reshape(1, -1)
    slides = window is not None and m > window
    mask = None
    if slides or n < m:
        mask = _additive_mask(n, m, window if slides else None, q.dtype)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(x.transpose(0, 1)[None] for x in (q, k, v)),
        0.0,
        # PyTorch's causal mask begins with the first key, which is right only for as many keys as
        # rows; otherwise the mask above hides keys.
        mask is None and n == m,
        attn_mask=mask,
        scale=scale,
    )
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def _tiles(n: int, m: int, window: int | None, size: int) -> Iterator[tuple[slice, slice]]:
    """Yield query rows, `size` at a time, and the keys that they see. A tile is a run of its own:
    its queries are the last of its keys.
    """
    if window is not None:  # a tile of more rows than the window would mostly score hidden keys
        size = min(size, max(window, _MIN_TILE_ROWS))
    for start in range(0, n, size):
        end = min(start + size, n)
        # The first key that the tile's first row sees; the last is the tile's last row's own.
        first_key = 0 if window is None else max(0, m - n + start - window + 1)
        yield slice(start, end), slice(first_key, m - n + end)


def _forward_rows(n: int, m: int, window: int | None) -> int:
    """Return how many query rows to process at once."""
    needs_no_mask = n == m and (window is None or m <= window)
    return n if needs_no_mask else max(1, _MAX_TILE_ELEMENTS // _span(m, window))


def _backward_rows(num_heads: int, m: int, window: int | None) -> int:
    """Return how many query rows to process at once in the backward pass."""
    return max(_MIN_BACKWARD_ROWS, _CACHED_TILE_ELEMENTS // (num_heads * _span(m, window)))


def _span(m: int, window: int | None) -> int:
    """Return about how many keys a tile sees."""
    return m if window is None else min(m, 2 * window)


def _hidden_keys(n: int, m: int, window: int | None) -> Tensor:
    """Return the keys that a query must not see: bool [n, m]."""
    query, key = torch.arange(m - n, m)[:, None], torch.arange(m)[None, :]
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    return hidden


def _by_head(store: Tensor, width: int) -> Tensor:
    """Return a store [pages, entries, heads * D] as [pages * entries, heads, D]."""
    return store.reshape(store.shape[0] * store.shape[1], -1, width)


def _heads_first(x: Tensor) -> Tensor:
    """Return x [n, heads, ...] as a new float32 tensor [heads, n, ...]."""
    made = torch.empty(x.shape[1], x.shape[0], *x.shape[2:], dtype=torch.float32, device=x.device)
    return made.copy_(x.transpose(0, 1))


@lru_cache(maxsize=16)
def _tile_mask(n: int, m: int, window: int | None) -> Tensor:
    """Return the keys that a tile's queries must not see: bool [n, 1, m]."""
    return _hidden_keys(n, m, window)[:, None]


@lru_cache(maxsize=16)
def _additive_mask(n: int, m: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return 0 where a query sees a key and -inf elsewhere, [1, 1, n, m]. The layers of a step, and
    often its sequences, share it.
    """
    hidden = _hidden_keys(n, m, window)
    return torch.zeros(n, m, dtype=dtype).masked_fill_(hidden, float("-inf"))[None, None]

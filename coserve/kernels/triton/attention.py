"""Attention of a batch of segments: the launches of `attention_kernels`."""

from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from coserve.kernels.attention import AttentionSpec
from coserve.kernels.triton import attention_kernels as kernels
from coserve.kernels.triton.attention_tables import (
    SingleRows,
    StaticSegments,
    TritonAttentionBatch,
    TritonAttentionRoom,
)
from coserve.kernels.triton.products import is_exact

# The fewest queries of a tile, which matrix units take.
_MIN_QUERIES = 16
# Maximum width of a head: a wider one does not fit.
_MAX_WIDTH = 256
# Classes with segments and tiles.
Tiled = TritonAttentionBatch | TritonAttentionRoom | StaticSegments


def forward(
    q: Tensor, keys: Tensor, values: Tensor, batch: Tiled, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Implement `Backend.attention`."""
    found, given, kind = _results(q, batch), _Given(q, keys, spec), "rows"
    # Rows alone in their segment: their keys are divided among programs. The others go in tiles.
    if (single := batch.single) is not None:
        _attend_single(q, keys, values, single, given, *found)
        kind = "several"
    tiles = batch.tiles(kind, given.block_m // given.groups)
    if tiles.shape[0]:
        kernels.attend[tiles.shape[0], given.num_key_heads, 1](
            # lse stands in for `sums`, which a launch without splits does not touch.
            *(q, keys, values, *found, found[1], batch.segments, tiles, batch.pages, *given.tables),
            *(q.stride(0), keys.stride(0), keys.stride(1), *given.numbers),
            **given.shape,
            **given.for_forward,
            IS_SINGLE=False,
            SPLITS=1,
            BLOCK_M=given.block_m,
            BLOCK_N=given.block_n,
            **given.launch,
        )
    return found


def forward_single(
    q: Tensor, keys: Tensor, values: Tensor, rows: SingleRows, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Implement `Backend.attention` for segments of one row each."""
    found = _results(q)
    _attend_single(q, keys, values, rows, _Given(q, keys, spec), *found)
    return found


def _results(q: Tensor, batch: Tiled | None = None) -> tuple[Tensor, Tensor]:
    """Allocate rows like q's, and a float32 number of each head; zeros where rows of no segment are
    read, too.
    """
    make = torch.zeros if isinstance(batch, TritonAttentionRoom) else torch.empty
    out = make(q.shape, dtype=q.dtype, device=q.device)
    return out, make(q.shape[:2], dtype=torch.float32, device=q.device)


def _attend_single(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: SingleRows,
    given: "_Given",
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attend with segments of one row, into their rows of out [n, Hq, D] and lse [n, Hq]."""
    (_, num_heads, width), num_segments = q.shape, rows.segments.shape[0]
    sums = torch.empty(
        num_segments, num_heads, rows.splits, 2 + width, dtype=torch.float32, device=q.device
    )
    kernels.attend[num_segments, given.num_key_heads, rows.splits](
        # Segments stand in for tiles, which single rows do not read.
        *(q, keys, values, out, lse, sums, rows.segments, rows.segments, rows.pages, *given.tables),
        *(q.stride(0), keys.stride(0), keys.stride(1), *given.numbers),
        **given.shape,
        **given.for_forward,
        IS_SINGLE=True,
        SPLITS=rows.splits,
        **given.single,
    )
    kernels.merge_splits[num_segments, num_heads](
        *(sums, out, lse, rows.segments, given.tables[1]),
        **{name: given.shape[name] for name in ("NUM_HEADS", "WIDTH", "WIDTH_BLOCK")},
        SPLITS=rows.splits,
        HAS_SINKS=given.for_forward["HAS_SINKS"],
        num_warps=1,
    )


def backward(
    grad: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    batch: Tiled,
    spec: AttentionSpec,
    *,
    key_grads: Tensor,
    value_grads: Tensor,
) -> Tensor:
    """Implement `Backend.attention_gradient`."""
    given, (n, num_heads, width) = _Given(q, keys, spec), q.shape
    (dq, delta), block = _results(q, batch), given.shape["WIDTH_BLOCK"]
    kernels.row_products[n, num_heads](
        grad, out, delta, grad.stride(0), out.stride(0), WIDTH=width, WIDTH_BLOCK=block, num_warps=1
    )
    steps = (grad.stride(0), q.stride(0), keys.stride(1), *given.numbers)
    common = {**given.shape, "BLOCK_M": given.block_m, "BLOCK_N": given.backward_n, **given.launch}
    read = (grad, q, keys, values, lse, delta)
    tiles = batch.tiles("rows", given.block_m // given.groups)
    kernels.query_gradients[tiles.shape[0], given.num_key_heads](
        *read, dq, batch.segments, tiles, given.tables[0], *steps, **common
    )
    # By keys, so that each key's gradient is summed by one program, without atomics.
    tiles = batch.tiles("keys", given.backward_n)
    kernels.key_gradients[tiles.shape[0], given.num_key_heads](
        *read, key_grads, value_grads, batch.segments, tiles, given.tables[0], *steps, **common
    )
    return dq


class _Given:
    """Arguments of kernels for shapes and for the formula of scores."""

    def __init__(self, q: Tensor, keys: Tensor, spec: AttentionSpec) -> None:
        num_heads, width = q.shape[1:]
        self.num_key_heads = keys.shape[2] // width
        self.groups = num_heads // self.num_key_heads
        block, is_float32 = max(16, triton.next_power_of_2(width)), q.dtype == torch.float32
        slopes = q if spec.alibi_slopes is None else _slopes(spec.alibi_slopes, q.device)
        self.tables = (slopes, q if spec.sinks is None else spec.sinks)  # q: not read
        self.numbers = (spec.scale, spec.soft_cap or 1.0, spec.sliding_window or 0)
        self.shape: dict[str, Any] = {
            "NUM_HEADS": num_heads,
            "GROUPS": self.groups,
            "WIDTH": width,
            "WIDTH_BLOCK": block,
            "EXACT": is_exact(q.dtype, q.device),
            "HAS_CAP": spec.soft_cap is not None,
            "HAS_SLOPES": spec.alibi_slopes is not None,
            "HAS_WINDOW": spec.sliding_window is not None,
        }
        # A store of one page needs no look-up: a key's place follows from its number.
        is_paged = keys.shape[0] > 1
        self.for_forward = {
            "IS_PAGED": is_paged,
            "TOKENS": keys.shape[1] if is_paged else 1,
            "HAS_SINKS": spec.sinks is not None,
        }
        # Sizes of tiles: by measurement on an H200 (2,048 rows of 14 heads of 64 and of 32 of 128);
        # wide ones take much of the shared memory.
        is_large = block > 128 or is_float32
        self.least_m = max(_MIN_QUERIES, triton.next_power_of_2(self.groups))
        self.block_m, self.block_n = (
            max(self.least_m, 32 if is_large else 64),
            64 if block <= 64 else 32,
        )
        self.backward_n = 32
        self.launch = {"num_warps": 4, "num_stages": 1 if is_large else 3}
        self.single = {
            "BLOCK_M": self.least_m,
            "BLOCK_N": 32 if is_large else 64,
            "num_warps": 4,
            "num_stages": 2,
        }


@lru_cache(maxsize=8)
def _slopes(slopes: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def fit(q: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Return whether the kernels are for queries [n, Hq, D] and stores that lie so."""
    n, num_heads, width = q.shape
    are_rows = n > 0 and q.stride(2) == 1 and (num_heads == 1 or q.stride(1) == width)
    are_stores = keys.stride(2) == 1 and values.stride() == keys.stride()
    return are_rows and are_stores and width <= _MAX_WIDTH and q.dtype == keys.dtype == values.dtype

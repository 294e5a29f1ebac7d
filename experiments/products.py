"""Times of products of rows with a weight, by order of factors and number of rows.

    python -m experiments.products [--dtype bfloat16]

The choices of `coserve/kernels/cpu/products.py` and `tile_products.py` follow from this table.
Every product has its own weight, so that none is in the caches. Columns: microseconds of x W^T by
PyTorch's choice, converted to float32, by our choice, by our kernel for the weight in int8, of dy W
by PyTorch and by our choice, and of reading the weight once.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor

from coserve.bench.machine import describe, read_bytes_per_s
from coserve.kernels import find_backend
from coserve.kernels.cpu.products import wide_product
from coserve.kernels.weights import Int8Weight

_SHAPES = (
    *((9728, 896), (896, 4864), (896, 896), (1152, 896)),
    *((1536, 576), (576, 1536), (960, 576), (49152, 576)),
)
_ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 512)
_WEIGHT_BYTES = 256 << 20


def _best_us(run: Callable[[Any], object], weights: Sequence[Tensor | Int8Weight]) -> float:
    times = []
    for _ in range(4):
        start = time.perf_counter()
        for weight in weights:
            run(weight)
        times.append((time.perf_counter() - start) / len(weights))
    return 1e6 * min(times)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="bfloat16")
    dtype = getattr(torch, parser.parse_args().dtype)
    device = torch.device("cpu")
    backend = find_backend(device)
    bytes_per_s = read_bytes_per_s(device)
    print(f"{describe(device)}, {dtype}, reads {bytes_per_s / 1e9:.0f} GB/s")
    print(f"{'weight':>12} rows  linear    wide    ours    int8    dy W    ours    read")
    for out, inner in _SHAPES:
        num_bytes = out * inner * dtype.itemsize
        weights = [
            torch.randn(out, inner).to(dtype)
            for _ in range(max(1, min(40, _WEIGHT_BYTES // num_bytes)))
        ]
        quantised = [Int8Weight.quantised(weight) for weight in weights]
        for rows in _ROWS:
            x, dy = torch.randn(rows, inner).to(dtype), torch.randn(rows, out).to(dtype)
            ways: list[tuple[Callable[[Any], object], Sequence[Tensor | Int8Weight]]] = [
                (partial(torch.nn.functional.linear, x), weights),
                (partial(wide_product, x), weights),
                (partial(backend.product, x), weights),
                (methodcaller("product", backend, x), quantised),
                (partial(torch.matmul, dy), weights),
                (partial(backend.input_gradient, dy), weights),
            ]
            with torch.inference_mode():
                times = "".join(f"{_best_us(*way):8.0f}" for way in ways)
            print(f"{f'{out}x{inner}':>12} {rows:4}{times}{1e6 * num_bytes / bytes_per_s:8.0f}")


if __name__ == "__main__":
    main()

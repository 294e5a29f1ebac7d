"""Times of the kernels of this machine's backend and of the plain ones, in turns.

    python -m experiments.kernels [--dtype bfloat16]

Microseconds, the minimum of some calls each. Before every call other memory is read, so that the
kernel's data are in no cache, as within a step.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from coserve.bench.machine import describe
from coserve.devices.torch.process_memory import keep_freed_memory
from coserve.kernels import find_backend
from coserve.kernels.attention import AttentionSpec, Segment
from coserve.kernels.base import Backend
from coserve.kernels.plain import PlainBackend
from coserve.kernels.weights import Int8Weight

_CALLS, _OTHER_BYTES = 7, 128 << 20
_DEVICE = torch.device("cpu")
_BACKENDS: tuple[Backend, Backend] = (PlainBackend(_DEVICE), find_backend(_DEVICE))
_Case = tuple[str, list[Callable[[], object]]]


def _both(name: str, method: str, *given: Any, **options: Any) -> _Case:
    """Return a method of the plain backend, and of this machine's."""
    return name, [partial(getattr(backend, method), *given, **options) for backend in _BACKENDS]


def _attention(dtype: torch.dtype) -> Iterator[_Case]:
    def make(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    spec = AttentionSpec(scale=0.125)
    for n, m, heads, key_heads in ((1024, 1024, 9, 3), (150, 512, 14, 2), (32, 2048, 14, 2)):
        q, grad, keys, values = (
            make(n, heads, 64),
            make(n, heads, 64),
            *make(2, 1, m, key_heads * 64),
        )
        sums = torch.zeros(2, 1, m, key_heads * 64)
        segments = [Segment(num_rows=n, num_keys=m)]
        batches = [backend.prepare_attention(segments, block_tokens=m) for backend in _BACKENDS]
        out, lse = _BACKENDS[0].attention(q, keys, values, batches[0], spec)
        name = f"{n} rows, {m} keys, {heads} and {key_heads} heads"
        ways = list(zip(_BACKENDS, batches, strict=True))
        yield (
            f"attention forward, {name}",
            [partial(b.attention, q, keys, values, batch, spec) for b, batch in ways],
        )
        given = (grad, q, keys, values, out, lse)
        yield (
            f"attention backward, {name}",
            [
                partial(
                    b.attention_gradient,
                    *given,
                    batch,
                    spec,
                    key_grads=sums[0],
                    value_grads=sums[1],
                )
                for b, batch in ways
            ],
        )
    q, pages = make(4, 9, 64), make(600, 2, 16, 3 * 64)
    segments = [
        Segment(num_rows=1, num_keys=512, pages=range(i * 32, (i + 1) * 32)) for i in range(4)
    ]
    yield (
        "attention in pages, 4 rows, 512 keys, 9 and 3 heads",
        [
            partial(
                b.attention,
                q,
                pages[:, 0],
                pages[:, 1],
                b.prepare_attention(segments, block_tokens=16),
                spec,
            )
            for b in _BACKENDS
        ],
    )


def _cases(dtype: torch.dtype) -> Iterator[_Case]:
    def make(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    yield from _attention(dtype)
    for n in (1, 4, 16, 64, 128, 192):
        x, weight = make(n, 896), make(9728, 896)
        yield _both(f"product, {n} x 896 with 9728 x 896", "product", x, weight)
        yield _both(
            f"int8 product, {n} x 896 with 9728 x 896",
            "int8_product",
            x,
            *Int8Weight.quantised(weight).tensors(),
        )
    for n in (4, 150, 512):
        x, narrow, a, b = make(n, 4864), make(n, 16), make(16, 4864), make(4864, 16)
        yield _both(f"LoRA x A^T, {n} x 4864", "low_rank_product", x, a)
        yield _both(f"LoRA y += z B^T, {n} x 4864", "low_rank_product", narrow, b, x)
        yield _both(
            f"LoRA gradient of A, {n} x 4864",
            "add_low_rank_gradient",
            narrow,
            x,
            torch.zeros(16, 4864),
        )
    for n in (4, 512):
        x, y, weight, cos = make(n, 896), make(n, 896), make(896), make(n, 64)
        yield _both(f"RMSNorm, {n} x 896", "rms_norm", x, weight, 1e-6)
        yield _both(
            f"RMSNorm gradient, {n} x 896", "rms_norm_gradient", y, x, weight, 1e-6, with_y=True
        )
        yield _both(f"rotary positions, {n} x 896", "rope", x, cos, cos)
        gate, up, dy = make(n, 4864), make(n, 4864), make(n, 4864)
        yield _both(f"gated unit, {n} x 4864", "silu_mul", gate, up)
        yield _both(
            f"gated unit gradients, {n} x 4864", "silu_mul_gradients", dy, gate, up, with_y=True
        )
    for n in (4, 256):
        logits, targets = make(n, 151936), torch.zeros(n, dtype=torch.int64)
        _, _, norm = _BACKENDS[1].cross_entropy(logits, targets)
        yield _both(f"argmax, {n} x 151936", "argmax", logits)
        yield _both(f"loss, {n} x 151936", "cross_entropy", logits, targets)
        yield _both(
            f"loss gradient, {n} x 151936",
            "cross_entropy_gradient",
            logits,
            targets,
            norm,
            torch.ones(n),
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="bfloat16")
    dtype = getattr(torch, parser.parse_args().dtype)
    keep_freed_memory()
    print(f"{describe(torch.device('cpu'))}, {dtype}")
    print(f"{'':58} plain      ours  ratio")
    other = torch.zeros(_OTHER_BYTES // 4)
    with torch.inference_mode():
        for name, ways in _cases(dtype):
            least = [float("inf"), float("inf")]
            for _ in range(_CALLS):
                for index, run in enumerate(ways):
                    other.sum()
                    start = time.perf_counter()
                    run()
                    least[index] = min(least[index], 1e6 * (time.perf_counter() - start))
            print(f"{name:55} {least[0]:8.0f} {least[1]:9.0f} {least[0] / least[1]:6.2f}")


if __name__ == "__main__":
    main()

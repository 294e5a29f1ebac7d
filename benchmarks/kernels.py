"""How long the compiled CPU kernels take, and their plain twins, in turns.

    python benchmarks/kernels.py [--dtype bfloat16]

Microseconds, the least of some calls each. Before every call other memory is read, so that what a kernel works on is in
no cache, as it is within a step.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from coserve.bench.machine import describe
from coserve.devices.process_memory import keep_freed_memory
from coserve.kernels import amx, cpu
from coserve.kernels.argmax import argmax
from coserve.kernels.attention import CpuAttention, PageTable, attention_kernel
from coserve.kernels.cross_entropy import cross_entropy, cross_entropy_gradient
from coserve.kernels.linear import add_product, product, weight_gradient
from coserve.kernels.rms_norm import rms_norm, rms_norm_gradient
from coserve.kernels.rope import rope
from coserve.kernels.silu_mul import silu_mul, silu_mul_gradients

_CALLS, _OTHER_BYTES = 7, 128 << 20
Case = tuple[str, Callable[[], object], Callable[[], object]]


@contextmanager
def _plain() -> Iterator[None]:
    """The plain twins run within."""
    before = cpu.compiled_kernels
    cpu.compiled_kernels = amx.compiled_kernels = lambda: None
    try:
        yield
    finally:
        cpu.compiled_kernels = amx.compiled_kernels = before


def _run_plain(run: Callable[[], object]) -> object:
    with _plain():
        return run()


def _cases(dtype: torch.dtype) -> Iterator[Case]:
    def make(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    def both(name: str, run: Callable[[], object]) -> Case:
        return name, partial(_run_plain, run), run

    fast, slow = attention_kernel(torch.device("cpu")), CpuAttention()
    settings = {"scale": 0.125, "sliding_window": None}
    for n, m, heads, key_heads in ((1024, 1024, 9, 3), (150, 512, 14, 2), (32, 2048, 14, 2)):
        q, grad = make(n, heads, 64), make(n, heads, 64)
        k, v = make(m, key_heads, 64), make(m, key_heads, 64)
        sums = torch.zeros(2, m, key_heads, 64)
        out, lse = slow.forward(q, k, v, **settings)
        name = f"{n} rows, {m} keys, {heads} and {key_heads} heads"
        yield (f"attention forward, {name}", *(partial(a.forward, q, k, v, **settings) for a in (slow, fast)))
        reverse = [
            partial(a.backward, grad, q, k, v, out, lse, **settings, key_grads=sums[0], value_grads=sums[1])
            for a in (slow, fast)
        ]
        yield (f"attention backward, {name}", *reverse)
    pages = make(600, 2, 16, 3 * 64)
    table = PageTable([range(i * 32, (i + 1) * 32) for i in range(4)], [512] * 4, torch.device("cpu"))
    decode = [
        partial(a.forward_paged, make(4, 9, 64), pages[:, 0], pages[:, 1], table, **settings) for a in (slow, fast)
    ]
    yield ("attention in pages, 4 rows, 512 keys, 9 and 3 heads", *decode)
    for n in (1, 4, 16, 64, 128, 192):
        yield both(f"product, {n} x 896 with 9728 x 896", partial(product, make(n, 896), make(9728, 896)))
    for n in (4, 150, 512):
        x, narrow, a, b = make(n, 4864), make(n, 16), make(16, 4864), make(4864, 16)
        yield both(f"LoRA x A^T, {n} x 4864", partial(product, x, a))
        yield both(f"LoRA y += z B^T, {n} x 4864", partial(add_product, x, narrow, b))
        yield both(f"LoRA gradient of A, {n} x 4864", partial(weight_gradient, narrow, x))
    for n in (4, 512):
        x, y, weight, cos = make(n, 896), make(n, 896), make(896), make(n, 64)
        yield both(f"RMSNorm, {n} x 896", partial(rms_norm, x, weight, 1e-6))
        yield both(f"RMSNorm gradient, {n} x 896", partial(rms_norm_gradient, y, x, weight, 1e-6, with_y=True))
        yield both(f"rotary positions, {n} x 896", partial(rope, x, cos, cos))
        gate, up, dy = make(n, 4864), make(n, 4864), make(n, 4864)
        yield both(f"gated unit, {n} x 4864", partial(silu_mul, gate, up))
        yield both(f"gated unit gradients, {n} x 4864", partial(silu_mul_gradients, dy, gate, up, with_y=True))
    for n in (4, 256):
        logits, targets = make(n, 151936), torch.zeros(n, dtype=torch.int64)
        _, _, norm = cross_entropy(logits, targets)
        yield both(f"argmax, {n} x 151936", partial(argmax, logits))
        yield both(f"loss, {n} x 151936", partial(cross_entropy, logits, targets))
        run = partial(cross_entropy_gradient, logits, targets, norm, torch.ones(n))
        yield both(f"loss gradient, {n} x 151936", run)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="bfloat16")
    dtype = getattr(torch, parser.parse_args().dtype)
    keep_freed_memory()
    print(f"{describe(torch.device('cpu'))}, {dtype}")
    print(f"{'':58} plain  compiled  ratio")
    other = torch.zeros(_OTHER_BYTES // 4)
    with torch.inference_mode():
        for name, *ways in _cases(dtype):
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

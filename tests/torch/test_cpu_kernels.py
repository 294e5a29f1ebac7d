"""The CPU's compiled kernels against their plain twins, and what happens where they cannot be
compiled."""

import ctypes
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lengths import long_but

from coserve.kernels import cpu_library, find_backend, why_slow
from coserve.kernels.attention import AttentionSpec, Segment
from coserve.kernels.base import Grouped, JoinedRows
from coserve.kernels.cpu import CpuBackend, compiled
from coserve.kernels.cpu.attention import run_backward, run_forward
from coserve.kernels.cpu.low_rank import LowRankProducts
from coserve.kernels.cpu.products import FEW_FLOAT32_ROWS, CpuProducts
from coserve.kernels.cpu.tile_products import TileProducts
from coserve.kernels.low_rank import AdapterRows, LowRankGradient, LowRankRows
from coserve.kernels.plain import PlainBackend
from coserve.kernels.weights import Int8Weight

KERNELS = compiled.compiled_kernels()
needs_kernels = pytest.mark.skipif(KERNELS is None, reason="needs g++")
needs_pairs = pytest.mark.skipif(
    KERNELS is None or not KERNELS.has_pairs, reason="needs g++ and AMD's AVX-512"
)
needs_tiles = pytest.mark.skipif(
    KERNELS is None or not KERNELS.has_tiles, reason="needs g++, and AMX or AMD's AVX-512"
)
needs_amx = pytest.mark.skipif(KERNELS is None or not KERNELS.has_amx, reason="needs g++ and AMX")
DEVICE = torch.device("cpu")
PLAIN = PlainBackend(DEVICE)
CPU = PLAIN if KERNELS is None else CpuBackend(DEVICE)


def attention(n, m, num_heads, num_key_heads, width, sliding_window):
    """Inputs of a backward pass, and its settings."""
    torch.manual_seed(0)
    q, grad = torch.randn(2, n, num_heads, width).bfloat16()
    k, v = torch.randn(2, m, num_key_heads, width).bfloat16()
    spec = AttentionSpec(scale=width**-0.5, sliding_window=sliding_window)
    return grad, q, k, v, *run_forward(q, k, v, spec), spec


def attend(backend, q, k, v, spec):
    """One segment, whose keys stand one after another."""
    batch = backend.prepare_attention(
        [Segment(num_rows=len(q), num_keys=len(k))], block_tokens=len(k)
    )
    return backend.attention(q, k.flatten(1)[None], v.flatten(1)[None], batch, spec)


def reverse(backend, grad, q, k, v, out, lse, spec):
    """Gradients of q, k and v; what was in the sums before stays in them."""
    dk, dv = (torch.full((1, len(k), k[0].numel()), value) for value in (2.0, -1.0))
    batch = backend.prepare_attention(
        [Segment(num_rows=len(q), num_keys=len(k))], block_tokens=len(k)
    )
    stores = k.flatten(1)[None], v.flatten(1)[None]
    dq = backend.attention_gradient(
        grad, q, *stores, out, lse, batch, spec, key_grads=dk, value_grads=dv
    )
    return dq.float(), dk.sub_(2.0).view(k.shape), dv.add_(1.0).view(v.shape)


FEWER_THREADS = """
import torch
from test_cpu_kernels import CPU, KERNELS, PLAIN, attend, reverse
from coserve.kernels.attention import AttentionSpec
from coserve.kernels.cpu.tile_products import TileProducts

torch.manual_seed(0)
q, grad = torch.randn(2, 300, 6, 64).bfloat16()
k, v = torch.randn(2, 300, 2, 64).bfloat16()
spec = AttentionSpec(scale=0.125)
results = []
for backend, num_threads in ((PLAIN, 1), (CPU, 4)):
    torch.set_num_threads(num_threads)
    out, lse = attend(backend, q, k, v, spec)
    results.append([x.float() for x in (out, lse, *reverse(backend, grad, q, k, v, out, lse, spec))])
for one, other in zip(*results):
    assert (one - other).norm() < 1e-2 * other.norm()
weight = torch.randn(96, 64).bfloat16()
ours = TileProducts(KERNELS).product(q[:20, 0], weight)
assert (ours.float() - q[:20, 0].float() @ weight.float().T).abs().max() < 0.2
"""


@needs_tiles
def test_kernels_are_whole_with_fewer_threads_than_they_ask_for():
    tests = Path(__file__).parent
    places = [str(Path(compiled.__file__).parents[3]), str(tests), str(tests.parent)]
    environment = {**os.environ, "OMP_THREAD_LIMIT": "1", "PYTHONPATH": os.pathsep.join(places)}
    subprocess.run([sys.executable, "-c", FEWER_THREADS], check=True, env=environment, timeout=120)


SHAPES = [
    (300, 300, 6, 2, 64, None),  # several tiles, the last one in part
    (128, 128, 4, 4, 32, None),  # one tile
    (150, 500, 6, 3, 64, None),  # a window with keys before it
    (33, 97, 2, 1, 96, None),
    (16, 40, 3, 1, 64, 7),  # a sliding window within a tile
    (300, 700, 4, 2, 128, 200),  # and over several
    (2, 3, 1, 1, 32, None),
]


@needs_tiles
@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_forward_pass_of_attention(monkeypatch, shape, num_threads):
    monkeypatch.setattr("coserve.kernels.cpu.attention._MIN_ROWS_BY_TILES", 1)
    _, q, k, v, _, _, spec = attention(*shape)
    q, k = 3 * q, 3 * k  # some probabilities near 1, many near 0
    exact, exact_lse = attend(PLAIN, q.float(), k.float(), v.float(), spec)
    torch.set_num_threads(num_threads)
    out, lse = attend(CPU, q, k, v, spec)
    torch.testing.assert_close(lse, exact_lse, atol=1e-5, rtol=1e-5)
    # Probabilities are rounded to bfloat16 on the way, and the result is.
    assert (out.float() - exact).norm() < 4e-3 * exact.norm()
    torch.testing.assert_close(out.float(), exact, atol=0.01 * float(exact.abs().max()), rtol=0.02)
    torch.set_num_threads(1)
    assert torch.equal(attend(CPU, q, k, v, spec)[0], out)


@needs_tiles
@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_backward_pass_of_attention(shape, num_threads):
    *tensors, spec = attention(*shape)
    inputs: list[Any] = tensors
    plain = reverse(PLAIN, *(*(x.float() for x in inputs), spec))
    torch.set_num_threads(num_threads)
    ours = reverse(CPU, *(*inputs, spec))
    for one, exact in zip(ours, plain, strict=True):
        assert one.shape == exact.shape
        # Probabilities and gradients of scores are rounded to bfloat16 on the way, 2e-3 of each.
        assert (one - exact).norm() < 4e-3 * exact.norm()
        torch.testing.assert_close(one, exact, atol=0.02 * float(exact.abs().max()), rtol=0.02)
    again = reverse(CPU, *(*inputs, spec))
    assert all(torch.equal(one, other) for one, other in zip(ours, again, strict=True))


@needs_tiles
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_no_number_stays_none(wrong):
    _, q, k, v, _, _, spec = attention(140, 140, 4, 2, 64, None)
    k[5, 0, 3] = wrong
    plain, ours = (attend(backend, q, k, v, spec)[0] for backend in (PLAIN, CPU))
    assert plain.isnan().any() and torch.equal(plain.isnan(), ours.isnan())


@needs_tiles
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 32), (torch.bfloat16, 24)])
def test_other_dtypes_and_widths_of_attention_take_the_other_way(dtype, width):
    *inputs, spec = attention(9, 20, 4, 2, width, None)
    grad, q, k, v, out, lse = (x.to(dtype) if x.dtype == torch.bfloat16 else x for x in inputs)
    dk, dv = torch.zeros(k.shape), torch.zeros(v.shape)
    dq = run_backward(grad, q, k, v, out, lse, spec, key_grads=dk, value_grads=dv)
    ours = reverse(CPU, grad, q, k, v, out, lse, spec)
    for one, other in zip((dq.float(), dk, dv), ours, strict=True):
        torch.testing.assert_close(one, other)


@needs_tiles
def test_segments_of_a_window_run_as_one_call():
    torch.manual_seed(0)
    sizes, spec = (20, 100, 33, 5), AttentionSpec(scale=0.125)
    q, grad = torch.randn(2, sum(sizes), 4, 64).bfloat16()
    k, v = torch.randn(2, sum(sizes), 2, 64).bfloat16()
    segments = [
        Segment(num_rows=n, num_keys=n, first_key=sum(sizes[:index]))
        for index, n in enumerate(sizes)
    ]
    batch, stores = (
        CPU.prepare_attention(segments, block_tokens=len(k)),
        (k.flatten(1)[None], v.flatten(1)[None]),
    )
    out, lse = CPU.attention(q, *stores, batch, spec)
    dk, dv = torch.zeros(2, 1, len(k), 128)
    dq = CPU.attention_gradient(
        grad, q, *stores, out, lse, batch, spec, key_grads=dk, value_grads=dv
    )
    for own in (slice(sum(sizes[:index]), sum(sizes[: index + 1])) for index in range(len(sizes))):
        given = (q[own], k[own], v[own])
        alone, norm = attend(CPU, *given, spec)
        grads = reverse(CPU, grad[own], *given, alone, norm, spec)
        whole = (
            out[own],
            lse[own],
            dq[own].float(),
            dk[0, own].view(grads[1].shape),
            dv[0, own].view(grads[2].shape),
        )
        for one, other in zip(whole, (alone, norm, *grads), strict=True):
            torch.testing.assert_close(one, other)


@needs_tiles
@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize(("inner", "outer"), [(32, 32), (96, 64), (576, 960), (1536, 544)])
def test_products_of_few_rows(inner, outer, num_threads):
    torch.manual_seed(0)
    torch.set_num_threads(num_threads)
    tiles, weight, bias = (
        TileProducts(KERNELS),
        torch.randn(outer, inner).bfloat16(),
        torch.randn(outer).bfloat16(),
    )
    wide = torch.randn(100, inner + 8).bfloat16()
    for n in (1, 2, 15, 16, 17, 32, 33, 49, 64, 100):
        x = wide[:n, 8:]  # rows of a wider tensor
        exact = x.double() @ weight.double().T
        whole = tiles.product(x, weight)
        torch.testing.assert_close(whole, exact.bfloat16(), atol=1e-3, rtol=2**-7)
        with_bias = tiles.product(x, weight, bias)
        torch.testing.assert_close(
            with_bias, (exact + bias.double()).bfloat16(), atol=1e-3, rtol=2**-7
        )
        # Without AMX the fewest rows have a kernel of their own, with another order of sums.
        least = 1 if KERNELS.has_amx or n <= 12 else 13
        assert torch.equal(tiles.product(x[-least:], weight)[-1:], whole[-1:]), (
            "whatever other rows are there"
        )


@pytest.mark.skipif(KERNELS is None or not KERNELS.has_amx, reason="needs AMX")
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize(
    ("inner", "outer"), [(32, 64), (1088, 96), (96, 1088), (544, 1536), (2080, 1120)]
)
def test_products_of_many_rows(inner, outer, num_threads):
    torch.manual_seed(0)
    torch.set_num_threads(num_threads)
    tiles, weight, bias = (
        TileProducts(KERNELS),
        torch.randn(outer, inner).bfloat16(),
        torch.randn(outer).bfloat16(),
    )
    x_of_all, grad_of_all = (
        torch.randn(1030, inner + 8).bfloat16(),
        torch.randn(1030, outer + 8).bfloat16(),
    )
    for n in (128, 200, 255, 513, 1030):
        x, grad = x_of_all[:n, 8:], grad_of_all[:n, 8:]  # rows of wider tensors
        exact = x.double() @ weight.double().T
        whole = tiles.product(x, weight)
        torch.testing.assert_close(whole, exact.bfloat16(), atol=1e-3, rtol=2**-7)
        with_bias = tiles.product(x, weight, bias)
        torch.testing.assert_close(
            with_bias, (exact + bias.double()).bfloat16(), atol=1e-3, rtol=2**-7
        )
        assert torch.equal(tiles.product(x[-128:], weight)[-1:], whole[-1:]), (
            "whatever other rows are there"
        )

        exact = grad.double() @ weight.double()
        whole = tiles.input_gradient(grad, weight)
        assert torch.equal(tiles.input_gradient(grad.contiguous(), weight), whole), (
            "however far apart rows lie"
        )
        torch.testing.assert_close(whole, exact.bfloat16(), atol=1e-3, rtol=2**-7)
        assert torch.equal(tiles.input_gradient(grad[-128:], weight)[-1:], whole[-1:]), (
            "whatever other rows are there"
        )
        onto = torch.randn(n, inner + 8).bfloat16()
        before = onto.clone()
        assert tiles.input_gradient(grad, weight, onto[:, 8:]) is not None
        torch.testing.assert_close(
            onto[:, 8:], (before[:, 8:].double() + exact).bfloat16(), atol=1e-3, rtol=2**-7
        )
        assert torch.equal(onto[:, :8], before[:, :8])


def fused_kernel(name: str, backend: Any = CPU) -> Any:
    """A backend's kernel of a fused operator."""
    return backend.fused.get(name, lambda *given: None)


gradient_beside_low_rank = fused_kernel("linear_beside_low_rank")
product_and_low_rank, gated_product = (
    fused_kernel("linear_and_low_rank"),
    fused_kernel("gated_linear"),
)


@needs_amx
@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize(
    ("inner", "outer", "sites"),
    [
        (32, 32, [(0, 32, 16)]),
        (96, 160, [(0, 64, 8), (128, 32, 33)]),
        (896, 1152, [(0, 896, 16), (896, 128, 64), (1024, 128, 1)]),
        (4864, 896, [(0, 896, 16)]),
    ],
)
def test_what_a_lora_adds_is_within_the_sums_of_a_product(inner, outer, sites, num_threads):
    """sites: first column, columns and rank of each. Rounded once, and no row depends on others or
    on threads."""
    torch.manual_seed(0)
    torch.set_num_threads(num_threads)
    weight, bias = torch.randn(outer, inner).bfloat16(), torch.randn(outer).bfloat16()
    wide, most = torch.randn(700, inner + 8).bfloat16(), 700
    added = [
        LowRankRows(
            torch.randn(most, rank + 3).bfloat16()[:, 3:],
            torch.randn(columns, rank).bfloat16(),
            first,
        )
        for first, columns, rank in sites
    ]
    whole = None
    for n in (700, 128, 129, 200, 544):
        x, own = wide[:n, 8:], [each._replace(narrow=each.narrow[:n]) for each in added]
        found = product_and_low_rank(x, weight, bias, own)
        exact = x.double() @ weight.double().T + bias.double()
        sizes = x.double().abs() @ weight.double().abs().T + bias.double().abs()
        for narrow, b, first in own:
            columns = slice(first, first + len(b))
            exact[:, columns] += narrow.double() @ b.double().T
            sizes[:, columns] += narrow.double().abs() @ b.double().abs().T
        assert ((found.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6 * sizes).all()
        whole = found if whole is None else whole
        assert torch.equal(found, whole[:n]), "whatever other rows are there"
    torch.set_num_threads(1)
    assert torch.equal(whole, product_and_low_rank(wide[:, 8:], weight, bias, added))
    without = [
        rows
        for rows in range(outer)
        if not any(first <= rows < first + size for first, size, _ in sites)
    ]
    assert torch.equal(whole[:, without], CPU.product(wide[:, 8:], weight, bias)[:, without])


@needs_amx
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize(
    ("inner", "outer", "sites"),
    [
        (32, 64, []),
        (2080, 192, [(96, 96, 16)]),
        (896, 1152, [(0, 576, 16), (576, 576, 33)]),
        (96, 16384, []),
    ],
)
def test_a_gated_product_keeps_and_gives_what_its_parts_do(inner, outer, sites, num_threads):
    """sites: as above. To the last bit, wherever it is kept."""
    torch.manual_seed(0)
    torch.set_num_threads(num_threads)
    weight, bias = torch.randn(outer, inner).bfloat16() / 8, torch.randn(outer).bfloat16()
    for n, gap, own_bias in ((128, 0, bias), (201, 8, None), (544, 32, bias), (1030, 0, None)):
        x = torch.randn(n, inner + 8).bfloat16()[:, 8:]
        added = [
            LowRankRows(
                torch.randn(n, rank).bfloat16(), torch.randn(columns, rank).bfloat16(), first
            )
            for first, columns, rank in sites
        ]
        both = product_and_low_rank(x, weight, own_bias, added)
        gate, up = both.tensor_split(2, -1)
        rooms = torch.full((2, n + 1, outer // 2 + gap), -1.0, dtype=torch.bfloat16)
        kept = rooms[:, :n, : outer // 2]
        found = gated_product(x, weight, own_bias, added, kept.unbind())
        assert torch.equal(found, CPU.silu_mul(gate, up))
        assert torch.equal(kept[0], gate) and torch.equal(kept[1], up)
        assert (rooms[:, n:] == -1).all() and (rooms[:, :, outer // 2 :] == -1).all(), (
            "and nothing else"
        )


@needs_amx
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize(
    ("inner", "outer", "rank"), [(32, 64, 1), (1088, 96, 16), (896, 1152, 33), (4864, 896, 64)]
)
def test_what_a_lora_adds_is_within_the_sums_of_an_input_gradient(inner, outer, rank, num_threads):
    """Rounded once, and no row depends on others or on threads."""
    torch.manual_seed(0)
    torch.set_num_threads(num_threads)
    weight, a = torch.randn(outer, inner).bfloat16(), torch.randn(rank, inner).bfloat16()
    grads, narrows = torch.randn(1030, outer + 8).bfloat16(), torch.randn(1030, rank + 3).bfloat16()
    whole = None
    for n in (1030, 128, 200, 513):
        grad, narrow = grads[:n, 8:], narrows[:n, 3:]
        exact = grad.double() @ weight.double() + narrow.double() @ a.double()
        found = gradient_beside_low_rank(grad, weight, LowRankGradient(narrow, a), None)
        torch.testing.assert_close(found, exact.bfloat16(), atol=1e-3, rtol=2**-7)
        whole = found if whole is None else whole
        assert torch.equal(found, whole[:n]), "whatever other rows are there"
        onto = torch.randn(n, inner + 8).bfloat16()
        before = onto.clone()
        total = onto[:, 8:]
        assert gradient_beside_low_rank(grad, weight, LowRankGradient(narrow, a), total) is total
        torch.testing.assert_close(
            total, (before[:, 8:].double() + exact).bfloat16(), atol=1e-3, rtol=2**-7
        )
        assert torch.equal(onto[:, :8], before[:, :8])
    torch.set_num_threads(1)
    assert torch.equal(
        whole,
        gradient_beside_low_rank(grads[:, 8:], weight, LowRankGradient(narrows[:, 3:], a), None),
    )


@needs_kernels
def test_input_gradients_that_take_no_adapter_along_say_so():
    grad, weight = torch.ones(128, 64).bfloat16(), torch.ones(64, 32).bfloat16()
    added = LowRankGradient(torch.ones(128, 8).bfloat16(), torch.ones(8, 32).bfloat16())
    assert (gradient_beside_low_rank(grad, weight, added, None) is not None) == KERNELS.has_amx
    for other in (
        added._replace(narrow=added.narrow[:127]),
        added._replace(a=added.a.float()),
        added._replace(a=torch.ones(32, 8).bfloat16().T),
        LowRankGradient(torch.ones(128, 65).bfloat16(), torch.ones(65, 32).bfloat16()),
    ):
        assert gradient_beside_low_rank(grad, weight, other, None) is None
    few = added._replace(narrow=added.narrow[:127])
    assert gradient_beside_low_rank(grad[:127], weight, few, None) is None, "few rows"


@needs_amx
def test_gated_products_that_are_not_for_the_kernel_say_so():
    x, weight, keep = (
        torch.ones(128, 64).bfloat16(),
        torch.ones(128, 64).bfloat16(),
        torch.ones(2, 128, 64).bfloat16(),
    )
    assert gated_product(x, weight, None, (), keep.unbind()) is not None
    assert gated_product(x[:127], weight, None, (), keep[:, :127].unbind()) is None, "few rows"
    assert gated_product(x, weight[:96], None, (), keep[:, :, :48].unbind()) is None, (
        "halves of no whole tiles"
    )
    assert gated_product(x, weight, None, (), keep.float().unbind()) is None, "another dtype"
    assert (
        gated_product(x, weight, None, (), (keep[0], torch.ones(128, 65).bfloat16()[:, :64]))
        is None
    ), "steps"


@needs_amx
def test_a_neighbour_of_b_that_is_not_finite_reaches_its_own_column_alone():
    """Ranks are filled up with zeros, not with what comes after a row of B."""
    torch.manual_seed(0)
    x, weight, narrow = (
        torch.randn(size, width).bfloat16() for size, width in ((128, 64), (64, 64), (128, 16))
    )
    b = torch.randn(64, 16).bfloat16()
    b[5] = float("inf")
    found = product_and_low_rank(x, weight, None, [LowRankRows(narrow, b)])
    assert not found[:, 5].isfinite().any()
    assert found[:, [column for column in range(64) if column != 5]].isfinite().all()


@needs_kernels
def test_products_that_take_no_adapter_along_say_so():
    torch.set_num_threads(1)
    x, weight, narrow = (
        torch.ones(256, 64).bfloat16(),
        torch.ones(64, 64).bfloat16(),
        torch.ones(256, 8).bfloat16(),
    )
    added = LowRankRows(narrow, torch.ones(64, 8).bfloat16())
    fits = KERNELS.has_amx
    assert (product_and_low_rank(x, weight, None, [added]) is not None) == fits
    few = added._replace(narrow=narrow[:127])
    assert product_and_low_rank(x[:127], weight, None, [few]) is None, "few rows"
    assert product_and_low_rank(x.float(), weight.float(), None, [added]) is None, "another dtype"
    for other in (
        added._replace(narrow=narrow[:255]),
        added._replace(narrow=narrow.float()),
        added._replace(b=torch.ones(8, 64).bfloat16().T),
        LowRankRows(torch.ones(256, 65).bfloat16(), torch.ones(64, 65).bfloat16()),
        LowRankRows(narrow, torch.ones(48, 8).bfloat16()),
        LowRankRows(narrow, torch.ones(32, 8).bfloat16(), first=16),
    ):
        assert product_and_low_rank(x, weight, None, [other]) is None


def vector_product(x, weight, bias, num_threads, *, name="vector_product"):
    y, more = torch.full((len(x), len(weight)), float("nan")).to(x.dtype), list[int]()
    if x.dtype == torch.float32:
        name, more = "float32_product", [FEW_FLOAT32_ROWS]
    addresses = (
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
    )
    getattr(KERNELS, name)(*addresses, *x.shape, len(weight), *more, num_threads)
    return y


def pair_product(x, weight, bias, num_threads):
    return vector_product(x, weight, bias, num_threads, name="pair_product")


def int8_pair_product(x, weight, bias, num_threads):
    y = torch.full((len(x), weight.shape[0]), float("nan")).bfloat16()
    values, scales = weight.tensors()
    KERNELS.int8_pair_product(
        *(
            x.data_ptr(),
            x.stride(0),
            values.data_ptr(),
            scales.data_ptr(),
            bias.data_ptr(),
            y.data_ptr(),
        ),
        *(*x.shape, weight.shape[0], num_threads),
    )
    return y


@needs_pairs
@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize(
    ("inner", "outer"), [(32, 32), (96, 64), (64, 96), (576, 960), (1536, 544)]
)
def test_input_gradients_of_few_rows_by_pairs(inner, outer, num_threads):
    torch.manual_seed(0)
    torch.set_num_threads(num_threads)
    products, weight = CpuProducts(KERNELS), torch.randn(outer, inner).bfloat16()
    wide, wide_onto = torch.randn(64, outer + 8).bfloat16(), torch.randn(64, inner + 8).bfloat16()
    whole = products.input_gradient(wide[:, 8:], weight)
    for n in (1, 2, 11, 12, 13, 31, 64):
        grad = wide[:n, 8:]  # rows of a wider tensor
        exact, sizes = grad.double() @ weight.double(), grad.double().abs() @ weight.double().abs()
        found, onto = products.input_gradient(grad, weight), wide_onto[:n, 8:].clone()
        assert ((found.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6 * sizes).all()
        assert torch.equal(found, whole[:n]), "whatever other rows are there"
        exact, before = exact + onto.double(), torch.cat([wide_onto[:n, :8], onto], dim=1)
        added = products.input_gradient(grad, weight, before[:, 8:])
        assert added.data_ptr() == before[:, 8:].data_ptr() and torch.equal(
            before[:, :8], wide_onto[:n, :8]
        )
        assert ((added.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6 * sizes).all(), (
            "rounded once"
        )


@needs_pairs
@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize(("inner", "outer"), [(1, 1), (24, 90), (37, 41), (129, 64), (896, 65)])
def test_products_of_few_rows_with_int8_weights_by_pairs(inner, outer, num_threads):
    torch.manual_seed(0)
    torch.set_num_threads(num_threads)
    weight, bias = Int8Weight.quantised(torch.randn(outer, inner)), torch.randn(outer).bfloat16()
    values, scales = weight.tensors()
    exact_weight = values.double() * scales.double()[:, None]
    wide = torch.randn(48, inner + 3).bfloat16()
    whole = int8_pair_product(wide[:, 3:], weight, bias, num_threads)
    for n in (1, 2, 3, 4, 5, 8, 9, 17, 48):
        x = wide[:n, 3:]
        found = int8_pair_product(x, weight, bias, num_threads)
        exact = x.double() @ exact_weight.T + bias.double()
        sizes = x.double().abs() @ exact_weight.abs().T + bias.double().abs()
        assert ((found.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6 * sizes).all()
        assert torch.equal(found, whole[:n]), "whatever other rows are there"


@needs_pairs
@pytest.mark.parametrize("num_threads", [1, 2, 5, 8])
@pytest.mark.parametrize(
    ("inner", "outer"), [(1, 1), (24, 90), (37, 41), (45, 2), (129, 64), (300, 31), (896, 65)]
)
def test_products_of_few_rows_by_pairs(inner, outer, num_threads):
    torch.manual_seed(0)
    torch.set_num_threads(num_threads)
    weight, bias = torch.randn(outer, inner).bfloat16(), torch.randn(outer).bfloat16()
    wide = torch.randn(48, inner + 3).bfloat16()
    whole = pair_product(wide[:, 3:], weight, bias, num_threads)
    for n in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 48):
        x = wide[:n, 3:]  # rows of a wider tensor
        exact, sizes = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
        for found, expected in (
            (pair_product(x, weight, None, num_threads), exact),
            (pair_product(x, weight, bias, num_threads), exact + bias.double()),
        ):
            assert (
                (found.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-6 * sizes
            ).all()
        assert torch.equal(pair_product(x, weight, bias, num_threads), whole[:n]), (
            "whatever other rows are there"
        )
        last = wide[n - 1 : n, 3:]
        assert torch.equal(pair_product(last, weight, bias, 1), whole[n - 1 : n]), (
            "and however many threads"
        )
    bad = wide[:, 3:].clone()
    bad[20, inner - 1] = float("nan")
    found = pair_product(bad, weight, bias, num_threads)
    others = [*range(20), *range(21, 48)]
    assert found[20].isnan().all() and torch.equal(found[others], whole[others])


def vector_input_gradient(grad, weight, num_threads):
    x_grad = torch.full((len(grad), weight.shape[1]), float("nan")).to(grad.dtype)
    addresses = (grad.data_ptr(), grad.stride(0), weight.data_ptr(), x_grad.data_ptr())
    name = "float32_input_gradient" if grad.dtype == torch.float32 else "vector_input_gradient"
    getattr(KERNELS, name)(*addresses, len(grad), weight.shape[1], len(weight), num_threads)
    return x_grad


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_threads", long_but(1, 5, of=[1, 2, 5, 8]))
@pytest.mark.parametrize(
    ("inner", "outer"),
    [(1, 1), (24, 90), (37, 41), (45, 2), (129, 64), (300, 31), (128, 475), (475, 128), (900, 65)],
)
def test_products_in_float32(inner, outer, num_threads, dtype):
    torch.manual_seed(0)
    torch.set_num_threads(num_threads)
    weight, bias = torch.randn(outer, inner).to(dtype), torch.randn(outer).to(dtype)
    wide, wide_grad = torch.randn(530, inner + 3).to(dtype), torch.randn(530, outer + 5).to(dtype)
    rounding = 2**-8 if dtype == torch.bfloat16 else 2**-23
    for n in (1, 2, 3, 4, 5, 7, 10, 11, 17, 28, 29, 64, 130, 257, 530):
        x, grad = wide[:n, 3:], wide_grad[:n, 5:]  # rows of wider tensors
        exact, exact_grad = x.double() @ weight.double().T, grad.double() @ weight.double()
        sizes, grad_sizes = (
            x.double().abs() @ weight.double().abs().T,
            grad.double().abs() @ weight.double().abs(),
        )
        for found, expected, size in (
            (vector_product(x, weight, None, num_threads), exact, sizes),
            (vector_product(x, weight, bias, num_threads), exact + bias.double(), sizes),
            (vector_input_gradient(grad, weight, num_threads), exact_grad, grad_sizes),
        ):
            assert (
                (found.double() - expected).abs() <= rounding * expected.abs() + 1e-6 * size
            ).all()


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_does_not_depend_on_others_or_threads(dtype):
    """Among few, and among many; of gradients among any number."""
    torch.manual_seed(0)
    weight, bias = torch.randn(300, 417).to(dtype), torch.randn(300).to(dtype)
    x, grad = torch.randn(290, 417).to(dtype), torch.randn(290, 300).to(dtype)
    product, gradient = vector_product(x, weight, bias, 1), vector_input_gradient(grad, weight, 1)
    few = FEW_FLOAT32_ROWS if dtype == torch.float32 else 10
    product_of_few = torch.cat([vector_product(part, weight, bias, 1) for part in x.split(few)])
    for num_threads in (1, 2, 4, 5):
        torch.set_num_threads(num_threads)
        for first, last in ((0, 290), (0, 17), (5, 70), (160, 290)):
            assert torch.equal(
                vector_product(x[first:last], weight, bias, num_threads), product[first:last]
            )
        for first, last in ((0, 1), (3, 7), (5, 70), (160, 290)):
            assert torch.equal(
                vector_input_gradient(grad[first:last], weight, num_threads), gradient[first:last]
            )
        for first, last in ((7, 8), (20, 22), (30, 30 + few), (40, 43), (50, 50 + min(few, 7))):
            assert torch.equal(
                vector_product(x[first:last], weight, bias, num_threads), product_of_few[first:last]
            )
    x[20, 400] = grad[20, 299] = float("nan")
    found = vector_product(x, weight, bias, 2), vector_input_gradient(grad, weight, 2)
    others = [*range(20), *range(21, 290)]
    for bad, before in zip(found, (product, gradient), strict=True):
        assert bad[20].isnan().all() and torch.equal(bad[others], before[others])


@needs_kernels
def test_float32_products_of_a_job_do_not_depend_on_other_rows():
    """Up to as many rows as our own kernels are for."""
    torch.manual_seed(0)
    weight, x, grad = torch.randn(130, 257), torch.randn(128, 257), torch.randn(128, 130)
    product, gradient = CPU.product(x, weight), CPU.input_gradient(grad, weight)
    for n in (1, 2, 3, 5, 17, 100):
        assert torch.equal(CPU.product(x[:n], weight), product[:n])
        assert torch.equal(CPU.input_gradient(grad[:n], weight), gradient[:n])
        onto = torch.ones(n, 257)
        assert CPU.input_gradient(grad[:n], weight, onto) is onto and torch.equal(
            onto, gradient[:n] + 1
        )


@needs_kernels
@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize(
    ("n", "width", "rank"), [(1, 96, 4), (37, 96, 16), (160, 896, 16), (33, 128, 40), (512, 96, 64)]
)
def test_products_with_a_matrix_of_low_rank(n, width, rank, num_threads):
    torch.manual_seed(0)
    torch.set_num_threads(num_threads)
    low_rank = LowRankProducts(KERNELS)
    x = torch.randn(n, width + 8).bfloat16()[:, :width]  # rows of a wider tensor
    narrow, a, b = (
        torch.randn(shape).bfloat16() for shape in ((n, rank), (rank, width), (width, rank))
    )
    for matrix, transposed in ((a, True), (b, False)):
        exact = x.double() @ (matrix.T if transposed else matrix).double()
        y = low_rank.to_low_rank(x, matrix, transposed=transposed)
        torch.testing.assert_close(y, exact.bfloat16(), atol=1e-3, rtol=2**-7)
    for matrix, transposed in ((a, False), (b, True)):
        total = torch.randn(n, width + 8).bfloat16()[
            :, 8:
        ]  # as where several sites' outputs are one tensor
        exact = total.double() + narrow.double() @ (matrix.T if transposed else matrix).double()
        assert low_rank.add_from_low_rank(total, narrow, matrix, transposed=transposed)
        torch.testing.assert_close(total, exact.bfloat16(), atol=1e-3, rtol=2**-7)
        exact = narrow.double() @ (matrix.T if transposed else matrix).double()
        y = low_rank.from_low_rank(narrow, matrix, transposed=transposed)
        torch.testing.assert_close(y, exact.bfloat16(), atol=1e-3, rtol=2**-7)
    exact = narrow.double().T @ x.double()
    for transposed in (False, True):
        start = torch.randn(exact.T.shape if transposed else exact.shape)
        grad = start.clone()
        assert low_rank.add_low_rank_gradient(grad, narrow, x, transposed=transposed)
        expected = start + (exact.T if transposed else exact)
        torch.testing.assert_close(grad, expected.float(), atol=1e-3, rtol=1e-4)


@needs_kernels
@pytest.mark.parametrize("by_tiles", [True, False])
@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("sizes", [(1, 9, 64, 37, 2, 160), (200, 7), (3, 3, 3)])
@pytest.mark.parametrize(("width", "rank"), [(96, 4), (896, 16), (128, 40)])
def test_rows_of_many_adapters_are_one_call_that_gives_each_what_it_gets_alone(
    by_tiles, num_threads, sizes, width, rank
):
    """To the last bit, NaN among the others or not; and of an adapter whose factor is NaN, its own
    rows alone."""
    if by_tiles and not KERNELS.has_tiles:
        pytest.skip("this processor has none")
    torch.manual_seed(0)
    torch.set_num_threads(num_threads)
    kinds = ("", "vector_")[not by_tiles]
    kernels = {
        f"{kinds}{name}": getattr(KERNELS, f"{kinds}{name}")
        for name in ("to_low_rank", "from_low_rank")
    }
    gradient = "add_low_rank_gradient" if by_tiles else "vector_low_rank_gradient"
    kernels[gradient] = getattr(KERNELS, gradient)
    calls: list[str] = []

    def counted(name):
        return lambda *arguments: (calls.append(name), kernels[name](*arguments))

    library: Any = SimpleNamespace(has_tiles=by_tiles, **{name: counted(name) for name in kernels})
    low_rank = LowRankProducts(library)
    rows, num_rows = AdapterRows(sizes, torch.device("cpu")), sum(sizes)
    x, narrow = (
        torch.randn(num_rows, width + 8).bfloat16()[:, 8:],
        torch.randn(num_rows, rank + 3).bfloat16()[:, :rank],
    )
    for transposed in (False, True):
        shapes = (
            (rank, width) if transposed else (width, rank),
            (width, rank) if transposed else (rank, width),
        )
        down, up = (
            Grouped(tensors=tuple(torch.randn(shape).bfloat16() for _ in sizes), rows=rows)
            for shape in shapes
        )
        down.tensors[1].fill_(float("nan"))
        up.tensors[1].fill_(float("nan"))
        sums = Grouped(tensors=tuple(torch.randn(shapes[1]) for _ in sizes), rows=rows)
        bad = x.clone()
        bad[rows.slices[1]] = float("nan")
        total, before = x.clone(), [each.clone() for each in sums.tensors]
        calls.clear()
        y = low_rank.to_low_rank(x, down, transposed=transposed)
        assert low_rank.add_from_low_rank(total, narrow, up, transposed=transposed)
        apart = JoinedRows(tensors=bad.split(sizes))
        assert low_rank.add_low_rank_gradient(
            sums, narrow, apart if transposed else bad, transposed=transposed
        )
        made = low_rank.from_low_rank(narrow, up, transposed=transposed)
        assert len(calls) == 4
        for i, own in enumerate(rows.slices):
            alone, base = x[own].clone(), before[i].clone()
            assert low_rank.add_from_low_rank(
                alone, narrow[own], up.tensors[i], transposed=transposed
            )
            assert low_rank.add_low_rank_gradient(
                base, narrow[own], bad[own], transposed=transposed
            )
            found = low_rank.to_low_rank(x[own], down.tensors[i], transposed=transposed)
            wide = low_rank.from_low_rank(narrow[own], up.tensors[i], transposed=transposed)
            for one, other in (
                (y[own], found),
                (total[own], alone),
                (made[own], wide),
                (sums.tensors[i], base),
            ):
                assert one.isnan().all() if i == 1 else torch.equal(one, other)
    assert low_rank.to_low_rank(x[1:], down, transposed=True) is None, "other rows"
    gaps = Grouped(tensors=(*down.tensors[:-1], down.tensors[-1].T.contiguous().T), rows=rows)
    assert low_rank.to_low_rank(x, gaps, transposed=True) is None, "gaps"


@needs_kernels
def test_products_that_the_kernels_by_tiles_are_not_for_go_the_other_way():
    names = ("to_low_rank", "from_low_rank", "add_low_rank_gradient")
    without_functions: Any = SimpleNamespace(
        has_amx=True,
        has_tiles=True,
        has_pairs=False,
        vector_product=KERNELS.vector_product,
        vector_input_gradient=KERNELS.vector_input_gradient,
        float32_product=KERNELS.float32_product,
        float32_input_gradient=KERNELS.float32_input_gradient,
        **dict.fromkeys(names),
    )
    products, tiles = CpuProducts(without_functions), TileProducts(without_functions)
    low_rank = LowRankProducts(without_functions)
    torch.manual_seed(0)
    torch.set_num_threads(5)  # more than the kernel for many rows is for

    def check(x, weight, grad):
        exact = x.float() @ weight.float().T
        tolerance: dict[str, Any] = {"atol": 0.1, "rtol": 0.02}
        total, back = torch.randn(exact.shape).to(x.dtype), torch.randn(x.shape).to(x.dtype)
        expected = ((total.float() + exact), (back.float() + grad.float() @ weight.float()))
        torch.testing.assert_close(products.product(x, weight).float(), exact, **tolerance)
        start = torch.randn(weight.shape)
        found = start.clone()
        products.add_low_rank_gradient(grad, x, found)
        torch.testing.assert_close(found, start + grad.float().T @ x.float(), atol=0.1, rtol=0.02)
        products.low_rank_product(x, weight, total)
        products.low_rank_input_gradient(grad, weight, back)
        for one, other in zip((total, back), expected, strict=True):
            torch.testing.assert_close(one.float(), other, **tolerance)

    for n, inner, outer in ((4, 72, 96), (4, 96, 72), (300, 96, 96), (9, 16, 16), (9, 100, 16)):
        check(
            *(torch.randn(shape).bfloat16() for shape in ((n, inner), (outer, inner), (n, outer)))
        )
    check(
        torch.randn(4, 96).bfloat16(),
        torch.randn(96, 96).bfloat16().T,
        torch.randn(4, 96).bfloat16(),
    )
    check(torch.randn(4, 96), torch.randn(96, 96), torch.randn(4, 96))
    check(torch.randn(4, 96), torch.randn(16, 96), torch.randn(4, 16))
    x, narrow, part = (torch.randn(shape).bfloat16() for shape in ((4, 96), (4, 16), (16, 100)))
    assert low_rank.to_low_rank(x, part[:, :96], transposed=True) is None
    assert not low_rank.add_from_low_rank(x, narrow, part[:, :96], transposed=False)
    weight = torch.randn(64, 96)
    assert tiles.product(x, weight) is None, "another dtype"
    assert tiles.product(x, weight[:, :64].bfloat16().contiguous()) is None, "another width"
    assert tiles.product(x, weight.bfloat16(), torch.zeros(128).bfloat16()[::2]) is None
    total = torch.zeros(16, 96)
    assert not low_rank.add_low_rank_gradient(total, narrow, x[:3], transposed=False), "other rows"
    assert not low_rank.add_low_rank_gradient(total.T, narrow, x, transposed=True), "gaps"
    assert not low_rank.add_low_rank_gradient(total.bfloat16(), narrow, x, transposed=False), (
        "another dtype"
    )
    assert not total.any()
    assert not low_rank.add_from_low_rank(
        x.float(), narrow, part[:, :96].contiguous(), transposed=False
    )


def paged(lengths, num_heads, num_key_heads, width, block_tokens, dtype):
    """Rows' queries, the pages in which their keys lie, and where. What is not theirs is NaN."""
    torch.manual_seed(0)
    counts = [-(-length // block_tokens) for length in lengths]
    numbers = iter(torch.randperm(sum(counts) + 1).tolist())
    pages = [[next(numbers) for _ in range(count)] for count in counts]
    # As in a cache of three layers: a layer's keys and values lie between those of others.
    pool = torch.full((sum(counts) + 1, 3, 2, block_tokens, num_key_heads * width), float("nan"))
    for row, length in zip(pages, lengths, strict=True):
        own = torch.randn(length, 2, num_key_heads * width)
        for page, part in zip(row, own.split(block_tokens), strict=True):
            pool[page, 1, :, : len(part)] = part.transpose(0, 1)
    keys, values = pool.to(dtype)[:, 1].unbind(1)
    return torch.randn(len(lengths), num_heads, width).to(dtype), keys, values, pages


def attend_paged(backend, q, keys, values, pages, lengths, spec):
    segments = [
        Segment(num_rows=1, num_keys=n, pages=own) for own, n in zip(pages, lengths, strict=True)
    ]
    batch = backend.prepare_attention(segments, block_tokens=keys.shape[1])
    return backend.attention(q, keys, values, batch, spec)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("sliding_window", [None, 1, 130])
@pytest.mark.parametrize(
    "shape",
    [
        ((300, 1, 17, 128, 129), 6, 2, 64, 16),
        ((5000, 3), 9, 3, 16, 16),  # one row is nearly all the work
        ((700,), 14, 2, 48, 5),
        ((40, 260), 11, 1, 32, 3),  # more query heads of a key head than go together
        ((90, 513), 4, 4, 80, 7),
        ((33,), 8, 2, 128, 32),
        ((200, 129, 31), 24, 24, 32, 16),  # more key heads than go together
        ((333, 70), 40, 8, 96, 48),  # these do not go into groups of as many
    ],
)
def test_attention_reads_keys_in_their_pages(shape, sliding_window, num_threads, dtype):
    lengths, num_heads, num_key_heads, width, _ = shape
    q, keys, values, pages = paged(*(*shape, dtype))
    spec = AttentionSpec(scale=1.5 * width**-0.5, sliding_window=sliding_window)
    torch.set_num_threads(num_threads)
    out, lse = attend_paged(CPU, q, keys, values, pages, lengths, spec)
    assert out.shape == q.shape and out.dtype == dtype and lse.dtype == torch.float32
    for i, (row, length) in enumerate(zip(pages, lengths, strict=True)):
        own = [
            x[row].flatten(0, 1)[:length].view(length, num_key_heads, width).double()
            for x in (keys, values)
        ]
        k, v = (
            x[-(sliding_window or length) :].repeat_interleave(num_heads // num_key_heads, 1)
            for x in own
        )
        scores = torch.einsum("hd,khd->hk", q[i].double(), k) * spec.scale
        exact = torch.einsum("hk,khd->hd", scores.softmax(-1), v)
        tolerance = 3e-6 if dtype == torch.float32 else 4e-3  # bfloat16: of rounding what comes out
        torch.testing.assert_close(out[i].double(), exact, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(lse[i].double(), scores.logsumexp(-1), atol=3e-6, rtol=3e-6)
        # Neither the company nor the number of threads changes a bit of it.
        torch.set_num_threads(1)
        alone = attend_paged(CPU, q[i : i + 1], keys, values, [row], [length], spec)
        torch.set_num_threads(num_threads)
        assert torch.equal(alone[0][0], out[i]) and torch.equal(alone[1][0], lse[i])


@needs_kernels
def test_what_is_not_finite_among_the_keys_stays_so():
    q, keys, values, pages = paged((50,), 2, 1, 16, 16, torch.float32)
    keys[pages[0][1], 3] = float("nan")
    out, lse = attend_paged(CPU, q, keys, values, pages, (50,), AttentionSpec(scale=1.0))
    assert out.isnan().all() and lse.isnan().all()


@needs_kernels
@pytest.mark.parametrize("case", ["float16", "width", "strides"])
def test_other_pages_take_the_plain_way(case):
    dtype = torch.float16 if case == "float16" else torch.bfloat16
    lengths = (20, 7)
    q, keys, values, pages = paged(lengths, 4, 2, 24 if case == "width" else 32, 16, dtype)
    keys, values = keys.nan_to_num(), values.nan_to_num()
    if case == "strides":
        keys = keys.transpose(1, 2).contiguous().transpose(1, 2)
    results = [
        attend_paged(x, q, keys, values, pages, lengths, AttentionSpec(scale=0.2))
        for x in (PLAIN, CPU)
    ]
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.fixture
def afresh(monkeypatch, tmp_path):
    """A process that has not asked for kernels yet, with a cache of its own; they compile faster
    than they run."""
    flags = tuple("-O0" if flag == "-O3" else flag for flag in cpu_library.FLAGS)
    monkeypatch.setattr(cpu_library, "FLAGS", flags)
    monkeypatch.delenv("COSERVE_KERNELS", raising=False)
    monkeypatch.setenv("COSERVE_CACHE", str(tmp_path))
    compiled.forget_kernels()
    yield monkeypatch
    compiled.forget_kernels()


@pytest.fixture(scope="module")
def kept_kernels() -> dict[str, bytes]:
    """By its name, the library that was compiled the first time."""
    return {}


@pytest.fixture
def kept(afresh, tmp_path, kept_kernels) -> Path:
    """The library that an earlier process has left in the cache."""
    directory = tmp_path / "kernels"
    directory.mkdir(mode=0o700)
    for name, content in kept_kernels.items():
        (directory / name).write_bytes(content)
        (directory / name).chmod(0o600)
    assert compiled.compiled_kernels() is not None
    [made] = directory.glob("*.so")
    kept_kernels[made.name] = made.read_bytes()
    compiled.forget_kernels()
    return made


@pytest.mark.long
@needs_kernels
def test_kernels_are_compiled_once_and_kept(afresh, tmp_path):
    assert compiled.compiled_kernels() is not None
    [made] = (tmp_path / "kernels").glob("*.so")
    compiled.forget_kernels()
    afresh.setattr(cpu_library, "_run_compiler", None)  # cannot be called
    assert compiled.compiled_kernels() is not None
    assert list((tmp_path / "kernels").glob("*.so")) == [made]


@pytest.mark.long
@needs_kernels
@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: bytes(len(data)), lambda data: b""]
)
def test_a_damaged_library_is_compiled_again(kept, damage):
    whole = kept.read_bytes()
    kept.unlink()  # it is in use here
    kept.write_bytes(damage(whole))
    assert compiled.compiled_kernels() is not None
    assert kept.read_bytes() == whole


@pytest.mark.long
@needs_kernels
@pytest.mark.parametrize("opened", ["the file", "the directory"])
def test_a_library_that_others_could_have_written_is_not_loaded(kept, tmp_path, caplog, opened):
    directory = kept.parent
    foreign = tmp_path / "foreign.so"
    foreign.write_bytes(
        kept.read_bytes() + b"whatever"
    )  # a library for all that, and of the right name
    kept.unlink()
    made_of = kept.stem.rpartition("-")[0]
    foreign = foreign.rename(directory / f"{made_of}-{cpu_library._digest(foreign)}.so")
    (foreign if opened == "the file" else directory).chmod(0o777)
    with caplog.at_level(logging.WARNING):
        assert compiled.compiled_kernels() is not None
    assert f"another user can write {foreign}, so it is not loaded" in caplog.text
    assert kept.exists(), "it has been compiled anew"
    assert foreign.exists() == (opened == "the file"), (
        "nor is it loaded later, once the directory is closed"
    )
    assert directory.stat().st_mode & 0o077 == kept.stat().st_mode & 0o077 == 0


@pytest.mark.long
@needs_kernels
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
def test_in_a_directory_of_another_user_nothing_is_loaded_or_kept(afresh, tmp_path, caplog):
    directory = tmp_path / "kernels"
    directory.mkdir()
    os.chown(directory, 12345, 12345)
    with caplog.at_level(logging.WARNING):
        assert compiled.compiled_kernels() is not None
    assert "is not this user's alone" in caplog.text
    assert not list(directory.iterdir())


@needs_kernels
def test_kernels_are_those_of_this_processor_and_source(afresh):
    before = cpu_library._identity()
    assert cpu_library._identity() == before
    afresh.setattr(cpu_library, "FLAGS", (*cpu_library.FLAGS, "-g"))
    assert cpu_library._identity() != before


@pytest.mark.long
@needs_kernels
@pytest.mark.parametrize("processor", ["x86-64", "bdver2", "haswell", "sapphirerapids"])
def test_kernels_can_be_compiled_for_every_kind_of_processor(processor):
    """With AMX and AVX-512, with AVX2, with FMA and no AVX2, and with nothing of that."""
    flags = [
        "-std=c++17",
        "-fopenmp",
        "-fsyntax-only",
        "-Wno-psabi",
        f"-march={processor}",
        f"-I{cpu_library.SOURCES}",
    ]
    sources = map(str, cpu_library.source_files())
    result = subprocess.run(["g++", *flags, *sources], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_environment_may_ask_for_the_plain_kernels(afresh, tmp_path):
    afresh.setenv("COSERVE_KERNELS", "plain")
    assert type(find_backend(DEVICE)) is PlainBackend
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "fault", ["no compiler", "a compiler that fails", "a cache that is a file"]
)
def test_without_kernels_the_plain_ones_run_and_a_line_says_why(afresh, caplog, tmp_path, fault):
    if compiled._openmp() is None:
        pytest.skip("PyTorch has no OpenMP of GNU's")
    if fault == "no compiler":
        afresh.setenv("PATH", str(tmp_path))
    elif fault == "a compiler that fails":
        afresh.setattr(cpu_library, "FLAGS", ("-no-such-flag",))
    else:
        afresh.setenv("COSERVE_CACHE", __file__)
    with caplog.at_level(logging.WARNING):
        assert compiled.compiled_kernels() is None and compiled.compiled_kernels() is None
    [record] = caplog.records
    assert "the slower plain ones run" in record.message and "\n" not in record.message
    plain = find_backend(DEVICE)
    assert type(plain) is PlainBackend
    assert why_slow(plain) == record.message, "it can be shown where people look"


def test_the_header_states_the_arguments_of_every_kernel():
    """The compiler holds the definitions against it; the library has whatever this processor can
    run."""
    found = compiled.signatures()
    assert len(found) == 54 and all(found.values())
    header = (cpu_library.SOURCES / "kernels.h").read_text()
    for group in header.split("\n\n"):
        paths = re.findall(r"[\w/]+\.cpp", group.partition("\n")[0])
        sources = "".join((cpu_library.SOURCES / path).read_text() for path in paths)
        for name in re.findall(r"^void (\w+)", group, re.MULTILINE):
            definitions = (
                f'extern "C" void {name}(',
                f"PAGED_ATTENTION({name}",
                f"INT8_PRODUCT({name}",
            )
            assert any(each in sources for each in definitions), f"{name} in {paths}"


@pytest.mark.parametrize(
    ("folder", "guard"), [("amx", "HAS_AMX"), ("avx512", "HAS_PAIRS"), ("tiles", "HAS_TILES")]
)
def test_a_folder_says_which_instructions_its_kernels_need(folder, guard):
    for path in (cpu_library.SOURCES / folder).glob("*.cpp"):
        says_what_there_is = path.name == "tiles.cpp"
        assert says_what_there_is or f"\n#ifdef {guard}\n" in path.read_text(), path


@pytest.mark.long
@needs_kernels
def test_a_kernel_that_is_declared_and_not_there_is_found_when_the_library_is_loaded(
    kept, afresh, caplog
):
    declared = compiled.signatures()
    amx = {"int8_product_by_tiles", "cross_entropy_of_columns", "cross_entropy_gradient_of_columns"}
    amx |= {"cross_entropy_input_gradient_of_columns", "wide_product", "wide_product_and_low_rank"}
    amx |= {
        "tile_input_gradient",
        "product_onto",
        "gated_product",
        "wide_product_onto",
        "wide_gated_product",
    }
    amx |= {"paged_attention_by_tiles"}
    tiles = {"attention_forward", "attention_backward", "attend_in_pieces", "product"}
    tiles |= {"to_low_rank", "from_low_rank", "add_low_rank_gradient"}
    assert compiled.kernels_for("tiles") == tiles <= declared.keys()
    assert compiled.kernels_for("AMX") == amx <= declared.keys()
    assert (
        compiled.kernels_for("pairs")
        == {"pair_product", "int8_pair_product", "pair_input_gradient"}
        <= declared.keys()
    )
    afresh.setattr(compiled, "signatures", lambda: {**declared, "softmax": [ctypes.c_void_p]})
    with caplog.at_level(logging.WARNING):
        assert compiled.compiled_kernels() is None
    assert "lacks the kernel softmax, which kernels.h declares" in caplog.text
    assert type(find_backend(DEVICE)) is PlainBackend


@pytest.mark.long
@needs_kernels
def test_flags_of_ones_own_make_other_kernels_and_other_profiles(kept, afresh, caplog):
    afresh.delenv("COSERVE_CXXFLAGS", raising=False)
    assert CpuBackend(DEVICE).identity == "CpuBackend"
    afresh.setenv("COSERVE_CXXFLAGS", "-DSOME='two words' -O2")
    assert cpu_library.own_flags() == ["-DSOME=two words", "-O2"]
    assert CpuBackend(DEVICE).identity == "CpuBackend -DSOME=two words -O2"
    afresh.setenv("COSERVE_CXXFLAGS", "-D'half")
    compiled.forget_kernels()
    with caplog.at_level(logging.WARNING):
        assert compiled.compiled_kernels() is None
    assert (
        "the CPU kernels could not be compiled, so the slower plain ones run: No closing quotation"
        in caplog.text
    )


@needs_kernels
def test_a_kernel_refuses_other_arguments_than_its_header_states():
    with pytest.raises(TypeError, match="at least"):
        KERNELS.argmax(None, 0)
    with pytest.raises(ctypes.ArgumentError):
        KERNELS.argmax(None, 0.5, None, 0, 0, 0, 1)

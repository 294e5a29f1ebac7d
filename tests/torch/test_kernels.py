"""Kernels of every backend that runs here against plain PyTorch; dropout masks and packed signs."""

from typing import Any

import pytest
import torch
from torch import nn

from coserve.errors import ModelError
from coserve.graph.fusions import SIBLING_FUSIONS
from coserve.graph.operators.base import Context
from coserve.kernels import backend_names, find_backend
from coserve.kernels.attention import AttentionSpec, Segment
from coserve.kernels.base import Grouped, JoinedRows
from coserve.kernels.bits import pack_signs, packed_width, unpack_signs
from coserve.kernels.cpu import products
from coserve.kernels.cpu.adapters import MANY_ROWS
from coserve.kernels.cpu.compiled import compiled_kernels
from coserve.kernels.dropout import dropout_ids_of_part, dropout_mask, dropout_row_ids
from coserve.kernels.low_rank import AdapterBatch, AdapterRows, LowRankAdapter, LowRankFactors
from coserve.kernels.plain import PlainBackend
from coserve.kernels.weights import DenseWeight, Int8Weight, join

DEVICE = torch.device("cpu")
PLAIN = PlainBackend(DEVICE)
BACKENDS = [PLAIN] + [find_backend(DEVICE)] * (type(find_backend(DEVICE)) is not PlainBackend)
HAS_AMX = (kernels := compiled_kernels()) is not None and kernels.has_amx
each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.identity)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def reference(q, k, v, spec):
    """Attention of one segment and its gradients by autograd, float32."""
    q, k, v = (x.detach().float().requires_grad_() for x in (q, k, v))
    n, m, groups = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(groups, 1).transpose(0, 1) for x in (k, v))
    scores = q.transpose(0, 1) @ keys.mT * spec.scale
    distance = torch.arange(m - n, m)[:, None] - torch.arange(m)
    hidden = (distance < 0) | (distance >= (spec.sliding_window or m))
    scores = scores.masked_fill(hidden, float("-inf"))
    out = (scores.softmax(-1) @ values).transpose(0, 1)
    return (
        out,
        scores.logsumexp(-1).T,
        lambda grad: torch.autograd.grad(out, (q, k, v), grad.float()),
    )


def _tolerance(dtype: torch.dtype) -> dict[str, Any]:
    return {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 5e-2}


@each_backend
@each_dtype
@pytest.mark.parametrize("width", [16, 32])
@pytest.mark.parametrize("sliding_window", [None, 1, 40])
@pytest.mark.parametrize(
    "lengths",
    [
        [(7, 7)],
        [(3, 9), (1, 70), (90, 90)],
        [(200, 300), (5, 5), (2, 130), (1, 1)],
        [(1, 1), (1, 64), (1, 65), (1, 300)],
    ],
)
def test_attention_of_packed_segments_and_its_gradients(
    backend, dtype, sliding_window, width, lengths
):
    """Segments (rows, keys) whose keys stand one after another."""
    torch.manual_seed(0)
    spec = AttentionSpec(scale=0.3, sliding_window=sliding_window)
    n, m = (sum(sizes) for sizes in zip(*lengths, strict=True))
    q, grad, k, v = (
        torch.randn(rows, heads, width).to(dtype)
        for rows, heads in ((n, 6), (n, 6), (m, 2), (m, 2))
    )
    starts = [sum(keys for _, keys in lengths[:index]) for index in range(len(lengths))]
    segments = [
        Segment(num_rows=rows, num_keys=keys, first_key=start)
        for (rows, keys), start in zip(lengths, starts, strict=True)
    ]
    batch = backend.prepare_attention(segments, block_tokens=m)
    assert batch.num_rows == n
    stores = k.flatten(1)[None], v.flatten(1)[None]
    out, lse = backend.attention(q, *stores, batch, spec)
    assert out.shape == q.shape and out.dtype == dtype and lse.dtype == torch.float32
    sums = [torch.full((1, m, 2 * width), 2.0) for _ in range(2)]  # what was in them before stays
    dq = backend.attention_gradient(
        grad, q, *stores, out, lse, batch, spec, key_grads=sums[0], value_grads=sums[1]
    )
    dk, dv = (total.sub_(2).view(m, 2, width) for total in sums)
    tolerance = 2e-5 if dtype == torch.float32 else 5e-2
    row = 0
    for (rows, keys), start in zip(lengths, starts, strict=True):
        own, seen = slice(row, row + rows), slice(start, start + keys)
        expected, norm, reverse = reference(q[own], k[seen], v[seen], spec)
        theirs = (expected, norm, *reverse(grad[own]))
        ours = (out[own], lse[own], dq[own], dk[seen], dv[seen])
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.float(), other.detach(), atol=tolerance, rtol=tolerance)
        row += rows


@each_backend
@each_dtype
@pytest.mark.parametrize("width", [16, 32, 64])
@pytest.mark.parametrize("sliding_window", [None, 5])
def test_attention_of_rows_whose_keys_lie_in_pages(backend, dtype, sliding_window, width):
    torch.manual_seed(0)
    pages, lengths, block, heads = ((3, 1, 6), (5,), (0, 2)), (11, 2, 8), 4, 2
    num_rows = (1, 2, 1)
    q = torch.randn(sum(num_rows), 6, width).to(dtype)
    k, v = (torch.randn(7, block, heads * width).to(dtype) for _ in range(2))
    spec = AttentionSpec(scale=0.3, sliding_window=sliding_window)
    segments = [
        Segment(num_rows=rows, num_keys=length, pages=own)
        for own, length, rows in zip(pages, lengths, num_rows, strict=True)
    ]
    out, lse = backend.attention(
        q, k, v, backend.prepare_attention(segments, block_tokens=block), spec
    )
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    row = 0
    for own, length, rows in zip(pages, lengths, num_rows, strict=True):
        keys, values = (
            x[list(own)].flatten(0, 1)[:length].view(length, heads, width) for x in (k, v)
        )
        expected, norm, _ = reference(q[row : row + rows], keys, values, spec)
        torch.testing.assert_close(
            out[row : row + rows].float(), expected.detach(), atol=tolerance, rtol=tolerance
        )
        torch.testing.assert_close(
            lse[row : row + rows], norm.detach(), atol=tolerance, rtol=tolerance
        )
        row += rows


@each_backend
def test_a_rows_attention_does_not_depend_on_its_company_in_float32(backend):
    torch.manual_seed(0)
    lengths, block = (300, 1, 17, 128, 700), 16
    numbers = iter(torch.randperm(100).tolist())
    pages = [[next(numbers) for _ in range(-(-length // block))] for length in lengths]
    q, (k, v) = torch.randn(5, 6, 16), torch.randn(2, 100, block, 32)
    spec = AttentionSpec(scale=0.3)
    segments = [
        Segment(num_rows=1, num_keys=n, pages=own) for n, own in zip(lengths, pages, strict=True)
    ]
    out, lse = backend.attention(
        q, k, v, backend.prepare_attention(segments, block_tokens=block), spec
    )
    for index, segment in enumerate(segments):
        own = slice(index, index + 1)
        alone = backend.attention(
            q[own], k, v, backend.prepare_attention([segment], block_tokens=block), spec
        )
        assert torch.equal(alone[0], out[own])
        torch.testing.assert_close(alone[1], lse[own], atol=1e-6, rtol=1e-6)


def test_tiles_of_bounded_memory_give_the_same_result(monkeypatch):
    torch.manual_seed(0)
    q, grad, (k, v) = torch.randn(200, 4, 8), torch.randn(200, 4, 8), torch.randn(2, 1, 300, 16)
    segments = [
        Segment(num_rows=150, num_keys=250),
        Segment(num_rows=50, num_keys=50, first_key=250),
    ]

    def run():
        batch, spec = (
            PLAIN.prepare_attention(segments, block_tokens=300),
            AttentionSpec(scale=0.3, sliding_window=90),
        )
        out, lse = PLAIN.attention(q, k, v, batch, spec)
        dk, dv = torch.zeros(2, 1, 300, 16)
        dq = PLAIN.attention_gradient(
            grad, q, k, v, out, lse, batch, spec, key_grads=dk, value_grads=dv
        )
        return out, lse, dq, dk, dv

    whole = run()
    monkeypatch.setattr("coserve.kernels.plain.attention._MAX_TILE_ELEMENTS", 1)
    for one, tiled in zip(whole, run(), strict=True):
        torch.testing.assert_close(tiled, one)


def test_the_plain_kernel_against_torch():
    torch.manual_seed(0)
    q, k, v = (torch.randn(9, heads, 8) for heads in (4, 2, 2))
    by_head = [x.transpose(0, 1)[None] for x in (q, k, v)]
    attended = nn.functional.scaled_dot_product_attention(
        by_head[0], by_head[1], by_head[2], is_causal=True, enable_gqa=True
    )
    expected = attended[0].transpose(0, 1)
    batch = PLAIN.prepare_attention([Segment(num_rows=9, num_keys=9)], block_tokens=9)
    out, _ = PLAIN.attention(
        q, k.flatten(1)[None], v.flatten(1)[None], batch, AttentionSpec(scale=8**-0.5)
    )
    torch.testing.assert_close(out, expected)


def test_the_backend_is_chosen_by_device_or_by_name(monkeypatch):
    monkeypatch.delenv("COSERVE_KERNELS", raising=False)
    assert {"cpu", "plain"} <= set(backend_names())
    assert type(find_backend(torch.device("meta"))) is PlainBackend
    assert type(find_backend(DEVICE, "plain")) is PlainBackend
    monkeypatch.setenv("COSERVE_KERNELS", "plain")
    assert type(find_backend(DEVICE)) is PlainBackend
    with pytest.raises(ModelError, match="no kernels 'none'; known: cpu, plain, triton"):
        find_backend(DEVICE, "none")
    with pytest.raises(ModelError, match="the kernels 'cpu' cannot run on meta; these can: plain"):
        find_backend(torch.device("meta"), "cpu")


@each_backend
@each_dtype
def test_factors_of_many_adapters_multiply_their_own_rows(backend, dtype):
    torch.manual_seed(0)
    sizes = (1, 9, 16, 2)
    factors = [torch.randn(4, 24).to(dtype) for _ in sizes]
    grouped = Grouped(tensors=tuple(factors), rows=AdapterRows(sizes, DEVICE))
    x, onto = torch.randn(28, 24).to(dtype), torch.randn(28, 4).to(dtype)
    expected = torch.cat([rows @ f.T for rows, f in zip(x.split(sizes), factors, strict=True)])
    tolerance: dict[str, Any] = (
        {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.05}
    )
    torch.testing.assert_close(backend.low_rank_product(x, grouped), expected, **tolerance)
    total = onto.clone()
    assert backend.low_rank_product(x, grouped, total) is total
    torch.testing.assert_close(total, onto + expected, **tolerance)


@each_backend
@each_dtype
@pytest.mark.parametrize("is_apart", [False, True])
def test_gradients_of_each_row_s_own_factor(backend, dtype, is_apart):
    torch.manual_seed(0)
    sizes = (1, 9, 16, 2)
    factors = [torch.randn(4, 24).to(dtype) for _ in sizes]
    rows = AdapterRows(sizes, DEVICE)
    grouped = Grouped(tensors=tuple(factors), rows=rows)
    grad, x = torch.randn(28, 4).to(dtype), torch.randn(28, 24).to(dtype)
    tolerance: dict[str, Any] = (
        {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.05}
    )
    expected = torch.cat([part @ f for part, f in zip(grad.split(sizes), factors, strict=True)])
    torch.testing.assert_close(
        backend.low_rank_input_gradient(grad, grouped), expected, **tolerance
    )
    total = x.clone()
    assert backend.low_rank_input_gradient(grad, grouped, total) is total
    torch.testing.assert_close(total, x + expected, **tolerance)
    before = [torch.randn(4, 24) for _ in sizes]
    sums = Grouped(tensors=tuple(each.clone() for each in before), rows=rows)
    backend.add_low_rank_gradient(grad, JoinedRows(tensors=x.split(sizes)) if is_apart else x, sums)
    for found, start, dy, own in zip(
        sums.tensors, before, grad.split(sizes), x.split(sizes), strict=True
    ):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, start + dy.float().T @ own.float(), **tolerance)
    alone = before[1].clone()
    backend.add_low_rank_gradient(grad[1:10], x[1:10], alone)
    torch.testing.assert_close(alone, sums.tensors[1], **tolerance)


def row_adapters(inner: int, outs: tuple[int, ...], dtype: torch.dtype) -> list[LowRankAdapter]:
    """Of several ranks, at all of some places or not, after one place that none of them has."""

    def factors(rank: int, out: int) -> LowRankFactors:
        return LowRankFactors(
            a=torch.randn(rank, inner).to(dtype), b=torch.randn(out, rank).to(dtype), scale=0.4
        )

    return [
        LowRankAdapter(
            [
                None,
                *(
                    None if (i + 2 * rank) % 5 == 0 else factors(rank + i, out)
                    for i, out in enumerate(outs)
                ),
            ]
        )
        for rank in (16, 1, 4, 41, 31, 7, 8)
    ]


@each_backend
@each_dtype
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(("inner", "outs"), [(64, (96, 32, 40)), (37, (50,)), (24, (3, 130))])
@pytest.mark.parametrize("most", [40, 5])
def test_adapters_add_to_their_own_rows_in_one_call(backend, dtype, threads, inner, outs, most):
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    adapters, places = row_adapters(inner, outs, dtype), torch.randperm(70)
    rows = [own.tolist() for own in places.split((1, 3, most, 1, 8, 2, 5, 50 - most))[:-1]]
    x = torch.randn(70, inner + 5).to(dtype)[:, 2:-3]
    given = [torch.randn(70, out + 3).to(dtype)[:, 1:-2] for out in outs]
    expected = [y.double() for y in given]
    for adapter, own in zip(adapters, rows, strict=True):
        for y, each in zip(expected, adapter.places[1:], strict=True):
            if each is not None:
                y[own] += x[own].double() @ each.a.double().T * each.scale @ each.b.double().T
    outputs = [y.clone() for y in given]
    backend.add_adapters(x, outputs, 1, AdapterBatch(adapters, rows, DEVICE))
    for y, exact in zip(outputs, expected, strict=True):
        tolerance = (2e-6 if dtype == torch.float32 else 2e-2) * float(exact.abs().max())
        torch.testing.assert_close(y.double(), exact, atol=tolerance, rtol=0)
    others = [row for row in range(70) if not any(row in own for own in rows)]
    assert all(torch.equal(y[others], old[others]) for y, old in zip(outputs, given, strict=True))
    if type(backend) is not PlainBackend and (dtype == torch.float32 or most < MANY_ROWS):
        torch.set_num_threads(1)
        for adapter, own in zip(adapters, rows, strict=True):
            alone = [y.clone() for y in given]
            backend.add_adapters(x, alone, 1, AdapterBatch([adapter], [own[-1:]], DEVICE))
            assert all(
                torch.equal(y[own[-1]], z[own[-1]]) for y, z in zip(alone, outputs, strict=True)
            )
    torch.set_num_threads(before)


@each_backend
@pytest.mark.parametrize("rank", [4, 8, 16, 32, 6])
def test_a_row_gets_the_same_of_an_adapter_that_others_have_too(backend, rank):
    """To the last bit, also where what was there and what is added nearly cancel out."""
    torch.manual_seed(0)
    num_rows, x = 4, torch.randn(4, 64).bfloat16()
    a, b = torch.randn(rank, 64).bfloat16(), torch.randn(2000, rank).bfloat16()
    adapter = LowRankAdapter([LowRankFactors(a=a, b=b, scale=0.7)])

    def added(given: torch.Tensor, groups: list[list[int]]) -> torch.Tensor:
        y = given.clone()
        backend.add_adapters(x, [y], 0, AdapterBatch([adapter] * len(groups), groups, DEVICE))
        return y

    all_rows = [list(range(num_rows))]
    given = -added(torch.zeros(num_rows, 2000).bfloat16(), all_rows)
    alone = added(given, [[row] for row in range(num_rows)])
    if type(backend) is not PlainBackend:
        assert torch.equal(added(given, all_rows), alone)
    torch.testing.assert_close(
        alone.float(), torch.zeros(num_rows, 2000), atol=2e-2 * given.abs().max().item(), rtol=0
    )


@each_backend
@each_dtype
@pytest.mark.parametrize("biased", [(), (0, 1, 2), (1,)])
@pytest.mark.parametrize("kind", [DenseWeight, Int8Weight.quantised])
def test_joined_weights_are_multiplied_as_one_and_others_one_by_one(
    backend, dtype, biased, kind, monkeypatch
):
    torch.manual_seed(0)
    given = [kind(torch.randn(out, 24, dtype=dtype)) for out in (30, 6, 90)]
    given_biases = [
        torch.randn(out, dtype=dtype) if i in biased else None for i, out in enumerate((30, 6, 90))
    ]
    x = torch.randn(40, 24, dtype=dtype)
    wanted = [
        weight.product(backend, x, bias) for weight, bias in zip(given, given_biases, strict=True)
    ]
    weights, biases = join(given, given_biases)
    names, calls = ("product", "int8_product"), []
    for name in names:
        run = getattr(backend, name)
        monkeypatch.setattr(backend, name, lambda *args, run=run: calls.append(args) or run(*args))
    for order, num_calls in ((1, 3 if biased == (1,) else 1), (-1, 3)):
        calls.clear()
        runs = [
            {"x": x, "weight": weight, "bias": bias}
            for weight, bias in zip(weights[::order], biases[::order], strict=True)
        ]
        found = SIBLING_FUSIONS["linear"].run(runs, Context(backend=backend))
        assert len(calls) == num_calls
        for results, theirs in zip(found, wanted[::order], strict=True):
            torch.testing.assert_close(results["y"], theirs, **_tolerance(dtype))


@each_backend
@each_dtype
@pytest.mark.parametrize("n", [5, 160])
@pytest.mark.parametrize("kind", [DenseWeight, Int8Weight.quantised])
@pytest.mark.parametrize("is_joined", [True, False])
@pytest.mark.parametrize("which", [(0, 1, 2), (0, 2), (1,)])
def test_what_a_lora_adds_to_weights_goes_with_their_products(
    backend, dtype, n, kind, is_joined, which
):
    """The same as products, and what is added to them, one after the other; rounded once less at
    most."""
    torch.manual_seed(0)
    sizes, ranks = (64, 32, 96), (16, 4, 40)
    weights, biases = (
        [kind(torch.randn(out, 96, dtype=dtype)) for out in sizes],
        list[torch.Tensor | None]([None] * 3),
    )
    if is_joined:
        weights, biases = join(weights, biases)
    x = torch.randn(n, 96, dtype=dtype)
    runs: list[dict[str, Any]] = []
    for place, (weight, bias, out, rank) in enumerate(
        zip(weights, biases, sizes, ranks, strict=True)
    ):
        more = {
            "narrow": torch.randn(n, rank, dtype=dtype),
            "factor": torch.randn(out, rank, dtype=dtype),
        }
        runs.append({"x": x, "weight": weight, "bias": bias, **(more if place in which else {})})
    found = SIBLING_FUSIONS["linear_and_low_rank"].run(runs, Context(backend=backend))
    for results, values in zip(found, runs, strict=True):
        y, exact = results["y"], x.double() @ values["weight"].dense().double().T
        if "narrow" in values:
            exact += values["narrow"].double() @ values["factor"].double().T
        tolerance = (1e-4 if dtype == torch.float32 else 2**-7) * float(exact.abs().max())
        torch.testing.assert_close(y.double(), exact, atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_weights_are_the_nearest_of_a_scale_per_output_channel(dtype):
    torch.manual_seed(0)
    weight = (torch.randn(50, 70) * torch.logspace(-4, 2, 50)[:, None]).to(dtype)
    weight[7] = 0
    found = Int8Weight.quantised(weight)
    values, scales = found.tensors()
    assert values.dtype == torch.int8 and scales.dtype == torch.float32 and found.shape == (50, 70)
    assert (
        int(values.abs().max()) == 127
        and found.dense().dtype == dtype
        and not found.dense()[7].any()
    )
    error = (values.float() * scales[:, None] - weight.float()).abs()
    assert (error <= scales[:, None] * 0.5001).all()
    assert float(error.max()) <= found.max_rounding * 1.001


@each_backend
@each_dtype
@pytest.mark.parametrize(("inner", "outer"), [(24, 90), (37, 41), (576, 960), (1088, 352)])
@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 13, 33, 100])
def test_products_with_int8_weights_are_those_with_the_dequantised(backend, dtype, inner, outer, n):
    torch.manual_seed(0)
    weight, bias = (
        Int8Weight.quantised(torch.randn(outer, inner, dtype=dtype)),
        torch.randn(outer, dtype=dtype),
    )
    values, scales = weight.tensors()
    exact = values.double() * scales[:, None].double()
    wide = torch.randn(n, inner + 8).to(dtype)
    x, grad, onto = wide[:, 8:], torch.randn(n, outer).to(dtype), torch.randn(n, inner).to(dtype)
    cases = (
        (weight.product(backend, x), x.double() @ exact.T),
        (weight.product(backend, x, bias), x.double() @ exact.T + bias.double()),
        (weight.input_gradient(backend, grad), grad.double() @ exact),
        (weight.input_gradient(backend, grad, onto.clone()), onto.double() + grad.double() @ exact),
    )
    step = 1e-5 if dtype == torch.float32 else 2**-7
    for found, expected in cases:
        assert found.dtype == dtype
        assert (found.double() - expected).abs().max() <= step * expected.abs().max()


@each_backend
@pytest.mark.parametrize("n", [1, 20])
def test_products_with_int8_weights_of_rows_with_outliers_are_as_near_as_bfloat16_is(backend, n):
    """A few elements are ten thousand times the others, as in rows of language models; one row has
    them alone."""
    torch.manual_seed(0)
    weight, x = Int8Weight.quantised(torch.randn(64, 1088)), torch.randn(n, 1088)
    x[:, [3, 700]] *= 1e4
    x[0] = 0
    x[0, 5] = 3e-20
    x = x.bfloat16()
    exact = x.double() @ weight.dense().double().T
    rounding = 2**-8 * (
        x.double().abs() @ weight.dense().double().abs().T
    )  # of the weights or the result
    assert ((weight.product(backend, x).double() - exact).abs() <= rounding + 1e-30).all()
    values, scales = weight.tensors()
    values[:, [3, 700]] = 0  # what does not read the outliers does not lose by them
    exact = x.double() @ (values.double() * scales[:, None].double()).T
    error = (Int8Weight(values, scales, torch.bfloat16).product(backend, x).double() - exact).norm()
    assert error <= 3e-3 * exact.norm()


@each_backend
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_products_with_int8_weights_do_not_hide_what_is_no_number(backend, bad):
    torch.manual_seed(0)
    weight, x = Int8Weight.quantised(torch.randn(64, 1088)), torch.randn(3, 1088).bfloat16()
    before = weight.product(backend, x)
    x[1, 700] = bad
    found = weight.product(backend, x)
    assert not found[1].isfinite().any()
    assert torch.equal(found[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize(
    ("kind", "inner", "outer", "dtype"),
    [
        (Int8Weight.quantised, 45, 70, torch.float32),
        pytest.param(
            *(Int8Weight.quantised, 1088, 96, torch.bfloat16),
            marks=pytest.mark.skipif(not HAS_AMX, reason="AMX"),
        ),
        (DenseWeight, 45, 70, torch.bfloat16),  # of no whole tiles
        (DenseWeight, 1088, 96, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_a_rows_product_does_not_depend_on_its_company_or_threads(
    num_threads, kind, inner, outer, dtype
):
    backend = find_backend(DEVICE, "plain" if kernels is None else "cpu")
    torch.manual_seed(0)
    weight, x = kind(torch.randn(outer, inner).to(dtype)), torch.randn(13, inner).to(dtype)
    whole = (
        [weight.product(backend, x[:n])[:1] for n in (1, 2, 3, 4, 8, 13)]
        if kernels is not None
        else []
    )
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert all(torch.equal(one, weight.product(backend, x[:1])) for one in whole)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("width", [1, 7, 8, 9, 64])
def test_signs_survive_packing(width):
    x = torch.randn(5, width)
    x[0] = 0.0
    bits = pack_signs(x)
    assert bits.shape == (5, packed_width(width))
    assert bits.dtype == torch.uint8
    assert torch.equal(unpack_signs(bits, width), x > 0)


def test_dropout_masks_depend_on_key_feature_and_place_alone():
    keys = dropout_row_ids(5, torch.arange(40))
    mask = dropout_mask(keys, 30, p=0.3, salt=1)
    assert torch.equal(dropout_mask(keys[10:20], 30, p=0.3, salt=1), mask[10:20]), (
        "rows can be split anywhere"
    )
    for other in (
        dropout_mask(keys, 30, p=0.3, salt=2),
        dropout_mask(dropout_row_ids(6, torch.arange(40)), 30, p=0.3, salt=1),
        dropout_mask(dropout_ids_of_part(keys, 3), 30, p=0.3, salt=1),
    ):
        agreement = (other == mask).float().mean()
        assert 0.5 < agreement < 0.66, "independent masks of 70% agree on 58% of the places"
    for part in range(1, 4):
        one, other = (
            dropout_mask(dropout_ids_of_part(keys, p), 30, p=0.3, salt=1) for p in (0, part)
        )
        agreement = (other == one).float().mean()
        assert 0.5 < agreement < 0.66, "independent masks of 70% agree on 58% of the places"


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_dropout_drops_at_its_rate_in_rows_and_features(p):
    kept = dropout_mask(dropout_row_ids(1, torch.arange(4000)), 500, p=p, salt=11).float()
    assert kept.mean() == pytest.approx(1 - p, abs=2e-3)
    assert kept.mean(0).sub(1 - p).abs().max() < 6 * (p * (1 - p) / 4000) ** 0.5
    assert kept.mean(1).sub(1 - p).abs().max() < 6 * (p * (1 - p) / 500) ** 0.5


def test_masks_are_made_in_pieces_with_the_same_result(monkeypatch):
    keys = dropout_row_ids(1, torch.arange(50))
    whole = dropout_mask(keys, 30, p=0.3, salt=1)
    monkeypatch.setattr("coserve.kernels.dropout._CHUNK_ELEMENTS", 70)
    assert torch.equal(dropout_mask(keys, 30, p=0.3, salt=1), whole)


def test_row_keys_do_not_repeat():
    keys = torch.cat([dropout_row_ids(seed, torch.arange(20000)) for seed in range(3)])
    assert keys.unique().numel() > 60000 - 10
    assert int(keys.min()) >= 0
    assert int(keys.max()) < 2**32


@each_backend
@pytest.mark.parametrize(("inner", "outer"), [(24, 90), (37, 41), (576, 960), (1088, 352)])
@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 13, 16, 33, 64, 65])
def test_products_in_bfloat16_are_rounded_once(backend, inner, outer, n):
    torch.manual_seed(0)
    weight, bias = torch.randn(outer, inner).bfloat16(), torch.randn(outer).bfloat16()
    x = torch.randn(n, inner + 8).bfloat16()[:, 8:]
    exact = x.double() @ weight.double().T
    for found, expected in (
        (backend.product(x, weight), exact),
        (backend.product(x, weight, bias), exact + bias.double()),
    ):
        assert found.dtype == torch.bfloat16 and found.shape == (n, outer)
        error = (found.double() - expected).abs()
        assert (
            error <= 2**-8 * expected.abs() + 1e-5 * (x.double().abs() @ weight.double().abs().T)
        ).all()


@each_backend
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_products_in_bfloat16_do_not_hide_what_is_no_number(backend, bad):
    torch.manual_seed(0)
    weight, x = torch.randn(70, 45).bfloat16(), torch.randn(3, 45).bfloat16()
    before = backend.product(x, weight)
    x[1, 40] = bad
    found = backend.product(x, weight)
    assert not found[1].isfinite().any()
    assert torch.equal(found[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize("rows", [1, 16, 47, 48, 130])
@pytest.mark.parametrize("tile", [1 << 21, 40 * 24])
def test_wide_products_of_bfloat16_are_the_plain_ones(rows, tile, monkeypatch):
    monkeypatch.setattr(products, "_TILE_ELEMENTS", tile)
    x, weight, bias, grad = (
        torch.randn(*shape).bfloat16() for shape in ((rows, 24), (90, 24), (90,), (rows, 90))
    )
    for wide, plain in (
        (products.wide_product(x, weight), PLAIN.product(x, weight)),
        (products.wide_product(x, weight, bias), PLAIN.product(x, weight, bias)),
        (products.wide_input_gradient(grad, weight), PLAIN.input_gradient(grad, weight)),
        (products.wide_weight_gradient(grad, x), PLAIN.weight_gradient(grad, x)),
    ):
        assert wide.shape == plain.shape
        torch.testing.assert_close(wide.float(), plain.float(), rtol=2e-2, atol=5e-2)

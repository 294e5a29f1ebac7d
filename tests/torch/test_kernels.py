import pytest
import torch
from torch import nn

from coserve.kernels import linear
from coserve.kernels.attention import CpuAttention, PageTable, PlainAttention, attention_kernel
from coserve.kernels.bits import pack_signs, packed_width, unpack_signs
from coserve.kernels.dropout import dropout_ids_of_part, dropout_mask, dropout_row_ids


def reverse(kernel, grad, q, k, v, out, lse, settings):
    """Gradients of q, k and v."""
    dk, dv = torch.zeros(k.shape), torch.zeros(v.shape)
    dq = kernel.backward(grad, q, k, v, out, lse, **settings, key_grads=dk, value_grads=dv)
    return dq, dk, dv


@pytest.mark.parametrize(("n", "m"), [(7, 7), (1, 9), (3, 9), (8, 40)])
@pytest.mark.parametrize("sliding_window", [None, 1, 4, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cpu_kernel_and_its_plain_twin_agree_on_the_same_inputs(n, m, sliding_window, dtype):
    torch.manual_seed(0)
    q, k, v = torch.randn(n, 6, 16), torch.randn(m, 2, 16), torch.randn(m, 2, 16)
    grad = torch.randn(n, 6, 16)
    q, k, v, grad = (x.to(dtype) for x in (q, k, v, grad))
    settings = {"scale": 0.3, "sliding_window": sliding_window}
    results = []
    for kernel in (PlainAttention(), CpuAttention()):
        out, lse = kernel.forward(q, k, v, **settings)
        assert lse.shape == (n, 6)
        assert lse.dtype == torch.float32
        results.append((out, lse, *reverse(kernel, grad, q, k, v, out, lse, settings)))
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    for plain, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kernel", [PlainAttention(), CpuAttention()])
@pytest.mark.parametrize(("n", "m"), [(11, 20), (20, 20)])
@pytest.mark.parametrize("sliding_window", [None, 6])
def test_kernels_work_in_tiles_with_the_same_result(monkeypatch, kernel, n, m, sliding_window):
    torch.manual_seed(0)
    q, k, v, grad = torch.randn(n, 4, 8), torch.randn(m, 2, 8), torch.randn(m, 2, 8), torch.randn(n, 4, 8)
    settings = {"scale": 0.3, "sliding_window": sliding_window}

    def run():
        out, lse = kernel.forward(q, k, v, **settings)
        return out, lse, *reverse(kernel, grad, q, k, v, out, lse, settings)

    whole = run()
    monkeypatch.setattr("coserve.kernels.attention._MAX_TILE_ELEMENTS", 50)
    for one, tiled in zip(whole, run(), strict=True):
        torch.testing.assert_close(tiled, one)


def test_a_sliding_window_makes_no_mask_of_all_keys():
    q, k = torch.randn(3000, 1, 8), torch.randn(3000, 1, 8)
    tiles = list(CpuAttention()._tiles(q, k, 500))
    assert [rows.start for rows, _ in tiles[1:]] == [rows.stop for rows, _ in tiles[:-1]]
    assert max((rows.stop - rows.start) * (keys.stop - keys.start) for rows, keys in tiles) < 3000 * 3000
    assert list(CpuAttention()._tiles(q[:1], k, 500)) == [(slice(0, 1), slice(2500, 3000))]


def test_the_plain_kernel_against_torch():
    torch.manual_seed(0)
    q, k, v = (torch.randn(9, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    heads = (x.transpose(0, 1)[None] for x in (q, k, v))
    expected = nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    grad = torch.randn_like(expected)
    theirs = torch.autograd.grad(expected, (q, k, v), grad)
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse = PlainAttention().forward(q, k, v, scale=8**-0.5, sliding_window=None)
    torch.testing.assert_close(out, expected.detach())
    ours = reverse(PlainAttention(), grad, q, k, v, out, lse, {"scale": 8**-0.5, "sliding_window": None})
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_the_kernel_is_chosen_by_device():
    assert isinstance(attention_kernel(torch.device("cpu")), CpuAttention)
    assert isinstance(attention_kernel(torch.device("meta")), PlainAttention)


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
    assert torch.equal(dropout_mask(keys[10:20], 30, p=0.3, salt=1), mask[10:20]), "rows can be split anywhere"
    for other in (
        dropout_mask(keys, 30, p=0.3, salt=2),
        dropout_mask(dropout_row_ids(6, torch.arange(40)), 30, p=0.3, salt=1),
        dropout_mask(dropout_ids_of_part(keys, 3), 30, p=0.3, salt=1),
    ):
        agreement = (other == mask).float().mean()
        assert 0.5 < agreement < 0.66, "independent masks of 70% agree on 58% of the places"
    for part in range(1, 4):
        one, other = (dropout_mask(dropout_ids_of_part(keys, p), 30, p=0.3, salt=1) for p in (0, part))
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


@pytest.mark.parametrize("rows", [1, 2, 23])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_with_the_weight_on_the_left_are_the_plain_ones(rows, dtype):
    x, weight, bias = (torch.randn(*shape, dtype=dtype) for shape in ((rows, 24), (90, 24), (90,)))
    for left, plain in (
        (linear.left_product(x, weight), torch.nn.functional.linear(x, weight)),
        (linear.left_product(x, weight, bias), torch.nn.functional.linear(x, weight, bias)),
    ):
        assert left.shape == plain.shape
        assert left.is_contiguous()
        torch.testing.assert_close(left, plain, **({} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 5e-2}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [(), (0, 1, 2), (1,)])
def test_joined_weights_are_multiplied_as_one_and_others_one_by_one(dtype, biased, monkeypatch):
    weights = linear.join([torch.randn(out, 24, dtype=dtype) for out in (30, 6, 90)])
    biases = linear.join([torch.randn(out, dtype=dtype) for out in (30, 6, 90)])
    biases = [bias if index in biased else None for index, bias in enumerate(biases)]
    x = torch.randn(40, 24, dtype=dtype)
    wanted = [linear.product(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    apart = [weight.clone() for weight in weights]
    calls, product = [], linear.product
    monkeypatch.setattr(linear, "product", lambda *given: calls.append(given) or product(*given))
    for given, order, num_calls in (
        (weights, 1, 3 if biased == (1,) else 1),
        (apart, 1, 3),
        (weights[::-1], -1, 3),
    ):
        calls.clear()
        found = linear.products(x, given, biases[::order])
        assert len(calls) == num_calls
        for y, theirs in zip(found, wanted[::order], strict=True):
            torch.testing.assert_close(y, theirs, **({} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 5e-2}))


@pytest.mark.parametrize("rows", [1, 16, 47, 48, 130])
@pytest.mark.parametrize("tile", [1 << 21, 40 * 24])
def test_wide_products_of_bfloat16_are_the_plain_ones(rows, tile, monkeypatch):
    monkeypatch.setattr(linear, "_TILE_ELEMENTS", tile)
    monkeypatch.setattr(linear, "_is_emulated", lambda x: False)
    x, weight, bias, grad = (torch.randn(*shape).bfloat16() for shape in ((rows, 24), (90, 24), (90,), (rows, 90)))
    for wide, plain in (
        (linear.wide_product(x, weight), linear.product(x, weight)),
        (linear.wide_product(x, weight, bias), linear.product(x, weight, bias)),
        (linear.wide_input_gradient(grad, weight), linear.input_gradient(grad, weight)),
        (linear.wide_weight_gradient(grad, x), linear.weight_gradient(grad, x)),
    ):
        assert wide.shape == plain.shape
        torch.testing.assert_close(wide.float(), plain.float(), rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("sliding_window", [None, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_whose_keys_lie_in_pages(sliding_window, dtype):
    torch.manual_seed(0)
    # Rows of few pages and of several are gathered apart.
    pages, lengths, block, heads, width = ((3, 1, 6), (5,), (0, 2)), (11, 2, 8), 4, 2, 16
    q = torch.randn(3, 6, width).to(dtype)
    k, v = (torch.randn(7, block, heads * width).to(dtype) for _ in range(2))
    settings = {"scale": 0.3, "sliding_window": sliding_window}
    table = PageTable(pages, lengths, q.device)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for kernel in (PlainAttention(), CpuAttention(), attention_kernel(q.device)):
        out, lse = kernel.forward_paged(q, k, v, table, **settings)
        assert out.shape == q.shape and out.dtype == dtype and lse.dtype == torch.float32
        for i, (numbers, length) in enumerate(zip(pages, lengths, strict=True)):
            keys, values = (x[list(numbers)].flatten(0, 1)[:length].view(length, heads, width) for x in (k, v))
            row, norm = PlainAttention().forward(q[i : i + 1], keys, values, **settings)
            torch.testing.assert_close(out[i : i + 1], row, atol=tolerance, rtol=tolerance)
            torch.testing.assert_close(lse[i : i + 1], norm, atol=tolerance, rtol=tolerance)

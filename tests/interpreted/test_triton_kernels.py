"""The kernels of GPUs against their plain twins: on a GPU, or interpreted on a CPU (`make
test-triton`)."""

from typing import Any

import pytest
import torch
from torch import Tensor

from coserve.kernels import find_backend
from coserve.kernels.attention import AttentionSpec, Segment
from coserve.kernels.base import Backend
from coserve.kernels.low_rank import AdapterBatch, LowRankAdapter, LowRankFactors
from coserve.kernels.plain import PlainBackend
from coserve.kernels.triton import TritonBackend

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IS_THERE = TritonBackend.is_available(DEVICE)
pytestmark = pytest.mark.skipif(
    not IS_THERE, reason="needs a GPU, or Triton's interpreter (make test-triton)"
)

PLAIN = PlainBackend(DEVICE)
CPU = PlainBackend(torch.device("cpu"))
TRITON = find_backend(DEVICE, "triton") if IS_THERE else PLAIN
IS_GPU = DEVICE.type == "cuda"
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])


def draw(*shape: int, dtype: torch.dtype = torch.float32, gap: int = 0) -> Tensor:
    """gap: columns of a wider tensor, with as many on each side."""
    wide = torch.randn(*shape[:-1], shape[-1] + 2 * gap).to(dtype).to(DEVICE)
    return wide[..., gap : shape[-1] + gap]


# -- row by row ---------------------------------------------------------------------


def check(ours: Tensor | None, twin: Tensor | None) -> None:
    """To the bit in half precision, where sums of float32 in another order are rounded alike; the
    interpreter cuts bfloat16 off, and does not round it.
    """
    assert ours is not None and twin is not None
    assert ours.dtype == twin.dtype and ours.shape == twin.shape
    if twin.dtype == torch.bfloat16 and not IS_GPU:
        torch.testing.assert_close(ours, twin, rtol=2**-6, atol=2**-6)
    elif twin.dtype == torch.float32:
        torch.testing.assert_close(ours, twin, rtol=1e-5, atol=1e-6)
    else:
        assert (ours != twin).float().mean() < 0.01
        torch.testing.assert_close(ours, twin, rtol=2 * torch.finfo(twin.dtype).eps, atol=1e-3)


@each_dtype
@pytest.mark.parametrize(("width", "features"), [(96, 96), (96, 24), (7, 7), (1536, 1536)])
def test_norms(dtype, width, features):
    torch.manual_seed(0)
    x, grad, weight = (
        draw(5, width, dtype=dtype, gap=8),
        draw(5, width, dtype=dtype, gap=3),
        draw(features, dtype=dtype),
    )
    check(TRITON.rms_norm(x, weight, 1e-6), PLAIN.rms_norm(x, weight, 1e-6))
    for ours, twin in zip(
        TRITON.rms_norm_gradient(grad, x, weight, 1e-6, with_y=True),
        PLAIN.rms_norm_gradient(grad, x, weight, 1e-6, with_y=True),
        strict=True,
    ):
        check(ours, twin)
    assert TRITON.rms_norm_gradient(grad, x, weight, 1e-6)[1] is None


@each_dtype
@pytest.mark.parametrize("width", [8, 1100])
def test_gated_units(dtype, width):
    torch.manual_seed(0)
    gate, up, grad = (draw(5, width, dtype=dtype, gap=gap) for gap in (8, 0, 4))
    check(TRITON.silu_mul(gate, up), PLAIN.silu_mul(gate, up))
    ours, twin = (each.silu_mul_gradients(grad, gate, up, with_y=True) for each in (TRITON, PLAIN))
    for one, other in zip(ours, twin, strict=True):
        check(one, other)
    assert TRITON.silu_mul_gradients(grad, gate, up).y is None


@each_dtype
@pytest.mark.parametrize(("heads", "width"), [(4, 24), (1, 64), (40, 16)])
def test_rotations(dtype, heads, width):
    torch.manual_seed(0)
    x, cos, sin = (
        draw(5, heads * width, dtype=dtype, gap=8),
        draw(5, width, dtype=dtype),
        draw(5, width, dtype=dtype),
    )
    check(TRITON.rope(x, cos, sin), PLAIN.rope(x.contiguous(), cos, sin))
    check(TRITON.rope_gradient(x, cos, sin), PLAIN.rope_gradient(x.contiguous(), cos, sin))


def test_other_dtypes_go_the_plain_way():
    x, weight = draw(2, 8, dtype=torch.bfloat16), draw(8)
    assert torch.equal(TRITON.rms_norm(x, weight, 1e-6), PLAIN.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("widths", [(24, 8, 1000), (6, 4), (2, 6), (3, 5, 8)])
@pytest.mark.parametrize("in_place", [False, True])
def test_rows_are_copied_to_addresses_and_back(widths, in_place):
    """Of several tensors at once, of rows of as many bytes, which make words of 8, 2, 2 and 1 of
    them."""
    own = [
        torch.randint(0, 100, (12 if in_place else 6, width), dtype=torch.uint8).to(DEVICE)
        for width in widths
    ]
    others = [
        torch.randint(100, 200, (12, width), dtype=torch.uint8).to(DEVICE) for width in widths
    ]
    places = torch.tensor([other.data_ptr() for other in others], device=DEVICE)
    copies = TRITON.row_copies(own, in_place=in_place, max_rows=6)
    for first, n in ((3, 6), (0, 1), (5, 0), (11, 1)):
        rows, expected = (
            torch.tensor([first, n], device=DEVICE),
            [other.clone() for other in others],
        )
        part = slice(first, first + n)
        for mine, theirs in zip(own, expected, strict=True):
            theirs[part] = mine[part] if in_place else mine[:n]
        copies.store(places, rows)
        assert all(torch.equal(*pair) for pair in zip(others, expected, strict=True))
        for other in others:
            other.add_(1)
        for mine, theirs in zip(expected := [mine.clone() for mine in own], others, strict=True):
            mine[part if in_place else slice(0, n)] = theirs[part]
        copies.load(places, rows)
        assert all(torch.equal(*pair) for pair in zip(own, expected, strict=True))


# -- attention ----------------------------------------------------------------------

SPECS: dict[str, dict[str, Any]] = {
    "basic": {},
    "window": {"sliding_window": 40},
    "cap": {"soft_cap": 5.0},
    "slopes": {"alibi_slopes": (0.5, 0.25, 0.125, 0.0625, 0.03, 0.01)},
    "sinks": {"sinks": torch.linspace(-1, 2, 6)},
    "all": {
        "sliding_window": 33,
        "soft_cap": 8.0,
        "alibi_slopes": (0.5, 0.25, 0.125, 0.0625, 0.03, 0.01),
        "sinks": torch.linspace(-1, 2, 6),
    },
}
# (rows, keys) of segments whose keys stand one after another.
LENGTHS = [[(7, 7)], [(3, 9), (1, 70), (90, 90)], [(1, 1), (1, 64), (1, 65), (1, 300)]]


def spec_of(name: str, device: torch.device) -> AttentionSpec:
    given = dict(SPECS[name])
    if "sinks" in given:
        given["sinks"] = given["sinks"].to(device)
    return AttentionSpec(scale=0.3, **given)


def attended(
    backend: Backend, dtype: torch.dtype, name: str, lengths: list[tuple[int, int]], width: int
) -> list[Tensor]:
    """Output, log-sum-exp and gradients."""
    torch.manual_seed(0)
    device, (n, m) = backend.device, (sum(sizes) for sizes in zip(*lengths, strict=True))
    q, grad, k, v = (
        torch.randn(rows, heads, width).to(dtype).to(device)
        for rows, heads in ((n, 6), (n, 6), (m, 2), (m, 2))
    )
    starts = [sum(keys for _, keys in lengths[:index]) for index in range(len(lengths))]
    batch = backend.prepare_attention(
        [
            Segment(num_rows=rows, num_keys=keys, first_key=first)
            for (rows, keys), first in zip(lengths, starts, strict=True)
        ],
        block_tokens=m,
    )
    spec, stores = spec_of(name, device), (k.flatten(1)[None], v.flatten(1)[None])
    out, lse = backend.attention(q, *stores, batch, spec)
    sums = [torch.full((1, m, 2 * width), 2.0, device=device) for _ in range(2)]
    dq = backend.attention_gradient(
        grad, q, *stores, out, lse, batch, spec, key_grads=sums[0], value_grads=sums[1]
    )
    return [each.float().cpu() for each in (out, lse, dq, *sums)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("width", [16, 24])
def test_attention_and_its_gradients(dtype, name, lengths, width):
    tolerance = 2e-5 if dtype == torch.float32 else 5e-2
    ours, twin = (
        attended(TRITON, dtype, name, lengths, width),
        attended(CPU, dtype, name, lengths, width),
    )
    for one, other in zip(ours, twin, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
def test_attention_over_pages(dtype, name):
    """Rows that decode, among them one of many keys, and pieces of prompts."""
    torch.manual_seed(0)
    lengths, rows, block, width = (11, 2, 300, 70), (1, 2, 1, 33), 4, 16
    numbers = iter(torch.randperm(120).tolist())
    pages = [tuple(next(numbers) for _ in range(-(-length // block))) for length in lengths]
    q = torch.randn(sum(rows), 6, width).to(dtype)
    k, v = (torch.randn(120, block, 2 * width).to(dtype) for _ in range(2))
    segments = [
        Segment(num_rows=number, num_keys=length, pages=own)
        for own, length, number in zip(pages, lengths, rows, strict=True)
    ]
    found = []
    for backend in (TRITON, CPU):
        batch = backend.prepare_attention(segments, block_tokens=block)
        own = [x.to(backend.device) for x in (q, k, v)]
        found.append(
            [
                x.float().cpu()
                for x in backend.attention(
                    own[0], own[1], own[2], batch, spec_of(name, backend.device)
                )
            ]
        )
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


def test_rooms_of_windows_hold_one_batch_after_another():
    """Rows that belong to no segment get zeros, and the tiles of a longer batch are gone with
    it."""
    torch.manual_seed(0)
    room = TRITON.attention_room(num_rows=40, num_keys=64, num_segments=4)
    assert room is not None and room.num_rows == 40
    q, grad, k, v = (draw(rows, heads, 16) for rows, heads in ((40, 6), (40, 6), (64, 2), (64, 2)))
    spec, stores = AttentionSpec(scale=0.3), (k.flatten(1)[None], v.flatten(1)[None])
    for lengths in ([(12, 20), (20, 40)], [(5, 5)], [(9, 30), (1, 4), (7, 7)]):
        starts = [sum(keys for _, keys in lengths[:index]) for index in range(len(lengths))]
        segments = [
            Segment(num_rows=rows, num_keys=keys, first_key=first)
            for (rows, keys), first in zip(lengths, starts, strict=True)
        ]
        batch, n = (
            TRITON.prepare_attention(segments, block_tokens=64),
            sum(rows for rows, _ in lengths),
        )
        room.fill(batch)
        results = []
        for given, rows in ((room, 40), (batch, n)):
            out, lse = TRITON.attention(q[:rows], *stores, given, spec)
            sums = [torch.zeros(1, 64, 32, device=DEVICE) for _ in range(2)]
            dq = TRITON.attention_gradient(
                grad[:rows],
                q[:rows],
                *stores,
                out,
                lse,
                given,
                spec,
                key_grads=sums[0],
                value_grads=sums[1],
            )
            assert not out[n:].any() and not dq[n:].any()
            results.append((out[:n], lse[:n], dq[:n], *sums))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", SPECS)
def test_rooms_of_requests_hold_one_step_after_another(name):
    """Rows that decode and pieces of prompts, more and fewer of both, in pages."""
    from coserve.kernels.triton.attention_tables import StaticSegments  # needs Triton

    torch.manual_seed(0)
    room = StaticSegments(40, 5, torch.zeros(64, dtype=torch.int64, device=DEVICE), splits=4)
    q, k, v = draw(40, 6, 16), draw(50, 4, 32), draw(50, 4, 32)
    spec = spec_of(name, DEVICE)
    for lengths in (
        [(1, 70), (33, 40), (1, 9)],
        [(2, 2)],
        [(1, 5), (1, 80), (1, 3), (20, 60), (2, 31)],
        [(12, 50)],
    ):
        numbers = iter(torch.randperm(50).tolist())
        segments = [
            Segment(
                num_rows=rows,
                num_keys=keys,
                pages=tuple(next(numbers) for _ in range(-(-keys // 4))),
            )
            for rows, keys in lengths
        ]
        batch, n = (
            TRITON.prepare_attention(segments, block_tokens=4),
            sum(rows for rows, _ in lengths),
        )
        room.fill(batch)
        found, expected = (
            TRITON.attention(q, k, v, room, spec),
            TRITON.attention(q[:n], k, v, batch, spec),
        )
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one[:n], other, atol=1e-5, rtol=1e-5)


# -- adapters -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("inner", "outs"), [(64, (96, 32, 40)), (37, (50,)), (1100, (3, 130))])
def test_adapters_of_many_ranks_add_to_their_rows(dtype, inner, outs):
    torch.manual_seed(0)

    def factors(rank: int, out: int) -> LowRankFactors:
        return LowRankFactors(
            a=draw(rank, inner, dtype=dtype), b=draw(out, rank, dtype=dtype), scale=0.4
        )

    adapters = [
        LowRankAdapter(
            [
                None,
                *(
                    None if (i + rank) % 5 == 0 else factors(rank, out)
                    for i, out in enumerate(outs)
                ),
            ]
        )
        for rank in (16, 1, 41, 7)
    ]
    rows = [own.tolist() for own in torch.randperm(50).split((1, 3, 26, 12, 8))[:-1]]
    x, given = (
        draw(50, inner, dtype=dtype, gap=2),
        [draw(50, out, dtype=dtype, gap=1) for out in outs],
    )
    results = []
    for backend in (TRITON, PLAIN):
        outputs = [y.clone() for y in given]
        backend.add_adapters(x, outputs, 1, AdapterBatch(adapters, rows, DEVICE))
        results.append(outputs)
    for one, other in zip(*results, strict=True):
        size = float(other.abs().max())
        torch.testing.assert_close(
            one, other, atol=(1e-5 if dtype == torch.float32 else 1e-2) * size, rtol=0
        )

"""Blocks that run as one call give what they give one by one, to the last bit, in any company."""

from collections import Counter
from typing import Any

import pytest
import torch
from steps_at_once import Steps, backbone_of, one_by_one
from support import make_adapter, make_backbone, random_tokens

from coserve.kernels.cpu import CpuBackend
from coserve.kernels.cpu.compiled import compiled_kernels
from coserve.kernels.cpu.traced_calls import CpuCalls
from coserve.memory.tensors import paged_kv
from coserve.models import forward

pytestmark = pytest.mark.skipif(
    not CpuBackend.is_available(torch.device("cpu")), reason="needs compiled kernels"
)

KERNELS = compiled_kernels()
needs_amx = pytest.mark.skipif(KERNELS is None or not KERNELS.has_amx, reason="needs g++ and AMX")
needs_tiles = pytest.mark.skipif(
    KERNELS is None or not KERNELS.has_tiles, reason="needs g++, and AMX or AMD's AVX-512"
)

MODELS = [
    ("qwen3", "float32", "int8"),
    ("llama-biases-tied", "float32", "int8"),
    ("qwen3", "bfloat16", "int8"),
    *(
        (name, "bfloat16", weights)
        for name in ("llama", "qwen2-sliding", "qwen3", "llama-biases-tied")
        for weights in ("dense", "int8")
    ),
]


@pytest.mark.parametrize(("name", "dtype", "weights"), MODELS)
def test_steps_of_requests_are_equal_to_the_last_bit(name, dtype, weights, monkeypatch):
    backbone = backbone_of(name, dtype, weights)
    few = [None, [4, 2], None, [0], [3, 1, 0], None]
    traced = Steps(backbone)
    ours = [traced.step(which=which) for which in few]
    assert traced.num_traces == 1
    one_by_one(monkeypatch)
    plain = Steps(backbone)
    theirs = [plain.step(which=which) for which in few]
    assert not plain.num_traces
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(traced.pages.storage, plain.pages.storage), "keys and values, too"


@pytest.mark.parametrize("name", ["llama", "qwen2-sliding", "qwen3", "llama-biases-tied"])
def test_steps_in_float32(name, monkeypatch):
    """Sums of few rows are made in another order than one by one, which have the order of a
    job's."""
    backbone = backbone_of(name, "float32", "dense")
    companies = [None, [4, 2], None, [0], [3, 1, 0], None]
    traced = Steps(backbone)
    ours = [traced.step(which=which) for which in companies]
    assert traced.num_traces == 1
    one_by_one(monkeypatch)
    plain = Steps(backbone)
    theirs = [plain.step(which=which) for which in companies]
    assert torch.equal(ours[0], theirs[0]), "five rows"
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-6 * float(other.abs().max()))


@pytest.mark.parametrize(("name", "dtype", "weights"), MODELS)
def test_with_adapters_at_all_or_some_linear_layers(name, dtype, weights, monkeypatch):
    backbone = backbone_of(name, dtype, weights)
    targets = [["q_proj", "v_proj"], "all-linear", ["down_proj"]]
    adapters = [
        make_adapter(backbone, seed=seed, r=rank, target_modules=target)
        for seed, rank, target in zip((1, 2, 3), (4, 8, 2), targets, strict=True)
    ]
    first, second, third = [adapter.bypasses() for adapter in adapters]
    companies = [
        [None, first, None, first, first],
        [first, second, None, second, first],
        [third] * 5,
    ]

    def run(steps: Steps) -> list[torch.Tensor]:
        found = [steps.step(company) for company in companies for _ in range(2)]
        for adapter in adapters:  # values change where they lie, as after an optimizer step
            for master in adapter.masters.values():
                master.mul_(-2)
            adapter.sync_compute_copy()
        found += [steps.step(company) for company in companies]
        for adapter in adapters:
            for master in adapter.masters.values():
                master.mul_(-0.5)
            adapter.sync_compute_copy()
        return found

    traced = Steps(backbone)
    ours = run(traced)
    assert sum(
        what.places > 0 and calls is not None for what, calls in traced.pages.stores.traces.items()
    ) == len(companies)
    one_by_one(monkeypatch)
    for one, other in zip(ours, run(Steps(backbone)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("num_rows", "weights"),
    [*((n, "int8") for n in (1, 32, 33, 100)), *((n, "dense") for n in (5, 128, 129))],
)
def test_any_number_of_rows(num_rows, weights, monkeypatch):
    """More than the kernels are for run one by one."""
    backbone = backbone_of("qwen3", "float32", weights)
    lengths = [index % 9 + 1 for index in range(num_rows)]
    ours = Steps(backbone, lengths).step()
    one_by_one(monkeypatch)
    assert torch.equal(ours, Steps(backbone, lengths).step())


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("opt", "float32"),
        ("llama", "float32"),
        ("gemma2", "float32"),
        ("gpt-oss", "float32"),
        ("qwen3", "float16"),
    ],
)
def test_what_cannot_be_traced_runs_one_by_one(name, dtype):
    """Operators, widths or dtypes that no kernel is for."""
    steps = Steps(make_backbone(name, dtype))
    assert steps.step().isfinite().all()
    assert not steps.num_traces


def prompts(steps: Steps, bypasses=(None, None, None)) -> torch.Tensor:
    """A step with pieces of two prompts, one of them a new one, beside a request that decodes."""
    pieces = [
        (0, 5, random_tokens(3, 8).tolist()),
        (1, 2, [9]),
        (2, 0, random_tokens(7, 9).tolist()),
    ]
    return forward(
        steps.pages.backbone,
        [
            steps.pages.rows([(steps.table(index), start, tokens)], own)
            for (index, start, tokens), own in zip(pieces, bypasses, strict=True)
        ],
    )


@pytest.mark.parametrize(("name", "dtype", "weights"), MODELS)
def test_pieces_of_prompts_are_one_call_whose_rows_attend_one_by_one(
    name, dtype, weights, monkeypatch
):
    backbone = backbone_of(name, dtype, weights)
    bypasses = make_adapter(backbone, seed=1, r=4, target_modules="all-linear").bypasses()
    traced, by_row, by_piece = (Steps(backbone, lengths=(5, 2, 1)) for _ in range(3))

    def run(steps: Steps) -> list[torch.Tensor]:
        return [
            prompts(steps),
            prompts(steps, (bypasses, None, bypasses)),
            steps.step(which=[0, 1]),
        ]

    ours = run(traced)
    assert traced.num_traces == 2
    one_by_one(monkeypatch)
    for one, other in zip(ours, run(by_piece), strict=True):
        assert (one - other).float().norm() < (
            1e-5 if dtype == "float32" else 0.03
        ) * other.float().norm()
    make_rows = paged_kv._CacheRows.__init__

    def make_rows_apart(rows: Any, *arguments: Any) -> None:
        make_rows(rows, *arguments)
        rows.segments = rows._apart

    monkeypatch.setattr(paged_kv._CacheRows, "__init__", make_rows_apart)
    for one, other in zip(ours, run(by_row), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(traced.pages.storage, by_row.pages.storage), "keys and values, too"


@needs_tiles
@pytest.mark.parametrize("name", ["llama", "qwen2-sliding", "qwen3", "llama-biases-tied"])
@pytest.mark.parametrize("weights", ["dense", "int8"])
def test_pieces_of_many_rows_attend_in_tiles_as_block_by_block(name, weights, monkeypatch):
    """Of prompts that begin and that continue, beside one of few rows and a request that decodes.
    Each row's result is equal to the last bit, but for those of the few, which attend one by one
    here.
    """
    backbone = backbone_of(name, "bfloat16", weights, head_dim=32)
    bypasses = make_adapter(backbone, seed=1, r=4, target_modules="all-linear").bypasses()

    def run(steps: Steps) -> list[torch.Tensor]:
        pieces = [(0, 5, 17), (3, 7, 1), (1, 2, 9), (2, 0, 24)]
        found = []
        for own in (None, bypasses):
            rows = [
                steps.pages.rows([(steps.table(i), start, random_tokens(n, i).tolist())], own)
                for i, start, n in pieces
            ]
            found.append(forward(backbone, rows))
        return [*found, steps.step(which=[0, 2])]

    traced, plain = (Steps(backbone, lengths=(5, 2, 1, 7)) for _ in range(2))
    ours = run(traced)
    assert traced.num_traces == 2
    one_by_one(monkeypatch)
    theirs = run(plain)
    for one, other in zip(ours[:2], theirs[:2], strict=True):
        for rows in (slice(18), slice(27, 51)):
            assert torch.equal(one[rows], other[rows])
        assert (one - other).float().norm() < 0.02 * other.float().norm()
    assert torch.equal(ours[2], theirs[2])


@needs_amx
@pytest.mark.parametrize("name", ["llama", "qwen2-sliding", "qwen3", "llama-biases-tied"])
@pytest.mark.parametrize("num_rows", [16, 48, 96, 144, 288])
def test_any_number_of_rows_of_prompts_is_one_call_to_the_last_bit(name, num_rows, monkeypatch):
    """Sums with what stands before a block, and gated units, are made within products there."""
    backbone = backbone_of(name, "bfloat16", "dense", head_dim=32)
    pieces = dict.fromkeys(range(num_rows // 16), 16)

    def run(steps: Steps) -> torch.Tensor:
        return steps.step(counts=pieces)

    traced, plain = (Steps(backbone, lengths=[index % 3 + 1 for index in pieces]) for _ in range(2))
    ours = run(traced)
    assert traced.num_traces == 1
    one_by_one(monkeypatch)
    assert torch.equal(ours, run(plain))
    assert torch.equal(traced.pages.storage, plain.pages.storage), "keys and values, too"


@needs_amx
def test_blocks_are_traced_as_the_fused_operators_that_there_are_kernels_for():
    """With adapters at a product, what they add to stays a product."""
    backbone = backbone_of("llama", "bfloat16", "dense", head_dim=32)
    for targets, kernels in (
        (None, {"product_onto": 2, "gated_product": 1, "product": 1}),
        (
            ["o_proj"],
            {"product_onto": 1, "gated_product": 1, "product": 2, "add": 1, "add_adapters": 1},
        ),
        (["up_proj"], {"product_onto": 2, "silu_mul": 1, "product": 2, "add_adapters": 1}),
    ):
        steps = Steps(backbone)
        bypasses = make_adapter(backbone, target_modules=targets).bypasses() if targets else None
        steps.step([bypasses] * 5)
        [calls] = steps.pages.stores.traces.values()
        assert isinstance(calls, CpuCalls)
        names = Counter(calls.names)
        assert {name: names[name] / backbone.architecture.num_layers for name in kernels} == kernels


@needs_amx
@pytest.mark.parametrize("width", [32, 48])
def test_gated_products_of_whole_tiles_have_a_kernel(width):
    weight = torch.randn(2 * width, 32).bfloat16()

    def run(trace: Any) -> Any:
        y = trace.backend.fused["gated_linear"](trace.input("x", 32), weight, None, (), ())
        assert (y is None) == bool(width % 32)
        halves = trace.backend.product(trace.input("x", 32), weight).split_with_sizes(
            [width, width], -1
        )
        return trace.backend.silu_mul(*halves)

    assert CpuBackend(torch.device("cpu")).trace(torch.bfloat16, run) is not None


@needs_amx
def test_a_trace_is_for_as_many_rows_as_its_products_take_with_the_threads_that_there_are():
    """Not with those that there were when it was made."""
    weight, threads = torch.randn(64, 32).bfloat16(), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        calls = CpuBackend(torch.device("cpu")).trace(
            torch.bfloat16, lambda trace: trace.backend.product(trace.input("x", 32), weight)
        )
        assert calls.max_rows > 1 << 20
        torch.set_num_threads(5)
        assert calls.max_rows == 192
    finally:
        torch.set_num_threads(threads)


@needs_tiles
def test_from_some_rows_on_a_piece_attends_in_tiles(monkeypatch):
    backbone = backbone_of("qwen3", "bfloat16", "dense", head_dim=32)
    for num_rows, is_equal in ((9, True), (10, False)):
        found = []
        for one_by_one_always in (False, True):
            with monkeypatch.context() as patch:
                if one_by_one_always:
                    patch.setattr("coserve.kernels.cpu.traced_calls._MIN_ROWS_BY_TILES", 1 << 30)
                steps = Steps(backbone, lengths=(5, 2, 1))
                rows = [(steps.table(0), 5, random_tokens(num_rows, 3).tolist())]
                found.append(forward(backbone, [steps.pages.rows(rows)]))
            assert steps.num_traces == 1
        assert torch.equal(*found) == is_equal
        assert (found[0] - found[1]).float().norm() < 0.02 * found[1].float().norm()


@needs_tiles
def test_a_piece_whose_keys_have_no_room_in_tiles_runs_block_by_block(monkeypatch):
    backbone = backbone_of("qwen3", "bfloat16", "dense", head_dim=32)
    calls, run = [], CpuCalls._run
    monkeypatch.setattr(CpuCalls, "_run", lambda *arguments: (calls.append(1), run(*arguments))[1])
    for most_bytes in (1 << 30, 1 << 10):  # the second has room for none
        monkeypatch.setattr("coserve.kernels.cpu.attention._MAX_TILE_BYTES", most_bytes)
        steps = Steps(backbone, lengths=(5, 2, 1))
        forward(backbone, [steps.pages.rows([(steps.table(0), 5, random_tokens(12, 3).tolist())])])
        assert len(calls) == 1


def test_prompts_whose_rows_have_too_many_keys_run_one_by_one(monkeypatch):
    """Three rows after five others, and seven: 3 x 7 + 7 x 4 pairs, without tiles."""
    backbone = backbone_of("qwen3", "float32", "int8")
    run, num_runs = CpuCalls._run, 0

    def counted(*arguments: Any) -> torch.Tensor:
        nonlocal num_runs
        num_runs += 1
        return run(*arguments)

    monkeypatch.setattr(CpuCalls, "_run", counted)
    for most, expected in ((49, 1), (48, 1)):
        monkeypatch.setattr("coserve.kernels.cpu.traced_calls.MAX_PROMPT_PAIRS", most)
        steps = Steps(backbone, lengths=(5, 2, 1))
        prompts(steps)
        assert num_runs == expected

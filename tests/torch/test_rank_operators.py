"""The operators with collectives, on ranks that are threads, against what one rank computes of
whole tensors."""

import pytest
import torch

from coserve.graph.operators import operator, operators
from coserve.graph.operators.base import Context, Load
from coserve.graph.tensors import TensorSpec
from coserve.kernels.cuts import even_cut, head_cut, side_by_side
from coserve.kernels.groups.threads import run_ranks
from coserve.kernels.plain import PlainBackend

BACKEND = PlainBackend(torch.device("cpu"))
N, SIZE = 5, 4
CUT = even_cut(8, SIZE)
assert CUT is not None
COPIES = head_cut(2, 4, SIZE, name="heads", may_copy=True)
_WIDE, _NARROW = even_cut(8, SIZE), head_cut(2, 2, SIZE, name="heads", may_copy=True)
assert _WIDE is not None
FUSED = side_by_side([_WIDE, _NARROW])
PADDED = even_cut(7, SIZE, padded=True)
assert PADDED is not None


def on_ranks(name, inputs, gradients, **attributes):
    """Return y and the gradient of x of each rank; inputs, gradients: by rank."""
    rule = operator(name)

    def run(group):
        context = Context(backend=BACKEND, group=group)
        y = rule.forward({"x": inputs[group.rank]}, attributes, context)["y"]
        return y, rule.vjp(["x"], {}, {"y": gradients[group.rank]}, attributes, context)["x"]

    return run_ranks(SIZE, run)


def rows(width, num=SIZE):
    return [torch.randn(N, width) for _ in range(num)]


def test_every_operator_with_a_collective_is_tested_here():
    tests = " ".join(name for name in globals() if name.startswith("test_"))
    assert [
        name for name in operators() if name.startswith("rank_") and f"test_{name}" not in tests
    ] == []


def test_rank_sum_adds_up_and_gives_its_gradient_to_all():
    xs, [dy] = rows(8), rows(8, 1)
    for y, dx in on_ranks("rank_sum", xs, [dy] * SIZE, tensor="t"):
        torch.testing.assert_close(y, sum(xs))
        assert torch.equal(dx, dy)


def test_rank_sum_leaves_its_input_alone():
    xs = rows(8)
    before = [x.clone() for x in xs]
    on_ranks("rank_sum", xs, xs, tensor="t")
    assert all(torch.equal(x, old) for x, old in zip(xs, before, strict=True))


def test_rank_copy_adds_up_gradients():
    [x], dys = rows(8, 1), rows(8)
    for y, dx in on_ranks("rank_copy", [x] * SIZE, dys, tensor="t"):
        assert torch.equal(y, x)
        torch.testing.assert_close(dx, sum(dys))


@pytest.mark.parametrize("cut", [CUT, COPIES, FUSED, PADDED])
def test_rank_gather_gives_whole_rows_and_its_gradient_the_pieces(cut):
    whole, dy = torch.randn(N, cut.width), torch.randn(N, cut.width)
    pieces = [cut.take(whole, rank) for rank in range(SIZE)]
    gathered = on_ranks("rank_gather", pieces, [dy] * SIZE, cut=cut, tensor="t")
    back = torch.zeros(N, cut.width)
    for rank, (y, dx) in enumerate(gathered):
        assert torch.equal(y, whole)
        one = torch.zeros(N, cut.width)
        cut.put(one, dx, rank)
        back += one
    assert torch.equal(back, dy), "gradients of copies add up"


@pytest.mark.parametrize("cut", [CUT, COPIES, FUSED, PADDED])
def test_rank_take_gives_own_columns_and_puts_their_gradient_back(cut):
    whole = torch.randn(N, cut.width)
    for rank, (y, dx) in enumerate(
        on_ranks("rank_take", [whole] * SIZE, rows(cut.local), cut=cut, tensor="t")
    ):
        assert torch.equal(y, cut.take(whole, rank))
        assert dx.shape == whole.shape and torch.count_nonzero(dx) <= N * cut.local


def test_rank_first_is_a_part_of_a_sum():
    [x], [dy] = rows(8, 1), rows(8, 1)
    found = on_ranks("rank_first", [x] * SIZE, [dy] * SIZE, tensor="t")
    assert torch.equal(sum(y for y, _ in found), x)
    assert all(torch.equal(dx, dy) for _, dx in found)


def test_rank_rms_norm_of_16_bit_rows_rounds_as_rms_norm_does():
    cut, rule = even_cut(32, SIZE), operator("rms_norm")
    x, weight = torch.randn(N, 32).bfloat16(), torch.randn(32).bfloat16()
    expected = rule.forward({"x": x, "weight": weight}, {"eps": 1e-6}, Context(backend=BACKEND))[
        "y"
    ]

    def run(group):
        own = {"x": cut.take(x, group.rank), "weight": cut.take(weight, group.rank)}
        context = Context(backend=BACKEND, group=group)
        return operator("rank_rms_norm").forward(own, {"eps": 1e-6, "width": 32}, context)["y"]

    torch.testing.assert_close(torch.cat(run_ranks(SIZE, run), -1), expected, atol=0, rtol=0)


@pytest.mark.parametrize("vocabulary", [8, 9, 13])
@pytest.mark.parametrize("has_bias", [False, True])
def test_rank_linear_cross_entropy_is_that_of_the_whole_vocabulary(vocabulary, has_bias):
    """The last of four ranks has none of 9 tokens."""
    cut = even_cut(vocabulary, SIZE, padded=True)
    x, weight, bias = torch.randn(N, 6), torch.randn(vocabulary, 6), torch.randn(vocabulary)
    targets = torch.tensor([0, vocabulary - 1, 3, 2, 5])
    inputs = {"x": x, "weight": weight, "targets": targets} | ({"bias": bias} if has_bias else {})
    wanted, dloss = [slot for slot in inputs if slot != "targets"], torch.randn(N)
    rule, alone = operator("linear_cross_entropy"), Context(backend=BACKEND)
    expected = rule.forward(inputs, {}, alone)
    gradients = rule.vjp(wanted, {**inputs, **expected}, {"loss": dloss}, {}, alone)
    again = rule.forward(inputs, {}, alone)

    def run(group):
        local, context, attributes = (
            operator("rank_linear_cross_entropy"),
            Context(backend=BACKEND, group=group),
            {"cut": cut},
        )
        own = {**inputs, "weight": cut.along(-2).take(weight, group.rank)}
        if has_bias:
            own["bias"] = cut.take(bias, group.rank)
        found = local.forward(own, attributes, context)
        kept = {name: value.clone() for name, value in found.items()}
        return kept, local.vjp(wanted, {**own, **found}, {"loss": dloss}, attributes, context)

    found = run_ranks(SIZE, run)
    for outputs, _ in found:
        torch.testing.assert_close(outputs["loss"], again["loss"])
        torch.testing.assert_close(outputs["log_sum"], again["log_sum"])
        assert torch.equal(outputs["correct"], again["correct"])
    torch.testing.assert_close(
        sum(of_rank["x"] for _, of_rank in found), gradients["x"], atol=1e-5, rtol=1e-5
    )
    for slot, dim in (("weight", 0), ("bias", 0)) if has_bias else (("weight", 0),):
        pieces = torch.cat([of_rank[slot] for _, of_rank in found], dim)[:vocabulary]
        torch.testing.assert_close(pieces, gradients[slot], atol=1e-5, rtol=1e-5)


def test_a_sum_costs_more_than_its_own_traffic_in_the_direction_in_which_it_runs():
    spec = TensorSpec(name="x", shape=(8,), kind="row")
    load = Load(rows=4, mean_context_len=0, compute_dtype=torch.float32)
    costs = {}
    for name in ("rank_sum", "rank_copy"):
        rule, specs = operator(name), {"x": spec, "y": spec}
        costs[name] = rule.cost(specs, {}, load).bytes, rule.vjp_cost(["x"], specs, {}, load).bytes
    assert (
        costs["rank_sum"][0] > costs["rank_sum"][1]
        and costs["rank_copy"][0] < costs["rank_copy"][1]
    )

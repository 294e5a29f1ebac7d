"""The compiled kernels that work row by row, against their plain twins and against float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from coserve.graph.operators import operator
from coserve.graph.operators.base import Context
from coserve.kernels.cpu import CpuBackend
from coserve.kernels.cpu.compiled import compiled_kernels
from coserve.kernels.cpu.rows import fit
from coserve.kernels.dropout import dropout_row_ids
from coserve.kernels.plain import PlainBackend

DEVICE = torch.device("cpu")
PLAIN = PlainBackend(DEVICE)
CPU = CpuBackend(DEVICE) if CpuBackend.is_available(DEVICE) else PLAIN
EPS = 1e-6


def has_amx() -> bool:
    kernels = compiled_kernels()
    return kernels is not None and kernels.has_amx


pytestmark = pytest.mark.skipif(CPU is PLAIN, reason="needs g++")
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
# The last has rows for several threads.
row_counts = pytest.mark.parametrize(
    ("n", "num_threads"), [(1, 1), (3, 2), (83, 1), (83, 2), (83, 5)]
)


def columns(n: int, width: int, dtype: torch.dtype) -> Tensor:
    """Some columns of a wider matrix."""
    return torch.randn(n, width + 13).to(dtype)[:, 5 : width + 5]


def check_close(ours: Tensor, twin: Tensor, exact: Tensor) -> None:
    """As close to the exact result as the twin is, and but a few roundings from it."""
    assert ours.dtype == twin.dtype and ours.shape == twin.shape and ours.is_contiguous()
    step = torch.finfo(ours.dtype).eps
    size = exact.abs().max()
    torch.testing.assert_close(
        ours, twin, rtol=4 * step, atol=float(2 * step * size) if step < 1e-3 else 1e-6
    )
    assert (ours.double() - exact).abs().max() <= 1.05 * (
        twin.double() - exact
    ).abs().max() + 4e-6 * size
    if ours.dtype == torch.bfloat16:
        assert (ours != twin).float().mean() < 0.02, (
            "the last bit of float32 seldom decides how bfloat16 is rounded"
        )


def check_rows(function, matrices: list[Tensor], others: list[Tensor]) -> None:
    """A row has the same result alone as in company."""
    for whole, *alone in zip(
        function(*matrices, *others),
        *(
            function(*(x[i : i + 1] for x in matrices), *others)
            for i in range(0, matrices[0].shape[0], 9)
        ),
        strict=True,
    ):
        assert torch.equal(whole[::9], torch.cat(alone))


@dtypes
@row_counts
@pytest.mark.parametrize("width", [1, 37, 576, 2048])
@pytest.mark.parametrize("p", [0.0, 0.05, 0.999])
def test_dropped_features_are_those_of_the_plain_twin_to_the_bit(dtype, n, num_threads, width, p):
    torch.manual_seed(0)
    torch.set_num_threads(num_threads)
    x = columns(n, width, dtype)
    keys = dropout_row_ids(7, torch.arange(2**33, 2**33 + n))
    for salt in (0, 2**32 - 1):
        twin = PLAIN.dropped(x, keys, p=p, salt=salt)
        assert torch.equal(CPU.dropped(x, keys, p=p, salt=salt), twin)
        if not p:
            assert torch.equal(twin, x)
    x[0, 0] = torch.nan
    assert CPU.dropped(x, keys, p=p, salt=0)[0, 0].isnan(), "as PEFT's, which multiplies by 0"


@dtypes
@row_counts
@pytest.mark.parametrize(("width", "features"), [(576, 576), (1, 1), (37, 37), (600, 100), (48, 3)])
def test_rms_norm(dtype, n, num_threads, width, features):
    torch.manual_seed(0)
    torch.set_num_threads(num_threads)
    grad, x, weight = (
        columns(n, width, dtype),
        columns(n, width, dtype) * 3,
        torch.randn(features).to(dtype),
    )
    exact_x = x.double().requires_grad_()
    grouped = exact_x.view(n, -1, features)
    exact = torch.nn.functional.rms_norm(grouped, (features,), weight.double(), EPS).flatten(1)
    [exact_grad] = torch.autograd.grad(exact, exact_x, grad.double())
    y = CPU.rms_norm(x, weight, EPS)
    check_close(y, PLAIN.rms_norm(x, weight, EPS), exact.detach())
    x_grad, again = CPU.rms_norm_gradient(grad, x, weight, EPS, with_y=True)
    twin, _ = PLAIN.rms_norm_gradient(grad, x, weight, EPS)
    if width > 1:  # else the gradient is what rounding leaves
        check_close(x_grad, twin, exact_grad)
    assert torch.equal(again, y)
    x_grad_only, none = CPU.rms_norm_gradient(grad, x, weight, EPS)
    assert torch.equal(x_grad_only, x_grad) and none is None
    check_rows(
        lambda dy, x, w: CPU.rms_norm_gradient(dy, x, w, EPS, with_y=True), [grad, x], [weight]
    )


@dtypes
@row_counts
@pytest.mark.parametrize("width", [1536, 1, 37, 400])
def test_silu_mul(dtype, n, num_threads, width):
    torch.manual_seed(0)
    torch.set_num_threads(num_threads)
    grad, gate, up = (
        columns(n, width, dtype),
        columns(n, width, dtype) * 4,
        columns(n, width, dtype),
    )
    exact_gate, exact_up = gate.double().requires_grad_(), up.double().requires_grad_()
    exact = torch.nn.functional.silu(exact_gate) * exact_up
    exact_grads = torch.autograd.grad(exact, (exact_gate, exact_up), grad.double())
    y = CPU.silu_mul(gate, up)
    check_close(y, PLAIN.silu_mul(gate, up), exact.detach())
    ours = CPU.silu_mul_gradients(grad, gate, up, with_y=True)
    twins = PLAIN.silu_mul_gradients(grad, gate, up, with_y=True)
    for one, twin, wide in zip(ours, twins, (*exact_grads, exact.detach()), strict=True):
        check_close(one, twin, wide)
    assert torch.equal(ours.y, y)
    without = CPU.silu_mul_gradients(grad, gate, up)
    assert (
        torch.equal(without.gate, ours.gate)
        and torch.equal(without.up, ours.up)
        and without.y is None
    )
    check_rows(lambda *inputs: CPU.silu_mul_gradients(*inputs, with_y=True), [grad, gate, up], [])


@dtypes
def test_silu_mul_of_what_is_not_small(dtype):
    ends = [1e-30, 1.0, 15.0, 87.0, 88.5, 89.0, 104.0, 1e4, 3e38, float("inf")]
    gate = torch.tensor([[*ends, *(-end for end in ends), float("nan"), 0.0]]).to(dtype)
    for factor in (1.0, 1e-3, float("inf"), float("nan")):
        up, grad = torch.full_like(gate, factor), torch.full_like(gate, 2.0)
        y, twin = CPU.silu_mul(gate, up), PLAIN.silu_mul(gate, up)
        settings: dict[str, Any] = {
            "rtol": 3 * torch.finfo(dtype).eps,
            "atol": 3e-36,
            "equal_nan": True,
        }
        torch.testing.assert_close(y, twin, **settings)
        ours = CPU.silu_mul_gradients(grad, gate, up, with_y=True)
        twins = PLAIN.silu_mul_gradients(grad, gate, up, with_y=True)
        for one, twin in zip(ours, twins, strict=True):
            torch.testing.assert_close(one, twin, **settings)


@dtypes
@row_counts
@pytest.mark.parametrize(("num_heads", "head_width"), [(9, 64), (3, 6), (1, 2), (2, 80)])
def test_rope_gives_the_plain_results_to_the_last_bit(dtype, n, num_threads, num_heads, head_width):
    torch.manual_seed(0)
    torch.set_num_threads(num_threads)
    x = columns(n, num_heads * head_width, dtype)
    angles = 9 * torch.randn(n, head_width)  # halves that differ, too
    for cos, sin in (
        (angles.cos().to(dtype), angles.sin().to(dtype)),
        columns(2 * n, head_width, dtype).split(n),
    ):
        for function, twin in ((CPU.rope, PLAIN.rope), (CPU.rope_gradient, PLAIN.rope_gradient)):
            ours = function(x, cos, sin)
            assert ours.is_contiguous()
            assert torch.equal(ours, twin(x, cos, sin))


@dtypes
@pytest.mark.parametrize(("n", "num_threads"), [(1, 1), (2, 2), (13, 1), (13, 2), (13, 5)])
@pytest.mark.parametrize("vocabulary", [49152, 1, 45, 5003])
def test_cross_entropy(dtype, n, num_threads, vocabulary):
    torch.manual_seed(0)
    torch.set_num_threads(num_threads)
    logits, targets = columns(n, vocabulary, dtype) * 4, torch.randint(vocabulary, (n,))
    targets[0] = logits[0].argmax()
    loss_grad = torch.randn(n)
    exact_logits = logits.double().requires_grad_()
    exact = torch.nn.functional.cross_entropy(exact_logits, targets, reduction="none")
    [exact_grad] = torch.autograd.grad(exact, exact_logits, loss_grad.double())
    loss, correct, log_sum = CPU.cross_entropy(logits, targets)
    _, twin_correct, twin_log_sum = PLAIN.cross_entropy(logits, targets)
    torch.testing.assert_close(loss, exact.detach().float(), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(log_sum, twin_log_sum, rtol=1e-6, atol=1e-6)
    assert torch.equal(correct, twin_correct) and correct[0]
    arguments = (logits, targets, log_sum, loss_grad)
    grad = CPU.cross_entropy_gradient(*arguments)
    if vocabulary > 1:
        check_close(grad, PLAIN.cross_entropy_gradient(*arguments), exact_grad)
    check_rows(CPU.cross_entropy, [logits, targets], [])
    check_rows(lambda *inputs: [CPU.cross_entropy_gradient(*inputs)], list(arguments), [])
    for backend in (CPU, PLAIN):
        expected, over = backend.cross_entropy_gradient(*arguments), logits.contiguous().clone()
        found = backend.cross_entropy_gradient(over, *arguments[1:], overwrites=True)
        assert found.data_ptr() == over.data_ptr() and torch.equal(found, expected)
        assert torch.equal(
            backend.cross_entropy_gradient(logits.clone(), *arguments[1:], overwrites=True),
            expected,
        )


def head_gradient(backend, logits, targets, log_sum, loss_grad, weight):
    """The gradient of the head's input, as `linear_cross_entropy` has it."""
    values = {"logits": logits, "targets": targets, "log_sum": log_sum, "weight": weight}
    found = operator("linear_cross_entropy").vjp(
        ("x",), values, {"loss": loss_grad}, {}, Context(backend=backend)
    )
    return found["x"]


@pytest.mark.skipif(not has_amx(), reason="needs AMX, whose products leave logits so")
@pytest.mark.parametrize(("n", "num_threads"), [(16, 1), (13, 2), (250, 2), (33, 5)])
@pytest.mark.parametrize("vocabulary", [49152, 1, 45, 5003])
def test_cross_entropy_of_logits_that_lie_by_columns(n, num_threads, vocabulary):
    torch.manual_seed(0)
    torch.set_num_threads(num_threads)
    rows, targets = torch.randn(n, vocabulary).bfloat16() * 4, torch.randint(vocabulary, (n,))
    logits, loss_grad = rows.T.contiguous().T, torch.randn(n)
    loss, correct, log_sum = CPU.cross_entropy(logits, targets)
    twin_loss, twin_correct, twin_log_sum = PLAIN.cross_entropy(rows, targets)
    torch.testing.assert_close(loss, twin_loss, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(log_sum, twin_log_sum, rtol=1e-6, atol=2e-6)
    assert torch.equal(correct, twin_correct)
    exact = (rows.double() - log_sum.double()[:, None]).exp()
    exact[torch.arange(n), targets] -= 1
    grad = CPU.cross_entropy_gradient(logits, targets, log_sum, loss_grad)
    if vocabulary > 1:
        twin = PLAIN.cross_entropy_gradient(rows, targets, log_sum, loss_grad)
        check_close(grad, twin, exact * loss_grad[:, None])


@pytest.mark.skipif(not has_amx(), reason="needs AMX, whose products leave logits so")
@pytest.mark.parametrize(("n", "num_threads"), [(16, 1), (13, 2), (250, 2), (33, 5)])
@pytest.mark.parametrize(
    ("vocabulary", "width"), [(49152, 96), (31, 32), (45, 32), (5003, 64), (520, 50)]
)
def test_the_gradient_of_the_heads_input_from_logits_that_lie_by_columns(
    n, num_threads, vocabulary, width
):
    """Of logits whose gradient never is in memory: the same as from that gradient. No kernel is for
    a width of 50."""
    torch.manual_seed(0)
    torch.set_num_threads(num_threads)
    rows, targets = torch.randn(n, vocabulary).bfloat16() * 4, torch.randint(vocabulary, (n,))
    logits, weight, loss_grad = (
        rows.T.contiguous().T,
        torch.randn(vocabulary, width).bfloat16(),
        torch.randn(n),
    )
    _, _, log_sum = PLAIN.cross_entropy(rows, targets)
    found = head_gradient(CPU, logits, targets, log_sum, loss_grad, weight)
    twin = head_gradient(PLAIN, rows.clone(), targets, log_sum, loss_grad, weight)
    torch.testing.assert_close(found, twin, rtol=8e-3, atol=1e-3 * float(twin.abs().max()))
    assert (found != twin).float().mean() < 0.02, (
        "the gradient of the logits is rounded as where it is in memory"
    )
    hidden = torch.zeros(n, width, dtype=torch.float64, requires_grad=True)
    exact_logits = rows.double() + hidden @ weight.double().T
    exact = torch.nn.functional.cross_entropy(exact_logits, targets, reduction="none")
    [exact_grad] = torch.autograd.grad(exact, hidden, loss_grad.double())
    assert (found.double() - exact_grad).norm() < 5e-3 * exact_grad.norm()
    with pytest.raises(IndexError, match="targets must be from 0 to"):
        head_gradient(CPU, logits, targets + vocabulary, log_sum, loss_grad, weight)


@pytest.mark.skipif(not has_amx(), reason="needs AMX")
@pytest.mark.parametrize("n", [2, 8, 20, 64, 100, 250])
def test_logits_lie_by_columns_for_a_loss_and_by_rows_for_choosing_tokens(n):
    torch.manual_seed(0)
    x, weight = torch.randn(n, 64).bfloat16(), torch.randn(40000, 64).bfloat16()
    of_requests, of_loss = CPU.product(x, weight), CPU.for_losses.product(x, weight)
    assert of_requests.is_contiguous()
    assert of_loss.is_contiguous() == (n < 32)
    exact = (x.float() @ weight.float().T).bfloat16()
    for logits in (of_requests, of_loss):
        torch.testing.assert_close(logits, exact, rtol=8e-3, atol=1e-2)


@dtypes
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("place", [0, 40, 99])
def test_cross_entropy_of_logits_that_are_not_finite(dtype, place, by_columns):
    torch.manual_seed(0)
    logits = torch.randn(8, 100).to(dtype)
    targets = torch.tensor([place, 3, place, 3, place, 3, 3, 3])
    logits[:2, place], logits[2:4, place], logits[4:6, place] = (
        float("-inf"),
        float("inf"),
        float("nan"),
    )
    logits[6] = float("-inf")
    logits[7] = float("-inf")
    logits[7, place] = 1.0
    if by_columns:
        logits = logits.T.contiguous().T
    ours = CPU.cross_entropy(logits, targets)
    twins = PLAIN.cross_entropy(logits, targets)
    for one, twin in zip(ours, twins, strict=True):
        torch.testing.assert_close(one, twin, equal_nan=True)
    arguments = (logits, targets, twins[2], torch.ones(8))
    grad = CPU.cross_entropy_gradient(*arguments)
    twin = PLAIN.cross_entropy_gradient(*arguments)
    torch.testing.assert_close(grad, twin, equal_nan=True)
    weight = torch.randn(100, 32).to(dtype)
    x_grad, x_twin = (
        head_gradient(each, logits.clone(), *arguments[1:], weight) for each in (CPU, PLAIN)
    )
    torch.testing.assert_close(x_grad, x_twin, equal_nan=True, rtol=1e-2, atol=1e-2)


@dtypes
@pytest.mark.parametrize(("n", "num_threads"), [(1, 1), (1, 2), (13, 1), (13, 2), (13, 5)])
@pytest.mark.parametrize("vocabulary", [49152, 1, 45, 2048, 2049, 5003])
def test_argmax_is_the_first_of_the_largest(dtype, n, num_threads, vocabulary):
    torch.manual_seed(0)
    torch.set_num_threads(num_threads)
    logits = columns(n, vocabulary, dtype)
    exact = logits.double().numpy()
    assert CPU.argmax(logits).tolist() == exact.argmax(-1).tolist()
    for place in {0, vocabulary // 3, vocabulary - 1}:
        for value in (9.0, float("inf"), float("nan")):
            one = logits.clone()
            one[:, place] = value
            assert CPU.argmax(one).tolist() == [place] * n
            one[:, place // 2] = value
            assert CPU.argmax(one).tolist() == [place // 2] * n
    for value in (float("-inf"), float("nan"), -0.0, -3.0):
        assert CPU.argmax(torch.full((n, vocabulary), value, dtype=dtype)).tolist() == [0] * n


@dtypes
def test_argmax_of_what_compares_in_other_ways_than_its_bits(dtype):
    infinity, nan = float("inf"), float("nan")
    logits = torch.tensor(
        [[-1.0, -0.0, 0.0], [-1.0, 0.0, -0.0], [-2.0, -1.0, -3.0], [infinity, 1.0, nan]]
    )
    logits = torch.cat(
        [logits, torch.tensor([[1.0, -nan, infinity], [-infinity, -3e38, -infinity]])]
    ).to(dtype)
    for rows in (logits, torch.cat([logits.new_full((6, 4000), -infinity), logits], -1)):
        assert CPU.argmax(rows).tolist() == PLAIN.argmax(rows).tolist()
    assert CPU.argmax(logits).tolist() == [1, 1, 1, 2, 1, 1]


@dtypes
def test_gated_units_and_gradients_of_logits_are_exact_to_the_rounding(dtype):
    """Over all sizes of the gate, in every place of a vector and of what is left over."""
    gate = torch.linspace(-80, 80, 4003).to(dtype)[None]
    up = torch.ones_like(gate)
    wide = gate.double()
    step = torch.finfo(dtype).eps
    exact = wide * wide.sigmoid()
    torch.testing.assert_close(
        CPU.silu_mul(gate, up).double(), exact, rtol=0.51 * step + 5e-7, atol=0
    )
    logits = gate.minimum(torch.zeros(1, dtype=dtype))
    grad = CPU.cross_entropy_gradient(logits, torch.tensor([4002]), torch.zeros(1), torch.ones(1))
    exact = logits.double().exp()
    torch.testing.assert_close(
        grad[:, :-1].double(), exact[:, :-1], rtol=0.51 * step + 5e-7, atol=0
    )


@pytest.mark.parametrize("target", [-1, 10])
def test_a_target_outside_the_vocabulary_is_an_error(target):
    logits, targets, each = torch.randn(2, 10), torch.tensor([1, target]), torch.ones(2)
    with pytest.raises(IndexError, match="from 0 to 9"):
        CPU.cross_entropy(logits, targets)
    with pytest.raises(IndexError, match="from 0 to 9"):
        CPU.cross_entropy_gradient(logits, targets, each, each)


def test_no_rows_are_no_rows():
    x, weight, angles, no_targets = (
        torch.ones(0, 8),
        torch.ones(8),
        torch.ones(0, 4),
        torch.ones(0, dtype=torch.int64),
    )
    results = (
        CPU.rms_norm(x, weight, EPS),
        CPU.silu_mul(x, x),
        CPU.rope(x, angles, angles),
        CPU.cross_entropy_gradient(x, no_targets, *torch.ones(2, 0)),
    )
    assert all(result.shape == (0, 8) for result in results)
    assert CPU.argmax(x).shape == (0,)
    with pytest.raises(IndexError):
        CPU.argmax(torch.ones(2, 0))
    assert all(result.shape == (0,) for result in CPU.cross_entropy(x, no_targets))


def test_other_dtypes_and_layouts_take_the_plain_way():
    x, weight = torch.randn(4, 8), torch.randn(8)
    assert fit(x, weight)
    for tensors in (
        (x.double(), weight.double()),
        (x.bfloat16(), weight),
        (x, weight.bfloat16()),
        (x.T.contiguous().T, weight),
        (x.to("meta"), weight.to("meta")),
        (x[:, ::2], weight[:4]),
        (x[:, :1].expand(4, 8), weight),
    ):
        assert not fit(*tensors)
        result = CPU.rms_norm(*tensors, EPS)
        assert result.shape == tensors[0].shape
        if not result.is_meta:
            assert CPU.argmax(tensors[0]).tolist() == tensors[0].double().argmax(-1).tolist()
    y = CPU.silu_mul(x.T.contiguous().T, x)
    torch.testing.assert_close(y, torch.nn.functional.silu(x) * x)

"""Every operator of the table against torch.autograd, one line each."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coserve.errors import GraphError
from coserve.graph.fusions import FUSIONS, GRADIENT_FUSIONS, GRADIENT_SUMS
from coserve.graph.operators import operator, operators
from coserve.graph.operators.base import AttentionRows, Context, Load
from coserve.kernels.attention import Segment
from coserve.kernels.bits import pack_signs
from coserve.kernels.dropout import dropout_mask, dropout_row_ids
from coserve.kernels.plain import PlainBackend
from coserve.tuning.pack_states import PackStates, clear_gradient, states_shape

CONTEXT = Context(backend=PlainBackend(torch.device("cpu")))


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Whatever ran before: a few draws in a thousand are beyond a tolerance by rounding alone."""
    torch.manual_seed(0)


def rnd(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).float()


def check(
    name: str,
    reference: Any,
    inputs: dict[str, Tensor],
    context: Any = CONTEXT,
    tolerance: float = 1e-5,
    **attributes: Any,
) -> None:
    """Forward, the gradient of every differentiable slot, and every restorable output, against a
    reference function."""
    rule = operator(name)
    assert rule.needs.keys() == set(rule.inputs), (
        "a rule for every slot, None where there is no gradient"
    )
    leaves = {
        slot: value.clone().requires_grad_(
            rule.needs[slot] is not None and value.is_floating_point()
        )
        for slot, value in inputs.items()
    }
    expected = reference(**leaves)
    outputs = rule.forward(inputs, attributes, context)
    torch.testing.assert_close(
        outputs[rule.outputs[0]], expected.detach(), atol=tolerance, rtol=tolerance
    )
    wanted = [slot for slot, leaf in leaves.items() if leaf.requires_grad]
    grad = torch.randn_like(expected)
    theirs = (
        torch.autograd.grad(expected, [leaves[slot] for slot in wanted], grad) if wanted else ()
    )
    at_hand = inputs | outputs
    for subset in [[slot] for slot in wanted] + [wanted]:
        if hasattr(context, "reset"):
            context.reset()
        values = {slot: at_hand[slot].clone() for slot in rule.reads(subset, at_hand)}
        ours = rule.vjp(subset, values, {rule.outputs[0]: grad}, attributes, context)
        for slot in values.keys() - rule.overwrites:
            assert torch.equal(values[slot], at_hand[slot]), (
                f"{slot} is not for an operator to change"
            )
        assert ours.keys() == set(subset)
        for slot in subset:
            torch.testing.assert_close(
                ours[slot],
                theirs[wanted.index(slot)].to(ours[slot].dtype),
                atol=tolerance,
                rtol=tolerance,
            )
    for slot in rule.restores:
        again = rule.vjp([*wanted, slot], at_hand, {rule.outputs[0]: grad}, attributes, context)
        torch.testing.assert_close(again[slot], outputs[slot], atol=1e-6, rtol=1e-6)


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    grouped = x.unflatten(1, (-1, weight.shape[0]))
    return (nn.functional.rms_norm(grouped, weight.shape, weight, 1e-6)).flatten(1)


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    heads = x.unflatten(1, (-1, cos.shape[1]))
    half = heads.shape[-1] // 2
    rotated = torch.cat((-heads[..., half:], heads[..., :half]), -1)
    return (heads * cos[:, None] + rotated * sin[:, None]).flatten(1)


def _halves(x: Tensor) -> Tensor:
    return torch.cat((x, x), -1)


def _dropped(x: Tensor, weight: Tensor, dropout_row_ids: Tensor) -> Tensor:
    return (x * dropout_mask(dropout_row_ids, x.shape[1], p=0.4, salt=7) / 0.6) @ weight.T


def _magnitude(
    base: Tensor, change: Tensor, magnitude: Tensor, norm: Tensor, bias: Tensor | float = 0.0
) -> Tensor:
    gain = magnitude / norm.detach()
    return (gain - 1) * (
        base - (bias.detach() if isinstance(bias, Tensor) else bias)
    ) + gain * change


def test_linear():
    inputs = {"x": rnd(5, 6), "weight": rnd(4, 6), "bias": rnd(4)}
    check("linear", lambda x, weight, bias: nn.functional.linear(x, weight, bias), inputs)


def test_linear_without_bias():
    check(
        "linear",
        lambda x, weight: nn.functional.linear(x, weight),
        {"x": rnd(5, 6), "weight": rnd(4, 6)},
    )


def test_low_rank():
    check("low_rank", lambda x, weight: x @ weight.T, {"x": rnd(5, 6), "weight": rnd(2, 6)})


def test_embedding():
    inputs = {"ids": torch.tensor([0, 3, 3, 1]), "weight": rnd(6, 4)}
    check("embedding", lambda ids, weight: weight[ids + 2], inputs, offset=2)


def test_embedding_gives_zeros_for_virtual_tokens():
    inputs = {"ids": torch.tensor([2, -1, -3, 0]), "weight": rnd(3, 4)}
    check(
        "embedding",
        lambda ids, weight: weight[ids.clamp(min=0)] * (ids >= 0)[:, None],
        inputs,
        offset=0,
    )


def test_rms_norm():
    check("rms_norm", _rms_norm, {"x": rnd(5, 8), "weight": rnd(8)}, eps=1e-6)


def test_rms_norm_of_heads():
    check("rms_norm", _rms_norm, {"x": rnd(5, 12), "weight": rnd(4)}, eps=1e-6)


def test_layer_norm():
    inputs = {"x": rnd(5, 8), "weight": rnd(8), "bias": rnd(8)}
    check(
        "layer_norm",
        lambda x, weight, bias: nn.functional.layer_norm(x, (8,), weight, bias, 1e-5),
        inputs,
        eps=1e-5,
    )


def test_rope():
    angles = _halves(rnd(5, 3))
    check("rope", _rope, {"x": rnd(5, 12), "cos": angles.cos(), "sin": angles.sin()})


def test_rope_of_a_part_of_each_head():
    angles = _halves(rnd(5, 2))
    inputs = {"x": rnd(5, 12), "cos": angles.cos(), "sin": angles.sin()}

    def reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = x.unflatten(1, (2, 6))
        turned = _rope(heads[..., :4].flatten(1), cos, sin).unflatten(1, (2, 4))
        return torch.cat((turned, heads[..., 4:]), -1).flatten(1)

    check("rope", reference, inputs, head_dim=6, interleaved=False)


def test_rope_of_neighbouring_pairs():
    angles = rnd(5, 2)
    inputs = {"x": rnd(5, 12), "cos": _halves(angles).cos(), "sin": _halves(angles).sin()}

    def reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = x.unflatten(1, (2, 6))
        pairs = torch.view_as_complex(heads[..., :4].unflatten(2, (2, 2)).contiguous())
        turned = torch.view_as_real(pairs * torch.complex(cos, sin)[:, None, :2]).flatten(2)
        return torch.cat((turned, heads[..., 4:]), -1).flatten(1)

    check("rope", reference, inputs, head_dim=6, interleaved=True)


def test_layer_norm_without_bias():
    inputs = {"x": rnd(5, 8), "weight": rnd(8)}
    check(
        "layer_norm",
        lambda x, weight: nn.functional.layer_norm(x, (8,), weight, None, 1e-5),
        inputs,
        eps=1e-5,
    )


def test_rms_norm_whose_weight_is_stored_less_one():
    inputs = {"x": rnd(5, 8), "weight": rnd(8)}
    check("rms_norm", lambda x, weight: _rms_norm(x, weight + 1), inputs, eps=1e-6, plus_one=True)


@pytest.mark.parametrize(("groups", "start", "width"), [(1, 4, 3), (4, 0, 2), (4, 1, 1)])
def test_columns(groups, start, width):
    inputs, of = {"x": rnd(5, 12)}, 12 // groups

    def reference(x: Tensor) -> Tensor:
        return x.unflatten(1, (groups, of))[..., start : start + width].flatten(1)

    check("columns", reference, inputs, groups=groups, of=of, start=start, width=width)


@pytest.mark.parametrize(
    ("groups", "start", "widths"), [(1, 4, (3, 5)), (4, 0, (2, 1)), (2, 1, (1, 3, 1))]
)
def test_regroup(groups, start, widths):
    inputs, of = {"x": rnd(5, 12)}, 12 // groups

    def reference(x: Tensor) -> Tensor:
        parts = x.unflatten(1, (groups, of))[..., start : start + sum(widths)].split(widths, -1)
        return torch.cat([part.flatten(1) for part in parts], 1)

    check("regroup", reference, inputs, groups=groups, of=of, start=start, widths=widths)


_COLUMNS = {"groups": 4, "of": 3, "start": 1}
_LOW_RANK: dict[str, tuple[int, ...]] = {"x": (5, 8), "weight": (2, 8), "y": (5, 2)}
# By operator: shapes of its inputs and outputs, and attributes.
_ADDED: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, Any]]] = {
    "columns": ({"x": (5, 12), "y": (5, 8)}, {**_COLUMNS, "width": 2}),
    "dropout_low_rank": (_LOW_RANK, {"p": 0.3, "salt": 7}),
    "linear": ({"x": (5, 8), "weight": (6, 8), "y": (5, 6)}, {}),
    "linear_beside_low_rank": (
        {"x": (5, 8), "weight": (6, 8), "factor": (2, 8), "y": (5, 6), "narrow": (5, 2)},
        {},
    ),
    "low_rank": (_LOW_RANK, {}),
    "regroup": ({"x": (5, 12), "y": (5, 8)}, {**_COLUMNS, "widths": (1, 1)}),
}


@pytest.mark.parametrize(("op", "slot"), GRADIENT_SUMS)
def test_a_gradient_that_is_added_to_a_sum_is_that_of_the_operator(op, slot):
    shapes, attributes = _ADDED[op]
    tensors: dict[str, Tensor] = {name: rnd(*shape) for name, shape in shapes.items()}
    tensors["dropout_row_ids"] = dropout_row_ids(3, torch.arange(5))
    gradients = {name: rnd(*shapes[name]) for name in operator(op).outputs}
    total = rnd(*shapes[slot])
    expected = total + operator(op).vjp((slot,), tensors, gradients, attributes, CONTEXT)[slot]
    GRADIENT_SUMS[op, slot](total, tensors, gradients, attributes, CONTEXT)
    torch.testing.assert_close(total, expected)


def test_gradients_of_columns_are_written_into_one_tensor():
    total, dy = rnd(5, 12), rnd(5, 8)
    expected = total + nn.functional.pad(dy.unflatten(1, (4, 2)), (1, 0)).flatten(1)
    attributes = {"groups": 4, "of": 3, "start": 1, "width": 2}
    GRADIENT_SUMS["columns", "x"](total, {}, {"y": dy}, attributes, CONTEXT)
    torch.testing.assert_close(total, expected)


def test_clamp():
    check("clamp", lambda x: x.clamp(-0.5, 0.5), {"x": rnd(5, 8)}, most=0.5)


def test_clamped_swiglu():
    def reference(gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=0.8), up.clamp(-0.8, 0.8)
        return (up + 1) * gate * torch.sigmoid(1.7 * gate)

    check("clamped_swiglu", reference, {"gate": rnd(5, 8), "up": rnd(5, 8)}, limit=0.8, alpha=1.7)


@pytest.mark.parametrize("name", ["route", "route_of_all"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_route_of_all_or_of_those_chosen(name, has_bias):
    """Shares have gradients; which experts a row goes to has none."""
    inputs = {"x": rnd(6, 4), "weight": rnd(5, 4)} | ({"bias": rnd(5)} if has_bias else {})

    def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        scores = nn.functional.linear(x, weight, bias)
        return (
            scores.softmax(-1).topk(2)[0]
            if name == "route_of_all"
            else scores.topk(2)[0].softmax(-1)
        )

    check(name, reference, inputs, top_k=2)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("out", "width"), [(4, 8), (3, 6)])
def test_expert_linear(shared, has_bias, out, width):
    experts = torch.tensor([[0, 3], [3, 1], [0, 1], [3, 0], [1, 0]])  # nobody goes to 2
    inputs = {
        "x": rnd(5, width if shared else 2 * width),
        "experts": experts,
        "weight": rnd(4, out, width),
    }
    inputs |= {"bias": rnd(4, out)} if has_bias else {}

    def reference(x: Tensor, experts: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        parts = x[:, None].expand(5, 2, width) if shared else x.view(5, 2, width)
        y = torch.einsum("nki,nkoi->nko", parts, weight[experts])
        return (y if bias is None else y + bias[experts]).flatten(1)

    check("expert_linear", reference, inputs, shared=shared)


def test_mixture():
    inputs = {"x": rnd(5, 12), "shares": rnd(5, 3)}
    check("mixture", lambda x, shares: torch.einsum("nkw,nk->nw", x.view(5, 3, 4), shares), inputs)


def test_soft_cap():
    check("soft_cap", lambda x: 3.0 * torch.tanh(x / 3.0), {"x": 4 * rnd(5, 8)}, cap=3.0)


def test_silu():
    check("silu", lambda x: nn.functional.silu(x), {"x": rnd(5, 8)})


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(approximate):
    check(
        "gelu",
        lambda x: nn.functional.gelu(x, approximate=approximate),
        {"x": rnd(5, 8)},
        approximate=approximate,
    )


def test_relu():
    check("relu", lambda x: torch.relu(x), {"x": rnd(5, 8)})


def test_relu_from_packed_signs():
    x, dy = rnd(5, 13), rnd(5, 13)
    y = torch.relu(x)
    whole = operator("relu").vjp(["x"], {"y": y}, {"y": dy}, {}, CONTEXT)
    packed = operator("relu").vjp(["x"], {"y": pack_signs(y)}, {"y": dy}, {}, CONTEXT)
    assert torch.equal(whole["x"], packed["x"])


def test_silu_mul():
    check(
        "silu_mul",
        lambda gate, up: nn.functional.silu(gate) * up,
        {"gate": rnd(5, 8), "up": rnd(5, 8)},
    )


def test_add():
    check("add", lambda a, b: a + b, {"a": rnd(5, 8), "b": rnd(5, 8)})


def test_mul_by_a_vector():
    check("mul", lambda x, factor: x * factor, {"x": rnd(5, 8), "factor": rnd(8)}, per_row=False)


def test_mul_by_rows():
    check("mul", lambda x, factor: x * factor, {"x": rnd(5, 8), "factor": rnd(5, 8)}, per_row=True)


def test_scale():
    check("scale", lambda x: x * 0.25, {"x": rnd(5, 8)}, factor=0.25)
    check("scale", lambda x: x * 0.3, {"x": rnd(5, 8)}, factor=0.3, rounded=True)


def test_dropout_low_rank():
    inputs = {
        "x": rnd(5, 8),
        "weight": rnd(4, 8),
        "dropout_row_ids": dropout_row_ids(3, torch.arange(5)),
    }
    check("dropout_low_rank", _dropped, inputs, p=0.4, salt=7)


def test_dropout():
    inputs = {"x": rnd(5, 8), "dropout_row_ids": dropout_row_ids(3, torch.arange(5))}
    check(
        "dropout",
        lambda x, dropout_row_ids: _dropped(x, torch.eye(8), dropout_row_ids),
        inputs,
        p=0.4,
        salt=7,
    )


def test_other_rows():
    ids = torch.tensor([3, 7, 0, 3, 9])

    def reference(base: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        own = torch.stack(
            [
                weight[(7, 3).index(int(i))] if int(i) in (7, 3) else row
                for i, row in zip(ids, base, strict=True)
            ]
        )
        return own - base

    check(
        "other_rows", reference, {"base": rnd(5, 8), "weight": rnd(2, 8), "ids": ids}, tokens=(7, 3)
    )


def test_other_columns():
    def reference(base: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return base.index_copy(1, torch.tensor([4, 1]), x @ weight.T) - base

    check(
        "other_columns",
        reference,
        {"base": rnd(5, 8), "x": rnd(5, 6), "weight": rnd(2, 6)},
        columns=(4, 1),
    )


def test_add_vector():
    check(
        "add_vector",
        lambda x, vector: x + 0.5 * vector,
        {"x": rnd(5, 8), "vector": rnd(8)},
        factor=0.5,
    )


def test_other_vector():
    inputs = {"like": rnd(5, 8), "new": rnd(8), "old": rnd(8)}
    check("other_vector", lambda like, new, old: 0 * like.detach() + new - old.detach(), inputs)


def test_on_virtual_rows():
    inputs = {"x": rnd(4, 8), "other": rnd(4, 8), "tokens": torch.tensor([-2, 5, -1, 0])}
    check("on_virtual_rows", lambda x, other, tokens: (other - x) * (tokens < 0)[:, None], inputs)


def test_gain():
    for shape in ((8,), (8, 1), (1, 8)):
        inputs = {"x": rnd(5, 8), "factor": rnd(*shape)}
        check("gain", lambda x, factor: x * (factor.flatten() - 1), inputs)


def test_magnitude():
    inputs = {
        "base": rnd(5, 8),
        "change": rnd(5, 8),
        "magnitude": rnd(8),
        "norm": rnd(8).exp(),
        "bias": rnd(8),
    }
    check("magnitude", _magnitude, inputs)
    check(
        "magnitude", _magnitude, {slot: value for slot, value in inputs.items() if slot != "bias"}
    )


def test_cross_entropy():
    inputs = {"logits": rnd(5, 9), "targets": torch.tensor([0, 8, 3, 3, 1])}
    check(
        "cross_entropy",
        lambda logits, targets: nn.functional.cross_entropy(logits, targets, reduction="none"),
        inputs,
    )


def test_linear_cross_entropy():
    def reference(x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None) -> Tensor:
        return nn.functional.cross_entropy(
            nn.functional.linear(x, weight, bias), targets, reduction="none"
        )

    inputs = {"x": rnd(5, 8), "weight": rnd(9, 8), "targets": torch.tensor([0, 8, 3, 3, 1])}
    check("linear_cross_entropy", reference, inputs)
    check("linear_cross_entropy", reference, {**inputs, "bias": rnd(9)})


def test_cross_entropy_is_computed_in_float32():
    logits, targets = rnd(6, 400).bfloat16() * 3, torch.arange(6)
    rule, grad = operator("cross_entropy"), torch.ones(6)
    both = [{"logits": logits, "targets": targets}, {"logits": logits.float(), "targets": targets}]
    half, whole = (rule.forward(values, {}, CONTEXT) for values in both)
    for name in ("loss", "correct", "log_sum"):
        assert torch.equal(half[name], whole[name])
    one, other = (
        rule.vjp(["logits"], {**values, "log_sum": whole["log_sum"]}, {"loss": grad}, {}, CONTEXT)[
            "logits"
        ]
        for values in both
    )
    assert torch.equal(one, other.bfloat16())
    assert torch.equal(both[1]["logits"], logits.float()), (
        "its input is not for an operator to change"
    )


def test_embedding_looks_up_virtual_tokens_alone():
    inputs = {"ids": torch.tensor([2, -1, -3, 0]), "weight": rnd(3, 4)}
    check(
        "embedding",
        lambda ids, weight: weight[(-1 - ids).clamp(min=0)] * (ids < 0)[:, None],
        inputs,
        offset=0,
        virtual=True,
    )


def test_sign_bits_has_a_forward_and_no_gradient():
    x = rnd(5, 13)
    assert torch.equal(operator("sign_bits").forward({"x": x}, {}, CONTEXT)["y"], pack_signs(x))
    with pytest.raises(GraphError, match="no gradient with respect to x"):
        operator("sign_bits").reads(["x"], {"x"})


class _OneSequence:
    """A context of one sequence, built from k and v as they are."""

    backend = CONTEXT.backend

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self._k, self._v = k, v
        self.reset()

    def reset(self) -> None:
        self.key_grads, self.value_grads = torch.zeros_like(self._k), torch.zeros_like(self._v)
        n = self._k.shape[0]
        rows = AttentionRows(
            rows=slice(0, n),
            batch=self.backend.prepare_attention([Segment(num_rows=n, num_keys=n)], block_tokens=n),
            keys=self._k[None],
            values=self._v[None],
            key_grads=self.key_grads[None],
            value_grads=self.value_grads[None],
        )
        self.attention = (rows,)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, **settings: Any
) -> Tensor:
    """Attention of one sequence by its definition, head by head."""
    n, num_heads = q.shape[0], settings["num_heads"]
    queries, keys, values = (x.view(n, -1, 4).transpose(0, 1) for x in (q, k, v))
    keys, values = (x.repeat_interleave(num_heads // x.shape[0], 0) for x in (keys, values))
    distance = torch.arange(n)[:, None] - torch.arange(n)[None]
    scores = queries @ keys.mT * settings["scale"]
    if cap := settings.get("soft_cap"):
        scores = cap * torch.tanh(scores / cap)
    if slopes := settings.get("alibi_slopes"):
        scores = scores - torch.tensor(slopes)[:, None, None] * distance
    seen = (distance >= 0) & (distance < (settings["sliding_window"] or n))
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, n, 1)), -1)
    return (scores.softmax(-1)[..., :n] @ values).transpose(0, 1).flatten(1)


@pytest.mark.parametrize(
    "extra", [{}, {"soft_cap": 0.7}, {"alibi_slopes": (0.5, 0.25, 0.1, 0.05)}, {"sinks": True}]
)
@pytest.mark.parametrize("sliding_window", [None, 3, 90])
@pytest.mark.parametrize("n", [7, 150])
def test_attention(n, sliding_window, extra):
    q, k, v = rnd(n, 16), rnd(n, 8), rnd(n, 8)
    settings = {
        "num_heads": 4,
        "num_key_value_heads": 2,
        "scale": 0.3,
        "sliding_window": sliding_window,
        **extra,
    }
    inputs = {"q": q, "k": k, "v": v}
    if settings.pop("sinks", None):
        inputs["sinks"] = rnd(4)
    check(
        "attention",
        lambda **given: _attention(**given, **settings),
        inputs,
        _OneSequence(k, v),
        **settings,
    )


class _StatesOfOneSequence:
    """A context of one sequence that carries a state."""

    backend = CONTEXT.backend

    def __init__(self, state_size: int, rows: list[Tensor]) -> None:
        num_rows = rows[0].shape[0]
        self._kept = torch.full(states_shape(state_size, num_rows, is_trained=True), torch.nan)
        self._states = PackStates(self.backend.device).backward(
            self._kept, [(0, 0, num_rows)], rows
        )
        self.reset()

    def reset(self) -> None:
        clear_gradient(self._kept)
        self.states = (self._states,)


def _gated_delta(
    x: Tensor, b: Tensor, a: Tensor, conv: Tensor, a_log: Tensor, dt_bias: Tensor
) -> Tensor:
    """The rule by its definition, row by row: two key heads of 3, four value heads of 5."""
    n, channels = x.shape
    padded = torch.cat((x.new_zeros(conv.shape[2] - 1, channels), x))
    rows = nn.functional.silu(nn.functional.conv1d(padded.T[None], conv, groups=channels)[0].T)
    q, k, v = (
        part.view(n, -1, width)
        for part, width in zip(rows.split((6, 6, 20), 1), (3, 3, 5), strict=True)
    )
    q, k = (part * (part.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for part in (q, k))
    q, k = (part.repeat_interleave(2, 1) for part in (q / 3**0.5, k))
    decay, beta = (-a_log.exp() * nn.functional.softplus(a + dt_bias)).exp(), b.sigmoid()
    state, found = x.new_zeros(4, 3, 5), []
    for t in range(n):
        state = decay[t, :, None, None] * state
        delta = beta[t, :, None] * (v[t] - (state * k[t, :, :, None]).sum(1))
        state = state + k[t, :, :, None] * delta[:, None]
        found.append((state * q[t, :, :, None]).sum(1).flatten())
    return torch.stack(found)


@pytest.mark.parametrize("n", [1, 2, 64, 150])
def test_gated_delta(n):
    inputs = {"x": rnd(n, 32), "b": rnd(n, 4), "a": rnd(n, 4)}
    weights = {"conv": rnd(32, 1, 4), "a_log": rnd(4), "dt_bias": rnd(4)}
    sizes = {
        "num_key_heads": 2,
        "num_value_heads": 4,
        "key_dim": 3,
        "value_dim": 5,
        "kernel_size": 4,
    }
    context = _StatesOfOneSequence(operator("gated_delta").state_size(sizes), list(inputs.values()))
    check("gated_delta", _gated_delta, inputs | weights, context, tolerance=1e-4, **sizes)


@pytest.mark.parametrize("width", [8, 1])
def test_sigmoid_mul(width):
    check(
        "sigmoid_mul",
        lambda x, gate: torch.sigmoid(gate) * x,
        {"x": rnd(5, 8), "gate": rnd(5, width)},
    )


def test_every_operator_of_the_table_has_a_test_here():
    tests = " ".join(name for name in globals() if name.startswith("test_"))
    # Those with a collective, and fused ones, have files of their own.
    fused = {row.fused for row in (*FUSIONS, *GRADIENT_FUSIONS)}
    own = [name for name in operators() if not name.startswith("rank_") and name not in fused]
    assert [name for name in own if f"test_{name}" not in tests] == []


def test_an_unknown_operator_is_named_with_the_known_ones():
    with pytest.raises(GraphError, match=r"no operator 'conv'; known: .*linear"):
        operator("conv")


def test_a_gradient_without_a_rule_is_refused():
    with pytest.raises(GraphError, match="no gradient rule for y"):
        operator("linear").reads(["y"], {"x", "y"})
    with pytest.raises(GraphError, match="no gradient with respect to ids"):
        operator("embedding").reads(["ids"], {"ids"})


def test_costs_grow_with_rows_and_count_matrix_products():
    spec: dict[str, Any] = {
        slot: SimpleNamespace(
            shape=shape, per_row=per_row, num_bytes=lambda dtype, s=shape: 2 * torch.Size(s).numel()
        )
        for slot, shape, per_row in (
            ("x", (6,), True),
            ("weight", (4, 6), False),
            ("y", (4,), True),
        )
    }
    one, ten = (
        operator("linear").cost(
            spec, {}, Load(rows=rows, mean_context_len=0, compute_dtype=torch.bfloat16)
        )
        for rows in (1, 10)
    )
    assert (one.flops, ten.flops) == (48, 480)
    assert ten.bytes - one.bytes == 9 * 2 * (6 + 4)
    load = Load(rows=10, mean_context_len=0, compute_dtype=torch.bfloat16)
    both = operator("linear").vjp_cost(["x", "weight"], spec, {}, load)
    assert both.flops == 960


def test_attention_reads_the_keys_of_its_sequence_and_embedding_only_its_rows():
    sizes = {"q": 16, "k": 8, "v": 8, "y": 16, "lse": 4}
    spec: dict[str, Any] = {
        slot: SimpleNamespace(
            shape=(size,), per_row=True, num_bytes=lambda dtype, size=size: 2 * size
        )
        for slot, size in sizes.items()
    }
    settings: dict[str, Any] = {"sliding_window": None}

    def attention(rows: int, keys: float) -> int:
        load = Load(rows=rows, mean_context_len=keys, compute_dtype=torch.bfloat16)
        return operator("attention").cost(spec, settings, load).bytes

    assert attention(1, 1000.5) - attention(1, 0.5) == 1000 * 2 * (8 + 8), (
        "a decoded token reads all K and V"
    )
    assert attention(100, 50) == 100 * 2 * sum(sizes.values()), (
        "a whole prompt reads what it has just written"
    )
    load = Load(rows=1, mean_context_len=100, compute_dtype=torch.bfloat16)
    flops = operator("attention").cost(spec, settings, load).flops
    assert flops == 4 * 16 * 100, "scores and values: two products of queries with 100 keys"
    assert (
        operator("attention").vjp_cost(["q", "k", "v"], spec, settings, load).flops == 2.5 * flops
    )
    settings["sliding_window"] = 10
    assert operator("attention").cost(spec, settings, load).flops == flops / 10
    assert attention(1, 1000.5) < attention(1, 0.5) + 10 * 2 * (8 + 8) + 1
    weight: Any = SimpleNamespace(shape=(50_000, 8), per_row=False, num_bytes=lambda dtype: 800_000)
    load = Load(rows=3, mean_context_len=0, compute_dtype=torch.bfloat16)
    assert (
        operator("embedding").cost({"weight": weight, "y": spec["k"]}, {}, load).bytes == 3 * 2 * 16
    )

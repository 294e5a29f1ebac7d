import pytest
import torch
from transformers import (
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_scheduler,
)

from coserve.tuning.config import OptimizerConfig
from coserve.tuning.optimizer import AdapterOptimizer


def masters() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator)
        for name, shape in (("a", (3, 4)), ("b", (5,)))
    }


def gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(tensor.shape, generator=generator) * 30
        for name, tensor in masters().items()
    }


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0, 1e9])
def test_steps_equal_torchs_adamw_with_clipping(max_grad_norm):
    ours, theirs = masters(), masters()
    config = OptimizerConfig(
        learning_rate=0.1, weight_decay=0.05, betas=(0.8, 0.95), max_grad_norm=max_grad_norm
    )
    optimizer = AdapterOptimizer(ours, config)
    leaves = [tensor.requires_grad_() for tensor in theirs.values()]
    reference = torch.optim.AdamW(leaves, lr=0.1, weight_decay=0.05, betas=(0.8, 0.95))
    for step in range(6):
        for leaf, gradient in zip(leaves, gradients(step).values(), strict=True):
            leaf.grad = gradient / 7
        norm = torch.nn.utils.clip_grad_norm_(leaves, max_grad_norm or float("inf"))
        reference.step()
        ours_norm = float(optimizer.step(gradients(step), num_trained=7, num_steps=6))
        assert ours_norm == pytest.approx(float(norm), rel=1e-5)
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name].detach())


@pytest.mark.parametrize(
    ("schedule", "reference"),
    [("linear", get_linear_schedule_with_warmup), ("cosine", get_cosine_schedule_with_warmup)],
)
def test_schedules_fall_as_transformers_do(schedule, reference):
    config = OptimizerConfig(learning_rate=0.5, schedule=schedule)
    theirs = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    scheduler = reference(theirs, num_warmup_steps=0, num_training_steps=20)
    for step in range(20):
        assert config.learning_rate_at(step, 20) == pytest.approx(theirs.param_groups[0]["lr"])
        theirs.step()
        scheduler.step()


@pytest.mark.parametrize("name", ["constant", "constant_with_warmup", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [{"warmup_steps": 3}, {"warmup_ratio": 0.25}, {}])
def test_transformers_schedulers_have_transformers_learning_rates(name, warmup):
    config = OptimizerConfig(learning_rate=0.1, lr_scheduler_type=name, **warmup)
    reference = torch.optim.AdamW([torch.zeros(1)], lr=0.1)
    steps = warmup.get("warmup_steps", 3 if warmup else 0)
    scheduler = get_scheduler(name, reference, num_warmup_steps=steps, num_training_steps=10)
    for step in range(10):
        assert config.learning_rate_at(step, 10) == pytest.approx(scheduler.get_last_lr()[0])
        reference.step()
        scheduler.step()


def test_warmup_rises_to_the_learning_rate_and_constant_stays():
    config = OptimizerConfig(learning_rate=0.4, warmup_steps=3)
    assert [config.learning_rate_at(step, 10) for step in range(6)] == pytest.approx(
        [0.1, 0.2, 0.3, 0.4, 0.4, 0.4]
    )


def test_a_schedule_stays_at_its_end():
    for schedule in ("linear", "cosine"):
        config = OptimizerConfig(schedule=schedule)
        assert config.learning_rate_at(12, 10) == pytest.approx(0)


def test_a_state_that_is_not_this_adapters_is_refused_and_changes_nothing():
    optimizer = AdapterOptimizer(masters(), OptimizerConfig())
    optimizer.step(gradients(0), num_trained=1, num_steps=3)
    state = optimizer.state()
    for wrong in (
        {name: value for name, value in state.items() if name != "a/exp_avg"},
        {name: value for name, value in state.items() if not name.startswith("b/")},
        {**state, "a/exp_avg": torch.zeros(4, 3)},
    ):
        with pytest.raises(ValueError, match=r"the optimizer's state of [ab] must have"):
            optimizer.load_state({**wrong, "num_steps_done": torch.tensor(9)})
    assert optimizer.num_steps_done == 1


def test_a_gradient_that_is_not_finite_changes_nothing():
    ours = masters()
    optimizer = AdapterOptimizer(ours, OptimizerConfig(learning_rate=0.1))
    optimizer.step(gradients(0), num_trained=1, num_steps=3)
    before = {name: tensor.clone() for name, tensor in ours.items()}
    state = optimizer.state()
    broken = gradients(1) | {"b": torch.full((5,), float("nan"))}
    assert not optimizer.step(broken, num_trained=1, num_steps=3).isfinite()
    assert all(torch.equal(ours[name], before[name]) for name in ours)
    after = optimizer.state()
    assert all(torch.equal(after[name], state[name]) for name in state if name != "num_steps_done")


def test_a_restored_optimizer_continues_as_if_it_had_not_stopped():
    straight, resumed = masters(), masters()
    config = OptimizerConfig(learning_rate=0.1, schedule="cosine", warmup_steps=2)
    one = AdapterOptimizer(straight, config)
    for step in range(8):
        one.step(gradients(step), num_trained=3, num_steps=8)
    first = AdapterOptimizer(resumed, config)
    for step in range(4):
        first.step(gradients(step), num_trained=3, num_steps=8)
    second = AdapterOptimizer(resumed, config)
    second.load_state(first.state())
    for step in range(4, 8):
        second.step(gradients(step), num_trained=3, num_steps=8)
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_an_optimizer_restored_before_its_first_step_has_no_moments():
    fresh, restored = (
        AdapterOptimizer(masters(), OptimizerConfig()),
        AdapterOptimizer(masters(), OptimizerConfig()),
    )
    restored.load_state(fresh.state())
    assert restored.moments == fresh.moments == {}
    restored.step(gradients(0), num_trained=7, num_steps=6)
    assert sorted(restored.moments) == ["a/exp_avg", "a/exp_avg_sq", "b/exp_avg", "b/exp_avg_sq"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": 0}, "learning_rate must be a number above 0, not 0"),
        ({"betas": 0.9}, "betas must be two numbers"),
        ({"warmup_steps": True}, "warmup_steps must be a whole number"),
        ({"eps": -1}, "eps must be a number above 0"),
        ({"weight_decay": -0.1}, "weight_decay must be a number of at least 0"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers"),
        ({"schedule": "step"}, "schedule must be one of constant, linear, cosine, not 'step'"),
        ({"warmup_steps": 1.5}, "warmup_steps must be a whole number"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm must be a number of at least 0"),
    ],
)
def test_settings_out_of_range_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**settings)

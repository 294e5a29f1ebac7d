"""Gated delta layers: training through their states in windows of any size, and what requests may
not do with them."""

from typing import Any

import pytest
from engines import (
    BLOCK,
    assert_nothing_is_held,
    drain,
    expected_tokens,
    greedy,
    make_engine,
    prompts_of,
    tokens_by_request,
    watched,
)
from family_configs import MORE_CONFIGS
from support import (
    fresh_peft_twin,
    make_backbone,
    peft_gradients,
    random_sequences,
    wide_gradients,
    worst_error,
)
from transformers import AutoConfig

from coserve.adapters import Adapter
from coserve.adapters.methods.prefix_tuning import PrefixTuningConfig
from coserve.devices.messages.steps import StepFailure, StepResult
from coserve.engine.request import Chunk
from coserve.errors import AdapterError, BudgetError, RequestError, UnsupportedModelError
from coserve.models.families import build_architecture
from coserve.tuning import TrainingPass, make_pack, run_alone, training_programs

# Sequences of several chunks, such that begin and end within them, and at their ends.
SEQUENCES = random_sequences((150, 70, 9, 27, 64, 1))


def gradients_of(
    adapter: Any,
    forward_rows: int,
    backward_rows: int,
    budget: int | None = None,
    sequences: Any = SEQUENCES,
) -> Any:
    programs = training_programs(adapter, budget_bytes_per_token=budget)
    training = TrainingPass(adapter, programs, make_pack(sequences))
    run_alone(training, forward_rows=forward_rows, backward_rows=backward_rows)
    return training.gradients


@pytest.mark.long
def test_training_in_windows_of_any_size_gives_autograds_gradients():
    model, adapter = fresh_peft_twin("qwen3.5")
    whole = gradients_of(adapter, 1000, 1000)
    assert worst_error(whole, peft_gradients(model, SEQUENCES)) < 1e-4
    for forward_rows, backward_rows in ((17, 31), (64, 64), (50, 7), (1, 100), (1000, 3)):
        assert worst_error(gradients_of(adapter, forward_rows, backward_rows), whole) < 1e-4
    assert worst_error(gradients_of(adapter, 23, 19, budget=4 * 32 * 20), whole) < 1e-4, (
        "with less saved"
    )


@pytest.mark.parametrize("lengths", [(7, 11, 1, 5), (150, 70, 9, 27, 64, 1)])
def test_gradients_in_float32_are_as_near_to_those_in_float64_as_transformers_own(lengths):
    model, adapter = fresh_peft_twin("qwen3.5")
    sequences = random_sequences(lengths)
    theirs, exact = peft_gradients(model, sequences), wide_gradients(model, sequences)
    ours = gradients_of(adapter, 1000, 1000, sequences=sequences)
    assert worst_error(ours, exact) < 2 * max(1e-5, worst_error(theirs, exact))


@pytest.mark.parametrize("targets", [["out_proj"], ["in_proj_a"], ["down_proj"], ["q_proj"]])
def test_an_adapter_on_some_layers_alone_gives_autograds_gradients(targets):
    model, adapter = fresh_peft_twin("qwen3.5", target_modules=targets)
    theirs = peft_gradients(model, SEQUENCES)
    assert worst_error(gradients_of(adapter, 40, 25), theirs) < 1e-4


def test_requests_share_no_prefix_and_answer_the_same():
    engine, prompt = make_engine("qwen3.5"), prompts_of((4 * BLOCK + 1,))[0]
    for _ in range(2):
        request = engine.add(prompt, greedy(6))
        events = drain(engine)
        assert tokens_by_request(events)[request] == expected_tokens(prompt, 6, "qwen3.5")
        assert {event.num_cached_tokens for event in events if isinstance(event, Chunk)} == {0}
    assert_nothing_is_held(engine)


def test_requests_whose_step_ran_out_of_memory_begin_anew(monkeypatch):
    """Its blocks may have had the rows by then: states that have them must not have them again."""
    engine, prompts = make_engine("qwen3.5"), prompts_of((9, 14))
    names = {engine.add(prompt, greedy(6)): prompt for prompt in prompts}
    events = [event for _ in range(3) for event in engine.step()]
    device, collect = watched(engine).inner, watched(engine).inner.collect

    def out_of_memory_at_last():
        return StepResult(
            step=collect().step, failure=StepFailure(message="it was full", broken_update=None)
        )

    with monkeypatch.context() as patch:
        patch.setattr(device, "collect", out_of_memory_at_last)
        events += engine.step()
    got = tokens_by_request(events + drain(engine))
    assert {name: got[name] for name in names} == {
        name: expected_tokens(prompt, 6, "qwen3.5") for name, prompt in names.items()
    }
    assert engine.num_preemptions == 2
    assert_nothing_is_held(engine)


def test_a_request_has_pages_for_its_states_before_those_of_its_tokens():
    engine = make_engine("qwen3.5", num_pages=40)
    num_states = engine.device.info.num_state_pages
    assert num_states > 1
    engine.add(prompts_of((2 * BLOCK,))[0], greedy(1 + BLOCK))
    engine.step()
    assert (
        sum(len(each.sequence.pages) for each in engine.requests.running.values()) == num_states + 2
    )
    small = make_engine("qwen3.5", num_pages=num_states + 4)
    with pytest.raises(
        RequestError, match=rf"need {num_states + 5} pages; there are {num_states + 4}"
    ):
        small.add(prompts_of((2 * BLOCK,))[0], greedy(2 * BLOCK + 1))
    with pytest.raises(
        BudgetError, match=rf"{num_states + 2} pages, of which a request's states fill {num_states}"
    ):
        make_engine("qwen3.5", num_pages=num_states)


def test_what_states_cannot_do_is_refused_by_name():
    with pytest.raises(
        UnsupportedModelError, match="whose results depend on how its prompts are cut"
    ):
        make_engine("qwen3.5", deterministic=True)
    with pytest.raises(AdapterError, match="this model has blocks without"):
        Adapter(make_backbone("qwen3.5"), PrefixTuningConfig(num_virtual_tokens=3))
    with pytest.raises(UnsupportedModelError, match="the latter of one at least"):
        build_architecture(
            AutoConfig.for_model(
                **MORE_CONFIGS["qwen3.5"] | {"layer_types": ["linear_attention"] * 4}
            )
        )

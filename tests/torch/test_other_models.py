"""Jobs on another model than the one that serves, whose weights pass through a window of the page
pool: what PEFT makes of them, beside requests that are answered as ever.
"""

import shutil
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from threading import Event
from typing import Any

import pytest
import torch
from engines import (
    FAST,
    assert_nothing_is_held,
    drain,
    examples_of,
    expected_tokens,
    greedy,
    make_engine,
    prompts_of,
    tokens_by_request,
    watched,
)
from msgspec import structs
from peft import PeftModel
from random_plans import PlannedBy, random_policy
from safetensors.torch import load_file
from support import VOCAB, random_weights_, summed_loss
from transformers import AutoConfig, AutoModelForCausalLM

from coserve.adapters import Adapter, LoraConfig, save_adapter
from coserve.engine.jobs.events import JobEvent
from coserve.errors import AdapterError, JobError
from coserve.memory.tensors import weight_window
from coserve.memory.tensors.weight_window import WeightWindow
from coserve.models import load_backbone
from coserve.scheduling import Plan, PlannedTasklets, View
from coserve.scheduling.memory import MemoryPlan
from coserve.tuning.config import OptimizerConfig, TuningConfig
from coserve.tuning.examples import epoch_order

LORA = LoraConfig(r=3, alpha=6, target_modules="all-linear")
# Where a gradient is no more than rounding, Adam with a smaller eps makes a step of it that is a
# processor's own.
OPTIMIZER = OptimizerConfig(
    learning_rate=1e-2, weight_decay=0.1, warmup_steps=2, max_grad_norm=0.5, eps=1e-5
)
CONFIG = TuningConfig(num_epochs=2, batch_size=3, max_pack_tokens=12, seed=4, optimizer=OPTIMIZER)
LENGTHS = (9, 12, 5, 11, 7)


@cache
def other_model() -> tuple[Path, Any]:
    """Another family than the one that serves, wider and of many blocks: its directory, and
    transformers' model."""
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=14,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    model: Any = random_weights_(
        AutoModelForCausalLM.from_config(config, attn_implementation="eager"), 3
    )
    model.tie_weights()
    model.eval()
    directory = Path(mkdtemp(prefix="coserve-other-"))
    model.save_pretrained(directory)
    return directory, model


def other_engine(**settings: Any) -> Any:
    return make_engine(trainable_models={"big": str(other_model()[0])}, **settings)


def num_weight_bytes() -> int:
    return sum(p.nbytes for p in other_model()[1].parameters())


def sequences(examples):
    return [(list(example.tokens), list(example.trained)) for example in examples]


@cache
def by_peft() -> tuple[list[float], dict[str, torch.Tensor]]:
    """The job's losses and adapter by PEFT, autograd and torch's AdamW."""
    directory, _ = other_model()
    start = Path(mkdtemp(prefix="coserve-start-"))
    save_adapter(
        Adapter(load_backbone(str(directory), dtype="float32"), LORA, seed=CONFIG.seed), start
    )
    again = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    twin: Any = PeftModel.from_pretrained(again, str(start), is_trainable=True)
    trained = [p for p in twin.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(
        trained, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, weight_decay=OPTIMIZER.weight_decay
    )
    examples, losses = examples_of(LENGTHS), list[float]()
    for epoch in range(CONFIG.num_epochs):
        order = epoch_order(len(examples), seed=CONFIG.seed, epoch=epoch, shuffle=CONFIG.shuffle)
        for first in range(0, len(order), CONFIG.batch_size):
            batch = [examples[index] for index in order[first : first + CONFIG.batch_size]]
            for group in adamw.param_groups:
                group["lr"] = OPTIMIZER.learning_rate * min(
                    1.0, (len(losses) + 1) / (OPTIMIZER.warmup_steps + 1)
                )
            adamw.zero_grad()
            loss = summed_loss(twin, sequences(batch)) / sum(
                example.num_trained for example in batch
            )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, OPTIMIZER.max_grad_norm)
            adamw.step()
            losses.append(float(loss.detach()))
    parameters = {
        n.replace(".default", ""): p.detach() for n, p in twin.named_parameters() if "lora_" in n
    }
    return losses, parameters


def of_kind(events: list[Any], kind: str) -> list[JobEvent]:
    return [event for event in events if isinstance(event, JobEvent) and event.kind == kind]


def run_to_end(engine: Any, job: str, most_steps: int = 20_000) -> list[Any]:
    events: list[Any] = []
    for _ in range(most_steps):
        if engine.job(job).is_terminal:
            return events + engine.step()
        events += engine.step()
        engine.check_integrity()
    raise AssertionError(f"{job} is not over after {most_steps} steps: {engine.stats()}")


def assert_is_pefts(engine: Any, events: list[Any], directory: Path) -> None:
    losses, parameters = by_peft()
    assert [event.loss for event in of_kind(events, "step")] == pytest.approx(losses, rel=1e-5)
    engine.save_adapter("mine", directory)
    ours = load_file(directory / "adapter_model.safetensors")
    assert ours.keys() == parameters.keys()
    assert max(float((ours[name] - parameters[name]).abs().max()) for name in ours) < 3e-5


class AtOnce(Executor):
    """Does all that it is given before anything else happens."""

    def __init__(self, *_: Any) -> None:
        pass

    def submit(self, function: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(function(*given, **named))
        except Exception as error:
            done.set_exception(error)
        return done


@pytest.mark.long
def test_a_model_three_times_larger_than_the_pool_is_trained_beside_requests(monkeypatch, tmp_path):
    """Plans are any: tiny pieces, packs dropped, requests preempted; the same ones however fast the
    disk is.
    """
    monkeypatch.setattr(weight_window, "ThreadPoolExecutor", AtOnce)
    engine, rng = other_engine(num_pages=1750), Random(0)
    assert num_weight_bytes() > 3 * engine.pool.num_pages * engine.pool.page_bytes
    engine.policy = random_policy(3)
    job = engine.submit(examples_of(LENGTHS), CONFIG, adapter=LORA, name="mine", model="big")
    events: list[Any] = []
    asked: dict[str, Any] = {}
    sizes = []
    while not engine.job(job).is_terminal:
        if not engine.has_requests and len(asked) < 90 and rng.random() < 0.2:
            for prompt in prompts_of(range(5, 60, 9), len(asked)):
                asked[engine.add(prompt, greedy(12))] = prompt
        events += engine.step()
        engine.check_integrity()
        sizes.append(engine.pool.num_pages_by_owner().get("weights", 0))
    events += drain(engine)
    assert_is_pefts(engine, events, tmp_path)
    got = tokens_by_request(events)
    assert len(asked) >= 7
    assert {name: got[name] for name in asked} == {
        name: expected_tokens(prompt, 12) for name, prompt in asked.items()
    }
    assert engine.stats().num_packs_dropped == 0
    assert len({size for size in sizes if size}) > 3
    changes = [
        after - before
        for before, after in pairwise([size for size in sizes if size])
        if after != before
    ]
    grew = [change > 0 for change in changes]
    assert (False, True) in set(pairwise(grew)), "the window gave way, and grew again"
    assert engine.stats().num_weight_bytes_copied > 2 * num_weight_bytes()
    assert not engine.pool.num_pages_by_owner().get("weights")
    assert_nothing_is_held(engine)


def test_weights_that_are_not_there_are_not_waited_for_while_requests_run(monkeypatch, tmp_path):
    """Their copies are held up; steps with requests run without the job, which continues when they
    come."""
    engine = other_engine(num_pages=1750)
    may_copy, copy_part = Event(), WeightWindow._copy

    def copy_later(window, *args):
        may_copy.wait()
        return copy_part(window, *args)

    monkeypatch.setattr(WeightWindow, "_copy", copy_later)
    job = engine.submit(examples_of(LENGTHS), CONFIG, adapter=LORA, name="mine", model="big")
    (prompt,) = prompts_of((9,))
    asked = engine.add(prompt, greedy(20))
    try:
        events = drain(engine)
    finally:
        may_copy.set()
    assert tokens_by_request(events)[asked] == expected_tokens(prompt, 20)
    device = watched(engine)
    assert engine.stats().num_tasklets_declined > 10
    steps = zip(device.batches, device.results, strict=True)
    assert sum(result.weights_wait_s for batch, result in steps if batch.requests) < 0.1
    assert not any(result.packs for result in device.results)
    assert_is_pefts(engine, events + run_to_end(engine, job), tmp_path)


def test_requests_have_the_whole_device_while_a_job_of_harlis_starves(monkeypatch, tmp_path):
    """Weights that do not come leave nothing to run beside requests (HARLI section 6.2)."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    may_copy, copy_part = Event(), WeightWindow._copy

    def copy_later(window, *args):
        may_copy.wait()
        return copy_part(window, *args)

    monkeypatch.setattr(WeightWindow, "_copy", copy_later)
    hardware = replace(FAST, num_units=2, bytes_per_s=1e12)
    engine = other_engine(num_pages=1750, policy="harli", hardware=hardware)
    job = engine.submit(examples_of(LENGTHS), CONFIG, adapter=LORA, name="mine", model="big")
    (prompt,) = prompts_of((9,))
    asked = engine.add(prompt, greedy(20))
    try:
        events = drain(engine)
        batches = [batch for batch in watched(engine).batches if batch.requests and batch.tasklets]
        assert len(batches) > 10
        assert 4 * sum(batch.partition is not None for batch in batches) < len(batches)
    finally:
        may_copy.set()
        torch.set_num_threads(before)
    assert tokens_by_request(events)[asked] == expected_tokens(prompt, 20)
    events += run_to_end(engine, job)
    assert engine.job(job).state == "succeeded"


def test_it_is_told_within_which_time_weights_make_room_for_requests():
    """Packs begin only beside what requests take meanwhile (`MemoryPlan.begin_packs`)."""
    engine, seen = other_engine(num_pages=1750), [0.0]
    policy = engine.policy

    def plan(view: View, latency: Any) -> Plan:
        seen.append(view.give_back_s)
        return policy.plan(view, latency)

    engine.policy = PlannedBy(function=plan)
    engine.submit(examples_of(LENGTHS), CONFIG, adapter=LORA, name="mine", model="big")
    while engine.stats().num_weight_bytes_copied == 0:
        engine.step()
    assert engine.stats().give_back_s == 0 and max(seen) == 0
    for prompt in prompts_of((60,) * 45):  # more than is free, whatever the job does meanwhile
        engine.add(prompt, greedy(12))
    for _ in range(1000):
        engine.step()
        if engine.stats().give_back_s:
            break
    waited_s = max(result.weights_room_s for result in watched(engine).results)
    assert engine.stats().give_back_s == waited_s > 0
    engine.step()
    assert seen[-1] == waited_s


def test_steps_stop_at_their_time_limit(monkeypatch):
    """They stop between two tasklets, whatever there is left to do."""
    monkeypatch.setattr(weight_window, "ThreadPoolExecutor", AtOnce)
    engine = other_engine(num_pages=1750)
    engine.submit(examples_of(LENGTHS), CONFIG, adapter=LORA, name="mine", model="big")
    engine.policy = PlannedBy(
        function=lambda view, latency: structs.replace(plan_all(view), backward_limit_s=0.0)
    )
    for _ in range(6):
        engine.step()
        result = watched(engine).results[-1]
        assert result.num_tasklets == {"job-0": 1}, "the first in any case, and no other"


def plan_all(view: View) -> Plan:
    memory = MemoryPlan(view)
    memory.begin_packs()
    (job,) = memory.jobs
    return Plan(
        begin=tuple(memory.begin),
        tasklets=(PlannedTasklets(job.id, job.num_rows, job.num_parts_left),),
    )


def test_a_job_resumes_from_its_checkpoint_and_goes_to_the_host_and_back(tmp_path):
    engine = other_engine(num_pages=1750, num_host_pages=1750)
    engine.policy = random_policy(3)
    job = engine.submit(examples_of(LENGTHS), CONFIG, adapter=LORA, name="mine", model="big")
    events: list[Any] = []
    while engine.job(job).num_steps_done < 2:
        events += engine.step()
        if engine.job(job).has_pack and engine.num_steps % 7 == 0:
            engine.pause_job(job)
            engine.step()
            assert not engine.job(job).has_pack
            engine.resume_job(job)
    checkpoint = engine.checkpoint(job).write(tmp_path / "checkpoints")
    again = other_engine(num_pages=1750)
    resumed = again.submit_examples(
        examples_of(LENGTHS), CONFIG, checkpoint=checkpoint, name="mine", model="big"
    )
    assert_is_pefts(again, events + run_to_end(again, resumed), tmp_path / "adapter")


@pytest.mark.long
def test_two_jobs_take_turns_in_the_window_and_one_of_the_served_model_runs_beside_them(tmp_path):
    engine = other_engine(num_pages=2000)
    mine, other = (
        engine.submit(examples_of(LENGTHS), CONFIG, adapter=LORA, name=name, model="big")
        for name in ("mine", "other")
    )
    served = engine.submit(examples_of(LENGTHS), CONFIG, adapter=LORA, name="served")
    events: list[Any] = []
    while engine.has_work:
        events += engine.step()
        engine.check_integrity()
        assert not (engine.job(mine).has_pack and engine.job(other).has_pack)
    assert {engine.job(job).state for job in (mine, other, served)} == {"succeeded"}
    assert_is_pefts(
        engine, [event for event in events if getattr(event, "job", "") == mine], tmp_path
    )
    assert_nothing_is_held(engine)


def test_validation_losses_come_through_the_window():
    engine = other_engine(num_pages=1750)
    config = replace(CONFIG, num_epochs=1, evaluate_every_steps=1)
    events = engine.tune(
        examples_of(LENGTHS), config, adapter=LORA, validation=examples_of((8, 6)), model="big"
    )
    found = of_kind(events, "evaluation")
    assert [event.step for event in found] == [1, 2]
    assert all(event.loss is not None and event.loss > 0 for event in found)


def test_its_adapter_is_saved_and_continued_but_not_served(tmp_path):
    engine = other_engine(num_pages=1750)
    config = replace(CONFIG, num_epochs=1)
    engine.tune(examples_of(LENGTHS), config, adapter=LORA, name="mine", model="big")
    with pytest.raises(
        AdapterError, match="adapter mine@2 is of model 'big', which is trained here and not served"
    ):
        engine.add(prompts_of((9,))[0], greedy(3), adapter="mine")
    with pytest.raises(
        JobError,
        match="adapter mine@2 is of model 'big', the job of the model that serves: continue",
    ):
        engine.submit(examples_of(LENGTHS), config, adapter="mine")
    engine.tune(examples_of(LENGTHS), config, adapter="mine", name="further", model="big")
    engine.save_adapter("further", tmp_path)
    again = AutoModelForCausalLM.from_pretrained(other_model()[0])
    assert PeftModel.from_pretrained(again, str(tmp_path)).peft_config["default"].r == LORA.r


@pytest.mark.parametrize(
    ("settings", "model", "message"),
    [
        (
            {},
            "huge",
            "model 'huge' is not served here, nor one of those that can be trained beside it: "
            "'big'",
        ),
        (
            {"num_pages": 100},
            "big",
            "two parts of model 'big' side by side need [0-9]+ bytes; the window of weights may",
        ),
        (
            {"weight_window_bytes": 1000},
            "big",
            "side by side need [0-9]+ bytes; the window of weights may have 1000",
        ),
        (
            {"num_pages": 900},
            "big",
            "a pack of 12 tokens needs [0-9]+ pages; there are [0-9]+: lower max_pack_tokens",
        ),
    ],
)
def test_a_job_that_can_never_run_is_refused(settings, model, message):
    engine = other_engine(**{"num_pages": 1750, **settings})
    with pytest.raises(JobError, match=message):
        engine.submit(examples_of(LENGTHS), CONFIG, adapter=LORA, model=model)
    assert not engine.jobs
    long = examples_of((65,))
    if not settings and model == "big":
        with pytest.raises(JobError, match="example 0 has 65 tokens; the model has 64 positions"):
            engine.submit(long, CONFIG, adapter=LORA, model=model)


def test_weights_that_disappear_fail_their_job_alone(tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(other_model()[0], directory)
    engine = make_engine(num_pages=1750, trainable_models={"big": str(directory)})
    job = engine.submit(examples_of(LENGTHS), CONFIG, adapter=LORA, model="big")
    engine.policy = random_policy(1)
    for _ in range(10):
        engine.step()
    (directory / "model.safetensors").unlink()
    (prompt,) = prompts_of((9,))
    asked = engine.add(prompt, greedy(20))
    run_to_end(engine, job)
    assert engine.job(job).state == "failed"
    assert "model.safetensors cannot be read any more" in (engine.job(job).error or "")
    assert tokens_by_request([*drain(engine)]).keys() <= {asked}
    assert_nothing_is_held(engine)


def test_a_window_takes_no_more_than_it_may(tmp_path):
    most = 1_600_000
    engine = other_engine(num_pages=6000, weight_window_bytes=most)
    job = engine.submit(examples_of(LENGTHS), CONFIG, adapter=LORA, name="mine", model="big")
    sizes = set()
    events: list[Any] = []
    while not engine.job(job).is_terminal:
        events += engine.step()
        sizes.add(engine.pool.num_pages_by_owner().get("weights", 0) * engine.pool.page_bytes)
    assert max(sizes) == most // engine.pool.page_bytes * engine.pool.page_bytes
    assert_is_pefts(engine, events, tmp_path)

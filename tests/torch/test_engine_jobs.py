"""Jobs of an engine: the adapters that PEFT, autograd and AdamW make, whatever else the engine does
meanwhile."""

import json
import math
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from engines import (
    adapter_directory,
    assert_nothing_is_held,
    drain,
    examples_of,
    expected_tokens,
    greedy,
    make_engine,
    prompts_of,
    tokens_by_request,
    watched,
    word_tokenizer,
)
from lengths import long_but
from peft import PeftModel
from random_plans import random_policy
from safetensors.torch import load_file
from support import FAMILIES, make_backbone, make_model, summed_loss

from coserve.adapters import Adapter, LoraConfig, save_adapter
from coserve.devices.messages.jobs import BeginPack, DropCheckpoint, DropTrainer
from coserve.devices.sampling_params import SamplingParams
from coserve.devices.torch.trainer import TorchTrainer
from coserve.engine.checks import check_examples
from coserve.engine.jobs import opening
from coserve.engine.jobs.events import JobEvent
from coserve.engine.request import Chunk
from coserve.errors import AdapterError, DataError, JobError
from coserve.simulate.hardware import Hardware
from coserve.tuning.config import OptimizerConfig, TuningConfig
from coserve.tuning.examples import Example, epoch_order

LORA = LoraConfig(r=3, alpha=6, target_modules="all-linear")
OPTIMIZER = OptimizerConfig(
    learning_rate=1e-2, weight_decay=0.1, warmup_steps=2, max_grad_norm=0.5, eps=1e-6
)
# Seven examples in batches of three, in packs that hold one or two: three steps an epoch, of
# several packs each.
CONFIG = TuningConfig(num_epochs=3, batch_size=3, max_pack_tokens=20, seed=4, optimizer=OPTIMIZER)
LENGTHS = (9, 14, 5, 20, 11, 7, 3)


def sequences(examples):
    return [(list(example.tokens), list(example.trained)) for example in examples]


def peft_model(adapter, name="llama"):
    """PEFT, from where a job begins."""
    directory = Path(adapter_directory(name)).parent / f"start-{name}-{id(adapter)}"
    save_adapter(adapter, directory)
    return PeftModel.from_pretrained(make_model(name), str(directory), is_trainable=True)


def parameters_of(model):
    return {
        n.replace(".default", ""): p.detach() for n, p in model.named_parameters() if "lora_" in n
    }


def mean_loss(model, examples):
    with torch.no_grad():
        return float(summed_loss(model, sequences(examples))) / sum(
            example.num_trained for example in examples
        )


def peft_training(model, examples, config, validation=()):
    """The job by autograd and torch's AdamW. Returns the loss of each step, and of the validation
    set after each."""
    optimizer, trained = config.optimizer, [p for p in model.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(
        trained, betas=optimizer.betas, eps=optimizer.eps, weight_decay=optimizer.weight_decay
    )
    losses: list[Any] = []
    validated: list[Any] = []
    for epoch in range(config.num_epochs):
        order = epoch_order(len(examples), seed=config.seed, epoch=epoch, shuffle=config.shuffle)
        for start in range(0, len(order), config.batch_size):
            batch = [examples[index] for index in order[start : start + config.batch_size]]
            for group in adamw.param_groups:
                group["lr"] = optimizer.learning_rate * min(
                    1.0, (len(losses) + 1) / (optimizer.warmup_steps + 1)
                )
            adamw.zero_grad()
            loss = summed_loss(model, sequences(batch)) / sum(
                example.num_trained for example in batch
            )
            loss.backward()
            if optimizer.max_grad_norm:
                torch.nn.utils.clip_grad_norm_(trained, optimizer.max_grad_norm)
            adamw.step()
            losses.append(float(loss.detach()))
            if validation:
                validated.append(mean_loss(model, validation))
    return losses, validated


def saved(engine, label, directory):
    """What the engine writes for a label: parameters by PEFT's names."""
    engine.save_adapter(label, directory)
    return load_file(directory / "adapter_model.safetensors")


def distance(ours, theirs):
    """The largest difference of any parameter; both must have the same."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)


def of_kind(events, kind, job=None):
    return [
        e for e in events if isinstance(e, JobEvent) and e.kind == kind and job in (None, e.job)
    ]


def run_jobs(engine, *, most_steps=20_000):
    """Step until every job is over, with every invariant checked; the events."""
    events: list[Any] = []
    for _ in range(most_steps):
        if all(job.is_terminal for job in engine.jobs.values()):
            return events + engine.step()
        events += engine.step()
        engine.check_integrity()
    raise AssertionError(f"jobs are left after {most_steps} steps: {engine.stats()}")


# -- what comes of a job ----------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_a_job_makes_the_adapter_that_peft_makes(name, tmp_path):
    engine = make_engine(name)
    examples = examples_of(LENGTHS)
    events = engine.tune(examples, CONFIG, adapter=LORA, name="mine")
    model = peft_model(Adapter(make_backbone(name), LORA, seed=CONFIG.seed), name)
    losses, _ = peft_training(model, examples, CONFIG)
    steps = of_kind(events, "step")
    assert [step.step for step in steps] == list(range(1, 10))
    assert [step.loss for step in steps] == pytest.approx(losses, rel=1e-5)
    assert sum(step.num_trained for step in steps) == 3 * sum(
        example.num_trained for example in examples
    )
    assert steps[0].norm > CONFIG.optimizer.max_grad_norm, "the gradient was clipped"
    assert [step.learning_rate for step in steps[:4]] == pytest.approx(
        [1e-2 / 3, 2e-2 / 3, 1e-2, 1e-2]
    )
    assert distance(saved(engine, "mine", tmp_path), parameters_of(model)) < (
        1e-4 if name == "opt" else 2e-5
    )
    (prompt,) = prompts_of((9,))
    (answer,) = engine.generate([prompt], greedy(8), adapter="mine")
    theirs = model.generate(
        input_ids=torch.tensor([prompt]),
        max_new_tokens=8,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert answer.tokens == tuple(theirs[0, 9:].tolist())
    assert_nothing_is_held(engine)


def test_validation_losses_are_pefts():
    examples, validation = examples_of(LENGTHS), examples_of((8, 25, 6), 5)
    model = peft_model(Adapter(make_backbone(), LORA, seed=CONFIG.seed))
    _, validated = peft_training(model, examples, CONFIG, validation)
    for every, steps in ((1, range(1, 10)), (4, (4, 8, 9)), (0, (9,))):
        config = TuningConfig(**{**vars(CONFIG), "evaluate_every_steps": every})
        events = make_engine().tune(examples, config, adapter=LORA, validation=validation)
        found = of_kind(events, "evaluation")
        assert [event.step for event in found] == list(steps)
        assert [event.loss for event in found] == pytest.approx(
            [validated[step - 1] for step in steps], rel=1e-5
        )
        assert all(
            event.num_trained == sum(example.num_trained for example in validation)
            for event in found
        )
        assert events[-1].kind == "succeeded"


# Its masks are the same whatever is dropped and begun again.
DROPOUT = replace(LORA, dropout=0.2)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The adapter and losses of a job that had the engine for itself."""
    engine = make_engine()
    events = engine.tune(examples_of(LENGTHS), CONFIG, adapter=DROPOUT, name="mine")
    directory = tmp_path_factory.mktemp("undisturbed")
    return saved(engine, "mine", directory), [event.loss for event in of_kind(events, "step")]


@pytest.mark.parametrize("seed", long_but(0, of=range(2)))
def test_a_job_ends_the_same_under_any_plan_in_any_company(seed, undisturbed, tmp_path):
    """Traffic on a small pool, packs dropped, requests preempted, tiny windows, another job,
    pauses."""
    rng, engine = Random(seed), make_engine(num_pages=105)
    engine.policy = random_policy(seed)
    mine = engine.submit(examples_of(LENGTHS), CONFIG, adapter=DROPOUT, name="mine")
    other = TuningConfig(num_epochs=2, batch_size=2, max_pack_tokens=12)
    engine.submit(examples_of((6, 10, 3), 9), other, adapter=LoraConfig(r=7), name="other")
    events: list[Any] = []
    asked: dict[str, Any] = {}
    preempted = 0
    while not engine.jobs[mine].is_terminal:
        if (
            not engine.has_requests
            and engine.jobs[mine].has_pack
            and len(asked) < 90
            and rng.random() < 0.3
        ):
            for prompt in prompts_of(range(5, 47, 3), rng.randrange(2)):
                asked[engine.add(prompt, greedy(15))] = prompt
        if rng.random() < 0.02:
            engine.pause_job(mine)
            events += [event for _ in range(5) for event in engine.step()]
            engine.resume_job(mine)
        events += engine.step()
        engine.check_integrity()
        preempted = max(preempted, engine.num_preemptions)
    events += run_jobs(engine) + drain(engine)
    adapter, losses = undisturbed
    assert engine.stats().num_packs_dropped > 4
    assert preempted > 0
    assert len(of_kind(events, "pack_dropped")) == engine.stats().num_packs_dropped
    assert distance(saved(engine, "mine", tmp_path), adapter) < 1e-5
    assert [event.loss for event in of_kind(events, "step", mine)] == pytest.approx(
        losses, rel=1e-5
    )
    assert {job.name: job.state for job in engine.jobs.values()} == {
        "mine": "succeeded",
        "other": "succeeded",
    }
    got = tokens_by_request(events)
    assert {name: got[name] for name in asked} == {
        n: expected_tokens(prompt, 15) for n, prompt in asked.items()
    }
    assert_nothing_is_held(engine)


def test_a_job_that_computes_again_keeps_less_and_learns_the_same(undisturbed, tmp_path):
    parameters, losses = undisturbed
    most_pages = []
    for share in (0.0, 0.1, 0.5):
        engine, held = make_engine(), [0]
        job = engine.submit(
            examples_of(LENGTHS), replace(CONFIG, max_recompute=share), adapter=DROPOUT, name="mine"
        )
        told: list[float] = []
        while not engine.job(job).is_terminal:
            told += [event.loss for event in of_kind(engine.step(), "step")]
            held.append(engine.pool.num_pages_by_owner().get("activations", 0))
        most_pages.append(max(held))
        assert distance(saved(engine, "mine", tmp_path / str(share)), parameters) < 1e-6
        assert told == pytest.approx(losses, rel=1e-6)
    assert most_pages[2] < most_pages[1] < most_pages[0]


def test_each_example_is_used_once_in_every_epoch():
    """Also when packs are dropped, and when the job is paused: what counts is what joins the
    gradients."""
    engine, rng = make_engine(num_pages=200), Random(0)
    engine.policy = random_policy(0)
    examples = examples_of(LENGTHS)
    job = engine.job(engine.submit(examples, CONFIG, adapter=LORA))
    device, used = watched(engine), []
    while not job.is_terminal:
        if job.has_pack and rng.random() < 0.1:
            engine.pause_job(job.id)
            engine.resume_job(job.id)
        engine.step()
        if device.results and job.id in device.results.pop().packs:
            last = [command for command in device.commands if isinstance(command, BeginPack)][-1]
            used.append([tokens for tokens, _ in last.sequences])
    assert job.progress.num_drops > 3
    flat = [tokens for pack in used for tokens in pack]
    assert len(flat) == 3 * len(examples)
    for epoch in range(3):
        part = flat[epoch * len(examples) : (epoch + 1) * len(examples)]
        assert sorted(part) == sorted(example.tokens for example in examples)
    assert job.num_tokens_trained == 3 * sum(LENGTHS)


def test_a_job_moves_on_however_slow_the_device_is():
    """With nothing else to do, even a step that takes longer than an arrival should wait is
    made."""
    slow = Hardware(name="slow", flops_per_s=1e4, bytes_per_s=1e4, call_s=1.0)
    engine = make_engine(hardware=slow, ttft_s=0.01, tpot_s=0.001)
    engine.submit(examples_of((9, 14)), TuningConfig(), adapter=LORA, name="mine")
    run_jobs(engine, most_steps=200)
    assert engine.jobs["job-0"].state == "succeeded"


def test_a_job_whose_pack_finds_no_neighbouring_pages_holds_up_no_other(monkeypatch):
    engine = make_engine(max_step_rows=4)
    stuck, other = (
        engine.submit(examples_of((9, 14), seed), TuningConfig(num_epochs=2), adapter=LORA)
        for seed in (0, 1)
    )
    begin = engine.jobs.begin
    monkeypatch.setattr(engine.jobs, "begin", lambda job: job != stuck and begin(job))
    for _ in range(200):
        engine.step()
    assert engine.jobs[other].state == "succeeded", (
        "the stuck one has been served less, and comes first"
    )
    assert engine.jobs[stuck].num_rows_run == 0
    monkeypatch.undo()
    run_jobs(engine)
    assert engine.jobs[stuck].state == "succeeded"


# -- pausing, cancelling, going on ---------------------------------------------------------


def test_a_job_that_is_cancelled_at_any_moment_gives_everything_back(undisturbed, tmp_path):
    rng = Random(0)
    for seed, num_steps in enumerate((1, 2, 3, 5, 8, 13, 21, 34, 55)):
        engine = make_engine()
        engine.policy = random_policy(seed)
        gone = engine.submit(
            examples_of(LENGTHS), CONFIG, adapter=DROPOUT, name="gone", validation=examples_of((9,))
        )
        stays = engine.submit(examples_of((6, 10), 9), TuningConfig(num_epochs=20), adapter=LORA)
        for _ in range(num_steps):
            engine.step()
        if rng.random() < 0.5:
            engine.pause_job(gone)
            held = engine.pool.num_pages_by_owner().get("activations", 0)
            assert engine.jobs[stays].has_pack or not held, "a paused job holds no pages"
        engine.cancel_job(gone)
        engine.check_integrity()
        events = [*engine.step(), *engine.step()]
        assert [
            event.kind for event in events if isinstance(event, JobEvent) and event.job == gone
        ][-1] == "cancelled"
        with pytest.raises(JobError, match=f"job '{gone}' is over: its state is cancelled"):
            engine.pause_job(gone)
        with pytest.raises(JobError, match="is over"):
            engine.cancel_job(gone)
        engine.cancel_job(stays)
        assert engine.pool.num_free == engine.pool.num_pages
        assert "gone" not in engine.versions
    # The name is free again, and the same job makes the same adapter.
    engine.tune(examples_of(LENGTHS), CONFIG, adapter=DROPOUT, name="gone")
    assert distance(saved(engine, "gone", tmp_path), undisturbed[0]) < 1e-5


def test_a_paused_job_rests_and_an_engine_with_nothing_else_has_no_work():
    engine = make_engine()
    job = engine.job(engine.submit(examples_of(LENGTHS), CONFIG, adapter=LORA))
    engine.step()
    engine.pause_job(job.id)
    engine.pause_job(job.id)
    engine.step()
    assert not engine.has_work
    rows = job.num_rows_run
    engine.step()
    assert (job.num_rows_run, job.state, engine.pool.num_free) == (
        rows,
        "paused",
        engine.pool.num_pages,
    )
    engine.resume_job(job.id)
    run_jobs(engine)
    assert job.state == "succeeded"


def test_a_job_continues_from_a_version(tmp_path):
    engine = make_engine()
    engine.load_adapter("start", adapter_directory(r=3))
    examples = examples_of(LENGTHS)
    before = saved(engine, "start", tmp_path / "before")
    engine.tune(examples, CONFIG, adapter="start", name="next")
    engine.tune(examples, CONFIG, adapter="next@9", name="third")
    model = PeftModel.from_pretrained(make_model(), adapter_directory(r=3), is_trainable=True)
    peft_training(model, examples, CONFIG)
    assert distance(saved(engine, "next", tmp_path / "next"), parameters_of(model)) < 2e-5
    assert distance(saved(engine, "start", tmp_path / "after"), before) == 0, (
        "the version itself stays as it is"
    )
    peft_training(model, examples, CONFIG)
    assert distance(saved(engine, "third", tmp_path / "third"), parameters_of(model)) < 1e-4


def test_versions_are_published_as_often_as_asked(tmp_path):
    for every, steps in ((0, [9]), (4, [4, 8, 9]), (3, [3, 6, 9])):
        engine = make_engine()
        config = TuningConfig(**{**vars(CONFIG), "publish_every_steps": every})
        events = engine.tune(examples_of(LENGTHS), config, adapter=LORA, name="mine")
        labels = [f"mine@{step}" for step in steps]
        assert [event.version for event in of_kind(events, "version")] == labels
        assert engine.versions.labels() == labels
        assert len(watched(engine).versions) == len(labels)
        newest, named = (
            saved(engine, label, tmp_path / f"{label}{every}") for label in ("mine", labels[-1])
        )
        assert distance(newest, named) == 0
        if len(labels) > 1:
            assert distance(saved(engine, labels[0], tmp_path / f"first{every}"), newest) > 1e-3


def test_a_live_job_serves_every_step_and_frees_what_is_passed():
    engine = make_engine()
    config = TuningConfig(**{**vars(CONFIG), "live": True})
    job = engine.job(engine.submit(examples_of(LENGTHS), config, adapter=LORA, name="live"))
    (prompt,), slow, labels, events = prompts_of((9,)), None, [], []
    while not job.is_terminal:
        new = engine.step()
        events += new
        for event in of_kind(new, "version"):
            labels.append(event.version)
            assert engine.versions.labels() == [event.version], (
                "the version before it is found no more"
            )
            if slow is None:
                slow = engine.add(prompt, greedy(60), adapter="live")
        readers = {request.version.label for request in engine.requests}
        kept = {key.split("#")[0] for key in watched(engine).versions}
        assert kept == readers | set(engine.versions.labels()), (
            "served versions, and those that are read"
        )
    assert labels == [f"live@{step}" for step in range(1, 10)]
    assert len(tokens_by_request(events + drain(engine))[slow]) == 60
    assert [key.split("#")[0] for key in watched(engine).versions] == ["live@9"]


def test_a_live_job_that_resumes_serves_what_it_resumes_from_before_its_next_step(tmp_path: Path):
    config = TuningConfig(**{**vars(CONFIG), "live": True})
    first = make_engine()
    job = first.submit(examples_of(LENGTHS), config, adapter=LORA, name="live")
    while first.job(job).num_steps_done < 3:
        first.step()
    written = first.checkpoint(job).write(tmp_path)
    resumed = make_engine()
    resumed.submit_examples(
        examples_of(LENGTHS), config, adapter=LORA, name="live", checkpoint=str(written)
    )
    assert resumed.versions.labels() == ["live@3"]
    assert (
        distance(
            saved(resumed, "live", tmp_path / "resumed"), saved(first, "live@3", tmp_path / "first")
        )
        == 0
    )


def test_an_adapter_of_the_same_name_and_step_shares_nothing_with_the_one_before_it():
    engine, (prompt,) = make_engine(), prompts_of((20,))
    answers = []
    for seed in (0, 1):
        engine.tune(examples_of(LENGTHS, seed), CONFIG, adapter=LORA, name="same")
        request = engine.add(prompt, greedy(8), adapter="same@9")
        events = drain(engine)
        assert [event.num_cached_tokens for event in events if isinstance(event, Chunk)][-1] == 0
        answers.append(tokens_by_request(events)[request])
        engine.unload_adapter("same")
    assert answers[0] != answers[1]


def test_a_job_may_have_the_id_of_one_that_was_forgotten():
    engine = make_engine()
    for _ in range(3):
        engine.submit_examples(examples_of(LENGTHS), CONFIG, adapter=LORA, job_id="same")
        engine.step()
        engine.cancel_job("same")
        engine.forget_job("same")
    engine.submit_examples(examples_of(LENGTHS), CONFIG, adapter=LORA, job_id="same")
    run_jobs(engine)
    assert engine.jobs["same"].state == "succeeded"


def test_a_copy_that_nobody_has_any_more_is_let_go_of_without_a_further_step():
    engine = make_engine()
    engine.tune(examples_of(LENGTHS), CONFIG, adapter=LORA)
    checkpoint = engine.checkpoint("job-0")
    engine.forget_job("job-0")
    del checkpoint
    assert not engine.has_work
    engine.flush_commands()
    told = watched(engine).commands
    assert sum(isinstance(command, DropCheckpoint) for command in told) == 1
    assert sum(isinstance(command, DropTrainer) for command in told) == 1


# -- failure -----------------------------------------------------------------------------


def test_a_job_without_numbers_fails_alone(undisturbed, tmp_path):
    engine = make_engine()
    engine.policy = random_policy(2)
    mine = engine.submit(examples_of(LENGTHS), CONFIG, adapter=DROPOUT, name="mine")
    absurd = TuningConfig(
        num_epochs=30, batch_size=2, optimizer=OptimizerConfig(learning_rate=1e30), live=True
    )
    broken = engine.submit(examples_of((12, 9, 6), 3), absurd, adapter=LORA, name="broken")
    asked, events = {}, []
    while not all(job.is_terminal for job in engine.jobs.values()):
        if len({request.request for request in engine.requests}) < 3:
            (prompt,) = prompts_of((engine.num_steps % 20 + 1,))
            asked[engine.add(prompt, greedy(5))] = prompt
            if "broken" in engine.versions:  # nonsense, but no more than that
                engine.add(
                    prompt, SamplingParams(max_tokens=3, logprobs=2, top_p=0.9), adapter="broken"
                )
        events += engine.step()
        engine.check_integrity()
    events += drain(engine)
    steps = of_kind(events, "step", broken)
    assert [step.norm for step in steps[-5:]] == [None] * 5
    assert steps[-6].norm is not None, "five in a row, and not one more"
    (failed,) = of_kind(events, "failed")
    assert (failed.job, failed.message) == (
        broken,
        "the gradient was not finite in 5 optimizer steps in a row",
    )
    assert (engine.jobs[broken].state, engine.jobs[mine].state) == ("failed", "succeeded")
    assert distance(saved(engine, "mine", tmp_path), undisturbed[0]) < 1e-5
    got = tokens_by_request(events)
    assert {name: got[name] for name in asked} == {
        n: expected_tokens(prompt, 5) for n, prompt in asked.items()
    }
    assert_nothing_is_held(engine)
    with pytest.raises(JobError, match=r"job job-\d+ has failed: the gradient was not finite"):
        engine.tune(examples_of((12, 9, 6), 3), absurd, adapter=LORA, name="again")


def test_a_gradient_that_is_not_finite_once_skips_its_step(monkeypatch, tmp_path):
    """As if that step had not been: nothing moves, the next ones do."""
    engine = make_engine()
    job = engine.job(engine.submit(examples_of(LENGTHS), CONFIG, adapter=LORA, name="mine"))
    finish = TorchTrainer.finish_pack

    def spoil(trainer):
        if job.num_steps_done == 4:
            next(iter(trainer.training_pass.gradients.values())).fill_(math.inf)
        finish(trainer)

    monkeypatch.setattr(TorchTrainer, "finish_pack", spoil)
    steps = of_kind(run_jobs(engine), "step")
    assert [index for index, step in enumerate(steps) if step.norm is None] == [4]
    assert job.state == "succeeded"
    assert all(tensor.isfinite().all() for tensor in saved(engine, "mine", tmp_path).values())


def test_the_examples_of_a_job_are_checked_once(monkeypatch, tmp_path):
    """Since requests wait meanwhile; whatever the job begins with."""
    engine, checked = make_engine(num_pages=100), []
    monkeypatch.setattr(
        opening,
        "check_examples",
        lambda *given, **named: checked.append(given) or check_examples(*given, **named),
    )
    job = engine.submit(examples_of((5, 6)), TuningConfig(), adapter=LORA, name="one")
    assert len(checked) == 1
    begun = engine.checkpoint(job).write(tmp_path)
    run_jobs(engine)
    engine.submit(examples_of((5, 6)), TuningConfig(), adapter="one", name="two")
    assert len(checked) == 2
    engine.submit_examples(
        examples_of((5, 6)), TuningConfig(), checkpoint=begun, job_id="three", name="three"
    )
    assert len(checked) == 3


@pytest.mark.parametrize(
    ("examples", "settings", "message"),
    [
        ([], {}, "a job needs examples"),
        (
            examples_of((9, 129)),
            {},
            "example 1 has 129 tokens; the model has 128 positions: lower max_sequence_length",
        ),
        ([Example(tokens=(1, 2), trained=(True, False))], {}, "example 0 has no token to train on"),
        ([Example(tokens=(), trained=())], {}, "example 0 has no token to train on"),
        (
            [Example(tokens=(1, 97), trained=(True, True))],
            {},
            "example 0 has a token beyond the model's 97",
        ),
        (
            [Example(tokens=(-1, 9), trained=(True, True))],
            {},
            "example 0 has a token beyond the model's 97",
        ),
        (
            examples_of((60, 60)),
            {"max_pack_tokens": 120},
            r"a pack of 120 tokens needs \d+ pages; there are 100: lower max_pack_tokens or "
            r"max_sequence_length, or",
        ),
        (
            examples_of((100,)),
            {"max_pack_tokens": 10},
            r"a pack of 100 tokens needs \d+ pages; there are 100",
        ),
    ],
)
def test_a_job_that_can_never_run_is_refused(examples, settings, message):
    engine = make_engine(num_pages=100)
    with pytest.raises(JobError, match=message):
        engine.submit(examples, TuningConfig(**settings), adapter=LORA)
    if examples:
        with pytest.raises(
            JobError,
            match=message.replace("example 0", "example 1").replace("example 1 has 129", ".*"),
        ):
            engine.submit(
                examples_of((5,)), TuningConfig(**settings), adapter=LORA, validation=examples
            )
    assert not engine.has_work
    assert not engine.jobs


def test_marks_that_are_not_one_for_each_token_are_refused():
    with pytest.raises(ValueError, match="3 tokens came with 2 marks"):
        Example(tokens=(1, 2, 3), trained=(True, True))


def test_packs_are_made_as_small_as_the_pool_needs_them():
    engine = make_engine(num_pages=150)
    job = engine.job(
        engine.submit(examples_of((10,) * 40), TuningConfig(batch_size=40), adapter=LORA)
    )
    assert 10 <= job.config.pack_tokens < 400
    held = []
    while not job.is_terminal:
        engine.step()
        held.append(engine.pool.num_pages_by_owner().get("activations", 0))
    assert 0 < max(held) <= 75
    assert job.state == "succeeded"


def test_examples_are_cut_to_the_length_that_was_asked_for():
    engine = make_engine()
    job = engine.job(
        engine.submit(examples_of((30, 9)), TuningConfig(max_sequence_length=12), adapter=LORA)
    )
    assert [len(example.tokens) for example in job.order.examples] == [12, 9]


def test_names_of_jobs_and_their_adapters_are_checked():
    engine = make_engine()
    engine.load_adapter("served", adapter_directory())
    examples = examples_of((9,))
    with pytest.raises(AdapterError, match="there is an adapter 'served' already"):
        engine.submit(examples, name="served")
    with pytest.raises(AdapterError, match="is not a valid adapter name"):
        engine.submit(examples, name="a@1")
    with pytest.raises(AdapterError, match="there is no adapter 'nobody'; there are: served"):
        engine.submit(examples, adapter="nobody")
    with pytest.raises(JobError, match="there is no job 'job-7'; there are: none"):
        engine.pause_job("job-7")
    running = engine.submit(examples, name="mine")
    with pytest.raises(AdapterError, match="a job is making the adapter 'mine'"):
        engine.submit(examples, name="mine")
    with pytest.raises(AdapterError, match="a job is making the adapter 'mine'"):
        engine.load_adapter("mine", adapter_directory())
    with pytest.raises(JobError, match=f"there is a job '{running}' already"):
        engine.submit_examples(examples, TuningConfig(), adapter=LORA, job_id=running)
    with pytest.raises(AdapterError, match="no_such_module"):
        engine.submit(examples, adapter=LoraConfig(target_modules=("no_such_module",)))
    run_jobs(engine)
    assert engine.versions.labels() == ["served@0", "mine@1"]


# -- data --------------------------------------------------------------------------------


def test_lines_of_text_are_trained_on_as_their_tokens(tmp_path):
    tokenizer = word_tokenizer()
    engine = make_engine(tokenizer=tokenizer)
    records = [{"text": "hello you"}, {"prompt": "say ", "completion": "it\u2028now"}]
    path = tmp_path / "data.jsonl"
    path.write_text(
        "".join(json.dumps(record, ensure_ascii=False) + "\r\n\n" for record in records), "utf-8"
    )
    config = TuningConfig(batch_size=2)
    for data in (
        path,
        str(path),
        records,
        [json.dumps(record) for record in records],
        iter(records),
    ):
        found = engine.job(engine.submit(data, config, adapter=LORA)).order.examples
        assert [tokenizer.decode(example.tokens) for example in found] == [
            "hello you<end>",
            "say it\u2028now<end>",
        ]
        assert found[0].num_trained == 9
        assert found[1].trained == (False,) * 4 + (True,) * (len(found[1].tokens) - 4)
    run_jobs(engine)
    assert {job.state for job in engine.jobs.values()} == {"succeeded"}


def test_lines_that_cannot_be_used_are_named(tmp_path):
    engine = make_engine(tokenizer=word_tokenizer())
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "fine"}\n' + "nonsense\n" * 5 + '{"tixt": "x"}\n' * 20)
    with pytest.raises(DataError, match="lines 2, 3, 4 and 2 more: not valid JSON") as caught:
        engine.submit(path, adapter=LORA)
    assert "lines 7, 8, 9 and 17 more: needs messages" in str(caught.value)
    path.write_text("\n\n")
    with pytest.raises(DataError, match="there is no line with an example"):
        engine.submit(path, adapter=LORA)
    with pytest.raises(DataError, match="there is no line with an example"):
        engine.submit([{"text": "fine"}], adapter=LORA, validation=path)
    with pytest.raises(DataError, match=r"nothing.jsonl cannot be read: No such file"):
        engine.submit(tmp_path / "nothing.jsonl", adapter=LORA)
    path.write_bytes(b"{\xff\xfe")
    with pytest.raises(DataError, match="line 1: is not UTF-8 at byte 1"):
        engine.submit(path, adapter=LORA)
    lines: Any = [{"text": "fine"}, {"text": object()}]
    with pytest.raises(DataError, match="line 2: "):
        engine.submit(lines, adapter=LORA)
    numbers: Any = [7]
    with pytest.raises(DataError, match=r"line 1: .*must be a JSON object"):
        engine.submit(numbers, adapter=LORA)
    with pytest.raises(DataError, match="has no tokenizer: examples must be token ids"):
        make_engine().submit([{"text": "fine"}], adapter=LORA)
    assert not engine.jobs


def test_adapters_make_the_round_trip_through_pefts_format(tmp_path):
    engine = make_engine()
    lora = LoraConfig(
        r=3,
        alpha=5,
        use_rslora=True,
        target_modules=("q_proj", "down_proj"),
        rank_pattern={"q_proj": 2},
    )
    engine.tune(examples_of(LENGTHS), CONFIG, adapter=lora, name="mine")
    engine.save_adapter("mine@9", tmp_path / "ours")
    model = PeftModel.from_pretrained(make_model(), str(tmp_path / "ours")).eval()
    model.save_pretrained(tmp_path / "theirs")
    engine.load_adapter("back", str(tmp_path / "theirs"))
    (prompt,) = prompts_of((9,))
    theirs = model.generate(
        input_ids=torch.tensor([prompt]),
        max_new_tokens=8,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    for label in ("mine", "back"):
        assert engine.generate([prompt], greedy(8), adapter=label)[0].tokens == tuple(
            theirs[0, 9:].tolist()
        )
    assert (
        distance(
            saved(engine, "back", tmp_path / "again"),
            load_file(tmp_path / "ours/adapter_model.safetensors"),
        )
        == 0
    )


def test_jobs_that_are_to_be_alone_take_turns():
    engine = make_engine()
    alone = engine.submit_examples(examples_of(LENGTHS), CONFIG, adapter=LORA, alone_until_step=5)
    other, third = (
        engine.submit_examples(examples_of(LENGTHS), CONFIG, adapter=LORA) for _ in range(2)
    )
    company = set()
    while engine.has_work:
        was_alone = engine.job(alone).is_alone
        engine.step()
        plan = engine.last_plan
        jobs = {rows.item for rows in plan.rows} | {piece.job for piece in plan.losses}
        jobs |= {part.job for part in plan.tasklets} | set(plan.updates)
        assert not (was_alone and alone in jobs and len(jobs) > 1)
        company.add(frozenset(jobs))
    assert {frozenset((alone,)), frozenset((other, third))} <= company
    assert any(alone in jobs and len(jobs) > 1 for jobs in company), (
        "when it need not be alone any more"
    )
    assert all(engine.job(id).state == "succeeded" for id in (alone, other, third))

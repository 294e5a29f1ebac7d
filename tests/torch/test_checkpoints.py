"""Checkpoints: a job that is stopped anywhere and gone on with elsewhere ends as one that never
was."""

import json
from random import Random
from typing import Any

import pytest
from engines import examples_of, make_engine
from random_plans import random_policy
from safetensors.torch import load_file

from coserve.adapters import LoraConfig
from coserve.engine.jobs.events import JobEvent
from coserve.errors import AdapterError, JobError
from coserve.tuning.config import OptimizerConfig, TuningConfig

LORA = LoraConfig(r=3, alpha=6, dropout=0.2, target_modules="all-linear")
OPTIMIZER = OptimizerConfig(
    learning_rate=1e-2, weight_decay=0.1, warmup_steps=2, schedule="cosine", eps=1e-6
)
CONFIG = TuningConfig(
    num_epochs=2,
    batch_size=2,
    max_pack_tokens=16,
    seed=4,
    evaluate_every_steps=3,
    optimizer=OPTIMIZER,
)
DATA, VALIDATION = examples_of((9, 14, 5, 11, 7)), examples_of((6, 12), seed=9)


def submit(engine, *, config=CONFIG, data=DATA, **settings):
    return engine.submit_examples(
        data, config, validation=VALIDATION, job_id="job", name="mine", **settings
    )


def run(engine, num_steps=10_000):
    """Up to this many engine steps; the job's events."""
    events: list[Any] = []
    for _ in range(num_steps):
        if engine.jobs["job"].is_terminal:
            return events + engine.step()
        events += engine.step()
        engine.check_integrity()
    return events


def run_to_step(engine, step):
    while engine.jobs["job"].num_steps_done < step:
        engine.step()


def told(events):
    """What a job's steps and evaluations reported, by kind and step."""
    return {
        (e.kind, e.step): (e.loss, e.num_trained, e.learning_rate)
        for e in events
        if isinstance(e, JobEvent) and e.kind in ("step", "evaluation")
    }


def adapter_of(engine, tmp_path):
    engine.save_adapter("mine", tmp_path / "adapter")
    return load_file(tmp_path / "adapter" / "adapter_model.safetensors")


def assert_equal(ours, theirs, within=1e-6):
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert float((ours[name] - theirs[name]).abs().max()) < within, name


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    engine = make_engine()
    submit(engine, adapter=LORA)
    events = run(engine)
    return told(events), adapter_of(engine, tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 8))]
)
def test_a_job_stopped_anywhere_and_gone_on_with_ends_the_same(seed, undisturbed, tmp_path):
    rng = Random(seed)
    reported: dict[int, Any] = {}
    checkpoint, num_lives, is_terminal = None, 0, False
    while not is_terminal:
        engine = make_engine()
        engine.policy = random_policy(rng.randrange(1000))
        start = {"adapter": LORA} if checkpoint is None else {"checkpoint": checkpoint}
        submit(engine, **start)
        events = run(engine, rng.randrange(1, 25) if num_lives < 12 else 10_000)
        num_lives += 1
        position = engine.checkpoint("job")
        reported |= told(events)
        later = run(engine, rng.randrange(10))  # lost, and done again
        if is_terminal := engine.jobs["job"].is_terminal:
            reported |= told(later)
        checkpoint = position.write(tmp_path / "checkpoints")
        assert position.position.num_steps_done <= engine.jobs["job"].num_steps_done
    assert num_lives > 1
    losses, adapter = undisturbed
    assert reported.keys() == losses.keys()
    for key, (loss, num_trained, rate) in losses.items():
        assert reported[key][0] == pytest.approx(loss, abs=1e-5), key
        assert reported[key][1:] == (num_trained, rate), key
    assert_equal(
        adapter_of(engine, tmp_path), adapter, within=1e-5
    )  # windows are others, and round otherwise
    assert engine.jobs["job"].num_tokens_trained == 2 * sum(len(e.tokens) for e in DATA)


def test_a_checkpoint_is_of_the_moment_it_was_taken(tmp_path):
    engine = make_engine()
    submit(engine, adapter=LORA)
    run_to_step(engine, 2)
    early = engine.checkpoint("job").write(tmp_path / "at-once")
    taken = engine.checkpoint("job")
    run(engine)
    late = taken.write(tmp_path / "later")
    assert (early.name, late.name) == ("step-2", "step-2")
    for file in ("adapter_model.safetensors", "optimizer.safetensors"):
        assert_equal(load_file(early / file), load_file(late / file))
    assert sorted(path.name for path in early.iterdir()) == [
        *("adapter_config.json", "adapter_model.safetensors", "job.json", "optimizer.safetensors"),
    ]


def test_a_checkpoint_never_takes_anothers_place(tmp_path):
    engine = make_engine()
    submit(engine, adapter=LORA)
    names = [engine.checkpoint("job").write(tmp_path).name for _ in range(3)]
    assert names == ["step-0", "step-0-1", "step-0-2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_job_that_is_over_keeps_its_adapter_for_a_last_checkpoint_until_it_is_forgotten(
    undisturbed, tmp_path
):
    engine = make_engine()
    submit(engine, adapter=LORA)
    with pytest.raises(JobError, match="cancel it first"):
        engine.forget_job("job")
    run(engine)
    directory = engine.checkpoint("job").write(tmp_path)
    assert_equal(load_file(directory / "adapter_model.safetensors"), undisturbed[1])
    assert not (directory / "optimizer.safetensors").exists()
    trained = engine.stats().num_tokens_trained
    engine.forget_job("job")
    assert not engine.jobs
    assert engine.stats().num_tokens_trained == trained
    assert engine.versions.resolve("mine")


def test_a_live_job_is_served_as_soon_as_it_resumes(tmp_path):
    config = TuningConfig(num_epochs=3, batch_size=2, live=True)
    engine = make_engine()
    submit(engine, config=config, adapter=LORA)
    run_to_step(engine, 2)
    checkpoint = engine.checkpoint("job").write(tmp_path)
    engine = make_engine()
    submit(engine, config=config, checkpoint=checkpoint)
    assert engine.versions.labels() == ["mine@2"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": DATA[1:]}, "steps"),
        ({"data": examples_of((9, 14, 5, 11, 8))}, "tokens"),
        ({"config": TuningConfig(num_epochs=3, batch_size=2)}, "this one has 9"),
    ],
)
def test_another_jobs_checkpoint_is_refused(change, message, tmp_path):
    engine = make_engine()
    submit(engine, adapter=LORA)
    run_to_step(engine, 2)
    checkpoint = engine.checkpoint("job").write(tmp_path)
    other = make_engine()
    with pytest.raises(JobError, match=message):
        submit(other, checkpoint=checkpoint, **change)
    assert not other.jobs
    submit(other, checkpoint=checkpoint)


def test_a_damaged_checkpoint_is_refused(tmp_path):
    engine = make_engine()
    submit(engine, adapter=LORA)
    run_to_step(engine, 2)
    checkpoint = engine.checkpoint("job").write(tmp_path)
    other = make_engine()
    for file, content, error in (
        ("optimizer.safetensors", b"", AdapterError),
        ("adapter_model.safetensors", b"nonsense", AdapterError),
        ("job.json", b"{}", JobError),
        ("job.json", b"[" * 100_000, JobError),
        ("job.json", b" " * 100_000, JobError),
    ):
        whole = (checkpoint / file).read_bytes()
        (checkpoint / file).write_bytes(content)
        with pytest.raises(error):
            submit(other, checkpoint=checkpoint)
        (checkpoint / file).unlink()
        with pytest.raises(error, match=file):
            submit(other, checkpoint=checkpoint)
        (checkpoint / file).write_bytes(whole)
        assert not other.jobs
    with pytest.raises(JobError, match="not a checkpoint"):
        submit(other, checkpoint=tmp_path / "elsewhere")
    submit(other, checkpoint=checkpoint)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_steps_done", -1),
        ("num_steps_done", 10**6),
        ("num_steps_done", "2"),
        ("num_bad_steps", 2.5),
        ("num_rows_run", float("nan")),
        ("num_tokens_trained", None),
        ("evaluated", 7),
    ],
)
def test_a_position_that_no_job_has_is_refused(name, value, tmp_path):
    engine = make_engine()
    submit(engine, adapter=LORA)
    run_to_step(engine, 2)
    checkpoint = engine.checkpoint("job").write(tmp_path)
    path = checkpoint / "job.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    with pytest.raises(JobError, match=r"no usable job\.json"):
        submit(make_engine(), checkpoint=checkpoint)


def test_a_checkpoint_that_cannot_be_written_leaves_nothing(tmp_path):
    engine = make_engine()
    submit(engine, adapter=LORA)
    (tmp_path / "file").write_text("")
    with pytest.raises(JobError, match="cannot write a checkpoint"):
        engine.checkpoint("job").write(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_job_needs_something_to_begin_with():
    with pytest.raises(JobError, match="an adapter to begin with"):
        submit(make_engine())


def test_the_position_is_plain_json(tmp_path):
    engine = make_engine()
    submit(engine, adapter=LORA)
    run_to_step(engine, 2)
    checkpoint = engine.checkpoint("job").write(tmp_path)
    position = json.loads((checkpoint / "job.json").read_text())
    assert position["num_steps_done"] == engine.jobs["job"].num_steps_done
    assert position["num_examples"] == len(DATA)

"""Metrics of answers to a job's validation set: what the adapter says at that step, whatever else
the engine does."""

from dataclasses import replace
from random import Random

import pytest
from engines import assert_nothing_is_held, greedy, make_engine, prompts_of, word_tokenizer
from random_plans import random_policy

from coserve.adapters import LoraConfig
from coserve.client.job_progress import ANSWERS
from coserve.devices.sampling_params import SamplingParams
from coserve.engine.jobs.events import JobEvent
from coserve.engine.request import Chunk
from coserve.errors import DataError, JobError
from coserve.tuning.config import OptimizerConfig, TuningConfig
from coserve.tuning.evaluation import METRICS, EvaluationConfig, is_right, questions_of
from coserve.tuning.examples import Example

LORA = LoraConfig(r=16, alpha=16, target_modules="all-linear")
LINES = [
    {"prompt": f"{word}? ", "completion": answer}
    for word, answer in (("one", "1"), ("two", "[2]"), ("six", '"x"'), ("ten", "null"))
]
# What is learned by heart in some ten steps of all four.
CONFIG = TuningConfig(
    num_epochs=12,
    batch_size=4,
    evaluate_every_steps=2,
    publish_every_steps=2,
    optimizer=OptimizerConfig(learning_rate=1e-2, schedule="cosine"),
    evaluation=EvaluationConfig(metric="exact_match", max_tokens=24),
)
STEPS = [2, 4, 6, 8, 10, 12]


def make():
    """An engine with text, and a token that ends one."""
    return make_engine(tokenizer=word_tokenizer(), end_tokens=[0])


def evaluations(events):
    return [event for event in events if isinstance(event, JobEvent) and event.kind == "evaluation"]


def asked(engine, label, lines, max_tokens=24):
    """What a client gets for the same prompts."""
    prompts = [engine.tokenizer(line["prompt"])["input_ids"] for line in lines]
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    return [answer.text for answer in engine.generate(prompts, params, adapter=label)]


@pytest.mark.parametrize("metric", METRICS)
def test_a_metric_is_the_share_of_right_answers_that_clients_get(metric):
    engine = make()
    config = replace(CONFIG, evaluation=replace(CONFIG.evaluation, metric=metric))
    events = engine.tune(LINES, config, adapter=LORA, name="mine", validation=LINES)
    found = [(event.step, event.metrics[metric]) for event in evaluations(events)]
    assert [step for step, _ in found] == STEPS
    for step, share in found:
        answers = asked(engine, f"mine@{step}", LINES)
        right = [
            is_right(metric, line["completion"], text)
            for line, text in zip(LINES, answers, strict=True)
        ]
        assert share == sum(right) / len(LINES)
    assert found[0][1] < 1 == found[-1][1], "it has been learned"
    assert all(event.loss is not None for event in evaluations(events)), "the loss is measured, too"
    assert not any("@answers" in label for label in engine.versions.labels())
    assert_nothing_is_held(engine)


def test_answers_do_not_depend_on_plans_company_and_pauses():
    lines = [*LINES, {"prompt": "never learned? ", "completion": "no"}]
    alone, config = make(), replace(CONFIG, evaluate_every_steps=6)
    expected = evaluations(alone.tune(LINES, config, adapter=LORA, validation=lines))
    assert expected[-1].metrics == {"exact_match": 0.8}
    engine, rng = make_engine(tokenizer=word_tokenizer(), end_tokens=[0], num_pages=120), Random(3)
    engine.policy = random_policy(3)
    id = engine.submit(LINES, config, adapter=LORA, validation=lines)
    job, events, answers, num_paused = engine.job(id), [], 0, 0
    while not job.is_terminal:
        if not engine.has_requests and rng.random() < 0.05:
            for prompt in prompts_of((9, 20)):
                engine.add(prompt, greedy(6))
                answers += 1
        if job.progress.stage == "answers" and num_paused < 6 and rng.random() < 0.2:
            num_paused += 1
            engine.pause_job(id)
            events += [event for _ in range(3) for event in engine.step()]
            assert job.state == "paused"
            engine.resume_job(id)
        events += engine.step()
        engine.check_integrity()
    while engine.has_work:
        events += engine.step()
    assert num_paused > 2
    assert [(e.step, e.metrics) for e in evaluations(events)] == [
        (e.step, e.metrics) for e in expected
    ]
    assert sum(isinstance(e, Chunk) and e.finish_reason is not None for e in events) == answers, (
        "of clients alone"
    )
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("end", ["cancel", "live", "resumed"])
def test_nothing_is_left_of_questions(end, tmp_path):
    engine = make()
    config = replace(CONFIG, live=end == "live")
    id = engine.submit(LINES, config, adapter=LORA, name="mine", validation=LINES)
    while not (engine.job(id).progress.stage == "answers" and engine.has_requests):
        engine.step()
    if end == "cancel":
        engine.cancel_job(id)
    elif end == "resumed":
        engine.checkpoint(id).write(tmp_path)
        engine.cancel_job(id)
        engine.forget_job(id)
        assert_nothing_is_held(engine)
        validation = engine._examples(LINES, config, "")
        (step,) = tmp_path.iterdir()
        again = engine.submit_examples(
            validation, config, name="again", validation=validation, checkpoint=step
        )
        found = []
        while not engine.job(again).is_terminal:
            found += evaluations(engine.step())
        assert [event.step for event in found] == STEPS, "the one that was under way is made again"
    else:
        while not engine.job(id).is_terminal:
            engine.step()
    engine.step()
    assert_nothing_is_held(engine)


def test_questions_are_the_last_turns_of_whole_examples():
    trained = Example(
        tokens=tuple(range(9)), trained=(False, True, False, False, True, True, False, False, False)
    )
    cut = replace(trained, truncated=True)
    text = Example(tokens=(1, 2), trained=(True, True))
    config = EvaluationConfig(metric="exact_match", max_examples=2)
    (question,) = questions_of([cut, text, trained], config)
    assert (question.prompt, question.expected) == ((0, 1, 2, 3), (4, 5))
    assert len(questions_of([trained] * 5, config)) == 2
    assert questions_of([trained], EvaluationConfig()) == ()
    with pytest.raises(
        DataError,
        match="exact_match needs examples with a prompt and a whole answer; none of these 2",
    ):
        questions_of([cut, text], config)


@pytest.mark.parametrize(
    ("metric", "expected", "answer", "right"),
    [
        ("exact_match", "Paris", " Paris\n", True),
        ("exact_match", "Paris", "paris", False),
        ("json_valid", "", "null", True),
        ("json_valid", "", '{"a": NaN}', False),
        ("json_valid", "", '{"a": 1} and more', False),
        ("json_valid", "", "[" * 100_000, False),
        ("json_match", '{"a": 1, "b": 2}', '{"b":2,"a":1.0}', True),
        ("json_match", '{"a": 1}', '{"a": 2}', False),
        ("json_match", "no json", "no json", False),
    ],
)
def test_what_is_right(metric, expected, answer, right):
    assert is_right(metric, expected, answer) == right


def test_the_client_shows_every_metric():
    assert tuple(f"valid_{name}" for name in METRICS) == ANSWERS


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(
        ValueError,
        match="metric must be one of loss, exact_match, json_valid, json_match, not 'bleu'",
    ):
        EvaluationConfig(metric="bleu")
    with pytest.raises(
        ValueError, match="metric exact_match goes with the method supervised alone"
    ):
        replace(CONFIG, objective="dpo")
    engine = make()
    with pytest.raises(JobError, match="validation set: exact_match needs examples with a prompt"):
        engine.submit(LINES, CONFIG, adapter=LORA, validation=[{"text": "all of it is learned"}])

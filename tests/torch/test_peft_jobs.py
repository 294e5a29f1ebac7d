"""Jobs of every PEFT method on one engine: trained side by side, served together, saved for PEFT,
resumed."""

import pytest
import torch
from engines import drain, examples_of, greedy, make_engine, prompts_of
from peft_methods import CASES, Ours, config_of
from support import make_backbone

from coserve.adapters import load_adapter
from coserve.engine.request import Chunk
from coserve.errors import JobError, RequestError
from coserve.tuning.config import OptimizerConfig, TuningConfig

FAMILY = "qwen2"
NAMES = [case for case, found in CASES.items() if FAMILY in found.families]
CONFIG = TuningConfig(
    num_epochs=4, batch_size=2, optimizer=OptimizerConfig(learning_rate=1e-2), seed=3
)
DATA = examples_of((9, 12, 7, 10))


def run_to_end(engine):
    events = []
    while not all(job.is_terminal for job in engine.jobs.values()):
        events += engine.step()
        engine.check_integrity()
    return events + engine.step()


@pytest.fixture(scope="module")
def trained():
    engine = make_engine(FAMILY, num_pages=3000)
    for name in NAMES:
        engine.submit_examples(DATA, CONFIG, adapter=config_of(name), job_id=name, name=name)
    return engine, run_to_end(engine)


@pytest.fixture
def engine(trained):
    return trained[0]


def test_every_method_learns(trained):
    losses: dict[str, list[float]] = {}
    for event in trained[1]:
        if getattr(event, "kind", "") == "step":
            losses.setdefault(event.job, []).append(event.loss)
    assert losses.keys() == set(NAMES)
    for name, each in losses.items():
        assert sum(each[-2:]) < sum(each[:2]), f"{name}: the last epoch is no better than the first"


def test_what_is_served_side_by_side_is_what_was_saved(engine, tmp_path):
    """Requests of all methods at once, each after its virtual tokens, with and without what is
    known of its prefix."""
    prompt, expected = prompts_of((9,))[0], {}
    for name in NAMES:
        engine.save_adapter(name, tmp_path / name)
        ours, tokens = (
            Ours.of_directory(load_adapter(make_backbone(FAMILY), tmp_path / name)),
            torch.tensor(prompt),
        )
        for _ in range(4):
            tokens = torch.cat((tokens, ours.logits(tokens)[-1:].argmax(-1)))
        expected[name] = tuple(tokens[len(prompt) :].tolist())
    for _ in range(2):
        names = {engine.add(prompt, greedy(4), adapter=name): name for name in NAMES}
        found = dict.fromkeys(NAMES, ())
        while engine.has_requests:
            for event in engine.step():
                if (name := names.get(getattr(event, "request", ""))) is not None:
                    found[name] += event.tokens
            engine.check_integrity()
        assert found == expected


@pytest.mark.parametrize(
    "case",
    [
        "dora",
        *(
            pytest.param(case, marks=pytest.mark.long)
            for case in ("pissa", "vera", "prefix-tuning")
        ),
        "p-tuning",
    ],
)
def test_a_job_that_resumes_ends_as_one_that_was_never_stopped(case, engine, tmp_path):
    first = make_engine(FAMILY)
    first.submit_examples(DATA, CONFIG, adapter=config_of(case), job_id="job", name="mine")
    while first.jobs["job"].num_steps_done < 3:
        first.step()
    checkpoint = first.checkpoint("job").write(tmp_path / "checkpoints")
    second = make_engine(FAMILY)
    second.submit_examples(
        DATA, CONFIG, adapter=config_of(case), checkpoint=checkpoint, job_id="job", name="mine"
    )
    run_to_end(second)
    second.save_adapter("mine", tmp_path / "second")
    engine.save_adapter(case, tmp_path / "whole")
    ours, theirs = (
        load_adapter(make_backbone(FAMILY), tmp_path / each).masters for each in ("second", "whole")
    )
    for name, master in ours.items():
        torch.testing.assert_close(master, theirs[name], atol=1e-4, rtol=0)


def test_virtual_tokens_count_among_the_models_positions(engine):
    with pytest.raises(
        RequestError,
        match=r"3 virtual tokens of the adapter, 120 tokens of prompt and 8 to come are 131",
    ):
        engine.add(prompts_of((120,))[0], greedy(8), adapter="prompt-tuning")
    with pytest.raises(
        JobError,
        match="3 virtual tokens and an example of 127 tokens are more than the model's 128",
    ):
        engine.submit_examples(
            examples_of((127,)), CONFIG, adapter=config_of("prompt-tuning"), name="long"
        )


def test_log_probabilities_of_a_prompt_after_virtual_tokens(engine, tmp_path):
    prompt = prompts_of((9,))[0]
    engine.save_adapter("prompt-tuning", tmp_path)
    ours = Ours.of_directory(load_adapter(make_backbone(FAMILY), tmp_path))
    expected = ours.logits(torch.tensor(prompt)).log_softmax(-1)[range(8), prompt[1:]]
    engine.add(prompt, greedy(1, prompt_logprobs=0), adapter="prompt-tuning")
    found = [
        each
        for event in drain(engine)
        if isinstance(event, Chunk)
        for each in event.prompt_logprobs
    ]
    assert [each.token for each in found] == prompt[1:]
    torch.testing.assert_close(
        torch.tensor([each.logprob for each in found]), expected, atol=1e-4, rtol=0
    )

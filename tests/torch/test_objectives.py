"""Objectives over whole sequences: gradients of every parameter are those of their papers' formulas
under autograd on PEFT's model, whose reference is the same model with its adapter switched off; in
windows and pieces of any size.
"""

import json
from typing import Any

import pytest
import torch
from engines import assert_nothing_is_held, make_engine, word_tokenizer
from peft import PeftModel
from support import make_backbone, make_model, peft_twin, random_sequences, worst_error
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from coserve.adapters import Adapter, LoraConfig, save_adapter
from coserve.adapters.methods.prompt_tuning import PromptTuningConfig
from coserve.engine.jobs.events import JobEvent
from coserve.errors import AdapterError, DataError
from coserve.jobs.datasets.examples import read_examples_file, write_examples_file
from coserve.tuning import TrainingPass, make_pack, run_alone, training_programs
from coserve.tuning.config import OptimizerConfig, TuningConfig
from coserve.tuning.examples import Example, epoch_order
from coserve.tuning.objective_examples import read_objective_examples
from coserve.tuning.objectives import make_objective, objective_names
from coserve.tuning.programs import evaluation_programs
from coserve.tuning.scores import Extras, PackScores

LENGTHS = (9, 6, 5, 11, 7, 4)  # three pairs
LABELS = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)


def row_logprobs(model: Any, sequences: Any) -> list[Tensor]:
    """Return the log-probabilities of the trained tokens of each sequence."""
    found = []
    for ids, trained in sequences:
        logits = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        rows = logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        found.append(rows[torch.tensor(trained[1:])])
    return found


def dpo(logps, reference, values, beta, smoothing):
    sums = torch.stack([a.sum() - b.sum() for a, b in zip(logps, reference, strict=True)])
    margin = beta * (sums[0::2] - sums[1::2])
    return -((1 - smoothing) * logsigmoid(margin) + smoothing * logsigmoid(-margin)).sum()


def simpo(logps, reference, values, beta, gamma):
    means = torch.stack([each.mean() for each in logps])
    return -logsigmoid(beta * (means[0::2] - means[1::2]) - gamma).sum()


def orpo(logps, reference, values, beta):
    means = torch.stack([each.mean() for each in logps])
    odds = means - torch.log1p(-means.exp())
    return (-means[0::2] - beta * logsigmoid(odds[0::2] - odds[1::2])).sum()


def kto(logps, reference, values, beta, wanted, unwanted):
    ratios = torch.stack([a.sum() - b.sum() for a, b in zip(logps, reference, strict=True)])
    own, moved = ratios[0::2], relu(ratios[1::2].detach().mean())
    is_wanted = torch.tensor(LABELS)[0::2] > 0
    losses = torch.where(
        is_wanted,
        wanted * (1 - (beta * (own - moved)).sigmoid()),
        unwanted * (1 - (beta * (moved - own)).sigmoid()),
    )
    return losses.sum()


def policy(logps, reference, values, clip):
    advantages, sampled = values.unbind(1)
    ratios = (torch.cat(logps) - sampled).exp()
    bounded = ratios.clamp(1 - clip, 1 + clip) if clip else ratios
    return -torch.minimum(ratios * advantages, bounded * advantages).sum()


CASES: dict[str, tuple[Any, dict[str, float], tuple[float, ...]]] = {
    "dpo": (dpo, {"beta": 0.3}, (0.3, 0.0)),
    "dpo, smoothed": (dpo, {"beta": 0.7, "label_smoothing": 0.2}, (0.7, 0.2)),
    "simpo": (simpo, {"beta": 1.5, "gamma": 0.4}, (1.5, 0.4)),
    "orpo": (orpo, {"beta": 0.6}, (0.6,)),
    "kto": (
        kto,
        {"beta": 0.4, "desirable_weight": 1.2, "undesirable_weight": 0.7},
        (0.4, 1.2, 0.7),
    ),
    "policy-gradient": (policy, {"clip": 0.2}, (0.2,)),
    "policy-gradient, not clipped": (policy, {"clip": 0}, (0,)),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_papers_formulas(case):
    formula, settings, arguments = CASES[case]
    model, adapter = peft_twin("llama")
    sequences = [(ids, [False, *marks[1:-1], True]) for ids, marks in random_sequences(LENGTHS)]
    with torch.no_grad(), model.disable_adapter():
        reference = row_logprobs(model, sequences)
    torch.manual_seed(1)
    with torch.no_grad():
        sampled = torch.cat(row_logprobs(model, sequences))
    values = torch.stack((torch.randn(len(sampled)), sampled + 0.3 * torch.randn(len(sampled))), 1)

    model.zero_grad()
    loss = formula(row_logprobs(model, sequences), reference, values, *arguments)
    loss.backward()
    theirs = {
        name.removeprefix("base_model.model.").replace(".default", ""): parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }

    pack, device = make_pack(sequences), adapter.backbone.device
    bare = PackScores(None, pack, device)
    run_alone(
        TrainingPass(
            adapter, evaluation_programs(adapter), pack, training=False, bare=True, scores=bare
        ),
        forward_rows=8,
        backward_rows=8,
    )
    torch.testing.assert_close(bare.logprobs, torch.cat(reference), atol=1e-4, rtol=0)
    objective = make_objective(case.split(",")[0], settings)
    extras = Extras(values=tuple(map(tuple, values.tolist())), labels=LABELS)
    for rows in (1000, 5):
        scores = PackScores(objective, pack, device, reference=bare.logprobs, extras=extras)
        training = TrainingPass(adapter, training_programs(adapter), pack, scores=scores)
        run_alone(training, forward_rows=rows, backward_rows=rows)
        assert worst_error(training.gradients, theirs) < 1e-4
        assert training.sums.loss == pytest.approx(float(loss.detach()), rel=1e-4)
        assert scores.outcome is not None
        assert (
            training.sums.num_trained
            == scores.outcome.count
            == (len(sampled) if "policy" in case else 3)
        )


def test_every_objective_is_tested():
    assert set(objective_names()) == {"supervised"} | {case.split(",")[0] for case in CASES}


def test_what_is_wrong_with_an_objective_is_said():
    with pytest.raises(
        ValueError, match="objective 'ppo' is not one of supervised, dpo, kto, orpo"
    ):
        make_objective("ppo", {})
    with pytest.raises(
        ValueError, match="dpo has no setting 'betas'; it has beta, label_smoothing"
    ):
        make_objective("dpo", {"betas": 1})
    with pytest.raises(ValueError, match="beta must be a number above 0, not 0"):
        make_objective("dpo", {"beta": 0})


# -- jobs -------------------------------------------------------------------------------

LORA = LoraConfig(r=3, alpha=6, target_modules="all-linear")
DPO = TuningConfig(
    num_epochs=3,
    batch_size=2,
    max_pack_tokens=24,
    seed=4,
    evaluate_every_steps=3,
    objective="dpo",
    objective_settings={"beta": 0.5},
    optimizer=OptimizerConfig(learning_rate=1e-2),
)


def pairs_of(lengths, seed=0):
    """Pairs of random answers."""
    found = [(ids, [False, *marks[1:-1], True]) for ids, marks in random_sequences(lengths, seed)]
    return [
        Example(tokens=(*a, *b), trained=(*x, *y), parts=(len(a), len(b)))
        for (a, x), (b, y) in zip(found[0::2], found[1::2], strict=True)
    ]


def dpo_of(model, pairs):
    """The loss of pairs, summed up, and their margins."""
    sequences = [(list(ids), list(marks)) for pair in pairs for ids, marks in pair.sequences]
    with torch.no_grad(), model.disable_adapter():
        reference = [each.sum() for each in row_logprobs(model, sequences)]
    sums = torch.stack(
        [a.sum() - b for a, b in zip(row_logprobs(model, sequences), reference, strict=True)]
    )
    margins = 0.5 * (sums[0::2] - sums[1::2])
    return -logsigmoid(margins).sum(), margins.detach()


def test_a_job_learns_preferences_as_autograd_does(tmp_path):
    """Three pairs in batches of two, in packs that hold one or two; the reference is the model
    without the adapter."""
    pairs, validation = pairs_of((9, 6, 5, 11, 7, 4)), pairs_of((8, 5, 4, 6), 7)
    engine = make_engine("llama")
    events = engine.tune(pairs, DPO, adapter=LORA, name="mine", validation=validation)
    save_adapter(Adapter(make_backbone(), LORA, seed=DPO.seed), tmp_path)
    model = PeftModel.from_pretrained(make_model(), str(tmp_path), is_trainable=True)
    adamw = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0
    )
    losses, margins = [], []
    for epoch in range(DPO.num_epochs):
        order = epoch_order(len(pairs), seed=DPO.seed, epoch=epoch, shuffle=True)
        for batch in (order[:2], order[2:]):
            adamw.zero_grad()
            loss, found = dpo_of(model, [pairs[index] for index in batch])
            (loss / len(batch)).backward()
            torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
            adamw.step()
            losses.append(float(loss.detach()) / len(batch))
            margins.append(float(found.mean()))
    steps = [event for event in events if isinstance(event, JobEvent) and event.kind == "step"]
    assert [step.loss for step in steps] == pytest.approx(losses, rel=1e-4)
    assert [step.metrics["reward_margin"] for step in steps] == pytest.approx(margins, abs=1e-4)
    assert margins[-1] > 0.1 and steps[-1].token_accuracy == 1.0
    assert [step.num_trained for step in steps] == [2, 1, 2, 1, 2, 1]
    last = [
        event for event in events if isinstance(event, JobEvent) and event.kind == "evaluation"
    ][-1]
    with torch.no_grad():
        loss, found = dpo_of(model, validation)
    assert last.loss == pytest.approx(float(loss) / 2, rel=1e-3)
    assert last.metrics["reward_margin"] == pytest.approx(float(found.mean()), abs=1e-3)
    assert_nothing_is_held(engine)


def test_an_adapter_at_the_head_learns_no_preferences():
    lora = LoraConfig(r=3, alpha=6, target_modules=("q_proj", "lm_head"))
    with pytest.raises(
        AdapterError, match="dpo does not train an adapter at the output layer; leave lm_head out"
    ):
        make_engine("llama").tune(pairs_of((5, 6)), DPO, adapter=lora, name="mine")


def test_virtual_tokens_learn_no_preferences():
    config = TuningConfig(objective="simpo")  # without a reference, too
    with pytest.raises(
        AdapterError,
        match="simpo trains no virtual tokens; an adapter with these has the method superv",
    ):
        make_engine("llama").tune(
            pairs_of((5, 6)), config, adapter=PromptTuningConfig(num_virtual_tokens=3), name="mine"
        )


# -- examples ---------------------------------------------------------------------------


def read(schema, *records):
    lines = [json.dumps(record) for record in records]
    return read_objective_examples(lines, word_tokenizer(), schema=schema, max_sequence_length=40)


def test_pairs_answers_and_samples_are_read(tmp_path):
    pairs = read("pairs", {"prompt": "w1 w2 ", "chosen": "w3 w4", "rejected": "w5"})
    (chosen, marks), (rejected, others) = pairs[0].sequences
    num_asked = marks.index(True)
    assert chosen[:num_asked] == rejected[:num_asked] and len(chosen) > len(rejected)
    assert num_asked == others.index(True) and all(marks[num_asked:]) and all(others[num_asked:])

    records = [{"prompt": "w1 ", "completion": f"w{n}", "label": n == 2} for n in (2, 3)]
    answers = read("labelled", *records)
    assert [answer.labels for answer in answers] == [(1.0, 0.0), (0.0, 0.0)]
    assert answers[0].sequences[1] == answers[1].sequences[0], "its prompt with the other's answer"

    sampled = read(
        "sampled",
        {
            "prompt_tokens": [1, 2],
            "completion_tokens": [3, 4],
            "logprobs": [-1, -2.5],
            "advantages": 0.5,
        },
    )
    assert sampled[0].values == ((0.5, -1.0), (0.5, -2.5))
    assert sampled[0].trained == (False, False, True, True)

    for examples in (pairs, answers, sampled):
        write_examples_file(tmp_path / "examples", examples)
        assert read_examples_file(tmp_path / "examples") == examples


@pytest.mark.parametrize(
    ("schema", "record", "message"),
    [
        (
            "pairs",
            {"prompt": "a", "completion": "b"},
            "line 1: a preference has input, preferred_output and non_pref",
        ),
        (
            "pairs",
            {"prompt": "w1", "chosen": 3, "rejected": "w2"},
            "chosen must be a string, as prompt is",
        ),
        (
            "pairs",
            {"input": [], "preferred_output": [], "non_preferred_output": []},
            "input must be an object with",
        ),
        (
            "labelled",
            {"prompt": "a", "completion": "b"},
            "an answer has a label, true if it is wanted and false if not",
        ),
        ("sampled", {"prompt_tokens": [1]}, "completion_tokens must be a list of token ids"),
        (
            "sampled",
            {"prompt_tokens": [1], "completion_tokens": [2, 3], "logprobs": [1], "advantages": 1},
            "logprobs must be 2 numbers, one for each of completion_tokens",
        ),
    ],
)
def test_what_is_wrong_with_a_record_is_said(schema, record, message):
    with pytest.raises(DataError, match=message):
        read(schema, record)

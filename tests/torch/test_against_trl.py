"""Objectives against TRL's own trainers: the loss of a batch, and the gradient of every parameter
of the adapter.

Skipped where TRL is not installed. Where its loss is another by design, the test says how.
"""

import importlib
from typing import Any

import pytest
import torch
from engines import word_tokenizer
from support import fresh_peft_twin, random_sequences, worst_error
from torch import Tensor

from coserve.tuning import TrainingPass, make_pack, run_alone, training_programs
from coserve.tuning.objectives import make_objective
from coserve.tuning.programs import evaluation_programs
from coserve.tuning.scores import Extras, PackScores

pytest.importorskip("trl", exc_type=ImportError)
pytest.importorskip("datasets", exc_type=ImportError)

# Of TRL, and of what it imports.
pytestmark = pytest.mark.filterwarnings("ignore")

LENGTHS = (9, 6, 5, 11, 7, 4)  # three pairs, or three answers beside others' prompts
LABELS = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)


def trainer(module: str, name: str, directory: Any, model: Any, **settings: Any) -> Any:
    """One of TRL's, on rows that are never read."""
    trl, datasets = importlib.import_module(module), importlib.import_module("datasets")
    tokenizer = word_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    config = getattr(trl, f"{name}Config")(
        output_dir=str(directory),
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=4,
        **settings,
    )
    answers = (
        {"completion": "c", "label": True} if name == "KTO" else {"chosen": "c", "rejected": "d"}
    )
    rows = [
        {"prompt": "a b", **answers, **({"label": place % 2 == 0} if name == "KTO" else {})}
        for place in range(4)
    ]
    named = {"reward_funcs": [lambda **_: [0.0]]} if name == "GRPO" else {}
    rows = datasets.Dataset.from_list(rows)
    return getattr(trl, f"{name}Trainer")(
        model=model, args=config, train_dataset=rows, processing_class=tokenizer, **named
    )


def padded(sequences: Any, prefix: str = "") -> dict[str, Tensor]:
    """A batch as TRL's collators make it."""
    length = max(len(ids) for ids, _ in sequences)
    fields = {
        "input_ids": [[*ids, *[0] * (length - len(ids))] for ids, _ in sequences],
        "attention_mask": [[1] * len(ids) + [0] * (length - len(ids)) for ids, _ in sequences],
        "completion_mask": [
            [*map(int, marks), *[0] * (length - len(ids))] for ids, marks in sequences
        ],
    }
    return {prefix + name: torch.tensor(rows) for name, rows in fields.items()}


def log_probabilities(model: Any, sequences: Any) -> list[Tensor]:
    """Of the trained tokens of each sequence."""
    found = []
    for ids, marks in sequences:
        rows = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        found.append(rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0][torch.tensor(marks[1:])])
    return found


class Twin:
    """A PEFT model, the same adapter in coserve, and sequences."""

    def __init__(self, *, suffixes: bool = False) -> None:
        self.model, self.adapter = fresh_peft_twin("llama")
        self.sequences = [
            (ids, [False, *marks[1:-1], True]) for ids, marks in random_sequences(LENGTHS)
        ]
        if suffixes:
            self.sequences = [
                (ids, [place >= 2 for place in range(len(ids))]) for ids, _ in self.sequences
            ]
        with torch.no_grad(), self.model.disable_adapter():
            self.reference = log_probabilities(self.model, self.sequences)
        self.sums = torch.stack([rows.sum() for rows in self.reference])

    def gradients(self, loss: Tensor) -> dict[str, Tensor]:
        """Of PEFT's parameters by the names that coserve has for them."""
        self.model.zero_grad()
        loss.backward()
        return {
            name.removeprefix("base_model.model.").replace(".default", ""): parameter.grad.clone()
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }

    def check(
        self, objective: str, settings: dict[str, float], loss: Tensor, values: Tensor | None = None
    ) -> None:
        """loss: TRL's, summed up over what coserve sums up over."""
        theirs = self.gradients(loss)
        pack, device = make_pack(self.sequences), self.adapter.backbone.device
        bare = PackScores(None, pack, device)
        programs = evaluation_programs(self.adapter)
        run_alone(
            TrainingPass(self.adapter, programs, pack, training=False, bare=True, scores=bare),
            forward_rows=8,
            backward_rows=8,
        )
        extras = Extras(
            values=() if values is None else tuple(map(tuple, values.tolist())), labels=LABELS
        )
        scores = PackScores(
            make_objective(objective, settings),
            pack,
            device,
            reference=bare.logprobs,
            extras=extras,
        )
        ours = TrainingPass(self.adapter, training_programs(self.adapter), pack, scores=scores)
        run_alone(ours, forward_rows=8, backward_rows=8)
        assert ours.sums.loss == pytest.approx(float(loss.detach()), rel=1e-4)
        assert worst_error(ours.gradients, theirs) < 1e-4


def test_dpo(tmp_path):
    twin = Twin()
    theirs = trainer("trl", "DPO", tmp_path, twin.model, beta=0.3)
    theirs.precompute_ref_logps = (
        True  # of the model without the adapter: TRL takes the adapter it is given otherwise
    )
    pairs = padded([*twin.sequences[0::2], *twin.sequences[1::2]])
    given = {"ref_chosen_logps": twin.sums[0::2], "ref_rejected_logps": twin.sums[1::2]}
    loss = theirs._compute_loss(theirs.model, pairs | given, return_outputs=False)
    twin.check("dpo", {"beta": 0.3}, 3 * loss)


def test_dpo_with_smoothed_labels(tmp_path):
    """TRL smooths labels in `aot`, which for a single pair is conservative DPO."""
    twin = Twin()
    theirs = trainer(
        "trl", "DPO", tmp_path, twin.model, beta=0.7, label_smoothing=0.2, loss_type=["aot"]
    )
    theirs.precompute_ref_logps = True
    losses = []
    for place in range(0, 6, 2):
        given = {
            "ref_chosen_logps": twin.sums[place, None],
            "ref_rejected_logps": twin.sums[place + 1, None],
        }
        pair = padded(twin.sequences[place : place + 2])
        losses.append(theirs._compute_loss(theirs.model, pair | given, return_outputs=False))
    twin.check("dpo", {"beta": 0.7, "label_smoothing": 0.2}, torch.stack(losses).sum())


def test_simpo(tmp_path):
    twin = Twin()
    settings = {"beta": 1.5, "simpo_gamma": 0.4, "loss_type": "simpo", "cpo_alpha": 0.0}
    theirs = trainer("trl.experimental.cpo", "CPO", tmp_path, twin.model, **settings)
    means = torch.stack([rows.mean() for rows in log_probabilities(twin.model, twin.sequences)])
    losses, _, _ = theirs.cpo_loss(means[0::2], means[1::2])
    twin.check("simpo", {"beta": 1.5, "gamma": 0.4}, losses.sum())


def test_orpo(tmp_path):
    """TRL's term of the odds; its other term also trains on prompts, and is a mean over all tokens
    of a batch, where the paper (arXiv 2403.07691, eq. 2 and 6) has each answer's mean.
    """
    twin = Twin()
    theirs = trainer("trl.experimental.orpo", "ORPO", tmp_path, twin.model, beta=0.6)
    batch = padded(twin.sequences)
    labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
    logits = twin.model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    means = theirs.get_batch_logps(logits, labels, average_log_prob=True)
    odds, *_ = theirs.odds_ratio_loss(means[0::2], means[1::2])
    twin.check("orpo", {"beta": 0.6}, (-means[0::2] - odds).sum())


def test_kto(tmp_path):
    twin = Twin()
    settings = {"beta": 0.4, "desirable_weight": 1.2, "undesirable_weight": 0.7}
    theirs = trainer("trl", "KTO", tmp_path, twin.model, **settings)
    theirs.precompute_ref_logps = True
    batch = {
        **padded(twin.sequences[0::2]),
        **padded(twin.sequences[1::2], "KL_"),
        "label": torch.tensor(LABELS[0::2]).bool(),
        "ref_logps": twin.sums[0::2],
        "ref_KL_logps": twin.sums[1::2],
    }
    loss = theirs._compute_loss(theirs.model, batch, return_outputs=False)
    twin.check("kto", settings, 3 * loss)


@pytest.mark.parametrize("clip", [0.2, 0.0])
def test_policy_gradient(clip, tmp_path):
    """GRPO's loss with given advantages and log-probabilities, as a mean over tokens (`bnpo`),
    without a KL term."""
    twin = Twin(suffixes=True)
    bound = (
        {"epsilon": clip, "epsilon_high": clip} if clip else {"epsilon": 1e9, "epsilon_high": 1e9}
    )
    theirs = trainer(
        "trl", "GRPO", tmp_path, twin.model, beta=0.0, loss_type="bnpo", num_generations=4, **bound
    )
    theirs.current_gradient_accumulation_steps = 1
    with torch.no_grad():
        sampled = torch.cat(log_probabilities(twin.model, twin.sequences))
    torch.manual_seed(1)
    values = torch.stack((torch.randn(len(sampled)), sampled + 0.3 * torch.randn(len(sampled))), 1)
    batch, lengths = padded(twin.sequences), [len(ids) - 2 for ids, _ in twin.sequences]

    def rows(numbers: Tensor) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(numbers.split(lengths), batch_first=True)

    inputs = {
        "prompt_ids": batch["input_ids"][:, :2],
        "prompt_mask": batch["attention_mask"][:, :2],
        "completion_ids": batch["input_ids"][:, 2:],
        "completion_mask": batch["completion_mask"][:, 2:],
        "advantages": rows(values[:, 0]),
        "old_per_token_logps": rows(values[:, 1]),
    }
    loss = theirs._compute_loss(theirs.model, inputs)
    twin.check("policy-gradient", {"clip": clip}, len(sampled) * loss, values)

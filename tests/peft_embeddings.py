"""Adapters with embeddings and head of their own, as PEFT makes them: every combination of what may
be trained."""

import itertools
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import peft
import torch
from peft_methods import trained
from support import VOCAB, make_model, model_directory

RESIZED = VOCAB + 6
TOKENS = [3, 5, VOCAB - 1]
NEW_TOKENS = [3, VOCAB + 1, VOCAB + 4]
OTHER_TOKENS = [2, 5, 8]
_WHOLE = {
    "none": None,
    "embed": ["embed_tokens"],
    "head": ["lm_head"],
    "both": ["embed_tokens", "lm_head"],
    "norm": ["norm"],
}
# What PEFT itself says of combinations that it does not make.
NOT_MADE = (
    "cannot be applied to modules of type",
    "already marked to be trained fully",
    "Cannot ensure weight tying when different token indices",
)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One combination.

    whole: a key of `_WHOLE`. tokens: "none", "list", "both" (embeddings and head have the same) or
    "others" (each has its own). targets: where LoRA is beside q_proj, "none", "embed", "head" or
    "both". ties: `ensure_weight_tying`.
    """

    method: str = "lora"
    tied: bool
    resized: bool
    whole: str = "none"
    tokens: str = "none"
    targets: str = "none"
    ties: bool = False

    @property
    def family(self) -> str:
        return "llama-biases-tied" if self.tied else "llama"

    def __str__(self) -> str:
        kinds = (
            "tied" if self.tied else "untied",
            "resized" if self.resized else "same",
            f"whole-{self.whole}",
        )
        return "-".join(
            (
                self.method,
                *kinds,
                f"tokens-{self.tokens}",
                f"targets-{self.targets}",
                f"ties-{self.ties:d}",
            )
        )


def cells() -> list[Cell]:
    """Return all combinations of what PEFT's methods have settings for."""
    truths, found = (False, True), []
    settings = itertools.product(
        truths,
        truths,
        _WHOLE,
        ("none", "list", "both", "others"),
        ("none", "embed", "head", "both"),
        truths,
    )
    for tied, resized, whole, tokens, targets, ties in settings:
        found.append(
            Cell(tied=tied, resized=resized, whole=whole, tokens=tokens, targets=targets, ties=ties)
        )
    for method, tied, resized, whole in itertools.product(
        ("dora", "ia3", "vera"), truths, truths, _WHOLE
    ):
        found.append(Cell(method=method, tied=tied, resized=resized, whole=whole))
    return found


def base_of(cell: Cell) -> Any:
    """Return the model that the adapter is for, with its vocabulary resized where it is."""
    base = make_model(cell.family)
    base.name_or_path = str(model_directory(cell.family))  # with which PEFT compares the vocabulary
    if cell.resized:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(1)
            base.resize_token_embeddings(RESIZED, mean_resizing=False)
    return base


def config_of(cell: Cell) -> Any:
    """Return PEFT's configuration."""
    whole = None if _WHOLE[cell.whole] is None else list(_WHOLE[cell.whole] or ())
    common: dict[str, Any] = {"modules_to_save": whole, "task_type": "CAUSAL_LM"}
    if cell.method == "ia3":
        return peft.IA3Config(
            target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], **common
        )
    if cell.method == "vera":
        return peft.VeraConfig(r=6, target_modules=["q_proj"], **common)
    tokens = NEW_TOKENS if cell.resized else TOKENS
    indices = {
        "none": None,
        "list": tokens,
        "both": {"embed_tokens": tokens, "lm_head": tokens},
        "others": {"embed_tokens": tokens, "lm_head": OTHER_TOKENS},
    }[cell.tokens]
    more = {
        "none": [],
        "embed": ["embed_tokens"],
        "head": ["lm_head"],
        "both": ["embed_tokens", "lm_head"],
    }[cell.targets]
    return peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=["q_proj", *more],
        trainable_token_indices=indices,
        ensure_weight_tying=cell.ties,
        use_dora=cell.method == "dora",
        **common,
    )


@cache
def made_by_peft(cell: Cell) -> tuple[Any, Path] | str:
    """Return PEFT's model with random values and where it has saved it; or what it says if it
    cannot make it."""
    try:
        theirs = peft.get_peft_model(base_of(cell), config_of(cell))
    except (TypeError, ValueError) as error:
        if not any(line in str(error) for line in NOT_MADE):
            raise
        return str(error)
    generator = torch.Generator().manual_seed(0)
    for _, parameter in trained(theirs):
        parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.15)
    directory = Path(mkdtemp(prefix="coserve-peft-"))
    theirs.eval().save_pretrained(directory)
    return theirs, directory


def greedy(logits_of: Any, prompt: torch.Tensor, num_tokens: int) -> list[int]:
    """Return the tokens that are likeliest one after the other. logits_of: of the rows of some
    tokens."""
    tokens = prompt
    for _ in range(num_tokens):
        tokens = torch.cat((tokens, logits_of(tokens)[-1].argmax()[None]))
    return tokens[len(prompt) :].tolist()

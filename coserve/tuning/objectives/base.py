"""What an objective is: from the log-probabilities of a pack's rows to their gradient.

A loss over sequences (a pair's margin, a clipped ratio) depends on rows through their
log-probabilities alone. So a pack goes through the head once, as for the next-token loss: that
gives each row's log-probability, and the gradient that it has with respect to the row. When all
rows have been through, the objective says what each log-probability counts, and each row's gradient
is multiplied by that.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoredRows:
    """The trained rows of a pack, t of them, of s sequences.

    logprobs float32 [t]: of each row's target. owners int64 [t]: the sequence of each.
    num_sequences: s. reference float32 [t]: the log-probabilities without the adapter, where the
    objective needs them. values float32 [t, v]: v numbers of each row's target, where the examples
    have any. labels float32 [s]: of each sequence, likewise.
    """

    logprobs: Tensor
    owners: Tensor
    num_sequences: int
    reference: Tensor | None = None
    values: Tensor | None = None
    labels: Tensor | None = None

    def sums(self, x: Tensor) -> Tensor:
        """By sequence: [t] -> [s]."""
        return x.new_zeros(self.num_sequences).index_add_(0, self.owners, x)

    @cached_property
    def lengths(self) -> Tensor:
        """Trained rows of each sequence, float32 [s]."""
        return self.sums(torch.ones_like(self.logprobs))

    @cached_property
    def means(self) -> Tensor:
        """Mean log-probability of each sequence, float32 [s]."""
        return self.sums(self.logprobs) / self.lengths

    @cached_property
    def log_ratios(self) -> Tensor:
        """How much likelier each sequence is than without the adapter, float32 [s]."""
        assert self.reference is not None, "the objective asks for a reference"
        return self.sums(self.logprobs - self.reference)


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """What came of a pack. All but the gradient are sums over its `count` units (pairs, say), which
    an optimizer step divides by.

    gradient float32 [t]: of the summed loss with respect to each row's log-probability. loss,
    correct: numbers on the device; correct: units that are as they should be. metrics: by name.
    """

    gradient: Tensor
    loss: Tensor
    correct: Tensor
    count: int
    metrics: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Objective(ABC):
    """Its fields are its settings, in the terms of its paper.

    unit: what the loss is a mean over. schema: of its examples (`tuning.objective_examples`):
    pairs, labelled answers, or sampled tokens. needs_reference: whether it compares with the model
    without the adapter. counts_packs: whether what a unit counts depends on the others of its pack,
    which are then all on one node.
    """

    unit: ClassVar[str]
    schema: ClassVar[str] = "pairs"
    needs_reference: ClassVar[bool] = False
    counts_packs: ClassVar[bool] = False

    @abstractmethod
    def outcome(self, rows: ScoredRows) -> Outcome:
        """Of a pack."""


@dataclass(frozen=True, kw_only=True)
class PairObjective(Objective):
    """Sequences come in pairs, the chosen one first."""

    unit: ClassVar[str] = "pair"


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of each pair's sequences [2 * pairs]: the chosen and the rejected, [pairs] each."""
    pairs = x.view(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def per_row(rows: ScoredRows, chosen: Tensor, rejected: Tensor) -> Tensor:
    """What counts for each pair's sequences [pairs], for each of their rows [t]."""
    return torch.stack((chosen, rejected), 1).flatten()[rows.owners]


def margin_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Sums of pairs' rewards."""
    return {
        "reward_chosen": chosen.sum(),
        "reward_rejected": rejected.sum(),
        "reward_margin": (chosen - rejected).sum(),
    }

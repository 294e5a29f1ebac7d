"""The interface of an objective: from the log-probabilities of a pack's rows to their gradient.

A loss over sequences (a pair's margin, a clipped ratio) depends on rows through their
log-probabilities alone. So a pack goes through the head once, as for the next-token loss: that
gives each row's log-probability, and its gradient with respect to the row. When all rows have been
through, the objective gives the gradient of the loss with respect to each log-probability, and each
row's gradient is multiplied by that.
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
    """The trained rows of a pack: t rows of s sequences."""

    logprobs: Tensor
    """Log-probability of each row's target, float32 [t]."""
    owners: Tensor
    """Sequence of each row, int64 [t]."""
    num_sequences: int
    """Number of sequences, s."""
    reference: Tensor | None = None
    """Log-probabilities without the adapter, float32 [t], where the objective needs them."""
    values: Tensor | None = None
    """Numbers of each row's target, float32 [t, v], where the examples have any."""
    labels: Tensor | None = None
    """Label of each sequence, float32 [s], where the examples have any."""

    def sums(self, x: Tensor) -> Tensor:
        """Return the sums by sequence: [t] -> [s]."""
        return x.new_zeros(self.num_sequences).index_add_(0, self.owners, x)

    @cached_property
    def lengths(self) -> Tensor:
        """Return the number of trained rows of each sequence, float32 [s]."""
        return self.sums(torch.ones_like(self.logprobs))

    @cached_property
    def means(self) -> Tensor:
        """Return the mean log-probability of each sequence, float32 [s]."""
        return self.sums(self.logprobs) / self.lengths

    @cached_property
    def log_ratios(self) -> Tensor:
        """Return the log-ratio of each sequence's probability to that without the adapter, float32
        [s].
        """
        assert self.reference is not None, "the objective asks for a reference"
        return self.sums(self.logprobs - self.reference)


@dataclass(frozen=True, kw_only=True, eq=False)
class PackLoss:
    """The loss of a pack and its gradient. All but the gradient are sums over its `count` units
    (pairs, for example), by which an optimizer step divides.
    """

    gradient: Tensor
    """Gradient of the summed loss with respect to each row's log-probability, float32 [t]."""
    loss: Tensor
    """Summed loss, on the device."""
    correct: Tensor
    """Number of units that are as they should be, on the device."""
    count: int
    """Number of units."""
    metrics: Mapping[str, Tensor]
    """Further sums by name, on the device."""


@dataclass(frozen=True, kw_only=True)
class Objective(ABC):
    """A loss over sequences; its fields are its settings, in the terms of its paper."""

    unit: ClassVar[str]
    """Unit over which the loss is averaged."""
    schema: ClassVar[str] = "pairs"
    """Schema of its examples (`tuning.objective_examples`): pairs, labelled answers, or sampled
    tokens.
    """
    needs_reference: ClassVar[bool] = False
    """Whether it compares with the model without the adapter."""
    counts_packs: ClassVar[bool] = False
    """Whether the weight of a unit depends on the others of its pack, which are then all on one
    node.
    """

    @abstractmethod
    def outcome(self, rows: ScoredRows) -> PackLoss:
        """Return the loss of a pack and its gradient."""


@dataclass(frozen=True, kw_only=True)
class PairObjective(Objective):
    """An objective over pairs of sequences, the chosen one first."""

    unit: ClassVar[str] = "pair"


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split values of sequences [2 * pairs] into those of the chosen and of the rejected, [pairs]
    each.
    """
    pairs = x.view(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def per_row(rows: ScoredRows, chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return values of each pair's sequences [pairs] for each of their rows [t]."""
    return torch.stack((chosen, rejected), 1).flatten()[rows.owners]


def margin_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Return the sums of pairs' rewards."""
    return {
        "reward_chosen": chosen.sum(),
        "reward_rejected": rejected.sum(),
        "reward_margin": (chosen - rejected).sum(),
    }

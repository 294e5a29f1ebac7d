"""KTO, an objective over single answers that are wanted or not. Source: arXiv 2402.01306, equations
7 and 8.

An example has two sequences: the answer, with a label of 1 (wanted) or 0, and the same prompt with
the answer of another example, whose log-ratios estimate how far the model has moved in general
(section 4.1).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from coserve.settings import check_number
from coserve.tuning.objectives.base import Objective, PackLoss, ScoredRows, halves, per_row


@dataclass(frozen=True, kw_only=True)
class Kto(Objective):
    """Kahneman-Tversky optimization."""

    unit: ClassVar[str] = "answer"
    schema: ClassVar[str] = "labelled"
    needs_reference: ClassVar[bool] = True
    counts_packs: ClassVar[bool] = True

    beta: float = 0.1
    """Strength of the pull towards the model without the adapter."""
    desirable_weight: float = 1.0
    """Weight of answers that are wanted."""
    undesirable_weight: float = 1.0
    """Weight of answers that are not."""

    def __post_init__(self) -> None:
        for name in ("beta", "desirable_weight", "undesirable_weight"):
            check_number(name, getattr(self, name), above=0)

    def outcome(self, rows: ScoredRows) -> PackLoss:
        assert rows.labels is not None, "answers have labels"
        ratios, others = halves(rows.log_ratios)
        is_wanted = halves(rows.labels)[0] > 0
        moved = others.mean().clamp(min=0)  # no gradient goes through it (section 4.1)
        sign = torch.where(is_wanted, 1.0, -1.0)
        weight = torch.where(is_wanted, self.desirable_weight, self.undesirable_weight)
        value = (sign * self.beta * (ratios - moved)).sigmoid()
        slope = -weight * sign * self.beta * value * (1 - value)
        reward = self.beta * ratios
        return PackLoss(
            gradient=per_row(rows, slope, torch.zeros_like(slope)),
            loss=(weight * (1 - value)).sum(),
            correct=((reward > self.beta * moved) == is_wanted).sum(),
            count=len(value),
            metrics={
                "reward_chosen": (reward * is_wanted).sum(),
                "reward_rejected": (reward * ~is_wanted).sum(),
                "moved": moved * len(value),
            },
        )

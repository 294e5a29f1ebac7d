"""ORPO: the next-token loss of the chosen answer, and the odds of both, without a reference.
Source: arXiv 2403.07691, equations 6 and 7; the next-token loss is that of the answer.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from coserve.settings import check_number
from coserve.tuning.objectives.base import (
    PackLoss,
    PairObjective,
    ScoredRows,
    halves,
    margin_metrics,
    per_row,
)

# The largest mean log-probability: one less is certain, and its odds are without bounds.
_MAX_MEAN = -1e-6


@dataclass(frozen=True, kw_only=True)
class Orpo(PairObjective):
    """Odds ratio preference optimization."""

    beta: float = 0.1
    """Weight of the odds (the paper's lambda)."""

    def __post_init__(self) -> None:
        check_number("beta", self.beta, above=0)

    def outcome(self, rows: ScoredRows) -> PackLoss:
        chosen, rejected = halves(rows.means.clamp(max=_MAX_MEAN))
        lengths = halves(rows.lengths)
        margin = _log_odds(chosen) - _log_odds(rejected)
        slope = -self.beta * (-margin).sigmoid()
        gradient = per_row(
            rows,
            (slope / -torch.expm1(chosen) - 1) / lengths[0],
            -slope / -torch.expm1(rejected) / lengths[1],
        )
        return PackLoss(
            gradient=gradient,
            loss=(-chosen - self.beta * logsigmoid(margin)).sum(),
            correct=(chosen > rejected).sum(),
            count=len(margin),
            metrics=margin_metrics(self.beta * chosen, self.beta * rejected),
        )


def _log_odds(mean: Tensor) -> Tensor:
    """Return the logarithm of p / (1 - p) for a mean log-probability."""
    return mean - torch.log(-torch.expm1(mean))

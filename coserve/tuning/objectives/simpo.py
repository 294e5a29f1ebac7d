"""SimPO: preferences by the mean log-probability, without a reference. Source: arXiv 2405.14734,
equation 6.
"""

from dataclasses import dataclass

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


@dataclass(frozen=True, kw_only=True)
class Simpo(PairObjective):
    """Simple preference optimization."""

    beta: float = 2.0
    """Factor of the reward, beta * mean log-probability."""
    gamma: float = 0.5
    """Margin by which the chosen answer's reward should be the larger."""

    def __post_init__(self) -> None:
        check_number("beta", self.beta, above=0)
        check_number("gamma", self.gamma, least=0)

    def outcome(self, rows: ScoredRows) -> PackLoss:
        chosen, rejected = halves(self.beta * rows.means)
        margin = chosen - rejected - self.gamma
        slope, lengths = -self.beta * (-margin).sigmoid(), halves(rows.lengths)
        return PackLoss(
            gradient=per_row(rows, slope / lengths[0], -slope / lengths[1]),
            loss=-logsigmoid(margin).sum(),
            correct=(chosen > rejected).sum(),
            count=len(margin),
            metrics=margin_metrics(chosen, rejected),
        )

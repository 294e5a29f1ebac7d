"""Direct preference optimization. Source: arXiv 2305.18290, equation 7; label smoothing as in
conservative DPO (https://ericmitchell.ai/cdpo.pdf, equation 3).
"""

from dataclasses import dataclass
from typing import ClassVar

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

# Margins of less, in nats, are rounding: before its first step the policy is the reference, and
# prefers nothing.
_TIE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Dpo(PairObjective):
    """Direct preference optimization."""

    needs_reference: ClassVar[bool] = True

    beta: float = 0.1
    """Strength of the pull towards the model without the adapter."""
    label_smoothing: float = 0.0
    """Share of pairs that are assumed to be the wrong way round."""

    def __post_init__(self) -> None:
        check_number("beta", self.beta, above=0)
        check_number("label_smoothing", self.label_smoothing, least=0, most=0.5)

    def outcome(self, rows: ScoredRows) -> PackLoss:
        chosen, rejected = halves(self.beta * rows.log_ratios)
        margin, smoothing = chosen - rejected, self.label_smoothing
        slope = self.beta * (smoothing * margin.sigmoid() - (1 - smoothing) * (-margin).sigmoid())
        loss = -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)
        return PackLoss(
            gradient=per_row(rows, slope, -slope),
            loss=loss.sum(),
            correct=(margin > _TIE).sum(),
            count=len(margin),
            metrics=margin_metrics(chosen, rejected),
        )

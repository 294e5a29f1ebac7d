"""The best evaluation of a job so far, and the rule by which a job without improvement ends early,
as in transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Self

from coserve.settings import MOST_WHOLE, check_number, check_whole
from coserve.tuning.evaluation import LOSS

TOKEN_ACCURACY = "token_accuracy"


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Rule by which a job ends before its last step; ValueError names the field and its range."""

    # Evaluations in a row without improvement that end the job.
    patience: int = 3
    # A value must be better than the best one by more than this to be an improvement.
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        check_whole("patience", self.patience, 1, MOST_WHOLE)
        check_number("min_delta", self.min_delta, least=0)


@dataclass(frozen=True, kw_only=True)
class BestEvaluation:
    """The best evaluation of a job so far; ValueError for numbers that no job has."""

    # Optimizer steps before it; 0 while there is none.
    step: int = 0
    value: float | None = None
    """Its value; None while there is none."""
    # Evaluations since the last improvement.
    num_without_gain: int = 0

    def __post_init__(self) -> None:
        check_whole("step", self.step, 0)
        check_whole("num_without_gain", self.num_without_gain, 0)

    def after(self, step: int, value: float | None, *, metric: str, min_delta: float) -> Self:
        """Return the best evaluation after one more. A value that is None or not finite is never
        the best.
        """
        gain = self._gain(value, metric)
        num_without_gain = 0 if gain > min_delta else self.num_without_gain + 1
        if gain <= 0:
            return replace(self, num_without_gain=num_without_gain)
        return replace(self, step=step, value=value, num_without_gain=num_without_gain)

    def _gain(self, value: float | None, metric: str) -> float:
        if value is None or not isfinite(value):
            return 0.0
        if self.value is None:
            return float("inf")
        return self.value - value if metric == LOSS else value - self.value


def evaluated_value(
    metric: str, *, loss: float | None, token_accuracy: float | None, metrics: Mapping[str, float]
) -> float | None:
    """Return the value of an evaluation that decides which one is the best."""
    if metric == LOSS:
        return loss
    return token_accuracy if metric == TOKEN_ACCURACY else metrics.get(metric)

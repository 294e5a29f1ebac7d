"""Sums of the losses of rows, which can be added up."""

from dataclasses import dataclass, field
from math import nan


@dataclass(kw_only=True)
class LossSums:
    """Sums over trained rows; those of windows, packs and jobs are added up before dividing. The
    means of no rows are nan.
    """

    loss: float = 0.0
    """Sum of the losses."""
    num_correct: int = 0
    """Rows whose most likely token is the target; units of an objective that are as they should be.
    """
    num_trained: int = 0
    """Trained rows; units of an objective."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Sums of an objective's metrics by name."""

    def add(self, other: "LossSums") -> None:
        self.loss += other.loss
        self.num_correct += other.num_correct
        self.num_trained += other.num_trained
        for name, value in other.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value

    @property
    def mean_metrics(self) -> dict[str, float]:
        """Return the means of an objective's metrics by name."""
        return (
            {name: value / self.num_trained for name, value in self.metrics.items()}
            if self.num_trained
            else {}
        )

    @property
    def mean_loss(self) -> float:
        return self.loss / self.num_trained if self.num_trained else nan

    @property
    def token_accuracy(self) -> float:
        """Return the share of trained rows whose most likely token is the target."""
        return self.num_correct / self.num_trained if self.num_trained else nan

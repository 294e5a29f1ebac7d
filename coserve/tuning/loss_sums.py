"""What the loss of some rows came to, as sums that can be added up."""

from dataclasses import dataclass, field
from math import nan


@dataclass(kw_only=True)
class LossSums:
    """Sums over trained rows; add up those of windows, packs and jobs before dividing. The means of
    no rows are nan.
    """

    loss: float = 0.0
    num_correct: int = 0
    num_trained: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    def add(self, other: "LossSums") -> None:
        self.loss += other.loss
        self.num_correct += other.num_correct
        self.num_trained += other.num_trained
        for name, value in other.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value

    @property
    def mean_metrics(self) -> dict[str, float]:
        """Of an objective, by name."""
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
        """Share of trained rows whose most likely token is the target."""
        return self.num_correct / self.num_trained if self.num_trained else nan

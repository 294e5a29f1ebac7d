"""A policy-gradient loss over given log-probabilities and advantages, token by token: importance
sampling, or PPO's clipped form (arXiv 1707.06347, equation 7).

Each trained token of an example has the log-probability that it had when it was sampled, and an
advantage.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from coserve.settings import check_number
from coserve.tuning.objectives.base import Objective, PackLoss, ScoredRows


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(Objective):
    """A policy-gradient loss."""

    unit: ClassVar[str] = "token"
    schema: ClassVar[str] = "sampled"

    clip: float = 0.2
    """Distance of a ratio of probabilities from one beyond which it has no gradient; 0 for no
    bound.
    """

    def __post_init__(self) -> None:
        check_number("clip", self.clip, least=0, most=1)

    def outcome(self, rows: ScoredRows) -> PackLoss:
        assert rows.values is not None, "tokens have advantages and log-probabilities"
        advantages, sampled = rows.values.unbind(1)
        ratios = (rows.logprobs - sampled).exp()
        gains = ratios * advantages
        clipped = ratios.clamp(1 - self.clip, 1 + self.clip) * advantages if self.clip else gains
        counts = gains <= clipped
        return PackLoss(
            gradient=-gains * counts,
            loss=-torch.minimum(gains, clipped).sum(),
            correct=counts.sum(),
            count=len(gains),
            metrics={"ratio": ratios.sum(), "advantage": advantages.sum()},
        )

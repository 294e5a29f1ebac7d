"""Log-probabilities of a pack's trained rows, as they come, and the gradient weights that an
objective computes from all of them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.kernels.transfer import on_device
from coserve.tuning.objectives.base import Objective, PackLoss, ScoredRows
from coserve.tuning.pack import UNTRAINED, Pack


@dataclass(frozen=True, kw_only=True)
class Extras:
    """Numbers that the examples of a pack have beside tokens, where they have any."""

    values: tuple[tuple[float, ...], ...] = ()
    """Numbers of each trained token."""
    labels: tuple[float, ...] = ()
    """Label of each sequence."""


class PackScores:
    """Scores of the rows of one pass. `logprobs`, float32 [trained rows], is complete once `take`
    has had all of them.
    """

    def __init__(
        self,
        objective: Objective | None,
        pack: Pack,
        device: torch.device,
        *,
        reference: Tensor | None = None,
        extras: Extras = Extras(),
    ) -> None:
        """Begin without scores; without an objective they are a reference for another pass."""
        trained = (pack.targets != UNTRAINED).nonzero()[:, 0]
        self.logprobs = torch.zeros(len(trained), dtype=torch.float32, device=device)
        self._objective, self._reference, self._num_taken = objective, reference, 0
        ends = torch.tensor(pack.bounds[1:])
        self._owners = on_device(torch.searchsorted(ends, trained, right=True), device)
        self._num_sequences = len(pack.bounds) - 1
        values, labels = (
            torch.tensor(x, dtype=torch.float32, device=device)
            for x in (extras.values, extras.labels)
        )
        self._values = values if extras.values else None
        self._labels = labels if extras.labels else None
        self.outcome: PackLoss | None = None

    @property
    def is_complete(self) -> bool:
        return self._num_taken == len(self.logprobs)

    def take(self, losses: Tensor) -> None:
        """Take the next-token losses of the next trained rows, float32 [n]."""
        end = self._num_taken + len(losses)
        torch.neg(losses, out=self.logprobs[self._num_taken : end])
        self._num_taken = end

    def weigh(self) -> Tensor | None:
        """Return the factors on the gradients of the rows' next-token losses, float32 [trained
        rows]; None if they are of no use.
        """
        assert self.is_complete
        if self._objective is None:
            return None
        rows = ScoredRows(
            logprobs=self.logprobs,
            owners=self._owners,
            num_sequences=self._num_sequences,
            reference=self._reference,
            values=self._values,
            labels=self._labels,
        )
        self.outcome = self._objective.outcome(rows)
        return -self.outcome.gradient

"""The interface of a policy: a pure function from a view to a plan, with settings of its own."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from coserve.scheduling.fairness import TokenWeights
from coserve.scheduling.history import History
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import Plan, View
from coserve.settings import HasSettings, Setting, setting

__all__ = ["Policy", "Setting", "setting"]


@dataclass(frozen=True, kw_only=True)
class Policy(HasSettings, ABC):
    """A policy: a subclass in a file of its own in this folder, found by the file's name. Its
    fields are `setting`s.

    `plan` reads no clock, does no I/O and keeps nothing between calls: the same view and latency
    model give the same plan. What it must know of earlier steps is in a `History`.

    Raises:
        ValueError: A setting is out of its range.
    """

    kind: ClassVar[str] = "policy"
    """Word for such a variant in messages."""
    summary: ClassVar[str]
    """One line for help texts."""
    serves_batch: ClassVar[bool] = False
    """Whether it distinguishes batch work; otherwise that is among the requests, with its window as
    their SLO."""
    runs_whole_passes: ClassVar[bool] = False
    """Whether a pack's pass, forward or backward, may run as a whole before any other work: then
    arriving requests wait the less, the smaller packs are."""
    is_fair: ClassVar[bool] = False
    """Whether the service that tenants have had decides whose request is admitted next."""

    @abstractmethod
    def plan(self, view: View, latency: LatencyModel) -> Plan:
        """Return the plan of the next step."""

    def make_history(self) -> History | None:
        """Return an empty record of steps for `View.history`; None if the policy keeps none."""
        return None

    @property
    def token_weights(self) -> TokenWeights:
        """Return the costs of tokens to their tenants, for the engine's counters."""
        return TokenWeights()

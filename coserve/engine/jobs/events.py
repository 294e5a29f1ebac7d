"""Events of a fine-tuning job, as its owner sees them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

EventKind = Literal[
    "step",
    "evaluation",
    "version",
    "pack_dropped",
    "contribution",
    "succeeded",
    "failed",
    "cancelled",
]


class StepSeconds(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Device time of one optimizer step of a job: its share, by rows, of the engine steps that it
    took part in.
    """

    started_s: float | None = None
    """Time at which the first of these began; None if it is not known."""
    forward_s: float = 0.0
    """Seconds in the forward pass."""
    loss_s: float = 0.0
    """Seconds in the loss."""
    backward_s: float = 0.0
    """Seconds in the backward pass."""
    update_s: float = 0.0
    """Seconds in the optimizer's update."""


@dataclass(frozen=True, kw_only=True)
class JobEvent:
    """An event of a job after `step` optimizer steps."""

    job: str
    """Id of the job."""
    kind: EventKind
    """Kind of the event. A "contribution" is due to the other nodes of a divided job."""
    step: int
    """Number of optimizer steps done."""
    now_s: float
    """Time of the event."""
    loss: float | None = None
    """Mean loss of the step or of the validation set, over trained tokens or over the objective's
    units.
    """
    token_accuracy: float | None = None
    """Share of trained tokens that were predicted, or of the objective's units that are as they
    should be.
    """
    num_trained: int = 0
    """Number of trained tokens."""
    num_tokens: int = 0
    """Number of tokens of a step, trained or not."""
    norm: float | None = None
    """Norm of a step's gradient before clipping; None: it was not finite, and the step was skipped.
    """
    learning_rate: float | None = None
    """Learning rate of a step."""
    seconds: StepSeconds = field(default=StepSeconds(), compare=False)
    """Device time of a step."""
    version: str | None = None
    """Label of the version that was published."""
    message: str = ""
    """Reason of a failure."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means of the objective's metrics, and those of answers to the validation set."""
    is_best: bool = False
    """Whether an evaluation is the best one so far."""

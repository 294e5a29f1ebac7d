"""What happens to a fine-tuning job, as its owner is told of it."""

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
    """Device time of one optimizer step of a job: its share, by rows, of the engine's steps that it
    was in.
    """

    started_s: float | None = None
    """When the first of these began; None if that is not known."""
    forward_s: float = 0.0
    loss_s: float = 0.0
    backward_s: float = 0.0
    update_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class JobEvent:
    """Something that happened to a job after `step` optimizer steps."""

    job: str
    kind: EventKind
    """A "contribution" is due to the other nodes of a job that is divided among several."""
    step: int
    now_s: float
    loss: float | None = None
    """Mean over trained tokens, or over the units of the objective that are as they should be, of
    the step or of the validation set; so is token_accuracy.
    """
    token_accuracy: float | None = None
    num_trained: int = 0
    num_tokens: int = 0
    """Tokens of a step, trained or not."""
    norm: float | None = None
    """Norm of a step's gradient before clipping; None: it was not finite, and the step was
    skipped."""
    learning_rate: float | None = None
    seconds: StepSeconds = field(default=StepSeconds(), compare=False)
    version: str | None = None
    """Label of the version that was published."""
    message: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means of the objective's metrics, and those of answers to the validation set."""
    is_best: bool = False
    """Whether an evaluation is the best one so far."""

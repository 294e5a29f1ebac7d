"""Hyperparameters of a fine-tuning job: how long it trains, on what at once, and when it evaluates
and publishes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, cos, pi
from typing import TYPE_CHECKING

from coserve.settings import MOST_WHOLE, check_number, check_whole, is_number, shown
from coserve.tuning.early_stopping import TOKEN_ACCURACY, EarlyStopping
from coserve.tuning.evaluation import LOSS, EvaluationConfig
from coserve.tuning.objectives import SUPERVISED, make_objective

if TYPE_CHECKING:
    from coserve.tuning.objectives.base import Objective

# Shapes of the learning rate after the warm-up.
SCHEDULES = ("constant", "linear", "cosine")
# transformers' names, by the shape after the warm-up.
_SCHEDULER_TYPES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
}


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW (arXiv 1711.05101) with a schedule of the learning rate.

    Raises:
        ValueError: A field is out of its range; the message names both.
    """

    learning_rate: float = 1e-4
    """Highest learning rate."""
    weight_decay: float = 0.0
    """Weight decay."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running means of gradients and of their squares."""
    eps: float = 1e-8
    """Term added to the denominator."""
    schedule: str = "constant"
    """Learning rate after the warm-up: constant, or falling to zero at the job's last step, as a
    line or half a cosine.
    """
    warmup_steps: int = 0
    """Steps in which the learning rate rises from zero."""
    max_grad_norm: float = 1.0
    """Norm to which the gradient of all parameters together is scaled down; 0 for no bound."""
    lr_scheduler_type: str | None = None
    """Replaces `schedule` by transformers' names and formulas: the first step of a warm-up has a
    learning rate of zero, and `constant` has no warm-up.
    """
    warmup_ratio: float = 0.0
    """Share of all steps that is the warm-up, with lr_scheduler_type and without warmup_steps."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "eps"):
            check_number(name, getattr(self, name), above=0)
        for name in ("weight_decay", "max_grad_norm"):
            check_number(name, getattr(self, name), least=0)
        if (
            not isinstance(self.betas, tuple)
            or len(self.betas) != 2
            or not all(is_number(beta) and 0 <= beta < 1 for beta in self.betas)
        ):
            raise ValueError(
                f"betas must be two numbers of at least 0 and below 1, not {shown(self.betas)}"
            )
        if self.schedule not in SCHEDULES:
            raise ValueError(
                f"schedule must be one of {', '.join(SCHEDULES)}, not {shown(self.schedule)}"
            )
        check_whole("warmup_steps", self.warmup_steps, 0, MOST_WHOLE)
        check_number("warmup_ratio", self.warmup_ratio, least=0, most=1)
        if self.lr_scheduler_type is not None and self.lr_scheduler_type not in _SCHEDULER_TYPES:
            known = ", ".join(_SCHEDULER_TYPES)
            raise ValueError(
                f"lr_scheduler_type must be one of {known}, not {shown(self.lr_scheduler_type)}"
            )
        if self.warmup_ratio and self.lr_scheduler_type is None:
            raise ValueError("warmup_ratio goes with lr_scheduler_type; schedule has warmup_steps")

    def learning_rate_at(self, step: int, num_steps: int) -> float:
        """Return the learning rate of a job's step (from 0) out of `num_steps`."""
        warmup, schedule = self.warmup_steps, self.schedule
        if self.lr_scheduler_type is None:
            rising = (step + 1) / (warmup + 1)
        else:  # https://huggingface.co/docs/transformers/main_classes/optimizer_schedules
            warmup = (
                0
                if self.lr_scheduler_type == "constant"
                else warmup or ceil(self.warmup_ratio * num_steps)
            )
            rising, schedule = step / max(1, warmup), _SCHEDULER_TYPES[self.lr_scheduler_type]
        if step < warmup:
            return self.learning_rate * rising
        if schedule == "constant":
            return self.learning_rate
        done = min(1.0, (step - warmup) / max(1, num_steps - warmup))
        return self.learning_rate * (
            (1 - done) if schedule == "linear" else (1 + cos(pi * done)) / 2
        )


@dataclass(frozen=True, kw_only=True)
class TuningConfig:
    """Hyperparameters of a job.

    Raises:
        ValueError: A field is out of its range; the message names both.
    """

    num_epochs: int = 1
    """Passes over the examples."""
    batch_size: int = 8
    """Examples of an optimizer step; with an objective, its examples (pairs, for example)."""
    max_sequence_length: int = 1024
    """Tokens to which an example is cut."""
    max_pack_tokens: int | None = None
    """Maximum number of tokens that lie end to end in a pack; None for 1,024, or the longest
    example.
    """
    shuffle: bool = True
    """Whether each epoch takes the examples in another order."""
    seed: int = 0
    """Seed of the order, the adapter's initial values and dropout."""
    evaluate_every_steps: int = 0
    """Optimizer steps between evaluations of the validation set's loss; 0 for one at the end."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Further metrics of an evaluation."""
    best_metric: str = LOSS
    """Metric by which the best evaluation is chosen: loss, token_accuracy, or that of `evaluation`.
    """
    early_stopping: EarlyStopping | None = None
    """Rule by which the job ends before its last step; None, or no validation set, for never."""
    publish_every_steps: int = 0
    """Optimizer steps between versions `name@step` that are served; 0 for one at the end."""
    live: bool = False
    """Whether every step is served at once."""
    max_recompute: float = 0.0
    """Maximum FLOPs for recomputing activations, as a share of the forward and backward pass: the
    job keeps as little as that allows between the two (FlexLLM section 5.2). 0 keeps all that the
    backward pass reads; `coserve inspect` shows the savings of more.
    """
    objective: str = SUPERVISED
    """Training objective (`tuning.objectives`)."""
    objective_settings: Mapping[str, float] = field(default_factory=dict)
    """Settings of the objective."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Settings of the optimizer."""

    def __post_init__(self) -> None:
        for name, least in (
            ("num_epochs", 1),
            ("batch_size", 1),
            ("max_sequence_length", 2),
            ("evaluate_every_steps", 0),
            ("publish_every_steps", 0),
        ):
            check_whole(name, getattr(self, name), least, MOST_WHOLE)
        if self.max_pack_tokens is not None:
            check_whole("max_pack_tokens", self.max_pack_tokens, 2, MOST_WHOLE)
        check_whole("seed", self.seed, 0, 2**63 - 1)
        check_number("max_recompute", self.max_recompute, least=0, most=1)
        for name in ("shuffle", "live"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, not {shown(getattr(self, name))}")
        if not isinstance(self.optimizer, OptimizerConfig):
            raise ValueError(f"optimizer must be an OptimizerConfig, not {self.optimizer!r}")
        if not isinstance(self.evaluation, EvaluationConfig):
            raise ValueError(f"evaluation must be an EvaluationConfig, not {self.evaluation!r}")
        if self.best_metric not in (
            known := (LOSS, TOKEN_ACCURACY, *({self.evaluation.metric} - {LOSS}))
        ):
            raise ValueError(
                f"best_metric must be one of {', '.join(known)}, not {shown(self.best_metric)}"
            )
        if self.early_stopping is not None and not isinstance(self.early_stopping, EarlyStopping):
            raise ValueError(
                f"early_stopping must be an EarlyStopping, not {self.early_stopping!r}"
            )
        if isinstance(self.objective, str):  # as commands and OpenAI's API spell it
            object.__setattr__(self, "objective", self.objective.replace("_", "-"))
        self.make_objective()
        if self.objective != SUPERVISED and self.evaluation.asks:
            raise ValueError(
                f"metric {self.evaluation.metric} goes with the method supervised alone"
            )

    def make_objective(self) -> "Objective | None":
        """Return the objective; None for the next-token loss.

        Raises:
            ValueError: There is no such objective or setting.
        """
        return make_objective(self.objective, self.objective_settings)

    @property
    def needs_reference(self) -> bool:
        """Return whether each pack is also run without the adapter."""
        objective = self.make_objective()
        return objective is not None and objective.needs_reference

    @property
    def counts_packs(self) -> bool:
        """Return whether the examples of a pack are weighed together (`Objective.counts_packs`)."""
        objective = self.make_objective()
        return objective is not None and objective.counts_packs

    @property
    def pack_tokens(self) -> int:
        return self.max_pack_tokens or max(1024, self.max_sequence_length)

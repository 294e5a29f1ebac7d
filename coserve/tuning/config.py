"""What a fine-tuning job is told: how long it trains, on what at once, and when it measures and publishes."""

from dataclasses import dataclass, field
from math import cos, pi

from coserve.settings import MOST_WHOLE, check_number, check_whole, is_number, shown

_SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW (arXiv 1711.05101) with a schedule; ValueError names the field and its range.

    schedule: of the learning rate after `warmup_steps` steps in which it rises from zero: constant, or falling to
    zero at the job's last step, as a line or half a cosine. max_grad_norm: the gradient of all parameters together is
    scaled down to this norm; 0 leaves it.
    """

    learning_rate: float = 1e-4
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    schedule: str = "constant"
    warmup_steps: int = 0
    max_grad_norm: float = 1.0

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
            raise ValueError(f"betas must be two numbers of at least 0 and below 1, not {shown(self.betas)}")
        if self.schedule not in _SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(_SCHEDULES)}, not {shown(self.schedule)}")
        check_whole("warmup_steps", self.warmup_steps, 0, MOST_WHOLE)

    def learning_rate_at(self, step: int, num_steps: int) -> float:
        """The learning rate of a job's step (from 0) out of `num_steps`."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / (self.warmup_steps + 1)
        if self.schedule == "constant":
            return self.learning_rate
        done = min(1.0, (step - self.warmup_steps) / max(1, num_steps - self.warmup_steps))
        return self.learning_rate * ((1 - done) if self.schedule == "linear" else (1 + cos(pi * done)) / 2)


@dataclass(frozen=True, kw_only=True)
class TuningConfig:
    """Hyperparameters of a job; ValueError when created names the field and its range.

    num_epochs: times that every example is used. batch_size: examples of an optimizer step. max_sequence_length: tokens
    to which an example is cut. max_pack_tokens: the most tokens that lie end to end in a pack (None: 1,024, or the
    longest example). shuffle, seed: the order of examples in each epoch, the adapter's initial values, dropout.
    evaluate_every_steps: optimizer steps from one measurement of the validation set's loss to the next (0: at the end
    alone). publish_every_steps: optimizer steps from one version `name@step` to serve to the next (0: at the end
    alone). live: serve every step at once. max_recompute: the most FLOPs that may be spent on computing activations
    again, as a share of the forward and backward pass: the job keeps as little as that allows between the two (FlexLLM
    section 5.2); 0 keeps all that the backward pass reads, `coserve inspect` shows what more would save.
    """

    num_epochs: int = 1
    batch_size: int = 8
    max_sequence_length: int = 1024
    max_pack_tokens: int | None = None
    shuffle: bool = True
    seed: int = 0
    evaluate_every_steps: int = 0
    publish_every_steps: int = 0
    live: bool = False
    max_recompute: float = 0.0
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

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

    @property
    def pack_tokens(self) -> int:
        return self.max_pack_tokens or max(1024, self.max_sequence_length)

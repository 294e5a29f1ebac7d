"""What a fine-tuning job is told: how long it trains, on what at once, and when it measures and publishes."""

from dataclasses import dataclass, field

from coserve.settings import check_whole
from coserve.tuning.optimizer import OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class TuningConfig:
    """Hyperparameters of a job; ValueError when created names the field and its range.

    num_epochs: times that every example is used. batch_size: examples of an optimizer step. max_sequence_length: tokens
    to which an example is cut. max_pack_tokens: the most tokens that lie end to end in a pack (None: 1,024, or the
    longest example). shuffle, seed: the order of examples in each epoch, the adapter's initial values, dropout.
    evaluate_every_steps: optimizer steps from one measurement of the validation set's loss to the next (0: at the end
    alone). publish_every_steps: optimizer steps from one version `name@step` to serve to the next (0: at the end
    alone). live: serve every step at once.
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
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        for name, least in (
            ("num_epochs", 1),
            ("batch_size", 1),
            ("max_sequence_length", 2),
            ("evaluate_every_steps", 0),
            ("publish_every_steps", 0),
        ):
            check_whole(name, getattr(self, name), least)
        if self.max_pack_tokens is not None:
            check_whole("max_pack_tokens", self.max_pack_tokens, 2)
        check_whole("seed", self.seed, 0)
        for name in ("shuffle", "live"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, not {getattr(self, name)!r}")
        if not isinstance(self.optimizer, OptimizerConfig):
            raise ValueError(f"optimizer must be an OptimizerConfig, not {self.optimizer!r}")

    @property
    def pack_tokens(self) -> int:
        return self.max_pack_tokens or max(1024, self.max_sequence_length)

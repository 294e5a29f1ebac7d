"""The optimizer step of a job: mean over trained tokens, clipping, AdamW, a learning-rate schedule."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import cos, isfinite, pi

import torch
from torch import Tensor

from coserve.settings import check_whole, is_number

_STATE = {"step", "exp_avg", "exp_avg_sq"}
_SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW (arXiv 1711.05101) with a schedule; ValueError at birth names the field and its range.

    schedule: of the learning rate behind `warmup_steps` steps in which it rises from zero: constant, or falling to
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
            if not is_number(getattr(self, name)) or getattr(self, name) <= 0:
                raise ValueError(f"{name} must be a number above 0, not {getattr(self, name)!r}")
        for name in ("weight_decay", "max_grad_norm"):
            if not is_number(getattr(self, name)) or getattr(self, name) < 0:
                raise ValueError(f"{name} must be a number of at least 0, not {getattr(self, name)!r}")
        if (
            not isinstance(self.betas, tuple)
            or len(self.betas) != 2
            or not all(is_number(beta) and 0 <= beta < 1 for beta in self.betas)
        ):
            raise ValueError(f"betas must be two numbers of at least 0 and below 1, not {self.betas!r}")
        if self.schedule not in _SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(_SCHEDULES)}, not {self.schedule!r}")
        check_whole("warmup_steps", self.warmup_steps, 0)

    def learning_rate_at(self, step: int, num_steps: int) -> float:
        """The learning rate of a job's step (from 0) out of `num_steps`."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / (self.warmup_steps + 1)
        if self.schedule == "constant":
            return self.learning_rate
        done = min(1.0, (step - self.warmup_steps) / max(1, num_steps - self.warmup_steps))
        return self.learning_rate * ((1 - done) if self.schedule == "linear" else (1 + cos(pi * done)) / 2)


class AdapterOptimizer:
    """AdamW on an adapter's float32 masters, in place."""

    def __init__(self, masters: Mapping[str, Tensor], config: OptimizerConfig) -> None:
        self.config = config
        self.num_steps_done = 0
        self._masters = masters
        self._adamw = torch.optim.AdamW(
            list(masters.values()),
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            fused=True,
            weight_decay=config.weight_decay,
        )

    def step(self, gradients: Mapping[str, Tensor], *, num_trained: int, num_steps: int) -> float | None:
        """One step with the summed gradients of `num_trained` trained rows, of a job of `num_steps` steps.

        Returns the gradient's norm before clipping; None if it is not finite: then nothing has changed but the step
        count.
        """
        mean = [gradients[name] / num_trained for name in self._masters]
        norm = float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(mean))))
        rate = self.config.learning_rate_at(self.num_steps_done, num_steps)
        self.num_steps_done += 1
        if not isfinite(norm):
            return None
        if 0 < self.config.max_grad_norm < norm:
            torch._foreach_mul_(mean, self.config.max_grad_norm / (norm + 1e-6))
        for group in self._adamw.param_groups:
            group["lr"] = rate
        for master, gradient in zip(self._masters.values(), mean, strict=True):
            master.grad = gradient
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        return norm

    def state(self) -> dict[str, Tensor]:
        """All that a checkpoint needs, as tensors by name; `load_state` is the inverse."""
        tensors = {"num_steps_done": torch.tensor(self.num_steps_done)}
        for name, master in self._masters.items():
            for field, value in self._adamw.state.get(master, {}).items():
                tensors[f"{name}/{field}"] = value.clone(memory_format=torch.contiguous_format)
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on where `state` was taken; ValueError, and nothing has changed, if these are not this adapter's."""
        num_steps_done = int(tensors["num_steps_done"])
        states: dict[str, dict[str, Tensor]] = {}
        for name, master in self._masters.items():
            fields = {key.rsplit("/", 1)[1]: value for key, value in tensors.items() if key.rsplit("/", 1)[0] == name}
            fields.pop("num_steps_done", None)
            if (fields and fields.keys() != _STATE) or (
                num_steps_done and not fields and any("/" in key for key in tensors)
            ):
                raise ValueError(f"the optimizer's state of {name} must have {', '.join(sorted(_STATE))}")
            if any(value.shape != master.shape for field, value in fields.items() if field != "step"):
                raise ValueError(f"the optimizer's state of {name} must have its shape, {list(master.shape)}")
            # Fused, it keeps even the count of its steps beside the parameter.
            states[name] = {field: value.to(master.device, copy=True) for field, value in fields.items()}
        self.num_steps_done = num_steps_done
        for name, master in self._masters.items():
            self._adamw.state[master] = states[name]

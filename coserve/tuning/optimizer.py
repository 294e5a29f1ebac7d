"""The optimizer step of a job: mean over trained tokens, clipping, AdamW, a learning-rate
schedule.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from coserve.tuning.config import OptimizerConfig

_MOMENTS = ("exp_avg", "exp_avg_sq")
_STATE = {"step", *_MOMENTS}

# Of each parameter, in float32.
NUM_MOMENTS = len(_MOMENTS)


class AdapterOptimizer:
    """AdamW on an adapter's float32 masters, in place."""

    def __init__(
        self,
        masters: Mapping[str, Tensor],
        config: OptimizerConfig,
        norm_of: Callable[[Mapping[str, Tensor]], Tensor] | None = None,
    ) -> None:
        """Begin without moments.

        Args:
            masters: Parameters by name.
            config: Settings of the optimizer.
            norm_of: Function that returns the norm of gradients by name, float32 [], where ranks
                hold parts of them (`RankGradients.norm`); None for whole gradients.
        """
        assert all(master.is_contiguous() for master in masters.values()), (
            "fused AdamW goes by where elements lie"
        )
        self.config, self._norm_of = config, norm_of or norm_of_all
        self.num_steps_done = 0
        self.room: Mapping[str, Tensor] | None = None
        """Where the moments are to lie from the first step on, by name; None: anywhere."""
        self._masters = masters
        self._states: dict[str, dict[str, Tensor]] = {}  # by master; none before the first step

    def step(self, gradients: Mapping[str, Tensor], *, num_trained: int, num_steps: int) -> Tensor:
        """Make one step with the summed gradients of `num_trained` trained rows, of a job of
        `num_steps` steps.

        Returns the mean gradient's norm before clipping, float32 []; where it is not finite,
        nothing changes but the step count. Waits for nothing on the device, where the norm decides
        (`found_inf`, as in PyTorch's GradScaler). Mean and clipping are one number by which AdamW
        divides as it reads the gradients (`grad_scale`, likewise), which overwrites them.
        """
        # In the order of the masters.
        sums = {name: gradients[name] for name in self._masters}
        norm = self._norm_of(sums) / num_trained
        divisor = torch.full_like(norm, num_trained)
        if bound := self.config.max_grad_norm:
            # As `torch.nn.utils.clip_grad_norm_` clips; it adds the same 1e-6.
            divisor *= torch.where(norm > bound, (norm + 1e-6) / bound, 1.0)
        rate = self.config.learning_rate_at(self.num_steps_done, num_steps)
        self.num_steps_done += 1
        self._begin()
        self._update(
            [each.contiguous() for each in sums.values()], rate, divisor, (~norm.isfinite()).float()
        )
        return norm

    def _begin(self) -> None:
        """Add the state that AdamW begins with, where a master has none; moments lie in `room`, if
        there is one.
        """
        for name, master in self._masters.items():
            if not self._states.get(name):
                moments = {
                    field: torch.zeros_like(master)
                    if self.room is None
                    else self.room[f"{name}/{field}"].zero_()
                    for field in _MOMENTS
                }
                step = torch.zeros((), dtype=torch.float32, device=master.device)
                self._states[name] = {"step": step} | moments

    @torch.no_grad()
    def _update(
        self, gradients: list[Tensor], rate: float, divisor: Tensor, found_inf: Tensor
    ) -> None:
        """Run the fused kernel that `torch.optim.AdamW(fused=True)` runs.

        The class itself imports torch._dynamo when it is first used, which would stop the engine's
        loop for a second.
        """
        states = [self._states[name] for name in self._masters]
        steps = [state["step"] for state in states]
        beta1, beta2 = self.config.betas
        # Counted before the kernel runs, whose bias correction reads the number of this step.
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            list(self._masters.values()),
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            steps,
            lr=rate,
            beta1=beta1,
            beta2=beta2,
            weight_decay=self.config.weight_decay,
            eps=self.config.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
            found_inf=found_inf,
        )
        # A step that was left out is not counted.
        torch._foreach_sub_(steps, [found_inf] * len(steps))

    def moment_shapes(self) -> dict[str, Tensor]:
        """Return tensors without memory, of the shapes and strides of `moments`, also before the
        first step.
        """
        return {
            f"{name}/{field}": torch.empty_like(master, device="meta")
            for name, master in self._masters.items()
            for field in _MOMENTS
        }

    @property
    def moments(self) -> dict[str, Tensor]:
        """Return the running means of gradients and of their squares, named as in `state`; empty
        before the first step.
        """
        return {
            f"{name}/{field}": self._states[name][field]
            for name in self._masters
            if self._states.get(name)  # nothing, too, after a checkpoint from before the first step
            for field in _MOMENTS
        }

    def replace_moments(self, moments: Mapping[str, Tensor]) -> None:
        """Continue with these tensors, of the same names."""
        for key, value in moments.items():
            name, _, field = key.rpartition("/")
            self._states[name][field] = value

    def state(self, *, on_host: bool = False) -> dict[str, Tensor]:
        """Return copies of all tensors that a checkpoint needs, by name, for `load_state`.

        Args:
            on_host: Whether they are copied to the CPU.
        """
        tensors = {"num_steps_done": torch.tensor(self.num_steps_done)}
        for name in self._masters:
            for field, value in self._states.get(name, {}).items():
                device = "cpu" if on_host else value.device
                tensors[f"{name}/{field}"] = value.to(
                    device, copy=True, memory_format=torch.contiguous_format
                )
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor], *, on_host: bool = False) -> None:
        """Continue where `state` was taken.

        Args:
            on_host: Whether the moments stay on the CPU, from where they must be moved before a
                step.

        Raises:
            ValueError: The tensors are not this adapter's; nothing has changed.
        """
        num_steps_done = int(tensors["num_steps_done"])
        states: dict[str, dict[str, Tensor]] = {}
        for name, master in self._masters.items():
            fields = {
                key.rsplit("/", 1)[1]: value
                for key, value in tensors.items()
                if key.rsplit("/", 1)[0] == name
            }
            fields.pop("num_steps_done", None)
            if (fields and fields.keys() != _STATE) or (
                num_steps_done and not fields and any("/" in key for key in tensors)
            ):
                raise ValueError(
                    f"the optimizer's state of {name} must have {', '.join(sorted(_STATE))}"
                )
            if any(
                value.shape != master.shape for field, value in fields.items() if field != "step"
            ):
                raise ValueError(
                    f"the optimizer's state of {name} must have its shape, {list(master.shape)}"
                )
            # The fused kernel needs the count of steps on the parameter's device, too.
            states[name] = {
                field: value.to(
                    "cpu" if on_host and field in _MOMENTS else master.device, copy=True
                )
                for field, value in fields.items()
            }
        self.num_steps_done = num_steps_done
        self._states = states


def norm_of_all(gradients: Mapping[str, Tensor]) -> Tensor:
    """Return the norm of whole gradients, float32 []."""
    norm: Tensor = torch.linalg.vector_norm(
        torch.stack(torch._foreach_norm(list(gradients.values())))
    )
    return norm

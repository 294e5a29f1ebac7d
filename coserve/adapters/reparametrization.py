"""Parameters that are trained in place of an adapter's own, where a method's settings ask for
that.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from coserve.graph.layouts import WHOLE, AnyState


class HasMasters(Protocol):
    """An adapter, as far as its parameters go; see `Adapter`."""

    masters: dict[str, Tensor]

    def sync_compute_copy(self) -> None:
        """Bring all else up to the masters."""
        ...


class Reparametrization(ABC):
    """Parameters that are trained in place of an adapter's own, which follow from them.

    parameters: float32, by name; moved in place by the optimizer.
    """

    parameters: dict[str, Tensor]

    @abstractmethod
    def compose(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The adapter's parameters that follow from these; PyTorch differentiates it."""

    def state_of(self, name: str, states: Mapping[str, AnyState]) -> AnyState:
        """Return how ranks divide a parameter; here: as they divide the adapter's parameter of its
        name.

        Args:
            name: the parameter's.
            states: those of the adapter's parameters, by full name; what is left out is whole.
        """
        return states.get(name, WHOLE)

    def published(self) -> Mapping[str, Tensor]:
        """The adapter's parameters for a version; here: those that are trained with."""
        return self.compose(self.parameters)

    def penalty(self, parameters: Mapping[str, Tensor]) -> Tensor | None:
        """What the loss, the mean over trained tokens, has beside; None: nothing."""
        return None

    @torch.inference_mode()
    def apply(self, adapter: HasMasters) -> None:
        """Bring an adapter up to the parameters."""
        for name, value in self.compose(self.parameters).items():
            adapter.masters[name].copy_(value)
        adapter.sync_compute_copy()

    def state(self) -> dict[str, Tensor]:
        """Copies of the parameters for a checkpoint, whose adapter alone does not say them."""
        return {f"{name}/value": value.clone() for name, value in self.parameters.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Continue with the parameters of a checkpoint; the rest of it. KeyError names what it
        lacks.
        """
        rest = dict(state)
        for name, value in self.parameters.items():
            value.copy_(rest.pop(f"{name}/value"))
        return rest

    def pull_back(self, gradients: Mapping[str, Tensor], *, num_trained: int) -> dict[str, Tensor]:
        """From the gradients of the adapter's parameters, summed over `num_trained` tokens, to
        those of the parameters that are trained: once in an optimizer step, on tensors of an
        adapter's size. Where ranks divide the model, both are complete gradients of what this rank
        holds.
        """
        with torch.inference_mode(False), torch.enable_grad():
            leaves = {
                name: value.clone().requires_grad_() for name, value in self.parameters.items()
            }
            made = {
                name: value for name, value in self.compose(leaves).items() if value.requires_grad
            }
            given = [gradients[name].clone() for name in made]
            outputs = list(made.values())
            if (penalty := self.penalty(leaves)) is not None:
                outputs, given = (
                    [*outputs, penalty],
                    [*given, torch.full_like(penalty, num_trained)],
                )
            found = torch.autograd.grad(outputs, list(leaves.values()), given)
        # The fused optimizer takes them as they lie in memory.
        return {name: gradient.contiguous() for name, gradient in zip(leaves, found, strict=True)}

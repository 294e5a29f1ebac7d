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
    """The part of an adapter that concerns its parameters; see `Adapter`."""

    masters: dict[str, Tensor]
    """Parameters, float32, by full name."""

    def sync_compute_copy(self) -> None:
        """Update everything else from the masters."""


class Reparametrization(ABC):
    """Parameters that are trained in place of an adapter's own, which are computed from them."""

    parameters: dict[str, Tensor]
    """Parameters, float32, by name; the optimizer changes them in place."""

    @abstractmethod
    def compose(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the adapter's parameters from these; PyTorch differentiates it."""

    def state_of(self, name: str, states: Mapping[str, AnyState]) -> AnyState:
        """Return how ranks divide a parameter; by default as they divide the adapter's parameter of
        its name.

        Args:
            name: the parameter's name.
            states: states of the adapter's parameters, by full name; parameters that are left out
                are whole.
        """
        return states.get(name, WHOLE)

    def published(self) -> Mapping[str, Tensor]:
        """Return the adapter's parameters for a version; by default those that are trained with."""
        return self.compose(self.parameters)

    def penalty(self, parameters: Mapping[str, Tensor]) -> Tensor | None:
        """Return an addition to the loss, the mean over trained tokens; None: nothing."""
        return None

    @torch.inference_mode()
    def apply(self, adapter: HasMasters) -> None:
        """Update an adapter from the parameters."""
        for name, value in self.compose(self.parameters).items():
            adapter.masters[name].copy_(value)
        adapter.sync_compute_copy()

    def state(self) -> dict[str, Tensor]:
        """Return copies of the parameters for a checkpoint, whose adapter alone does not determine
        them.
        """
        return {f"{name}/value": value.clone() for name, value in self.parameters.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Resume from the parameters of a checkpoint; return the tensors that are left.

        Raises:
            KeyError: one is missing.
        """
        rest = dict(state)
        for name, value in self.parameters.items():
            value.copy_(rest.pop(f"{name}/value"))
        return rest

    def pull_back(self, gradients: Mapping[str, Tensor], *, num_trained: int) -> dict[str, Tensor]:
        """Return the gradients of the trained parameters, once in an optimizer step, on tensors of
        an adapter's size. Where ranks divide the model, all gradients are complete for the part
        that this rank holds.

        Args:
            gradients: gradients of the adapter's parameters, summed over `num_trained` tokens.
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

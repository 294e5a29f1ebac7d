"""Gradients of an optimizer step among ranks that hold a model together.

Of some parameters each rank has a part of the gradient. The parts are added up once for each step,
so that a parameter which several ranks hold has the same bits on all of them, before and after the
step.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from coserve.graph.layouts import WHOLE, AnyState
from coserve.kernels.cuts import Cut
from coserve.kernels.groups.base import RankGroup
from coserve.models.shares import owned


class RankGradients:
    """One rank's side of the exchange. Every rank has to call each method, in the same order."""

    def __init__(
        self, group: RankGroup, states: Mapping[str, AnyState], summed: tuple[str, ...]
    ) -> None:
        """Set the division of a job's parameters.

        Args:
            group: The ranks.
            states: Layouts by full name; parameters that are left out are whole.
            summed: Names of the parameters of whose gradient each rank has a part.
        """
        self._group, self._states, self._summed = group, states, frozenset(summed)

    @torch.inference_mode()
    def complete(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradients of all ranks' losses together, of what this rank holds; those given
        are overwritten.

        A whole gradient that every rank has computed is taken from rank 0: sums of equal numbers
        may differ in their last bits from process to process, and masters that differ would drift
        apart.
        """
        whole, group = dict(gradients), self._group
        if group.size == 1:
            return whole
        brought = {
            name: part
            for name in gradients
            if (part := self._part(name, gradients[name])) is not None
        }
        sums = group.sum_several(list(brought.values()), "gradients")
        for name, total in zip(brought, sums, strict=True):
            state = self._states.get(name, WHOLE)
            if isinstance(state, Cut):
                state.put_copied(whole[name], total, group.rank)
            else:
                whole[name] = total
        return whole

    def _part(self, name: str, gradient: Tensor) -> Tensor | None:
        """Return the term that this rank adds to a sum over all ranks; None for a gradient that is
        not summed.
        """
        state, rank = self._states.get(name, WHOLE), self._group.rank
        if isinstance(state, Cut):
            return state.copied(gradient, rank) if name in self._summed else None
        if state is not WHOLE:
            return None
        return gradient if name in self._summed or not rank else torch.zeros_like(gradient)

    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return the norm of the whole gradient, float32 [], with the same bits on every rank.

        Args:
            gradients: Complete gradients by name, at least one.
        """
        group, parts, some = self._group, list[Tensor](), next(iter(gradients.values()))
        for name, gradient in gradients.items():
            part = owned(gradient, self._states.get(name, WHOLE), group.rank)
            if part is not None:
                parts.append(part)
        own = (
            torch.linalg.vector_norm(torch.stack(torch._foreach_norm(parts)))
            if parts
            else some.new_zeros(())
        )
        return (
            torch.linalg.vector_norm(group.all_gather(own, "gradient norm"))
            if group.size > 1
            else own
        )

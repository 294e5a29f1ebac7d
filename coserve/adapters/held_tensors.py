"""Files of tensors that have the shapes of an adapter's parameters, of which ranks hold pieces.

A file has the whole tensors, whatever number of ranks writes or reads it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from coserve.adapters.tensor_files import TensorFile, write_tensors
from coserve.graph.layouts import WHOLE, AnyState
from coserve.kernels.cuts import Cut
from coserve.kernels.groups.base import Ranks
from coserve.models.regions import TensorView, region_blocks
from coserve.models.shared_files import FileTensor, write_shared_tensors


@dataclass(frozen=True, kw_only=True)
class HeldTensors:
    """A rank's share of tensors that have the shapes of parameters: moments of an optimizer,
    gradients, masters.

    Their names are those of the parameters, or these and what they are ("…/exp_avg"); single
    numbers are whole.
    """

    states: Mapping[str, AnyState]
    """States of the parameters by name: how ranks divide each; what is left out is whole."""
    ranks: Ranks
    """Number of this rank in its group, and their number."""

    def write(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write a file of whole tensors; of several ranks, each writes what it holds (see
        `shared_files`).

        Raises:
            OSError: it cannot be written.
        """
        if self.ranks.size == 1:
            write_tensors(path, tensors)
        else:
            write_shared_tensors(
                path,
                {name: self._written(name, each) for name, each in tensors.items()},
                self.ranks,
            )

    def _written(self, name: str, tensor: Tensor) -> FileTensor:
        state = self._state(name, tensor.ndim)
        shape = whole_shape(tuple(tensor.shape), state)
        regions = partial(TensorView.all_of(shape).owned_regions, tensor, state, self.ranks.rank)
        return FileTensor(shape=shape, dtype=tensor.dtype, blocks=region_blocks(regions, shape))

    def whole_shape(self, parameter: str, own: Tensor) -> tuple[int, ...]:
        """Return the shape of a whole parameter of which this rank holds `own`."""
        return whole_shape(tuple(own.shape), self._state(parameter, own.ndim))

    def read(self, file: TensorFile, name: str, finite_in: torch.dtype | None = None) -> Tensor:
        """Return what this rank holds of a file's tensor.

        Args:
            file: one that `write` has written, whose names and shapes have been checked.
            name: that of the tensor.
            finite_in: the type that its numbers must be finite in; None: they may be anything.

        Raises:
            AdapterError: numbers are not finite.
        """
        shape = file.headers[name].shape
        state = self._state(name, len(shape))
        if state is WHOLE:
            return file.read(name) if finite_in is None else file.read_finite(name, finite_in)
        return read_piece(
            file, name, TensorView.all_of(shape), shape, state, self.ranks.rank, finite_in
        )

    def _state(self, name: str, num_dims: int) -> AnyState:
        return (
            self.states.get(name, self.states.get(name.rpartition("/")[0], WHOLE))
            if num_dims
            else WHOLE
        )


def read_piece(
    file: TensorFile,
    name: str,
    view: TensorView,
    shape: tuple[int, ...],
    state: AnyState,
    rank: int,
    finite_in: torch.dtype | None,
) -> Tensor:
    """Return what a rank holds of a tensor that a file has a view of, float32; zeros where the rank
    holds none.

    Args:
        file: to be read.
        name: of the tensor in the file.
        view: how the file's tensor views the whole one.
        shape: of the whole tensor.
        state: how ranks divide it.
        rank: number of the rank.
        finite_in: the type that numbers must be finite in; None: they may be anything.

    Raises:
        AdapterError: what is read holds numbers that are not finite.
    """
    own = torch.zeros(state.local_shape(shape) if isinstance(state, Cut) else shape)
    for region in view.regions(own, state, rank):
        region.part.copy_(
            file.read_finite(name, finite_in, region.at)
            if finite_in is not None
            else file.read(name, region.at)
        )
    return own


def whole_shape(shape: tuple[int, ...], state: AnyState) -> tuple[int, ...]:
    """Return the shape of a whole tensor from that of a rank's piece."""
    if not isinstance(state, Cut):
        return shape
    place = len(shape) + state.dim
    return (*shape[:place], state.width, *shape[place + 1 :])

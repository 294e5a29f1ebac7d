"""The files of an adapter that ranks hold in pieces: each rank writes, and reads, what it holds.

PEFT's file has most parameters as they are or transposed; there a rank knows its block of the
file's tensor. What the file has in another form (tables side by side, experts' matrices stacked) is
made whole with zeros for other ranks' elements, and only the rank's own are written.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from coserve.adapters.attached import AdapterGraphs
from coserve.adapters.file_names import CONFIG_FILE, WEIGHTS_FILE
from coserve.adapters.frozen_weights import FROZEN
from coserve.adapters.held_tensors import read_piece
from coserve.adapters.layout import AdapterLayout
from coserve.adapters.tensor_files import TensorFile
from coserve.graph.layouts import WHOLE, AnyState
from coserve.kernels.cuts import Cut
from coserve.kernels.groups.base import Ranks
from coserve.models.base import Architecture
from coserve.models.regions import TensorView, marked_blocks, region_blocks
from coserve.models.shared_files import FileTensor, write_shared_bytes, write_shared_tensors


class PeftForm(Protocol):
    """The part of a method that concerns the tensors of PEFT's file; see `AdapterConfig`."""

    def to_peft_tensors(
        self, values: Mapping[str, Tensor], layout: AdapterLayout
    ) -> dict[str, Tensor]:
        """Return parameters as PEFT's files have them."""

    def from_peft_tensors(
        self, tensors: Mapping[str, Tensor], layout: AdapterLayout
    ) -> dict[str, Tensor]:
        """Return parameters from PEFT's tensors."""

    def frozen_file_name(self, module: str, architecture: Architecture) -> str:
        """Return what PEFT's file calls a weight that the adapter brings."""
        ...


@dataclass(frozen=True, kw_only=True)
class DividedAdapter:
    """An adapter of a model that is divided among ranks, as far as its files go."""

    form: PeftForm
    """The method."""
    layout: AdapterLayout
    """Names and shapes of its whole tensors."""
    graphs: AdapterGraphs
    """States of the parameters: how ranks divide each."""
    ranks: Ranks
    """Number of this rank in its group, and their number."""

    def state(self, parameter: str) -> AnyState:
        """Return how ranks divide a parameter, by its full name."""
        return self.graphs.states.get(parameter, WHOLE)

    def write(
        self,
        directory: Path,
        masters: Mapping[str, Tensor],
        config: bytes,
        frozen_weights: Mapping[str, Tensor],
    ) -> None:
        """Write this rank's pieces of the adapter's files; see `shared_files`.

        Args:
            directory: of the adapter.
            masters: what the rank holds of the parameters.
            config: content of PEFT's configuration.
            frozen_weights: what the rank holds of the weights that are not trained, by module.

        Raises:
            OSError: they cannot be written.
        """
        tensors = self.tensors(masters) | self._frozen_tensors(frozen_weights)
        write_shared_tensors(directory / WEIGHTS_FILE, tensors, self.ranks)
        write_shared_bytes(directory / CONFIG_FILE, config, self.ranks)

    def tensors(self, masters: Mapping[str, Tensor]) -> dict[str, FileTensor]:
        """Return PEFT's tensors, as this rank writes them. masters: what it holds of the
        parameters.
        """
        viewed, shapes = self._views()
        found = {
            name: self._viewed_tensor(each, masters[each.parameter])
            for name, each in viewed.items()
        }
        # Usual for LoRA and the like: every tensor of the file is a block of one parameter.
        if not shapes.keys() - viewed.keys():
            return found
        layout, rank = self.layout, self.ranks.rank
        # The method converts whole tensors: once the values, and once which elements are this
        # rank's.
        values, marks = self._without_memory(torch.float32), self._without_memory(torch.bool)
        for name in layout.shapes.keys() - {each.parameter for each in viewed.values()}:
            state, master = self.state(name), masters[name].detach().cpu()
            values[name] = _put(master, state, layout.shapes[name], rank)
            marks[name] = _put(_owned_marks(master, state, rank), state, layout.shapes[name], rank)
        own_marks = self.form.to_peft_tensors(marks, layout)
        for name, value in self.form.to_peft_tensors(values, layout).items():
            if name not in viewed:
                own = own_marks[name]
                if (
                    own.dtype != torch.bool
                ):  # it follows from the method's settings, alike on every rank
                    # Such as VeRA's projections: rank 0 alone writes them.
                    own = torch.full(value.shape, rank == 0)
                blocks = partial(marked_blocks, value, own)
                found[name] = FileTensor(
                    shape=tuple(value.shape), dtype=torch.float32, blocks=blocks
                )
        return found

    def _frozen_tensors(self, frozen_weights: Mapping[str, Tensor]) -> dict[str, FileTensor]:
        """Return PEFT's tensors of the weights that are not trained, as this rank writes them."""
        frozen, architecture = self.layout.frozen, self.layout.architecture
        if frozen is None:
            return {}
        shapes, written = frozen.shapes(architecture), dict[str, FileTensor]()
        for module, tensor in frozen_weights.items():
            shape, state = shapes[module], self.state(f"{module}.{FROZEN}")
            regions = partial(
                TensorView.all_of(shape).owned_regions, tensor, state, self.ranks.rank
            )
            written[module] = FileTensor(
                shape=shape, dtype=tensor.dtype, blocks=region_blocks(regions, shape)
            )
        return frozen.in_files(written, architecture, self.form.frozen_file_name)

    def read(self, file: TensorFile, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the parameters by full name, of which this rank reads what it holds; some are
        whole.

        Args:
            file: PEFT's, whose names and shapes have been checked.
            dtype: that numbers must be finite in.

        Raises:
            AdapterError: what is read holds numbers that are not finite.
        """
        viewed, shapes = self._views()
        found, tensors = dict[str, Tensor](), dict[str, Tensor]()
        for name, shape in shapes.items():
            if (each := viewed.get(name)) is None:
                tensors[name] = file.read_finite(name, dtype)
                continue
            # A stand-in of the right shape, since `from_peft_tensors` expects every tensor.
            tensors[name] = torch.zeros(()).expand(shape)
            # A shared parameter may be in the file under several names.
            if each.parameter not in found:
                state, whole = self.state(each.parameter), self.layout.shapes[each.parameter]
                found[each.parameter] = read_piece(
                    file, name, each.view, whole, state, self.ranks.rank, dtype
                )
        return {**self.form.from_peft_tensors(tensors, self.layout), **found}

    def _views(self) -> tuple[dict[str, "_Viewed"], dict[str, tuple[int, ...]]]:
        """Return the tensors of PEFT's file that are views of a parameter, and the shapes of all of
        them.
        """
        viewed, shapes = dict[str, _Viewed](), dict[str, tuple[int, ...]]()
        with torch.inference_mode(False):  # within, views do not say what they are of
            # On the meta device: only what is a view of what matters.
            absent = {
                name: torch.empty(shape, device="meta")
                for name, shape in self.layout.shapes.items()
            }
            owners = {id(tensor): name for name, tensor in absent.items()}
            for name, tensor in self.form.to_peft_tensors(absent, self.layout).items():
                shapes[name] = tuple(tensor.shape)
                base = tensor if tensor._base is None else tensor._base
                if (owner := owners.get(id(base))) is not None and (
                    view := TensorView.of(tensor, base)
                ) is not None:
                    viewed[name] = _Viewed(parameter=owner, view=view)
        return viewed, shapes

    def _viewed_tensor(self, each: "_Viewed", master: Tensor) -> FileTensor:
        regions = partial(
            each.view.owned_regions, master, self.state(each.parameter), self.ranks.rank
        )
        shape = each.view.shape
        return FileTensor(shape=shape, dtype=torch.float32, blocks=region_blocks(regions, shape))

    def _without_memory(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return zeros in place of all parameters, which take no memory."""
        return {
            name: torch.zeros((), dtype=dtype).expand(shape)
            for name, shape in self.layout.shapes.items()
        }


@dataclass(frozen=True, kw_only=True)
class _Viewed:
    """A tensor of PEFT's file that is a view of a parameter."""

    parameter: str
    """Full name of the parameter."""
    view: TensorView
    """The view that the file has of it."""


def _owned_marks(own: Tensor, state: AnyState, rank: int) -> Tensor:
    """Return which elements of a rank's tensor it writes, bool, of its shape."""
    if isinstance(state, Cut):
        return state.owned(torch.ones(own.shape, dtype=torch.bool), rank)
    return torch.full(own.shape, rank == 0)


def _put(own: Tensor, state: AnyState, shape: tuple[int, ...], rank: int) -> Tensor:
    """Return a whole tensor with what a rank holds of it, and zeros elsewhere."""
    if not isinstance(state, Cut):
        return own
    whole = own.new_zeros(shape)
    state.put(whole, own, rank)
    return whole

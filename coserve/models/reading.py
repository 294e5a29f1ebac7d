"""Loading of a checkpoint: from safetensors files in Hugging Face's layout to the dtype and device
of the weights.

A rank of a group reads its own pieces of plain tensors. Where a piece depends on whole rows, or a
weight is made from several quantised tensors, the whole weight is made and then cut, one at a time.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coserve.errors import WeightsError
from coserve.graph.layouts import FIRST
from coserve.kernels.cuts import Cut
from coserve.kernels.weights import Weight
from coserve.models.entries import TensorEntry, open_file
from coserve.models.files import some_of
from coserve.models.local import LocalModel
from coserve.models.quantised.base import Quantisation
from coserve.models.shares import WeightShares, piece
from coserve.models.stored import AsItIs, Index, Pieces
from coserve.models.weights import (
    Weights,
    WeightStorage,
    check_tied_head,
    find_weights,
    joined_weights,
    quantisation_of_model,
    stored_head,
)

# Told how many tensors have been loaded, and of how many.
Progress = Callable[[int, int], None]
# Reads a tensor of a checkpoint, or the part of it that an index says.
Read = Callable[[Index], Tensor]

_log = logging.getLogger(__name__)


def load_weights(
    local: LocalModel, directory: Path, storage: WeightStorage, *, progress: Progress | None = None
) -> Weights:
    """Load a rank's share of a checkpoint's weights; one rank loads all of them.

    Names, shapes and types are checked before the first tensor is read. Weights of a quantised
    checkpoint are made from their tensors one by one, and the rounding error of their storage here
    is logged.

    Raises:
        WeightsError: a file is missing or damaged, or a tensor is missing, unknown, misshapen or
            not of a float type; the message names it.
    """
    architecture = local.architecture
    found, quantisation = find_weights(architecture, directory), quantisation_of_model(architecture)
    loading, rounding = _Loading(local, storage), Rounding()
    device, dtype = storage.backend.device, storage.dtype
    for file, entries in groupby(found.items(), key=lambda item: item[1].file):
        with open_file(file) as reader:
            for name, entry in entries:
                if name in architecture.stored_shapes:
                    if entry.parts:
                        assert quantisation is not None
                        weight = _dequantised(entry, reader, quantisation, device)
                        rounding.add(name, *loading.take_made(name, weight))
                    else:
                        loading.take(name, partial(entry.read, reader))
                    if progress is not None:
                        progress(len(loading.weights), len(architecture.weight_shapes))
    if unread := [
        name
        for name in found
        if name not in architecture.stored_shapes and name != stored_head(architecture)
    ]:
        _log.info(
            "%d tensors are left unread, which the text model does not have: %s",
            len(unread),
            some_of(unread),
        )
    if quantisation is not None and rounding.num_weights and local.ranks.rank == 0:
        _log.info("%s, %s", quantisation.words, rounding.words(storage.weight_format, dtype))
    head = found.get(stored_head(architecture)) if architecture.tied else None
    if head is not None and not head.parts:
        name = f"{architecture.embedding_name}.weight"
        table = loading.weights[name]
        assert isinstance(table, Tensor)
        check_tied_head(head, table, loading.pieces(name)[0])
    return joined_weights(local, loading.weights, storage)


class _Loading:
    """Weights by full name, built from a checkpoint's tensors as they come."""

    def __init__(self, local: LocalModel, storage: WeightStorage) -> None:
        self.weights: dict[str, Tensor | Weight] = {}
        self._architecture = local.architecture
        self._storage = storage
        self._shares = WeightShares(local)
        self._owners = {
            tensor: (name, index)
            for name, stored in self._architecture.stored.items()
            for index, tensor in enumerate(stored.names)
        }
        # Unfinished weights, with the pieces of each of their tensors and the number of tensors
        # that are still to come.
        self._partial: dict[str, tuple[Tensor, Sequence[Pieces], int]] = {}

    def take(self, tensor_name: str, read: Read) -> None:
        """Read the next tensor, as far as this rank needs it."""
        name, number = self._owners[tensor_name]
        if self._shares.state(name) is FIRST and self._shares.rank:
            self.weights[name] = self._empty(self._architecture.weight_shapes[name]).zero_()
        elif type(self._architecture.stored[name]) is AsItIs and self._cut(name) is None:
            self._hold(
                name, read(()).to(device=self._storage.backend.device, dtype=self._storage.dtype)
            )
        else:
            target, pieces, missing = (
                self._partial.pop(name) if name in self._partial else self._begin(name)
            )
            for index, place in pieces[number]:
                place.view(target).copy_(read(index))
            if missing > 1:
                self._partial[name] = target, pieces, missing - 1
            else:
                self._hold(name, target)

    def take_made(self, tensor_name: str, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Take a tensor that was made of several quantised ones, float32.

        Returns:
            This rank's share of it, before and after its conversion to the form in which it is
            stored.
        """
        self.take(tensor_name, lambda index: tensor[index])
        name, _ = self._owners[tensor_name]
        # The weight is made of several tensors, and is dense.
        if type(self._architecture.stored[name]) is not AsItIs:
            return tensor, tensor.to(self._storage.dtype)
        held = self.weights[name]
        dense = held if isinstance(held, Tensor) else held.dense()
        return piece(tensor, self._shares.state(name), self._shares.rank), dense

    def pieces(self, name: str) -> list[Pieces]:
        """Return which parts of each tensor of a weight are read, and where they go."""
        shape, cut = self._architecture.weight_shapes[name], self._cut(name)
        places = self._architecture.stored[name].places(shape)
        if cut is None:
            return [(((), place),) for place in places]
        return [place.of_rank(shape, cut, self._shares.rank) for place in places]

    def _cut(self, name: str) -> Cut | None:
        """Return the cut by which this rank reads pieces of a weight; None where it reads all of
        it.
        """
        state = self._shares.state(name)
        if not isinstance(state, Cut) or self._storage.needs_whole(self._architecture, name, state):
            return None
        return state

    def _begin(self, name: str) -> tuple[Tensor, Sequence[Pieces], int]:
        """Return an entry of `_partial` for a weight of which no tensor has come."""
        shape = self._architecture.weight_shapes[name]
        cut = self._cut(name)
        pieces = self.pieces(name)
        target = self._empty(shape if cut is None else cut.local_shape(shape))
        if cut is not None and cut.is_padded:
            target.zero_()
        return target, pieces, len(pieces)

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self._storage.dtype, device=self._storage.backend.device)

    def _hold(self, name: str, tensor: Tensor) -> None:
        """Store a weight, or this rank's piece of it."""
        made = self._storage.made(self._architecture, name, tensor)
        self.weights[name] = made if self._cut(name) is not None else self._shares.of(name, made)


class Rounding:
    """The error of weights as they are stored here, relative to those of a quantised checkpoint."""

    def __init__(self) -> None:
        self.num_weights = 0
        self._wrong = self._all = 0.0  # sums of squares
        self._worst = (0.0, "")

    def add(self, name: str, weight: Tensor, held: Tensor) -> None:
        """Add a weight. weight: float32. held: the same as it is stored."""
        wrong, whole = float((held.float() - weight).square().sum()), float(weight.square().sum())
        self._wrong += wrong
        self._all += whole
        self.num_weights += 1
        self._worst = max(self._worst, ((wrong / whole) ** 0.5 if whole else 0.0, name))

    @property
    def share(self) -> float:
        """Return the root mean square of the error over that of the weights."""
        return (self._wrong / self._all) ** 0.5 if self._all else 0.0

    def words(self, weight_format: str, dtype: torch.dtype) -> str:
        """Return a line for the log."""
        kind = str(dtype).removeprefix("torch.") if weight_format == "dense" else weight_format
        most, name = self._worst
        return (
            f"{self.num_weights} matrices, are held as {kind}: off by {self.share:.2%} of their "
            f"root mean square, at "
            f"most by {most:.2%} ({name})"
        )


def _dequantised(
    entry: TensorEntry, reader: Any, quantisation: Quantisation, device: torch.device
) -> Tensor:
    """Return a quantised weight in float32. reader: the reader of the entry's file."""

    def read(part: TensorEntry) -> Tensor:
        if part.file == entry.file:
            tensor: Tensor = reader.get_tensor(part.name)
            return tensor.to(device)
        with open_file(part.file) as other:
            found: Tensor = other.get_tensor(part.name)
            return found.to(device)

    tensors = {name: read(part) for name, part in entry.parts.items()}
    try:
        weight = quantisation.dequantised(tensors, entry.shape)
    except (RuntimeError, ValueError, KeyError, IndexError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise WeightsError(
            f"{entry.file}: the tensors of {entry.name} do not fit together: {reason}"
        ) from None
    if tuple(weight.shape) != entry.shape:
        raise WeightsError(
            f"{entry.file}: {entry.name} comes to {list(weight.shape)}; needed are "
            f"{list(entry.shape)}"
        )
    return weight

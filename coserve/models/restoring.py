"""Restoration of a model's weights from its files, after they were changed."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from coserve.errors import ModelError
from coserve.graph.layouts import WHOLE, AnyState
from coserve.kernels.cuts import Cut
from coserve.models.base import Architecture
from coserve.models.entries import open_file
from coserve.models.regions import TensorView
from coserve.models.source import ModelSource
from coserve.models.weights import find_weights


@dataclass(frozen=True, kw_only=True)
class HeldWeights:
    """A rank's pieces of some of a model's weights, by full name."""

    weights: Mapping[str, Tensor]
    """The rank's pieces."""
    states: Mapping[str, AnyState]
    """How ranks divide the weights; those that are left out are whole."""
    rank: int = 0
    """Number of the rank."""

    def stored(self, architecture: Architecture) -> "dict[str, StoredPiece]":
        """Return the rank's piece of each of the checkpoint's tensors that make up the weights, by
        its name.
        """
        found = dict[str, StoredPiece]()
        for name, weight in self.weights.items():
            stored, state = architecture.stored_as(name), self.states.get(name, WHOLE)
            with torch.inference_mode(False):  # within, views do not say what they are of
                whole = torch.empty(architecture.weight_shapes[name], device="meta")
                views = [TensorView.of(each, whole) for each in stored.views(whole)]
            for tensor, view in zip(stored.names, views, strict=True):
                assert view is not None, f"{tensor} is no view of {name}"
                found[tensor] = StoredPiece(weight=name, piece=weight, view=view, state=state)
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredPiece:
    """A rank's piece of a weight, and one of the checkpoint's tensors as a view of the whole
    weight.
    """

    weight: str
    """Full name of the weight."""
    piece: Tensor
    """What the rank holds of it."""
    view: TensorView
    """The checkpoint's tensor."""
    state: AnyState
    """How ranks divide the weight."""


def read_weights(architecture: Architecture, source: ModelSource, held: HeldWeights) -> None:
    """Overwrite weights with those of the files, of which only the rank's pieces are read.

    Raises:
        ModelError: there are no files.
        WeightsError: the files are damaged, or of another model.
    """
    if source.directory is None:
        raise ModelError(f"{source.name} has no files of weights, so none can be read again")
    wanted = held.stored(architecture)
    found = find_weights(architecture, source.directory)
    for file, entries in groupby(found.items(), key=lambda item: item[1].file):
        with open_file(file) as reader:
            for name, entry in entries:
                if (each := wanted.get(name)) is not None:
                    for region in each.view.regions(each.piece, each.state, held.rank):
                        index = region.at if isinstance(each.state, Cut) else ()
                        region.part.copy_(entry.read(reader, index))

"""A model's weights as its files have them, for one whose weights have been changed since."""

from collections.abc import Mapping
from itertools import groupby

from torch import Tensor

from coserve.errors import ModelError
from coserve.models.base import Architecture
from coserve.models.entries import open_file
from coserve.models.source import ModelSource
from coserve.models.weights import find_weights


def read_weights(architecture: Architecture, source: ModelSource, weights: Mapping[str, Tensor]) -> None:
    """Overwrite weights, by full name, with those of the files; ModelError if there are none."""
    if source.directory is None:
        raise ModelError(f"{source.name} has no files of weights, so none can be read again")
    wanted: dict[str, Tensor] = {}
    for name, weight in weights.items():
        stored = architecture.stored_as(name)
        wanted |= dict(zip(stored.names, stored.views(weight), strict=True))
    found = find_weights(architecture, source.directory)
    for file, entries in groupby(found.items(), key=lambda item: item[1].file):
        with open_file(file) as reader:
            for name, entry in entries:
                if name in wanted:
                    wanted[name].copy_(entry.read(reader))

"""Writing of a model that ranks hold in pieces, in Hugging Face's layout: each rank writes its
pieces of the changed weights.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from coserve.errors import ModelError
from coserve.graph.layouts import WHOLE
from coserve.kernels.groups.base import Ranks
from coserve.models.base import Architecture
from coserve.models.entries import TensorEntry, entries_of, open_file, tensors_of_all_experts
from coserve.models.files import weight_files
from coserve.models.regions import Blocks, ElementRuns, TensorView, region_blocks
from coserve.models.restoring import HeldWeights, StoredPiece
from coserve.models.saving import files_of, no_place, small_files, stored_name
from coserve.models.shared_files import (
    FileTensor,
    torch_type,
    write_shared_bytes,
    write_shared_tensors,
)
from coserve.models.source import ModelSource
from coserve.models.weights import name_in_model, stored_head


def save_model_pieces(
    architecture: Architecture,
    source: ModelSource,
    directory: Path,
    changed: HeldWeights,
    ranks: Ranks,
) -> None:
    """Write this rank's pieces of a model to a new directory; see `shared_files`. Rank 0 writes
    what has not changed. A head that is the table of embeddings stays that.

    Args:
        architecture: Architecture of the model.
        source: The model that it came from; its weights keep their types and files.
        directory: Directory for the files.
        changed: The rank's pieces of changed weights.
        ranks: Which rank this is.

    Raises:
        ModelError: the model has no files, or a weight has no place in them.
        OSError: they cannot be written.
    """
    files = files_of(architecture, source)
    pieces = changed.stored(architecture)
    table = stored_name(architecture, f"{architecture.embedding_name}.weight")
    head = stored_head(architecture)
    if architecture.tied and table in pieces:
        pieces[head] = pieces[table]  # where files have it as well
    directory.mkdir(parents=True, exist_ok=True)
    for path in small_files(files):
        write_shared_bytes(directory / path.name, path.read_bytes(), ranks)
    left = set(pieces) - ({head} if architecture.tied else set())
    for path in weight_files(files):
        left -= _write_file(architecture, path, directory / path.name, pieces, ranks)
    if left:
        raise ModelError(no_place(files, left))


def _write_file(
    architecture: Architecture,
    path: Path,
    target: Path,
    pieces: dict[str, StoredPiece],
    ranks: Ranks,
) -> set[str]:
    """Write a file; returns the names of the changed tensors that it has."""
    experts, written = tensors_of_all_experts(architecture), set[str]()
    tensors = dict[str, FileTensor]()
    with open_file(path) as reader:
        for entry in entries_of(path):
            name = name_in_model(architecture, entry.name)
            # One tensor of all experts is the weight as it is, and all parts of it have changed if
            # one has.
            names = experts[entry.name].names if entry.name in experts else (name,)
            each, view = pieces.get(names[0]), None
            if each is not None:
                view = TensorView.all_of(entry.shape) if entry.name in experts else each.view
                written.update(names)
            tensors[entry.name] = _tensor(entry, reader, each, view, ranks.rank)
        write_shared_tensors(target, tensors, ranks)
    return written


def _tensor(
    entry: TensorEntry, reader: Any, each: StoredPiece | None, view: TensorView | None, rank: int
) -> FileTensor:
    """Return a tensor of a file as a rank writes it.

    Args:
        entry: The tensor in the model's own file.
        reader: Reader of that file.
        each: The rank's piece; None if the tensor has not changed.
        view: The file's tensor as a view of the whole weight.
        rank: Number of the rank.
    """
    if (dtype := torch_type(entry.kind)) is None:
        raise ModelError(f"{entry.file}: {entry.name} is {entry.kind}, which ranks do not write")
    blocks: Blocks
    if each is None or view is None:
        blocks = partial(_unchanged, entry, reader, rank)
    else:
        blocks = region_blocks(
            partial(view.owned_regions, each.piece, each.state, rank), entry.shape
        )
    return FileTensor(shape=entry.shape, dtype=dtype, blocks=blocks)


def _unchanged(entry: TensorEntry, reader: Any, rank: int) -> Iterator[ElementRuns]:
    """Yield a tensor as the model's own file has it, on rank 0."""
    if rank == 0:
        tensor: Tensor = entry.read(reader)
        yield from region_blocks(
            partial(TensorView.all_of(entry.shape).owned_regions, tensor, WHOLE, 0), entry.shape
        )()

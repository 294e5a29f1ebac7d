"""Writing of a model in Hugging Face's layout: a copy of the one that it came from, with some
weights changed.
"""

import json
import os
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from torch import Tensor

from coserve.errors import ModelError
from coserve.models.base import Architecture
from coserve.models.entries import tensors_of_all_experts
from coserve.models.files import weight_files
from coserve.models.source import ModelSource
from coserve.models.weights import name_in_model, quantisation_of_model, stored_head

# Beside the weights: configuration, tokenizer, chat template.
_SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
_INDEX = "model.safetensors.index.json"
# Form in which safetensors gives the reason why a file cannot be written.
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def save_model(
    architecture: Architecture,
    source: ModelSource,
    directory: Path,
    changed: Mapping[str, Tensor],
    *,
    keeps_tie: bool = False,
) -> None:
    """Write a model to a new directory, file by file, so that one file's weights are in memory at a
    time.

    Args:
        source: The model that it came from; its weights keep their types and files.
        changed: Changed weights, by full name. A head that was the table of embeddings is written
            by itself where one of both is changed, unless it keeps_tie.

    Raises:
        ModelError: the model has no files, or a weight has no place in them.
        OSError: they cannot be written.
    """
    files = files_of(architecture, source)
    table = stored_name(architecture, f"{architecture.embedding_name}.weight")
    head = stored_head(architecture)
    tensors = _as_stored(architecture, changed)
    is_other = bool({table, head} & tensors.keys())
    unties = architecture.tied and is_other and not keeps_tie
    if architecture.tied and is_other and keeps_tie:
        tensors[head] = tensors[table]  # where files have it as well
    directory.mkdir(parents=True, exist_ok=True)
    for path in small_files(files):
        shutil.copy(path, directory)
    left = set(tensors) - ({head} if architecture.tied else set())
    for path in weight_files(files):
        left -= _write_file(
            architecture, path, directory / path.name, tensors, (table, head) if unties else None
        )
    if left:
        raise ModelError(no_place(files, left))
    if unties:
        _edit(directory / "config.json", {"tie_word_embeddings": False})
        _add_to_index(directory / _INDEX, table, head)


def files_of(architecture: Architecture, source: ModelSource) -> Path:
    """Return the directory of a model's files.

    Raises:
        ModelError: changed weights have no place in files like them.
    """
    if source.directory is None:
        raise ModelError(no_files(source))
    if (quantisation := quantisation_of_model(architecture)) is not None:
        raise ModelError(
            f"{source.name} is quantised ({quantisation.words}), and changed weights have no place "
            f"in its files; "
            "give the model that it was made from"
        )
    return source.directory


def small_files(directory: Path) -> list[Path]:
    """Return the files of a model beside its weights."""
    return [path for pattern in _SMALL_FILES for path in directory.glob(pattern)]


def no_place(directory: Path, tensors: Collection[str]) -> str:
    """Return the error text for files of a directory that have no place for tensors."""
    return f"{directory} has no tensor {min(tensors)}; its files have another layout"


def no_files(source: ModelSource) -> str:
    """Return the error text for a model that was not read from files."""
    return f"{source.name} has no files of weights, so none can be written from it"


def _as_stored(architecture: Architecture, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the checkpoint's tensors for weights by full name."""
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        stored = architecture.stored_as(name)
        found |= dict(zip(stored.names, stored.views(weight), strict=True))
    return found


def stored_name(architecture: Architecture, name: str) -> str:
    """Return the checkpoint's name of a weight that is one tensor there."""
    return architecture.stored_as(name).names[0]


def _write_file(
    architecture: Architecture,
    path: Path,
    target: Path,
    changed: Mapping[str, Tensor],
    tied: tuple[str, str] | None,
) -> set[str]:
    """Write a file with its changed tensors, and return their names. tied: names of the table of
    embeddings and of the head that is written beside it.
    """
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

    with safe_open(path, framework="pt") as reader:
        names = reader.keys()  # a reader is not a mapping
        tensors = {name: reader.get_tensor(name) for name in names}
    names = {name_in_model(architecture, name): name for name in tensors}
    if tied is not None and tied[0] in names:
        table, head = tied
        tensors[head] = tensors[names[table]].clone()
        names[head] = head
    written = names.keys() & changed.keys()
    for name in written:
        tensors[names[name]] = changed[name].to(tensors[names[name]]).contiguous()
    for name, experts in tensors_of_all_experts(architecture).items():
        if name in tensors:
            parts = dict(zip(experts.names, experts.views(tensors[name]), strict=True))
            for each in parts.keys() & changed.keys():
                parts[each].copy_(changed[each])
            written |= parts.keys() & changed.keys()
    try:
        save_file(tensors, target, metadata={"format": "pt"})
    except SafetensorError as error:
        if (number := _OS_ERROR.search(str(error))) is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(target)) from error
    return written


def _add_to_index(path: Path, table: str, head: str) -> None:
    if path.is_file():
        index = json.loads(path.read_text())
        index["weight_map"][head] = index["weight_map"][table]
        path.write_text(json.dumps(index, indent=2) + "\n")


def _edit(path: Path, fields: Mapping[str, object]) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}, indent=2) + "\n")

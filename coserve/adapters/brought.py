"""Embeddings and head that a directory of PEFT's holds beside the trained tensors (see
`frozen_weights`).

PEFT names such a weight by the wrappers that it has put around the module, and may write it more
than once.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from coserve.adapters.base import PEFT_PREFIX, AdapterConfig
from coserve.adapters.frozen_weights import HEAD_MODULE, FrozenWeights, differs
from coserve.adapters.held_tensors import read_piece
from coserve.adapters.layout import AdapterLayout
from coserve.adapters.places import Place, Site
from coserve.adapters.tensor_files import TensorFile, TensorHeader
from coserve.errors import AdapterError
from coserve.models.backbone import Backbone
from coserve.models.base import Architecture, Part
from coserve.models.regions import TensorView

# Parts of a name between the module's and "weight" where that is the model's own.
_WRAPPERS = re.compile(r"(base_layer\.|token_adapter\.)*weight")
# Copies of what is not used, or of what is there by another name, too: of whole modules, and of a
# tied head's tokens.
_COPIES = re.compile(
    r"(base_layer\.|token_adapter\.)*(modules_to_save|original_module)\.weight"
    r"|token_adapter\.trainable_tokens_delta"
)
# Along which axis the vocabulary goes in factors of a LoRA.
_VOCABULARY_AXES = {"lora_embedding_A": 1, "lora_B.weight": 0}


@dataclass(frozen=True, kw_only=True)
class Brought:
    """The tensors of a file that are not parameters."""

    frozen: FrozenWeights | None
    """The weights among them that rows of the adapter use; None: there are none."""
    sources: Mapping[str, str]
    """Name of a module's weight in the file, by module."""
    names: frozenset[str]
    """Names of all of them."""

    def read(self, file: TensorFile, backbone: Backbone) -> dict[str, Tensor]:
        """Return the weights by module, of which a rank reads what it holds.

        Raises:
            AdapterError: what is read has numbers that are not finite in the backbone's dtype.
        """
        dtype, frozen = backbone.dtype, self.frozen
        if backbone.ranks.size == 1 or frozen is None:
            return {module: file.read_finite(name, dtype) for module, name in self.sources.items()}
        sites = self._sites(frozen, backbone)
        return {
            module: read_piece(
                file,
                name,
                TensorView.all_of(file.headers[name].shape),
                file.headers[name].shape,
                sites[module].weight_state,
                backbone.ranks.rank,
                dtype,
            )
            for module, name in self.sources.items()
        }

    def without_equal(self, tensors: dict[str, Tensor], backbone: Backbone) -> FrozenWeights | None:
        """Return the weights that are others than the backbone's, and take the rest out of
        `tensors`.

        Each rank compares what it holds; all ranks call this, and keep what differs on any.
        """
        frozen, architecture = self.frozen, backbone.architecture
        if frozen is None or frozen.vocab_size != architecture.vocab_size:
            return frozen
        for module, site in self._sites(frozen, backbone).items():
            if module not in tensors:
                continue
            weight = site.weight
            is_equal = not differs(tensors[module], weight.dense(), weight.max_rounding)
            if backbone.group.agree_all(is_so=is_equal):
                del tensors[module]
        kept = tuple(
            module for module in frozen.modules if frozen.owner(module, architecture) in tensors
        )
        return replace(frozen, modules=kept) if kept else None

    @staticmethod
    def _sites(frozen: FrozenWeights, backbone: Backbone) -> dict[str, Site]:
        """Return the modules on the backbone, in the adapter's vocabulary."""
        architecture = frozen.architecture(backbone.architecture)
        return {
            module: Site(place=Place.of(architecture, module, *where), backbone=backbone)
            for module, where in frozen.sites(architecture).items()
        }


def read_brought(
    file: TensorFile, config: AdapterConfig, backbone: Backbone, directory: Path
) -> Brought:
    """Return what a file holds beside parameters; AdapterError if it lacks weights of the model
    that it is for.
    """
    headers = {name.removeprefix(PEFT_PREFIX): header for name, header in file.headers.items()}
    architecture = backbone.architecture
    modules: dict[str, Part] = {architecture.embedding_name: "embed", HEAD_MODULE: "head"}
    architecture = architecture.with_vocabulary(_vocab_size(headers, modules, architecture))
    parameters = _parameter_names(config, architecture)
    rest = [name for name in headers if name not in parameters]
    found = {module: names for module in modules if (names := _below(module, rest, _WRAPPERS))}
    known = {
        name
        for module in modules
        for name in (*found.get(module, ()), *_below(module, rest, _COPIES))
    }
    whole = [module for module in modules if f"{module}.weight" in parameters]
    is_tied = architecture.tied and not whole
    sources = {module: each[0] for module, each in found.items()}
    if is_tied and sources:  # one table, by whichever name
        table = architecture.embedding_name
        sources = {table: sources[table] if table in sources else sources[HEAD_MODULE]}
    for module, name in sources.items():
        _check_shape(
            headers[name], name, Place.of(architecture, module, modules[module], module), directory
        )
    covered = modules if is_tied and sources else (*sources, *whole)
    if architecture is not backbone.architecture:
        if (
            "bias" in architecture.graphs["head"].node[HEAD_MODULE].input
            and HEAD_MODULE not in whole
        ):
            raise AdapterError(
                f"{directory} is for {architecture.vocab_size} tokens, and the head of "
                f"{backbone.name} has a bias, "
                f"which is not supported with another vocabulary: name {HEAD_MODULE} in "
                f"modules_to_save"
            )
        _check_whole_vocabulary(modules, covered, architecture, backbone, directory)
    frozen = None
    if sources or architecture is not backbone.architecture:
        held = tuple(modules) if is_tied else tuple(sources)
        frozen = FrozenWeights(vocab_size=architecture.vocab_size, modules=held, tied=is_tied)
    return Brought(
        frozen=frozen,
        sources={module: _in_file(name, file) for module, name in sources.items()},
        names=frozenset(_in_file(name, file) for name in known),
    )


def vocabulary_of(file: TensorFile, architecture: Architecture) -> int:
    """Return the number of tokens of the model that a file is for. architecture: of the
    backbone.
    """
    headers = {name.removeprefix(PEFT_PREFIX): header for name, header in file.headers.items()}
    return _vocab_size(headers, (architecture.embedding_name, HEAD_MODULE), architecture)


def _vocab_size(
    headers: Mapping[str, TensorHeader], modules: Iterable[str], architecture: Architecture
) -> int:
    """Return the number of tokens of the model that a file is for."""
    for module in modules:
        for name in (*_below(module, headers, _WRAPPERS), *_below(module, headers, _COPIES)):
            if name.endswith("weight") and len(shape := headers[name].shape) == 2:
                return max(1, shape[0])
        for local, axis in _VOCABULARY_AXES.items():
            is_of_it = local != "lora_B.weight" or module == HEAD_MODULE
            header = headers.get(f"{module}.{local}") if is_of_it else None
            if header is not None and len(header.shape) == 2:
                return max(1, header.shape[axis])
    return architecture.vocab_size


def _below(module: str, names: Iterable[str], pattern: re.Pattern[str]) -> list[str]:
    """Return the names that are a module's with a match of the pattern after it."""
    start = f"{module}."
    return [
        name for name in names if name.startswith(start) and pattern.fullmatch(name, len(start))
    ]


def _parameter_names(config: AdapterConfig, architecture: Architecture) -> set[str]:
    """Return what PEFT's files call the parameters, without its prefix."""
    layout = AdapterLayout.of(config, architecture, every_target=False)
    absent = {name: torch.empty(shape, device="meta") for name, shape in layout.shapes.items()}
    return {name.removeprefix(PEFT_PREFIX) for name in config.to_peft_tensors(absent, layout)}


def _check_shape(header: TensorHeader, name: str, place: Place, directory: Path) -> None:
    shape = place.weights["weight"]
    if header.shape != shape or not header.is_floating_point:
        raise AdapterError(
            f"{directory}: {name} is {header.dtype} of shape {list(header.shape)}, and floats of "
            f"{list(shape)} fit "
            "this model; it was made for another one"
        )


def _check_whole_vocabulary(
    modules: Iterable[str],
    covered: Iterable[str],
    architecture: Architecture,
    backbone: Backbone,
    directory: Path,
) -> None:
    """Raise AdapterError unless a resized model's embeddings and head are both there."""
    if lacking := [module for module in modules if module not in covered]:
        raise AdapterError(
            f"{directory} is for {architecture.vocab_size} tokens, {backbone.name} has "
            f"{backbone.architecture.vocab_size}, and the weight of {lacking[0]} for them is not "
            f"in it: name that "
            "module in modules_to_save, so that PEFT writes it"
        )


def _in_file(name: str, file: TensorFile) -> str:
    return PEFT_PREFIX + name if PEFT_PREFIX + name in file.headers else name

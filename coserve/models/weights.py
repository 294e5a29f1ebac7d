"""Weights as a model stores them: storage formats, random weights, names in files, and joined
weights.

`coserve.models.reading` reads them. One tensor is made at a time, so nothing large ever exists
twice.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coserve.errors import WeightsError
from coserve.graph.ir import Graph
from coserve.kernels.base import Backend
from coserve.kernels.cuts import Cut
from coserve.kernels.weights import DenseWeight, Weight, join, weight_class
from coserve.models.base import HEAD, Architecture, Part
from coserve.models.entries import (
    TensorEntry,
    entries_of,
    of_experts,
    open_file,
    tensors_of_all_experts,
)
from coserve.models.files import some_of, weight_files
from coserve.models.local import LocalModel
from coserve.models.quantised import quantisation_of
from coserve.models.quantised.base import Quantisation
from coserve.models.shares import WeightShares
from coserve.models.stored import WHOLE_TENSOR, Pieces

# Weights by part and name: those of linear layers, and tensors (embeddings, norms, biases).
Weights = dict[Part, dict[str, Tensor | Weight]]
_FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' names of float types


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightStorage:
    """Storage of weights."""

    dtype: torch.dtype
    """Compute dtype, in which all but linear weights are stored."""
    weight_format: str
    """Storage of linear weights (`weight_formats`)."""
    backend: Backend
    """Backend that multiplies with the weights."""

    def __post_init__(self) -> None:
        weight_class(self.weight_format)  # ModelError if there is none

    def linear(self, tensor: Tensor) -> Weight:
        """Return the weight of a linear layer as it is stored."""
        return weight_class(self.weight_format).from_dense(tensor)

    def experts(self, tensor: Tensor) -> "Tensor | Weight":
        """Return the matrices of experts as they are stored; floats stay a tensor."""
        return tensor if self.weight_format == DenseWeight.format else self.linear(tensor)

    def needs_whole(self, architecture: Architecture, name: str, cut: Cut) -> bool:
        """Return whether a rank's piece of a weight depends on whole rows, of which it holds some
        columns.
        """
        # A scale per row is taken from the largest entry of the whole row.
        is_float = not weight_class(self.weight_format).scales_rows
        sites = {**architecture.linear_sites, **architecture.expert_sites}
        return (
            not is_float
            and cut.dim == -1
            and name.endswith(".weight")
            and name.removesuffix(".weight") in sites
        )

    def made(self, architecture: Architecture, name: str, tensor: Tensor) -> "Tensor | Weight":
        """Return a tensor of the checkpoint as it is stored. The table of embeddings that is also
        the head stays a tensor.
        """
        if name.removesuffix(".weight") in architecture.linear_sites and name.endswith(".weight"):
            return self.linear(tensor)
        if name.removesuffix(".weight") in architecture.expert_sites and name.endswith(".weight"):
            return self.experts(tensor)
        return tensor.contiguous() if architecture.is_tied_table(name) else tensor


def find_weights(architecture: Architecture, directory: Path) -> dict[str, TensorEntry]:
    """Return a checkpoint's tensors by the model's names; none is read.

    Raises:
        WeightsError: they are not the model's.
    """
    found: dict[str, TensorEntry] = {}
    whole = tensors_of_all_experts(architecture)
    quantisation = quantisation_of_model(architecture)
    if quantisation is not None:
        quantisation.check_layout(architecture)
    for file in weight_files(directory):
        for entry in entries_of(file):
            # Tensors that the file format stores beside the weight, and that nothing here reads.
            if quantisation is not None and entry.name.endswith(quantisation.unused):
                continue
            experts = whole.get(entry.name)
            parts = (
                {name_in_model(architecture, entry.name): entry}
                if experts is None
                else of_experts(entry, experts)
            )
            for name, part in parts.items():
                if name in found:
                    raise WeightsError(
                        f"{entry.name} is in both {found[name].file} and {file}; keep one of them"
                    )
                found[name] = part
    if quantisation is not None:
        found = _whole(found, quantisation, architecture)
    _check(architecture, found, directory)
    return found


def quantisation_of_model(architecture: Architecture) -> Quantisation | None:
    """Return the quantisation of a model's checkpoint; None where its weights are floats."""
    return quantisation_of(getattr(architecture.config, "quantization_config", None))


def _whole(
    found: dict[str, TensorEntry], quantisation: Quantisation, architecture: Architecture
) -> dict[str, TensorEntry]:
    """Return entries with one in place of those that a quantised weight is made from."""
    groups: dict[str, dict[str, TensorEntry]] = {}
    plain: dict[str, TensorEntry] = {}
    for name, entry in found.items():
        if (split := quantisation.split(name)) is None:
            plain[name] = entry
        else:
            groups.setdefault(name_in_model(architecture, split[0]), {})[split[1]] = entry
    for name, parts in groups.items():
        if list(parts) == [quantisation.weight]:  # it was left out
            plain[name] = parts[quantisation.weight]
            continue
        if missing := [part for part in quantisation.needed if part not in parts]:
            raise WeightsError(
                f"{name} lacks {missing[0]}, which {quantisation.words} needs to make it"
            )
        # Read with the file of its first part. Its kind is F32, since reading gives floats.
        first = parts[quantisation.needed[0]]
        shape = quantisation.shape({part: each.shape for part, each in parts.items()})
        shape = shape or architecture.stored_shapes.get(name, ())
        plain[name] = TensorEntry(file=first.file, name=name, shape=shape, kind="F32", parts=parts)
    # By file, so that a reader opens each file once.
    return dict(sorted(plain.items(), key=lambda item: str(item[1].file)))


def name_in_model(architecture: Architecture, name: str) -> str:
    """Return the model's name of a checkpoint's tensor, which lacks a prefix in a model that was
    saved without its head.
    """
    whole = architecture.bare_prefix + name
    return (
        whole
        if name not in architecture.stored_shapes and whole in architecture.stored_shapes
        else name
    )


def stored_head(architecture: Architecture) -> str:
    """Return the checkpoint's name of the head's weight, which a tied model may have too."""
    return architecture.stored_as(HEAD).names[0]


def _check(architecture: Architecture, found: dict[str, TensorEntry], directory: Path) -> None:
    shapes, family = architecture.stored_shapes, architecture.config.model_type
    if missing := [name for name in shapes if name not in found]:
        bare = all(name != entry.name for name, entry in found.items())
        hint = "; it was saved from the bare model, without its head" if bare else ""
        raise WeightsError(f"{directory} lacks {some_of(missing)}, which the model needs{hint}")
    unread = re.compile(architecture.unread)
    unknown = [
        name
        for name in found
        if name not in shapes
        and not unread.fullmatch(name)
        and not (architecture.tied and name == stored_head(architecture))
    ]
    if unknown:
        raise WeightsError(
            f"{directory} holds {some_of(unknown)}, which this {family} does not have"
        )
    for name, shape in shapes.items():
        entry = found[name]
        if entry.shape != shape:
            raise WeightsError(
                f"{entry.file}: {name} has shape {list(entry.shape)}, the model needs {list(shape)}"
            )
        if entry.kind not in _FLOATS:
            raise WeightsError(
                f"{entry.file}: {name} is {entry.kind}; weights must be float32, float16 or "
                f"bfloat16"
            )


def check_tied_head(head: TensorEntry, table: Tensor, pieces: Pieces = WHOLE_TENSOR) -> None:
    """Check that the head that a tied checkpoint may store, too, equals the embedding.

    Args:
        head: The head in its file.
        table: The embedding, or a rank's piece of it.
        pieces: Parts of the head that are compared, and their places in the table.

    Raises:
        WeightsError: they differ.
    """
    with open_file(head.file) as reader:
        for index, place in pieces:
            own = place.view(table)
            if not torch.equal(head.read(reader, index).to(own), own):
                raise WeightsError(
                    f"{head.file}: {head.name} is not the embedding, but the configuration ties "
                    f"them; set "
                    "tie_word_embeddings to false"
                )


def random_weights(local: LocalModel, storage: WeightStorage, *, seed: int) -> Weights:
    """Return weights drawn from N(0, 0.02²), norms at one, biases at zero: right in shape and speed
    only.

    A rank's are pieces of those of one rank: each tensor is drawn whole.
    """
    architecture, shares, device = local.architecture, WeightShares(local), storage.backend.device
    generator = torch.Generator(device).manual_seed(seed)
    weights: dict[str, Tensor | Weight] = {}
    for name, shape in architecture.weight_shapes.items():
        tensor = torch.empty(shape, dtype=storage.dtype, device=device)
        if name.endswith(".bias"):
            tensor.zero_()
        elif len(shape) == 1:
            tensor.fill_(1.0)
        else:
            # On every rank the same draw of the whole tensor, of which the rank keeps its piece.
            tensor.normal_(0.0, 0.02, generator=generator)
        weights[name] = shares.of(name, storage.made(architecture, name, tensor))
    return joined_weights(local, weights, storage)


def joined_weights(
    local: LocalModel, loaded: dict[str, Tensor | Weight], storage: WeightStorage
) -> Weights:
    """Return weights by part (`by_part`), with those that are multiplied by the same rows in one
    piece of memory; takes them from `loaded`.
    """
    weights = by_part(local.architecture, loaded, storage)
    loaded.clear()  # each is freed as soon as its copy is there
    return join_runs(weights, local.graphs)


def join_runs(weights: Weights, graphs: Mapping[Part, Graph]) -> Weights:
    """Join, in place, the weights of nodes that run at once into one piece of memory."""
    for part, graph in graphs.items():
        own: dict[str, Any] = weights[part]
        for run in graph.runs:
            # Nodes that run at once read the same rows: one product reads them once for all
            # weights.
            if len(run) > 1:
                biases = [node.input.get("bias") for node in run]
                joined = join(
                    [own[node.input["weight"]] for node in run],
                    [None if bias is None else own[bias] for bias in biases],
                )
                for node, bias, weight, joined_bias in zip(run, biases, *joined, strict=True):
                    own[node.input["weight"]] = weight
                    if bias is not None:
                        own[bias] = joined_bias
    return weights


def weight_tensors(weights: Mapping[str, Tensor | Weight]) -> list[Tensor]:
    """Return the tensors that the weights of a part hold."""
    tensors: list[Tensor] = []
    for weight in weights.values():
        tensors += (weight,) if isinstance(weight, Tensor) else weight.tensors()
    return tensors


def absent_weights(local: LocalModel, storage: WeightStorage) -> Weights:
    """Return weights of the right shapes on the meta device: nothing is read or stored."""
    architecture, shares = local.architecture, WeightShares(local)
    loaded = {
        name: shares.of(
            name,
            storage.made(
                architecture, name, torch.empty(shape, dtype=storage.dtype, device="meta")
            ),
        )
        for name, shape in architecture.weight_shapes.items()
    }
    return by_part(architecture, loaded, storage)


def by_part(
    architecture: Architecture, weights: dict[str, Tensor | Weight], storage: WeightStorage
) -> Weights:
    """Return weights by part and by the name in its graph, given those by full name; a tied dense
    head shares the embedding's tensor.
    """
    if architecture.tied:
        table = weights[f"{architecture.embedding_name}.weight"]
        assert isinstance(table, Tensor)
        is_dense = storage.weight_format == "dense"
        head = DenseWeight(table) if is_dense else storage.linear(table)
        weights = {**weights, HEAD: head}
    parts: Weights = {}
    for part in architecture.parts:
        prefix, names = architecture.prefix(part), architecture.graphs[part].with_kind("weight")
        parts[part] = {tensor.name: weights[prefix + tensor.name] for tensor in names}
    return parts

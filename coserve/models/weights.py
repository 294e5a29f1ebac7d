"""Weights: from safetensors files in Hugging Face's layout, or random, into the dtype and device they will stay in.

One tensor is converted at a time, so nothing large ever exists twice.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coserve.errors import WeightsError
from coserve.graph.ir import Graph
from coserve.kernels.base import Backend
from coserve.kernels.weights import DenseWeight, Weight, join, weight_class
from coserve.models.base import HEAD, Architecture, Part
from coserve.models.entries import Entry, entries_of, of_experts, open_file, tensors_of_all_experts
from coserve.models.files import some_of, weight_files
from coserve.models.quantised import quantisation_of
from coserve.models.quantised.base import Quantisation
from coserve.models.stored import AsItIs

# What the nodes of a part read, by name: the weights of linear layers, and tensors (embeddings, norms, biases).
Weights = dict[Part, dict[str, Tensor | Weight]]
# Told how many tensors have been loaded, and of how many.
Progress = Callable[[int, int], None]

_log = logging.getLogger(__name__)

_FLOATS = ("F64", "F32", "F16", "BF16")  # as safetensors writes them


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightStorage:
    """How weights are held: the compute dtype, how those of linear layers are stored (`weight_formats`; all others stay
    in the dtype), and which backend multiplies with them.
    """

    dtype: torch.dtype
    weight_format: str
    backend: Backend

    def __post_init__(self) -> None:
        weight_class(self.weight_format)  # ModelError if there is none

    def linear(self, tensor: Tensor) -> Weight:
        """The weight of a linear layer as it is stored."""
        return weight_class(self.weight_format).from_dense(tensor)

    def experts(self, tensor: Tensor) -> "Tensor | Weight":
        """The matrices of experts as they are stored: of floats they stay a tensor."""
        return tensor if self.weight_format == DenseWeight.format else self.linear(tensor)

    def made(self, architecture: Architecture, name: str, tensor: Tensor) -> "Tensor | Weight":
        """A tensor of the checkpoint as it is held. The table of embeddings that is also the head stays a tensor."""
        if name.removesuffix(".weight") in architecture.linear_sites and name.endswith(".weight"):
            return self.linear(tensor)
        if name.removesuffix(".weight") in architecture.expert_sites and name.endswith(".weight"):
            return self.experts(tensor)
        return tensor.contiguous() if architecture.is_tied_table(name) else tensor


def load_weights(
    architecture: Architecture, directory: Path, storage: WeightStorage, *, progress: Progress | None = None
) -> Weights:
    """Read a checkpoint's weights; names, shapes and types are checked before the first tensor is read. Those of a
    quantised one are made from their tensors one by one; the log says how far they are off as they are held.

    Raises:
        WeightsError: a file is missing or damaged, or a tensor is missing, unknown, misshapen or not of a float type;
            the message names it.
    """
    found, quantisation = find_weights(architecture, directory), quantisation_of_model(architecture)
    loading, rounding = _Loading(architecture, storage), Rounding()
    device, dtype = storage.backend.device, storage.dtype
    for file, entries in groupby(found.items(), key=lambda item: item[1].file):
        with open_file(file) as reader:
            for name, entry in entries:
                if name in architecture.stored_shapes:
                    if entry.parts:
                        assert quantisation is not None
                        weight = _dequantised(entry, reader, quantisation, device)
                        rounding.add(name, weight, loading.take(name, weight.to(dtype)))
                    else:
                        loading.take(name, entry.read(reader).to(device=device, dtype=dtype))
                    if progress is not None:
                        progress(len(loading.weights), len(architecture.weight_shapes))
    if unread := [
        name for name in found if name not in architecture.stored_shapes and name != stored_head(architecture)
    ]:
        _log.info("%d tensors are left unread, which the text model does not have: %s", len(unread), some_of(unread))
    if quantisation is not None and rounding.num_weights:
        _log.info("%s, %s", quantisation.words, rounding.words(storage.weight_format, dtype))
    head = found.get(stored_head(architecture)) if architecture.tied else None
    if head is not None and not head.parts:
        table = loading.weights[f"{architecture.embedding_name}.weight"]
        assert isinstance(table, Tensor)
        check_tied_head(head, table)
    return _joined(architecture, loading.weights, storage)


class _Loading:
    """Weights by full name, from a checkpoint's tensors as they come."""

    def __init__(self, architecture: Architecture, storage: WeightStorage) -> None:
        self.weights: dict[str, Tensor | Weight] = {}
        self._architecture, self._storage = architecture, storage
        self._owners = {
            tensor: (name, index)
            for name, stored in architecture.stored.items()
            for index, tensor in enumerate(stored.names)
        }
        # Of weights of which some tensors are still to come: the weight, its views, and how many those are.
        self._partial: dict[str, tuple[Tensor, Sequence[Tensor], int]] = {}

    def take(self, tensor_name: str, tensor: Tensor) -> Tensor:
        """The next tensor, in the dtype and on the device in which it stays. Returns it as it is held from now on."""
        name, index = self._owners[tensor_name]
        stored = self._architecture.stored[name]
        if type(stored) is not AsItIs:
            if name not in self._partial:
                weight = tensor.new_empty(self._architecture.weight_shapes[name])
                self._partial[name] = weight, stored.views(weight), len(stored.names)
            weight, views, missing = self._partial.pop(name)
            views[index].copy_(tensor)
            if missing > 1:
                self._partial[name] = weight, views, missing - 1
                return tensor
            self.weights[name] = self._storage.made(self._architecture, name, weight)
            return tensor  # weights of several tensors are dense
        held = self.weights[name] = self._storage.made(self._architecture, name, tensor)
        return held if isinstance(held, Tensor) else held.dense()


class Rounding:
    """How far weights are off as they are held, from those that a quantised checkpoint says."""

    def __init__(self) -> None:
        self.num_weights = 0
        self._wrong = self._all = 0.0  # sums of squares
        self._worst = (0.0, "")

    def add(self, name: str, weight: Tensor, held: Tensor) -> None:
        """weight: float32."""
        wrong, whole = float((held.float() - weight).square().sum()), float(weight.square().sum())
        self._wrong, self._all, self.num_weights = self._wrong + wrong, self._all + whole, self.num_weights + 1
        self._worst = max(self._worst, ((wrong / whole) ** 0.5 if whole else 0.0, name))

    @property
    def share(self) -> float:
        """The root mean square of the error over that of the weights."""
        return (self._wrong / self._all) ** 0.5 if self._all else 0.0

    def words(self, weight_format: str, dtype: torch.dtype) -> str:
        """For the log."""
        kind = str(dtype).removeprefix("torch.") if weight_format == "dense" else weight_format
        most, name = self._worst
        return (
            f"{self.num_weights} matrices, are held as {kind}: off by {self.share:.2%} of their root mean square, at "
            f"most by {most:.2%} ({name})"
        )


def find_weights(architecture: Architecture, directory: Path) -> dict[str, Entry]:
    """A checkpoint's tensors by the names that the model has for them, none of which is read; WeightsError if they are
    not the model's.
    """
    found: dict[str, Entry] = {}
    whole = tensors_of_all_experts(architecture)
    quantisation = quantisation_of_model(architecture)
    if quantisation is not None:
        quantisation.check_layout(architecture)
    for file in weight_files(directory):
        for entry in entries_of(file):
            if quantisation is not None and entry.name.endswith(quantisation.unused):
                continue
            experts = whole.get(entry.name)
            parts = {name_in_model(architecture, entry.name): entry} if experts is None else of_experts(entry, experts)
            for name, part in parts.items():
                if name in found:
                    raise WeightsError(f"{entry.name} is in both {found[name].file} and {file}; keep one of them")
                found[name] = part
    if quantisation is not None:
        found = _whole(found, quantisation, architecture)
    _check(architecture, found, directory)
    return found


def quantisation_of_model(architecture: Architecture) -> Quantisation | None:
    """None where its weights are floats."""
    return quantisation_of(getattr(architecture.config, "quantization_config", None))


def _whole(found: dict[str, Entry], quantisation: Quantisation, architecture: Architecture) -> dict[str, Entry]:
    """With one entry in place of those of the tensors that a quantised weight is made from."""
    groups: dict[str, dict[str, Entry]] = {}
    plain: dict[str, Entry] = {}
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
            raise WeightsError(f"{name} lacks {missing[0]}, which {quantisation.words} needs to make it")
        first = parts[quantisation.needed[0]]
        shape = quantisation.shape({part: each.shape for part, each in parts.items()})
        shape = shape or architecture.stored_shapes.get(name, ())
        plain[name] = Entry(file=first.file, name=name, shape=shape, kind="F32", parts=parts)
    return dict(sorted(plain.items(), key=lambda item: str(item[1].file)))


def _dequantised(entry: Entry, reader: Any, quantisation: Quantisation, device: torch.device) -> Tensor:
    """A quantised weight in float32. reader: of the entry's file."""

    def read(part: Entry) -> Tensor:
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
        raise WeightsError(f"{entry.file}: the tensors of {entry.name} do not fit together: {reason}") from None
    if tuple(weight.shape) != entry.shape:
        raise WeightsError(f"{entry.file}: {entry.name} comes to {list(weight.shape)}; needed are {list(entry.shape)}")
    return weight


def name_in_model(architecture: Architecture, name: str) -> str:
    """A checkpoint of a model that was saved without its head lacks what all names begin with."""
    whole = architecture.bare_prefix + name
    return whole if name not in architecture.stored_shapes and whole in architecture.stored_shapes else name


def stored_head(architecture: Architecture) -> str:
    """The name in checkpoints of the head's weight, which a tied model may have too."""
    return architecture.stored_as(HEAD).names[0]


def _check(architecture: Architecture, found: dict[str, Entry], directory: Path) -> None:
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
        raise WeightsError(f"{directory} holds {some_of(unknown)}, which this {family} does not have")
    for name, shape in shapes.items():
        entry = found[name]
        if entry.shape != shape:
            raise WeightsError(f"{entry.file}: {name} has shape {list(entry.shape)}, the model needs {list(shape)}")
        if entry.kind not in _FLOATS:
            raise WeightsError(f"{entry.file}: {name} is {entry.kind}; weights must be float32, float16 or bfloat16")


def check_tied_head(head: Entry, embedding: Tensor) -> None:
    """A tied checkpoint may store its head too, but then it must be the embedding."""
    with open_file(head.file) as reader:
        tensor = reader.get_tensor(head.name)
    if not torch.equal(tensor.to(embedding), embedding):
        raise WeightsError(
            f"{head.file}: {head.name} is not the embedding, but the configuration ties them; set tie_word_embeddings "
            "to false"
        )


def random_weights(architecture: Architecture, storage: WeightStorage, *, seed: int) -> Weights:
    """Weights drawn from N(0, 0.02²), norms at one, biases at zero: right in shape and speed, and nothing more."""
    device = storage.backend.device
    generator = torch.Generator(device).manual_seed(seed)
    weights: dict[str, Tensor | Weight] = {}
    for name, shape in architecture.weight_shapes.items():
        tensor = torch.empty(shape, dtype=storage.dtype, device=device)
        if name.endswith(".bias"):
            tensor.zero_()
        elif len(shape) == 1:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, 0.02, generator=generator)
        weights[name] = storage.made(architecture, name, tensor)
    return _joined(architecture, weights, storage)


def _joined(architecture: Architecture, loaded: dict[str, Tensor | Weight], storage: WeightStorage) -> Weights:
    """`by_part`, with weights that are multiplied with the same rows in one piece of memory; takes from `loaded`."""
    weights = by_part(architecture, loaded, storage)
    loaded.clear()  # so that each goes as soon as its copy is there
    return join_runs(weights, architecture.graphs)


def join_runs(weights: Weights, graphs: Mapping[Part, Graph]) -> Weights:
    """Join, in place, the weights of nodes that run at once into one piece of memory."""
    for part, graph in graphs.items():
        own: dict[str, Any] = weights[part]
        for run in graph.runs:
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
    """What the weights of a part hold in memory."""
    held = weights.values()
    return [tensor for each in held for tensor in ((each,) if isinstance(each, Tensor) else each.tensors())]


def absent_weights(architecture: Architecture, storage: WeightStorage) -> Weights:
    """Weights of the right shapes on the meta device: nothing is read and nothing is held."""
    loaded = {
        name: storage.made(architecture, name, torch.empty(shape, dtype=storage.dtype, device="meta"))
        for name, shape in architecture.weight_shapes.items()
    }
    return by_part(architecture, loaded, storage)


def by_part(architecture: Architecture, weights: dict[str, Tensor | Weight], storage: WeightStorage) -> Weights:
    """Weights by full name -> by part and the name in its graph; a tied dense head shares the embedding's tensor."""
    if architecture.tied:
        table = weights[f"{architecture.embedding_name}.weight"]
        assert isinstance(table, Tensor)
        is_dense = storage.weight_format == "dense"
        head = DenseWeight(table) if is_dense else storage.linear(table)
        weights = {**weights, HEAD: head}
    return {
        part: {
            tensor.name: weights[architecture.prefix(part) + tensor.name]
            for tensor in architecture.graphs[part].with_kind("weight")
        }
        for part in architecture.parts
    }

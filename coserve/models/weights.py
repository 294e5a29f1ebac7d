"""Weights: from safetensors files in Hugging Face's layout, or random, into the dtype and device they will stay in.

One tensor is converted at a time, so nothing large ever exists twice.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from coserve.errors import WeightsError
from coserve.models.base import Architecture, Part

Weights = dict[Part, dict[str, Tensor]]

# Buffers that older checkpoints carry and nothing reads.
_IGNORED = re.compile(r"(.*\.)?rotary_emb\.inv_freq$")
_INDEX = "model.safetensors.index.json"


def load_weights(architecture: Architecture, directory: Path, *, dtype: torch.dtype, device: torch.device) -> Weights:
    """Read a checkpoint's weights.

    Raises:
        WeightsError: a file is missing or damaged, or a tensor is missing, unknown, misshapen or not of a float type;
        the message names it.
    """
    shapes = architecture.weight_shapes
    loaded: dict[str, Tensor] = {}
    unknown: list[str] = []
    for file in _files(directory):
        for name, tensor in _read(file):
            if _IGNORED.match(name) or (architecture.tied and name == "lm_head.weight"):
                continue
            if name not in shapes:
                unknown.append(name)
                continue
            if tuple(tensor.shape) != shapes[name]:
                raise WeightsError(
                    f"{file}: {name} has shape {list(tensor.shape)}, the model needs {list(shapes[name])}"
                )
            if not tensor.is_floating_point():
                raise WeightsError(f"{file}: {name} is {_type(tensor)}; weights must be float32, float16 or bfloat16")
            loaded[name] = tensor.to(device=device, dtype=dtype)
    if missing := [name for name in shapes if name not in loaded]:
        raise WeightsError(f"{directory} lacks {_some(missing)}, which the model needs")
    if unknown:
        raise WeightsError(
            f"{directory} holds {_some(unknown)}, which this {architecture.config.model_type} does not have"
        )
    return by_part(architecture, loaded)


def random_weights(architecture: Architecture, *, dtype: torch.dtype, device: torch.device, seed: int) -> Weights:
    """Weights drawn from N(0, 0.02²), norms at one, biases at zero: right in shape and speed, and nothing more."""
    generator = torch.Generator(device).manual_seed(seed)
    weights = {}
    for name, shape in architecture.weight_shapes.items():
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if name.endswith(".bias"):
            tensor.zero_()
        elif len(shape) == 1:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, 0.02, generator=generator)
        weights[name] = tensor
    return by_part(architecture, weights)


def absent_weights(architecture: Architecture, *, dtype: torch.dtype) -> Weights:
    """Weights of the right shapes on the meta device: nothing is read and nothing is held."""
    shapes = architecture.weight_shapes
    return by_part(architecture, {name: torch.empty(shapes[name], dtype=dtype, device="meta") for name in shapes})


def by_part(architecture: Architecture, weights: dict[str, Tensor]) -> Weights:
    """Weights by full name -> by part and the name in its graph; a tied head shares the embedding's tensor."""
    if architecture.tied:
        weights = {**weights, "lm_head.weight": weights[f"{architecture.embedding_name}.weight"]}
    return {
        part: {
            tensor.name: weights[architecture.prefix(part) + tensor.name]
            for tensor in architecture.graphs[part].with_kind("weight")
        }
        for part in architecture.parts
    }


def _files(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise WeightsError(f"{index} is not a safetensors index: {error!r}") from None
        if missing := [name for name in names if not (directory / name).is_file()]:
            raise WeightsError(f"{directory} lacks {_some(missing)}, which its index names")
        return [directory / name for name in names]
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        other = ", ".join(path.name for path in sorted(directory.glob("*.bin"))[:3])
        found = f" (found {other}: convert it to safetensors)" if other else ""
        raise WeightsError(f"{directory} has no *.safetensors{found}")
    return files


def _read(file: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118 (a safe_open handle is no mapping)
                yield name, reader.get_tensor(name)
    except SafetensorError as error:
        raise WeightsError(f"{file} is damaged or cut short ({error}); fetch it again") from None


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _some(names: list[str]) -> str:
    """A few names, and how many more."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more

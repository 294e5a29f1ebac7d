"""Adapters in PEFT's directory format (adapter_config.json, adapter_model.safetensors), both ways exact."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from coserve.adapters.base import Adapter, AdapterConfig
from coserve.adapters.methods import method, method_names
from coserve.errors import AdapterError
from coserve.kernels.weights import as_weight
from coserve.models.backbone import Backbone

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


def save_adapter(adapter: Adapter, directory: str | Path) -> None:
    """Write the float32 masters and the config; files are replaced whole, never half-written.

    The config names this backbone as the base model, and the task that it is for: causal language modelling.
    """
    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AdapterError(f"cannot write an adapter to {directory}: {error.strerror}") from None
    fields = {**adapter.config.to_peft(), "base_model_name_or_path": adapter.backbone.name}
    tensors = {_PREFIX + name: tensor.contiguous().cpu() for name, tensor in _peft_values(adapter).items()}
    write_tensors(directory / _WEIGHTS, tensors)
    _replace(directory / _CONFIG, (json.dumps(fields, indent=2) + "\n").encode())


def load_adapter(backbone: Backbone, directory: str | Path) -> Adapter:
    """Read an adapter for this backbone.

    Raises:
        AdapterError: files are missing or damaged, the method or a setting is not supported, or the adapter was made
        for another model.
    """
    directory = Path(directory)
    config = read_config(directory)
    adapter = Adapter(backbone, config, every_target=False)
    tensors = _without_base_layers(read_tensors(directory / _WEIGHTS), adapter, directory)
    expected = {_PREFIX + name: value for name, value in _peft_values(adapter).items()}
    if missing := [name for name in expected if name not in tensors]:
        raise AdapterError(f"{directory} lacks {_first(missing)}; it was made for another model or with other targets")
    if unknown := [name for name in tensors if name not in expected]:
        raise AdapterError(f"{directory} holds {_first(unknown)}, which {backbone.name} has no place for")
    for name, value in expected.items():
        if tensors[name].shape != value.shape:
            raise AdapterError(
                f"{directory}: {name} has shape {list(tensors[name].shape)}, {backbone.name} needs "
                f"{list(value.shape)}; it was made for another model, or r is another"
            )
        if not tensors[name].is_floating_point():
            raise AdapterError(f"{directory}: {name} is {tensors[name].dtype}; adapters must be of a float type")
        name = name.removeprefix(_PREFIX)
        adapter.masters[name].copy_(config.from_peft_value(adapter.local_names[name], tensors[_PREFIX + name]))
    adapter.sync_compute_copy()
    return adapter


def _peft_values(adapter: Adapter) -> dict[str, torch.Tensor]:
    """The masters as PEFT's files have them."""
    convert, local = adapter.config.to_peft_value, adapter.local_names
    return {name: convert(local[name], master) for name, master in adapter.masters.items()}


def read_config(directory: Path) -> AdapterConfig:
    """The configuration alone; AdapterError as in `load_adapter`."""
    path = directory / _CONFIG
    if not path.is_file():
        raise AdapterError(f"{path.parent} has no {_CONFIG}; give a directory written by PEFT's save_pretrained")
    try:
        fields = json.loads(path.read_text())
    except ValueError as error:
        raise AdapterError(f"{path} is not valid JSON: {error}") from None
    try:
        return adapter_config(fields)
    except AdapterError as error:
        raise AdapterError(f"{path}: {error}") from None


def adapter_config(fields: Any) -> AdapterConfig:
    """A configuration in PEFT's format, of any method that there is; AdapterError names what is wrong."""
    kind: Any = fields.get("peft_type") if isinstance(fields, Mapping) else None
    for name in method_names():
        if kind == method(name).peft_type:
            return method(name).from_peft(fields)
    known = ", ".join(method(name).peft_type for name in method_names())
    raise AdapterError(f"peft_type {kind!r} is not supported; supported: {known}")


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file, whole or not at all."""
    from safetensors.torch import save

    _replace(path, save({name: tensor.cpu() for name, tensor in tensors.items()}, metadata={"format": "pt"}))


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The inverse; AdapterError if the file is missing or damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise AdapterError(f"{path.parent} has no {path.name}; save the adapter with safetensors")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{path} is damaged or cut short ({error}); fetch it again") from None


def _without_base_layers(
    tensors: dict[str, torch.Tensor], adapter: Adapter, directory: Path
) -> dict[str, torch.Tensor]:
    """Drop the copy of an output layer's own weights that PEFT writes beside an adapter on it; they must be the
    backbone's.
    """
    kept = {}
    for name, tensor in tensors.items():
        module = name.removeprefix(_PREFIX).removesuffix(".base_layer.weight")
        if not name.endswith(".base_layer.weight") or module not in adapter.sites:
            kept[name] = tensor
            continue
        part, node = adapter.sites[module]
        weight = as_weight(adapter.backbone.weights[part][f"{node}.weight"])
        own = weight.dense()
        # Both may have been rounded on their way here: to bfloat16, at worst, or quantised.
        atol = 1e-6 + weight.max_rounding
        if tensor.shape != own.shape or not torch.allclose(tensor.to(own).float(), own.float(), rtol=2**-7, atol=atol):
            raise AdapterError(
                f"{directory} comes with other weights for {module} than {adapter.backbone.name} has; "
                "it was made for another model"
            )
    return kept


def _replace(path: Path, content: bytes) -> None:
    part = path.with_suffix(path.suffix + ".part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _first(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")

"""Adapters in PEFT's directory format (adapter_config.json, adapter_model.safetensors), exact in
both directions.

No memory is taken before the size of a directory's tensors is known: the config and the shapes of
all tensors are read first, and compared with the model.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from coserve.adapters.attached import AdapterGraphs
from coserve.adapters.base import Adapter, AdapterConfig
from coserve.adapters.brought import Brought, read_brought
from coserve.adapters.divided_files import DividedAdapter
from coserve.adapters.file_names import CONFIG_FILE, FULL_FILE, WEIGHTS_FILE
from coserve.adapters.layout import AdapterLayout
from coserve.adapters.methods import method, method_names
from coserve.adapters.tensor_files import TensorFile, open_tensors
from coserve.adapters.whole_files import read_small_file
from coserve.errors import AdapterError
from coserve.models.backbone import Backbone
from coserve.settings import shown

_MAX_CONFIG_BYTES = 4 << 20
# Asked, with what is to be loaded, before memory is taken: a context that lasts until it is, or an
# error.
Taking = Callable[[str, AdapterLayout], AbstractContextManager[None]]


def save_adapter(adapter: Adapter, directory: str | Path) -> None:
    """Write an adapter's files (see `Adapter.save`); each is replaced whole, never half-written.
    AdapterError if it cannot be, or is a version of a model that is trained itself, which has no
    tensors of its own.
    """
    directory = Path(directory)
    if adapter.config.is_model and not adapter.masters:
        raise AdapterError(
            "what full fine-tuning has made is a model of its own, and no adapter: its job's "
            "checkpoint writes it "
            "(`Engine.checkpoint(job_id).write(directory)`)"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AdapterError(f"cannot write an adapter to {directory}: {error.strerror}") from None
    adapter.save(directory)


def load_adapter(
    backbone: Backbone,
    directory: str | Path,
    *,
    taking: Taking = lambda what, layout: nullcontext(),
) -> Adapter:
    """Read an adapter for this backbone.

    Args:
        taking: decides, before memory is taken, whether there is enough.

    Raises:
        AdapterError: files are missing or damaged, a number is NaN or infinite, the method or a
        setting is not supported, or the adapter was made for another model; AdapterTooLargeError:
        as `taking` raises it.
    """
    directory = Path(directory)
    config = read_config(directory)
    with open_tensors(directory / WEIGHTS_FILE) as file:
        brought = read_brought(file, config, backbone, directory)
        architecture = backbone.architecture
        layout = AdapterLayout.of(config, architecture, every_target=False, frozen=brought.frozen)
        _check_tensors(file, config, layout, brought, backbone, directory)
        with taking(str(directory), layout):
            frozen_weights = brought.read(file, backbone)
            frozen = brought.without_equal(frozen_weights, backbone)
            if frozen != brought.frozen:
                layout = AdapterLayout.of(config, architecture, every_target=False, frozen=frozen)
            graphs = None
            if backbone.ranks.size > 1:
                graphs = AdapterGraphs.on(config, layout, backbone)
                divided = DividedAdapter(
                    form=config, layout=layout, graphs=graphs, ranks=backbone.ranks
                )
                masters = divided.read(file, backbone.dtype)
            else:
                names = config.to_peft_tensors(_absent(layout), layout)
                masters = config.from_peft_tensors(
                    {name: file.read_finite(name, backbone.dtype) for name in names}, layout
                )
            adapter = Adapter(
                backbone,
                config,
                every_target=False,
                masters=masters,
                frozen=frozen,
                frozen_weights=frozen_weights if frozen is not None else None,
                graphs=graphs,
            )
            return config.as_served(adapter, is_fresh=False)


def check_directory(directory: str | Path, *, reads_tensors: bool = False) -> None:
    """Raise AdapterError if there is no adapter in a directory, or it cannot be read, as far as
    that can be seen without its model.

    reads_tensors: whether numbers that are NaN or infinite are looked for, which reads the whole
    file.
    """
    read_config(Path(directory))
    with open_tensors(Path(directory) / WEIGHTS_FILE) as file:
        for name, header in file.headers.items() if reads_tensors else ():
            if header.is_floating_point:
                file.read_finite(name, torch.float32)


def read_config(directory: Path) -> AdapterConfig:
    """Return the configuration alone; raise AdapterError as `load_adapter` does."""
    path = directory / CONFIG_FILE
    content = read_small_file(path, _MAX_CONFIG_BYTES)
    if content is None and (directory / FULL_FILE).is_file():
        raise AdapterError(
            f"{directory} is a model of its own, which full fine-tuning has made, and no adapter: "
            f"`coserve up` serves "
            "it, by the name of the fine-tuned model or this directory"
        )
    if content is None:
        raise AdapterError(
            f"{path.parent} has no {CONFIG_FILE}; give a directory written by PEFT's "
            f"save_pretrained"
        )
    try:
        fields = json.loads(content)
    except ValueError as error:
        raise AdapterError(f"{path} is not valid JSON: {error}") from None
    except RecursionError:
        raise AdapterError(f"{path} is nested too deeply to be a configuration of PEFT's") from None
    try:
        found = adapter_config(fields)
    except AdapterError as error:
        raise AdapterError(f"{path}: {error}") from None
    if found.is_model:
        kind = found.peft_type
        raise AdapterError(
            f"{path}: {kind} is full fine-tuning, which makes a model of its own, and no adapter"
        )
    return found


def adapter_config(fields: Any) -> AdapterConfig:
    """Return a configuration in PEFT's format, of any method; raise AdapterError, which names what
    is wrong.
    """
    kind: Any = fields.get("peft_type") if isinstance(fields, Mapping) else None
    for name in method_names():
        if kind == method(name).peft_type:
            return method(name).from_peft(fields)
    known = ", ".join(method(name).peft_type for name in method_names())
    raise AdapterError(f"peft_type {shown(kind)} is not supported; supported: {known}")


def _check_tensors(
    file: TensorFile,
    config: AdapterConfig,
    layout: AdapterLayout,
    brought: Brought,
    backbone: Backbone,
    directory: Path,
) -> None:
    """Raise AdapterError unless the tensors are those of the config on this backbone, by their
    names and shapes.
    """
    headers = file.headers
    expected = {
        name: tuple(tensor.shape)
        for name, tensor in config.to_peft_tensors(_absent(layout), layout).items()
    }
    if missing := [name for name in expected if name not in headers]:
        raise AdapterError(
            f"{directory} lacks {_first(missing)}; it was made for another model or with other "
            f"targets"
        )
    if unknown := [name for name in headers if name not in expected and name not in brought.names]:
        raise AdapterError(
            f"{directory} holds {_first(unknown)}, which {backbone.name} has no place for"
        )
    for name, shape in expected.items():
        header = headers[name]
        if header.shape != shape:
            raise AdapterError(
                f"{directory}: {name} has shape {list(header.shape)}, {backbone.name} needs "
                f"{list(shape)}; it was made for another model, or r is another"
            )
        if not header.is_floating_point:
            raise AdapterError(
                f"{directory}: {name} is {header.dtype}; adapters must be of a float type"
            )


def _absent(layout: AdapterLayout) -> dict[str, torch.Tensor]:
    """Return the parameters as shapes alone."""
    return {name: torch.empty(shape, device="meta") for name, shape in layout.shapes.items()}


def _first(names: list[str]) -> str:
    return shown(names[0])[1:-1] + (f" and {len(names) - 1} more" if len(names) > 1 else "")

"""An adapter merged into the weights of its model."""

from pathlib import Path

from torch import Tensor

from coserve.adapters.base import Adapter
from coserve.adapters.peft_directory import load_adapter
from coserve.errors import AdapterError, ModelError
from coserve.models.backbone import build_backbone, find_device
from coserve.models.saving import no_files, save_model
from coserve.models.source import find_model


def merged_weights(adapter: Adapter) -> dict[str, Tensor]:
    """Return the weights that the adapter changes, with it, by full name: float32.

    Raises:
        AdapterError: weights cannot hold what its method adds.
    """
    if adapter.architecture.vocab_size != adapter.backbone.architecture.vocab_size:
        raise AdapterError(
            f"an adapter with another vocabulary ({adapter.architecture.vocab_size} tokens) cannot "
            f"be merged into a "
            f"model of {adapter.backbone.architecture.vocab_size}: resize the model first, and "
            f"merge with PEFT"
        )
    found: dict[str, Tensor] = {}
    for module, site in adapter.at.items():
        if site.frozen is not None:
            found[f"{module}.weight"] = site.frozen.float()
        if parameters := adapter.masters_at[module]:
            for slot, tensor in adapter.config.merged(site, parameters).items():
                found[f"{module}.{slot}"] = tensor
    return found


def export_merged(model: str, adapter_directory: Path, directory: Path) -> None:
    """Write a model with an adapter merged into it, in Hugging Face's layout.

    Raises:
        AdapterError: the adapter is not of this model, or its method cannot be merged. ModelError,
            OSError: as `save_model`.
    """
    source = find_model(model)
    if source.directory is None:
        raise ModelError(no_files(source))  # before its weights are made, which may take all memory
    backbone = build_backbone(source, dtype="float32", device=find_device("cpu"))
    changed = merged_weights(load_adapter(backbone, adapter_directory))
    save_model(backbone.architecture, source, directory, changed)

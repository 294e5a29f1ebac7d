"""Model families, one file each. A family is looked up by the `model_type` of its configuration and imported on first
use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from coserve.errors import UnsupportedModelError
from coserve.models.base import Architecture

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_FAMILIES = {
    "llama": "llama:Llama",
    "mistral": "mistral:Mistral",
    "qwen2": "qwen2:Qwen2",
    "qwen3": "qwen3:Qwen3",
    "opt": "opt:Opt",
}


def families() -> tuple[str, ...]:
    """The model types that can be run."""
    return tuple(_FAMILIES)


def require_family(model_type: object) -> None:
    """UnsupportedModelError, naming the known families, if there is none for this model type."""
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        raise UnsupportedModelError(f"model_type {model_type!r} is not supported; supported: {', '.join(_FAMILIES)}")


def build_architecture(config: "PretrainedConfig") -> Architecture:
    """The architecture of a configuration."""
    require_family(config.model_type)
    module, name = _FAMILIES[config.model_type].split(":")
    family: type[Architecture] = getattr(import_module(f"{__name__}.{module}"), name)
    return family(config)

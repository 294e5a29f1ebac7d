"""Model families, one file each, named as the `model_type` of the configurations that it reads; found by that name and
imported on first use.
"""

from typing import TYPE_CHECKING

from coserve.discovery import variant_class, variant_names
from coserve.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from coserve.models.base import Architecture


def families() -> tuple[str, ...]:
    """The model types that can be run."""
    return tuple(name.replace("-", "_") for name in variant_names(__path__))


def require_family(model_type: object) -> None:
    """UnsupportedModelError, naming the known families, if there is none for this model type."""
    if not isinstance(model_type, str) or model_type.replace("-", "_") not in families():
        raise UnsupportedModelError(f"model_type {model_type!r} is not supported; supported: {', '.join(families())}")


def build_architecture(config: "PretrainedConfig") -> "Architecture":
    """The architecture of a configuration."""
    from coserve.models.base import Architecture

    require_family(config.model_type)
    family: type[Architecture] = variant_class(__name__, config.model_type, Architecture)
    return family(config)

"""Model families, one file each, named after the `model_type` of the configurations that it reads;
found by that name and imported on first use.
"""

import ast
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from coserve.discovery import variant_class, variant_names
from coserve.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from coserve.models.base import Architecture


def families() -> tuple[str, ...]:
    """Return the model types that are supported."""
    return tuple(name.replace("-", "_") for name in variant_names(__path__))


def require_family(model_type: object) -> None:
    """Check that a model type is supported.

    Raises:
        UnsupportedModelError: it is not; the message names the supported ones.
    """
    if not isinstance(model_type, str) or model_type.replace("-", "_") not in families():
        near = get_close_matches(str(model_type), families(), n=1)
        nearest = f"the nearest that is, is {near[0]}; " if near else ""
        raise UnsupportedModelError(
            f"model_type {model_type!r} is not supported; {nearest}supported: "
            f"{', '.join(families())}"
        )


@dataclass(frozen=True, kw_only=True)
class Family:
    """Description of a family."""

    model_type: str
    """Model type of its configurations."""
    summary: str
    """A sentence or two, from the module's docstring."""


def described_families() -> tuple[Family, ...]:
    """Return descriptions of all families; nothing is imported."""
    return tuple(Family(model_type=name, summary=_summary(name)) for name in families())


def _summary(name: str) -> str:
    spec = find_spec(f"{__name__}.{name}")
    assert spec is not None and spec.origin is not None
    text = ast.get_docstring(ast.parse(Path(spec.origin).read_text())) or ""
    return " ".join(text.split()).partition(" Source: ")[0]


def build_architecture(config: "PretrainedConfig") -> "Architecture":
    """Return the architecture of a configuration."""
    from coserve.models.base import Architecture

    require_family(config.model_type)
    family: type[Architecture] = variant_class(__name__, config.model_type, Architecture)
    return family(config)

"""PEFT methods, one file each, named as PEFT's `peft_type` in small letters; found by that name.

Requests for jobs say the same name as the `type` of an adapter.
"""

from collections.abc import Mapping
from typing import Any

from coserve.adapters.base import AdapterConfig
from coserve.discovery import variant_class, variant_names
from coserve.settings import shown


def method_names() -> tuple[str, ...]:
    """Return the names of all methods."""
    return tuple(name.replace("-", "_") for name in variant_names(__path__))


def method(name: Any) -> type[AdapterConfig]:
    """Return the config class of a method; raise ValueError, which lists the known ones, if there
    is none.
    """
    if not isinstance(name, str) or name not in method_names():
        raise ValueError(f"{shown(name)} is not supported; supported: {', '.join(method_names())}")
    found: type[AdapterConfig] = variant_class(__name__, name, AdapterConfig)
    return found


def changes_model(fields: Mapping[str, Any] | None) -> bool:
    """Return whether an adapter of this configuration, in PEFT's format, is the backbone's own
    weights.
    """
    kind = None if fields is None else fields.get("peft_type")
    return any(method(name).is_model and method(name).peft_type == kind for name in method_names())

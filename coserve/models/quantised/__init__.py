"""Quantised checkpoints, one file for each `quant_method` of `quantization_config`, found by that
name. Nothing heavy is imported before weights are read.
"""

from collections.abc import Mapping
from typing import Any

from coserve.discovery import variant_class, variant_names
from coserve.errors import UnsupportedModelError
from coserve.models.quantised.base import Quantisation


def quantisation_methods() -> tuple[str, ...]:
    """Return the names of all methods that are read."""
    return variant_names(__path__)


def quantisation_of(config: Mapping[str, Any] | None) -> Quantisation | None:
    """Return the quantisation of a `quantization_config`; None without one.

    Raises:
        UnsupportedModelError: a part of the configuration is not supported.
    """
    if not config:
        return None
    method = config.get("quant_method") if isinstance(config, Mapping) else None
    if not isinstance(method, str):
        raise UnsupportedModelError(
            "quantization_config has no quant_method, so that its weights cannot be read"
        )
    names = quantisation_methods()
    if method.replace("_", "-") not in names:
        raise UnsupportedModelError(
            f"weights quantised by {method} are not read; known are {', '.join(names)}; or give "
            f"the model in float32, "
            "float16 or bfloat16: --weights int8 quantises it"
        )
    found: type[Quantisation] = variant_class(__name__, method, Quantisation)
    return found.read(config)

"""The engine: requests and jobs on one backbone, in one step loop: plan, run, apply."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coserve.devices.sampling_params import SamplingParams
    from coserve.engine.config import EngineConfig
    from coserve.engine.engine import Engine
    from coserve.scheduling.slo import Slo


__all__ = ["Engine", "EngineConfig", "SamplingParams", "Slo"]

_MODULE = {
    "Engine": "coserve.engine.engine",
    "EngineConfig": "coserve.engine.config",
    "SamplingParams": "coserve.devices.sampling_params",
    "Slo": "coserve.scheduling.slo",
}


def __getattr__(name: str) -> Any:
    # Lazily, so that what imports one module of the engine does not import them all.
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE[name]), name)

"""coserve: serve a language model and fine-tune it at the same time, from one copy of the weights.

Importing this package is cheap: torch, transformers and the rest are imported with the first name
that needs them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from coserve.version import VERSION

if TYPE_CHECKING:
    from coserve.adapters import LoraConfig
    from coserve.engine import Engine, EngineConfig, SamplingParams, Slo
    from coserve.tuning import Example, OptimizerConfig, TuningConfig

__version__ = VERSION

_ROOM = {
    **dict.fromkeys(("Engine", "EngineConfig", "SamplingParams", "Slo"), "coserve.engine"),
    **dict.fromkeys(("Example", "OptimizerConfig", "TuningConfig"), "coserve.tuning"),
    "LoraConfig": "coserve.adapters",
}
__all__ = [
    "Engine",
    "EngineConfig",
    "Example",
    "LoraConfig",
    "OptimizerConfig",
    "SamplingParams",
    "Slo",
    "TuningConfig",
]


def __getattr__(name: str) -> Any:
    if name not in _ROOM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ROOM[name]), name)

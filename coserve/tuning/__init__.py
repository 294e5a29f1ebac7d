"""Fine-tuning: packs of training sequences, the loss, and a pack's way through the model by windows
and tasklets.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coserve.tuning.config import OptimizerConfig, TuningConfig
    from coserve.tuning.examples import Example
    from coserve.tuning.pack import Pack, make_pack
    from coserve.tuning.programs import TrainingPrograms, training_programs
    from coserve.tuning.training_pass import TrainingPass, run_alone

__all__ = [
    "Example",
    "OptimizerConfig",
    "Pack",
    "TrainingPass",
    "TrainingPrograms",
    "TuningConfig",
    "make_pack",
    "run_alone",
    "training_programs",
]

_MODULE = {
    "Example": "examples",
    **dict.fromkeys(("OptimizerConfig", "TuningConfig"), "config"),
    **dict.fromkeys(("Pack", "make_pack"), "pack"),
    **dict.fromkeys(("TrainingPrograms", "training_programs"), "programs"),
    **dict.fromkeys(("TrainingPass", "run_alone"), "training_pass"),
}


def __getattr__(name: str) -> Any:
    # Lazily, so that the settings and the order of a job can be had without torch.
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE[name]}"), name)

"""Fine-tuning: packs of training sequences, the loss, and a pack's way through the model by windows and tasklets."""

from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example
from coserve.tuning.optimizer import OptimizerConfig
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

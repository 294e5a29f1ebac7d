"""What `coserve data check` says of a job's time is what the engine takes, where steps take what
the profile says."""

import pytest

from coserve.adapters import LoraConfig
from coserve.engine.config import EngineConfig
from coserve.engine.token_engine import TokenEngine
from coserve.jobs.lifecycle.estimate import seconds_alone
from coserve.models import load_backbone
from coserve.scheduling.latency import LatencyModel
from coserve.simulate.hardware import Hardware
from coserve.simulate.modelled_device import ModelledDevice
from coserve.simulate.roofline import roofline_profile
from coserve.simulate.simulation import Simulation
from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example
from coserve.tuning.order import TrainingOrder

CPU = Hardware(name="cpu", flops_per_s=2e11, bytes_per_s=2e10, call_s=1e-4)
GPU = Hardware(name="gpu", flops_per_s=1e14, bytes_per_s=1e12, call_s=5e-6)


@pytest.mark.parametrize("hardware", [CPU, GPU])
@pytest.mark.parametrize(
    ("number", "length", "epochs", "batch_size"),
    [(24, 30, 1, 1), (96, 30, 2, 16), (48, 300, 1, 16)],
)
def test_it_is_what_the_engine_takes(hardware, number, length, epochs, batch_size):
    backbone = load_backbone("tiny", device="meta", dtype="bfloat16")
    profile = roofline_profile(backbone, hardware)
    marks = tuple(place >= length // 4 for place in range(length))
    examples = [Example(tokens=(5,) * length, trained=marks)] * number
    config = TuningConfig(num_epochs=epochs, batch_size=batch_size)
    device = ModelledDevice(backbone, profile, num_pages=4000)
    engine = TokenEngine(device, LatencyModel(profile), EngineConfig())
    engine.submit_examples(
        examples, config, adapter=LoraConfig(r=16, alpha=32, target_modules="all-linear")
    )
    for _ in Simulation(engine, []).run(1e6):
        pass
    assert device.clock.now() == pytest.approx(
        seconds_alone(TrainingOrder(examples, config), profile), rel=0.05
    )

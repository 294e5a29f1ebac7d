"""Report of an engine that is ready."""

import torch

from coserve.devices.messages.commands import ModelOnDevice
from coserve.devices.profiles.kept import device_name
from coserve.engine.engine import Engine
from coserve.protocol.messages import Ready


def ready_report(engine: Engine) -> Ready:
    """Return the report of an engine that is ready."""
    info = engine.device.info
    shared = {name: getattr(info, name) for name in ModelOnDevice.__struct_fields__}
    hardware = device_name(torch.device(info.device), info.threads, num_ranks=info.num_ranks)
    return Ready(**shared, slo=engine.slo, hardware=hardware, profile=engine.latency.profile)

"""Report of an engine that is ready."""

import torch

from coserve.devices.profiles.kept import device_name
from coserve.engine.engine import Engine
from coserve.protocol.messages import Ready


def ready_report(engine: Engine) -> Ready:
    """Return the report of an engine that is ready."""
    info = engine.device.info
    return Ready(
        model=info.model,
        dtype=info.dtype,
        device=info.device,
        threads=info.threads,
        slo=engine.slo,
        vocab_size=info.vocab_size,
        max_positions=info.max_positions,
        num_pages=info.num_pages,
        page_bytes=info.page_bytes,
        block_tokens=info.block_tokens,
        weight_bytes=info.weight_bytes,
        num_state_pages=info.num_state_pages,
        hardware=device_name(torch.device(info.device), info.threads, num_ranks=info.num_ranks),
        profile=engine.latency.profile,
        fingerprint=info.fingerprint,
        num_ranks=info.num_ranks,
        kernels=info.kernels,
        kernels_warning=info.kernels_warning,
    )

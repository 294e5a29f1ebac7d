"""Report on the rank that runs in this process: its memory, and how long it has waited."""

import os
from pathlib import Path

import torch

from coserve.devices.messages.commands import RankReport, RanksDescribed
from coserve.models.backbone import Backbone


def describe_rank(backbone: Backbone) -> RanksDescribed:
    """Return the reply to `DescribeRanks` of the rank that holds this backbone."""
    report = RankReport(
        pid=os.getpid(),
        device=str(backbone.device),
        memory_bytes=_memory_bytes(backbone.device),
        waited_s=backbone.group.waited_s,
    )
    return RanksDescribed((report,))


def _memory_bytes(device: torch.device) -> int:
    """Return the bytes that this process holds on a device; 0 where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.memory_reserved(device))
    try:
        num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return num_pages * os.sysconf("SC_PAGE_SIZE")

"""How large a page pool a device can bear, when nobody says."""

import os
from contextlib import suppress
from pathlib import Path

import torch

# Shares of what is free: a GPU is the engine's own but for transient tensors; a computer's memory is shared.
_GPU_SHARE, _CPU_SHARE = 0.85, 0.25


def pool_bytes(device: torch.device) -> int:
    """Bytes for the page pool on a device, with the weights loaded."""
    if device.type == "cuda":
        return int(_GPU_SHARE * torch.cuda.mem_get_info(device)[0])
    return int(_CPU_SHARE * _free_memory_bytes())


def _free_memory_bytes() -> int:
    """Memory that this process may still take: the machine's, or what its container allows."""
    free = 4 << 30
    with suppress(OSError, ValueError):
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        free = min(free, limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    return max(free, 64 << 20)

"""How large a page pool a device can bear, when no setting says so; and memory that is used again."""

import ctypes
import os
from contextlib import suppress
from pathlib import Path

import torch

# Shares of what is free: a GPU is the engine's own but for transient tensors; a computer's memory is shared.
_GPU_SHARE, _CPU_SHARE = 0.85, 0.25
# Options of glibc's mallopt (malloc.h).
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
# oneDNN's own bound is 1,024; a step has few kinds of products, and of the rest most are hardly ever used again.
_MOST_COMPILED_PRODUCTS = 256


def pool_bytes(device: torch.device) -> int:
    """Bytes for the page pool on a device, with the weights loaded."""
    if device.type == "cuda":
        return int(_GPU_SHARE * torch.cuda.mem_get_info(device)[0])
    return int(_CPU_SHARE * _free_memory_bytes())


def keep_freed_memory() -> None:
    """Have this process keep what it frees for its next tensors, where the C library is glibc.

    By default every tensor of some ten megabytes comes from the system and goes back there, and its pages are made and
    cleared anew: a quarter of the time of the loss over a large vocabulary. For a process that is the engine's own.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1)):
            mallopt(option, value)


def bound_compiled_products() -> None:
    """Have oneDNN keep fewer of the products that it compiled, each of which takes some 0.4 MB: one for every shape.

    The number of rows is part of a shape, and a server sees most numbers sooner or later. To be called before the first
    product; what the user's environment says stands.
    https://uxlfoundation.github.io/oneDNN/dev_guide_primitive_cache.html
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(_MOST_COMPILED_PRODUCTS))


def _free_memory_bytes() -> int:
    """Memory that this process may still take: the machine's, or what its container allows."""
    free = 4 << 30
    with suppress(OSError, ValueError):
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        free = min(free, limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    return max(free, 64 << 20)

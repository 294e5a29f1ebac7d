"""Memory of this process: the size of a page pool that no setting gives, memory that is used again,
and errors where there is none left.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from coserve.errors import DeviceMemoryError

# Shares of what is free: a GPU is the engine's own but for transient tensors; a computer's memory
# is shared.
_GPU_SHARE, _CPU_SHARE = 0.85, 0.25
# Of a GPU's free memory, for transient tensors; and the least that the pool has of it, whatever
# jobs would need.
_TRANSIENT_SHARE, _MIN_GPU_SHARE = 0.05, 0.25
# However little is said to be free.
_MIN_BYTES = 64 << 20
# Options of glibc's mallopt (malloc.h).
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
# oneDNN's own bound is 1,024; a step has few kinds of products, and of the rest most are hardly
# ever used again.
_MAX_COMPILED_PRODUCTS = 256


def pool_bytes(device: torch.device, beside_bytes: int, num_ranks: int = 1) -> int:
    """Return the bytes for the page pool on a device, with the weights loaded.

    Args:
        device: A GPU, or the CPU.
        beside_bytes: Bytes that a job should find beside the pool.
        num_ranks: Processes that hold the model together: on a CPU they share its memory.
    """
    if device.type == "cuda":
        free = int(torch.cuda.mem_get_info(device)[0])
        most = min(_GPU_SHARE * free, (1 - _TRANSIENT_SHARE) * free - beside_bytes)
        return int(max(most, _MIN_GPU_SHARE * free))
    return int(_CPU_SHARE * _free_memory_bytes()) // num_ranks


def available_bytes(device: torch.device) -> int:
    """Return the bytes that tensors on a device may still take, with what the system would free for
    them.
    """
    if device.type == "cuda":
        # What PyTorch holds and does not use: new tensors come from there first.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    available = _free_memory_bytes()
    with suppress(OSError, ValueError, LookupError):
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    with suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        counts = dict(
            line.split(" ", 1) for line in (group / "memory.stat").read_text().splitlines()
        )
        # Pages of files that are not in use are counted, but freed as soon as memory is needed.
        used = int((group / "memory.current").read_text()) - int(counts.get("inactive_file", 0))
        # Without a limit the file says "max": a ValueError, and what is available stands.
        available = min(available, int((group / "memory.max").read_text()) - used)
    return max(available, _MIN_BYTES)


def keep_freed_memory() -> None:
    """Have this process keep what it frees for its next tensors, where the C library is glibc.

    By default every tensor of some ten megabytes comes from the system and goes back there, and its
    pages are made and cleared anew: a quarter of the time of the loss over a large vocabulary. For
    a process that is the engine's own.

    All threads share one heap: of each other heap `give_back_freed_memory` would leave the end, up
    to 64 MB.

    Even so a large tensor gets new pages where what is kept lies in smaller pieces. So PyTorch asks
    for huge pages, which are 512 times fewer: to be called before the first tensor of some
    megabytes. What the user's environment says stands.
    https://github.com/pytorch/pytorch/pull/93888
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_ARENA_MAX, 1)):
            mallopt(option, value)


def give_back_freed_memory() -> None:
    """Give memory that was kept back to the system; it takes some milliseconds, for an engine
    without work.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def bound_compiled_products() -> None:
    """Have oneDNN keep fewer of the products that it compiled, each of which takes some 0.4 MB: one
    for every shape.

    The number of rows is part of a shape, and a server sees most numbers sooner or later. To be
    called before the first product; what the user's environment says stands.
    https://uxlfoundation.github.io/oneDNN/dev_guide_primitive_cache.html
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(_MAX_COMPILED_PRODUCTS))


def _free_memory_bytes() -> int:
    """Return the memory that this process may still take: the machine's, or what its container
    allows.
    """
    free = 4 << 30
    with suppress(OSError, ValueError):
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        free = min(free, limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    return max(free, _MIN_BYTES)


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise DeviceMemoryError in place of what PyTorch raises when memory runs out; other errors
    pass.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise DeviceMemoryError(" ".join(str(error).split()) or "out of memory") from error
    except RuntimeError as error:  # what PyTorch raises for CPUs
        if "can't allocate memory" in str(error) or "not enough memory" in str(error):
            raise DeviceMemoryError(" ".join(str(error).split())) from error
        raise

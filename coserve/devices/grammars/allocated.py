"""Bytes that native code of this process has allocated."""

import ctypes
import os
from contextlib import suppress
from functools import cache
from typing import Any

# Fields of glibc's `struct mallinfo2` (malloc.h).
_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _MallocInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS.split()]


@cache
def _mallinfo() -> Any:
    """Return glibc's function; None with another C library."""
    with suppress(AttributeError, OSError):
        function = ctypes.CDLL(None).mallinfo2
        function.restype = _MallocInfo
        return function
    return None


def allocated_bytes() -> int:
    """Return the bytes allocated and not freed; with another C library than glibc, the process's
    resident bytes.
    """
    if (mallinfo := _mallinfo()) is not None:
        info = mallinfo()
        return int(info.uordblks + info.hblkhd)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

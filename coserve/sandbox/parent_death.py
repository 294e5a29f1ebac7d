"""A process that ends with the one that started it, whatever either is doing."""

import ctypes
import os
import signal
import sys

# <linux/prctl.h>
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, even if this process hangs (Linux:
    prctl(2), PR_SET_PDEATHSIG; elsewhere nothing happens).

    It counts from now on: a parent that has ended before must be found out by other means. The
    parent is the thread that started this process, not its process.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))

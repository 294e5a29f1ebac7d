"""Termination of a process together with the one that started it, even if it hangs."""

import ctypes
import os
import signal
import sys

# <linux/prctl.h>
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Make the kernel kill this process when its parent ends (Linux: prctl(2), PR_SET_PDEATHSIG).

    Elsewhere nothing happens. It has no effect for a parent that has ended before. The parent is
    the thread that started this process, not its process.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))

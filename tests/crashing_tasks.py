"""A task for sandboxes that does what its calls ask for, good and bad."""

import ctypes
import os
import signal
import time
from contextlib import suppress
from typing import Any, ClassVar

from coserve.sandbox.task import SandboxTask
from coserve.sandbox.template import UNSTARTED


class Obedient(SandboxTask):
    """Runs a named deed with a number; the setup is a text that calls can have back."""

    setup_type: ClassVar[Any] = str
    call_type: ClassVar[Any] = tuple[str, int]
    reply_type: ClassVar[Any] = Any

    def __init__(self, setup: str) -> None:
        self.setup, self.num_calls = setup, 0

    def run(self, call: tuple[str, int]) -> Any:
        deed, number = call
        self.num_calls += 1
        return getattr(self, deed)(number)

    def say(self, number: int) -> Any:
        return self.setup * number, self.num_calls

    def fault(self, number: int) -> Any:
        ctypes.string_at(0)

    def overflow(self, number: int) -> Any:
        """Use this many bytes of the stack in native code."""
        library = ctypes.CDLL(None)
        callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        used = 0

        def compare(left: Any, right: Any) -> int:
            nonlocal used
            used += 1
            if used * 200 < number:
                library.qsort((ctypes.c_int * 2)(2, 1), 2, 4, deeper)
            return 0

        deeper = callback(compare)
        library.qsort((ctypes.c_int * 2)(2, 1), 2, 4, deeper)

    def allocate(self, number: int) -> Any:
        return len(bytearray(number))

    def allocate_and_abort(self, number: int) -> Any:
        os.write(2, b"memory allocation of 12345 bytes failed\n")
        os.abort()

    def compute(self, number: int) -> Any:
        until_s = time.process_time() + number
        while time.process_time() < until_s:
            pass

    def sleep(self, number: int) -> Any:
        time.sleep(number)

    def be_killed(self, number: int) -> Any:
        """End as the kernel ends processes where memory is short."""
        os.kill(os.getpid(), signal.SIGKILL)

    def be_unstarted(self, number: int) -> Any:
        """End as a process does that cannot start its thread."""
        os._exit(UNSTARTED)

    def fail(self, number: int) -> Any:
        raise ValueError("wrong")

    def surroundings(self, number: int) -> Any:
        files = []
        for file in range(3, 256):
            with suppress(OSError):
                files.append(os.readlink(f"/proc/self/fd/{file}"))
        return dict(os.environ), files, os.getpid(), os.getppid()

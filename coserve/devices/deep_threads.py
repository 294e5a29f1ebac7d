"""Threads with a larger stack than a sandbox gives its calls: what was safe there is safe here,
with a margin.

A sandbox's call has 1 MiB, and is refused if that is not enough. By default threads have what
`ulimit -s` says, which is 2 MiB where that says "unlimited". Pages of a stack that are not used
take no memory.
"""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Lock, stack_size

STACK_BYTES = 16 << 20
_starting = Lock()


def deep_threads(number: int, name: str) -> ThreadPoolExecutor:
    """Return an executor whose threads, which have started, have a stack of `STACK_BYTES`."""
    executor = ThreadPoolExecutor(number, name)
    started = Barrier(number + 1)
    with _starting:
        before = stack_size(STACK_BYTES)
        try:
            for _ in range(number):
                executor.submit(started.wait)
            started.wait()
        finally:
            stack_size(before)
    return executor

"""The two sides of a step on a CPU, each on some of its threads.

The number of threads of an operator is a setting of the thread that calls it, in PyTorch, in its
libraries and in the kernels of this package. So a second thread with a setting of its own is all it
takes; operators release Python's lock while they compute.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Event

import torch

from coserve.devices.sides.base import Work
from coserve.scheduling.plan import Partition
from coserve.scheduling.sharing import Side


class ThreadSides:
    """Sides of a CPU; see `coserve.devices.sides.base.Sides`."""

    def __init__(self) -> None:
        self.num_units = torch.get_num_threads()
        self._thread = ThreadPoolExecutor(1, "beside")

    @contextmanager
    def running(self, work: Work, partition: Partition) -> Iterator[None]:
        before, ended = torch.get_num_threads(), Event()
        found = self._thread.submit(_run, work, ended.is_set, partition.backward_units)
        try:
            torch.set_num_threads(partition.forward_units)
            yield
        finally:
            # Also after an error: the other side must not go on for a pass that is over.
            ended.set()
            wait([found])
            torch.set_num_threads(
                before
            )  # after the other thread's: later threads begin with the last
        found.result()

    @contextmanager
    def alone(self, side: Side, units: int) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(units)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def close(self) -> None:
        self._thread.shutdown()


def _run(work: Work, ended: Callable[[], bool], threads: int) -> None:
    torch.set_num_threads(threads)
    with torch.inference_mode():
        work(ended)

"""Two pieces of work at once on the threads of a CPU, each on as many as it is given.

How many threads an operator uses is a setting of the thread that calls it, in PyTorch, in its libraries and in the
kernels of this package. So a second thread with a setting of its own is all it takes; operators let go of Python's
lock while they compute.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Event

import torch

from coserve.models.backbone import Backbone


def num_units_of(backbone: Backbone) -> int:
    """Among which steps of a model in this process can be divided: threads of a CPU, unless results must be the same
    bit for bit, since sums depend on the number of threads.
    """
    is_divisible = backbone.device.type == "cpu" and backbone.block_rows is None
    return torch.get_num_threads() if is_divisible else 1


class Beside:
    """Runs work beside the caller's, in one thread that stays. The thread is made when it is first used."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "beside")

    @contextmanager
    def running(self, work: Callable[[Callable[[], bool]], None], *, threads: int, own_threads: int) -> Iterator[None]:
        """Run `work` with `threads` threads of the CPU while the body runs with own_threads; ends when both are done.

        An error of either is raised; of two, the body's.

        Args:
            work: is given a question that it can ask at any time: whether the body has ended.
        """
        before, ended = torch.get_num_threads(), Event()
        found = self._thread.submit(_run, work, ended.is_set, threads)
        try:
            torch.set_num_threads(own_threads)
            yield
        finally:
            ended.set()
            wait([found])
            torch.set_num_threads(before)  # after the other thread's: later threads begin with the last
        found.result()

    def close(self) -> None:
        """The thread ends."""
        self._thread.shutdown()


def _run(work: Callable[[Callable[[], bool]], None], ended: Callable[[], bool], threads: int) -> None:
    torch.set_num_threads(threads)
    with torch.inference_mode():
        work(ended)

"""Worker processes that end with their experiment."""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from typing import Any


@contextmanager
def worker_processes(
    number: int, initializer: Callable[..., object] | None = None, arguments: tuple[Any, ...] = ()
) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of new processes, which end if the experiment is interrupted: a pool alone would
    first finish all its work.
    """
    with ProcessPoolExecutor(
        number, get_context("spawn"), initializer=initializer, initargs=arguments
    ) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in active_children():
                process.terminate()
            raise

"""What was launched, as one CUDA graph, which launches it again."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from coserve.kernels.trace import UntraceableError

_log = logging.getLogger(__name__)


class Capturing:
    """Graphs of a device, whose passing tensors share one room: they run one after another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def capture(self, run: Callable[[], None]) -> Callable[[], None] | None:
        """See `Backend.capture`. Where kernels are interpreted, the call runs it again."""
        try:
            return self._captured(run)
        except torch.OutOfMemoryError:
            raise
        except (UntraceableError, RuntimeError) as error:
            _log.info("launched kernel by kernel: %s", error or "an operator cannot be captured")
            return None

    def _captured(self, run: Callable[[], None]) -> Callable[[], None]:
        if self._device.type != "cuda":
            run()
            return run
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream), _without_waiting():  # compiles kernels, and finds what would wait
            run()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            run()
        return graph.replay


@contextmanager
def _without_waiting() -> Iterator[None]:
    """RuntimeError for what would wait for the device, which no graph can hold."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():  # that this mode does not find everything yet
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)

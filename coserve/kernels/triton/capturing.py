"""What was launched, as one CUDA graph, which launches it again."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from coserve.kernels.trace import UntraceableError

_log = logging.getLogger(__name__)

# Operations whose results the host needs: it waits for the device.
_WAITING = frozenset(
    ("_local_scalar_dense", "bincount", "is_nonzero", "masked_select", "nonzero", "unique_consecutive", "_unique2")
)


class Capturing:
    """Graphs of a device, whose passing tensors share one room: they run one after another, on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._pool: Any = None

    def capture(self, run: Callable[[], None]) -> Callable[[], None] | None:
        """See `Backend.capture`: None, too, where there is no memory for it. Where kernels are interpreted, the call
        runs it again.
        """
        try:
            return self._captured(run)
        except torch.OutOfMemoryError:
            _log.warning("launched kernel by kernel: no memory is left to capture it")
            torch.cuda.empty_cache()
        except (UntraceableError, RuntimeError) as error:
            _log.info("launched kernel by kernel: %s", error or "an operator cannot be captured")
        return None

    def _captured(self, run: Callable[[], None]) -> Callable[[], None]:
        if self._device.type != "cuda":
            with _NoWaiting():  # type: ignore[no-untyped-call]
                run()
            return run
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()
        before = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(before)
        # Compiles kernels, and makes what is made once.
        with torch.cuda.stream(self._stream), _NoWaiting():  # type: ignore[no-untyped-call]
            run()
        before.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                run()
        finally:  # a capture that fails does not restore the stream
            torch.cuda.set_stream(before)
        return graph.replay


class _NoWaiting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """UntraceableError for what waits for the device, of this thread alone, before it is part of a capture."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in _WAITING:
            raise UntraceableError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))

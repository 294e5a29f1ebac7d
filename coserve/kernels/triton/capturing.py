"""Captures of launches as CUDA graphs, which launch them again."""

import logging
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from coserve.kernels.trace import UntraceableError

_log = logging.getLogger(__name__)

# Operations whose results the host needs: it waits for the device.
_WAITING = frozenset(
    (
        "_local_scalar_dense",
        "bincount",
        "is_nonzero",
        "masked_select",
        "nonzero",
        "unique_consecutive",
        "_unique2",
    )
)


class Capturing:
    """Graphs of a device.

    The launches of a graph run on the multiprocessors of the stream that it was captured for, so a
    call has one graph for each stream in which it is made. Passing tensors of one stream's graphs
    share one room: they run one after another.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rooms: dict[
            int, tuple[Any, Any]
        ] = {}  # by streams: that of the captures, and where tensors lie
        self._capturing = Lock()

    def capture(self, run: Callable[[], None]) -> Callable[[], None] | None:
        """Implement `Backend.capture`; return None, too, where there is no memory for it. Where
        kernels are interpreted, the call runs it again.
        """
        try:
            with _NoWaiting():  # type: ignore[no-untyped-call]
                self._run_once(run)
        except torch.OutOfMemoryError:
            _say_that_memory_is_missing()
            return None
        except (UntraceableError, RuntimeError) as error:
            _say_why(error)
            return None
        # Interpreted kernels: nothing can be captured, and a replay runs the call.
        if self._device.type != "cuda":
            return run
        call = _Call(self, run)
        return call if call.capture() else None

    def stream(self) -> int:
        """Return the handle of the stream in which calls are made; 0: the device's own."""
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def graph(self, run: Callable[[], None]) -> Callable[[], None] | None:
        """Capture what has run once, for the stream that calls are made in; None where that cannot
        be, or there is no memory for it.
        """
        with self._capturing:  # the sides of a step run in threads of their own
            try:
                return self._captured(run)
            except torch.OutOfMemoryError:
                _say_that_memory_is_missing()
            except (UntraceableError, RuntimeError) as error:
                _say_why(error)
        return None

    def _run_once(self, run: Callable[[], None]) -> None:
        """Compile kernels and make tables that are made once, in the stream of the captures."""
        if self._device.type != "cuda":
            run()
            return
        before, (stream, _) = torch.cuda.current_stream(self._device), self._room()
        # What the call reads may still be computed in the caller's stream.
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            run()
        # And the caller goes on only once the run has ended.
        before.wait_stream(stream)

    def _captured(self, run: Callable[[], None]) -> Callable[[], None]:
        before, (stream, pool) = torch.cuda.current_stream(self._device), self._room()
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: other threads of the process may allocate and launch meanwhile.
            with torch.cuda.graph(
                graph, pool=pool, stream=stream, capture_error_mode="thread_local"
            ):
                run()
        finally:  # a capture that fails does not restore the stream
            torch.cuda.set_stream(before)
        return graph.replay

    def _room(self) -> tuple[Any, Any]:
        """Return the stream that is captured, and its memory pool. The device's own stream cannot
        be captured; any other is, itself.
        """
        if (handle := self.stream()) not in self._rooms:
            stream = torch.cuda.current_stream(self._device)
            if handle == 0:
                stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._rooms[handle] = stream, torch.cuda.graph_pool_handle()
        return self._rooms[handle]


class _Call:
    """Launches, and their graphs by streams; None: they are launched kernel by kernel there."""

    def __init__(self, capturing: Capturing, run: Callable[[], None]) -> None:
        self._capturing, self._run = capturing, run
        self._graphs: dict[int, Callable[[], None] | None] = {}

    def capture(self) -> bool:
        """Capture for the stream in which calls are made; return whether there is a graph."""
        stream = self._capturing.stream()
        self._graphs[stream] = self._capturing.graph(self._run)
        return self._graphs[stream] is not None

    def __call__(self) -> None:
        stream = self._capturing.stream()
        if stream in self._graphs:
            (self._graphs[stream] or self._run)()
        else:  # this time it runs as what the capture needs to have run before
            self._run()
            self.capture()


def _say_that_memory_is_missing() -> None:
    _log.warning("launched kernel by kernel: no memory is left to capture it")
    torch.cuda.empty_cache()


def _say_why(error: Exception) -> None:
    _log.info("launched kernel by kernel: %s", error or "an operator cannot be captured")


class _NoWaiting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that raises UntraceableError for operations of this thread that wait for the device,
    before they are part of a capture.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in _WAITING:
            raise UntraceableError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))

"""The two sides of a step on a GPU, each on some of its multiprocessors: streams of green contexts.

Work that is launched in a stream of a green context runs on the multiprocessors that the context
holds, in the memory of the device
(https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__GREEN__CONTEXTS.html; CUDA 12.4 and
newer). The contexts are made by `cuda.bindings`, which PyTorch's builds for GPUs bring along:
PyTorch's own green contexts all begin at the first multiprocessor, so that two of them overlap.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from threading import Event
from typing import Any

import torch

from coserve.devices.sides.base import Work
from coserve.scheduling.plan import Partition
from coserve.scheduling.sharing import Side

_log = logging.getLogger(__name__)

# More would make for finer shares, and for more captured calls: one of each for each share.
_NUM_UNITS = 4


def stream_sides(device: torch.device) -> "StreamSides | None":
    """Return the sides of a GPU; None where it cannot be divided, for want of `cuda.bindings` or of
    a driver that can.
    """
    streams = _streams(torch.cuda.current_device() if device.index is None else device.index)
    return None if streams is None else StreamSides(streams)


class StreamSides:
    """Sides of a GPU; see `coserve.devices.sides.base.Sides`.

    The forward pass has the first units, work beside it the last.
    """

    num_units = _NUM_UNITS

    def __init__(self, streams: "_Streams") -> None:
        self._streams, self._device = streams, streams.device
        self._thread = ThreadPoolExecutor(1, "beside")

    @contextmanager
    def running(self, work: Work, partition: Partition) -> Iterator[None]:
        whole = torch.cuda.current_stream(self._device)
        forward = self._streams.of("forward", partition.forward_units)
        backward = self._streams.of("backward", partition.backward_units)
        # Both sides read what was launched in the device's own stream before.
        for stream in (forward, backward):
            stream.wait_stream(whole)
        launched, end = Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]

        def has_ended() -> bool:
            return launched.is_set() and bool(end.query())  # type: ignore[no-untyped-call]

        found = self._thread.submit(_run, work, has_ended, backward)
        try:
            with torch.cuda.stream(forward):
                yield
        finally:
            # Before `launched` is set: an event that was never recorded would count as done.
            end.record(forward)
            launched.set()
            # Not `result` yet: its error must not keep the streams from being joined.
            wait([found])
            for stream in (forward, backward):
                whole.wait_stream(stream)
        # Raises what went wrong on the other side.
        found.result()

    @contextmanager
    def alone(self, side: Side, units: int) -> Iterator[None]:
        whole = torch.cuda.current_stream(self._device)
        # All units are the whole device, for which no context is made.
        stream = whole if units == self.num_units else self._streams.of(side, units)
        stream.wait_stream(whole)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            whole.wait_stream(stream)

    def close(self) -> None:
        self._thread.shutdown()


def _run(work: Work, ended: Callable[[], bool], stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream), torch.inference_mode():
        work(ended)


@cache
def _streams(index: int) -> "_Streams | None":
    """Return the streams of the device with this number.

    They are made once for a process, which keeps them: calls are captured for them.
    """
    try:
        return _Streams(torch.device("cuda", index))
    except (ImportError, RuntimeError) as error:
        _log.info("the GPU cannot be divided: %s", error)
        return None


class _Streams:
    """Streams of each side, one for each number of units."""

    def __init__(self, device: torch.device) -> None:
        """Make the contexts and streams.

        Raises:
            ImportError, RuntimeError: There can be none.
        """
        from cuda.bindings import driver

        self.device = device
        self._driver: Any = driver
        self._streams: dict[tuple[Side, int], torch.cuda.Stream] = {}
        torch.cuda.synchronize(device)  # the device's own context is there
        self._place = self._done(driver.cuDeviceGet(device.index))
        kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        whole = self._done(driver.cuDeviceGetDevResource(self._place, kind))
        least = whole.sm.smCount // _NUM_UNITS // 8 * 8  # newer devices give them in eights
        groups, number, _ = self._done(
            driver.cuDevSmResourceSplitByCount(_NUM_UNITS, whole, 0, max(1, least))
        )
        if number < _NUM_UNITS:
            raise RuntimeError(
                f"{whole.sm.smCount} multiprocessors make {number} groups, not {_NUM_UNITS}"
            )
        self._groups: Sequence[Any] = groups[:_NUM_UNITS]
        # From opposite ends, so that sides whose units add up to all share no multiprocessor.
        for units in range(1, _NUM_UNITS):
            self._streams["forward", units] = self._made(self._groups[:units])
            self._streams["backward", units] = self._made(self._groups[_NUM_UNITS - units :])

    def of(self, side: Side, units: int) -> torch.cuda.Stream:
        return self._streams[side, units]

    def _made(self, groups: Sequence[Any]) -> torch.cuda.Stream:
        driver = self._driver
        what = self._done(driver.cuDevResourceGenerateDesc(groups, len(groups)))
        flag = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = self._done(driver.cuGreenCtxCreate(what, self._place, flag))
        stream = self._done(
            driver.cuGreenCtxStreamCreate(context, driver.CUstream_flags.CU_STREAM_NON_BLOCKING, 0)
        )
        return torch.cuda.ExternalStream(  # type: ignore[no-untyped-call]
            int(stream), device=self.device
        )

    def _done(self, result: tuple[Any, ...]) -> Any:
        """Return the result of a call of the driver.

        Raises:
            RuntimeError: It has failed.
        """
        error, *values = result
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"the driver says {error.name}")
        return values[0] if len(values) == 1 else values

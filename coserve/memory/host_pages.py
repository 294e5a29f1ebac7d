"""Slots of host memory beside the page pool, and copies between the two.

On a GPU the slots are pinned, and copies run on a stream of their own, beside whatever runs already: `wait` comes
before anything that reads or writes the pages. On a CPU they are a second arena, and copies are done when they return.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from coserve.memory.paged_kv import PagedKv


class HostPages:
    """Pages that gave way."""

    def __init__(self, pages: PagedKv, *, num_slots: int) -> None:
        """Take the memory."""
        self._pages, self._device = pages.storage, pages.storage.device
        self._is_cuda = self._device.type == "cuda"
        # uint8 [num_slots, page_bytes]
        self._slots = torch.empty(
            num_slots, pages.page_bytes, dtype=torch.uint8, pin_memory=self._is_cuda and num_slots > 0
        )
        self._stream: torch.cuda.Stream | None = None
        if self._is_cuda and num_slots:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._is_copying = False
        self._seconds = 0.0

    def copy_out(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Pages to slots, one to one."""
        self._copy(self._pages, pages, self._slots, slots)

    def copy_in(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """The inverse."""
        self._copy(self._slots, slots, self._pages, pages)

    def wait(self) -> None:
        """What the device is given from now on begins after the copies."""
        if self._stream is not None and self._is_copying:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._is_copying = False

    def take_seconds(self) -> float:
        """For which callers were held up by copies since this was asked last."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _copy(self, source: Tensor, sources: Sequence[int], target: Tensor, targets: Sequence[int]) -> None:
        started_s = time.perf_counter()
        with self._own_stream():
            for first, to, number in _runs(sources, targets):
                target[to : to + number].copy_(source[first : first + number], non_blocking=self._is_cuda)
        self._seconds += time.perf_counter() - started_s

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """After all that the device was given before: the pages are being written, or still read."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._is_copying = True
        with torch.cuda.stream(self._stream):
            yield


def _runs(sources: Sequence[int], targets: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Neighbours that go to neighbours are one copy: (first source, first target, number)."""
    start = 0
    for end in range(1, len(sources) + 1):
        is_next = end < len(sources) and (sources[end], targets[end]) == (sources[end - 1] + 1, targets[end - 1] + 1)
        if not is_next:
            yield sources[start], targets[start], end - start
            start = end

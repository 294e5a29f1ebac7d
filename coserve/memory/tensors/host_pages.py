"""Slots of host memory beside the page pool, copies between the two, and tensors that lie in slots.

On a GPU the slots are pinned, and copies run on a stream of their own, beside whatever runs
already: `wait` comes before anything that reads or writes the pages. On a CPU the slots are a
second arena, and copies are done when they return.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from coserve.memory.tensors.paged_kv import PagedKv


class HostPages:
    """Slots of a page's size in host memory."""

    def __init__(self, pages: PagedKv, *, num_slots: int) -> None:
        """Take the memory."""
        self._pages, self._device = pages.storage, pages.storage.device
        self._is_cuda = self._device.type == "cuda"
        # uint8 [num_slots, page_bytes]
        self._slots = torch.empty(
            num_slots,
            pages.page_bytes,
            dtype=torch.uint8,
            pin_memory=self._is_cuda and num_slots > 0,
        )
        self._stream: torch.cuda.Stream | None = None
        if self._is_cuda and num_slots:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._is_copying = False
        self._seconds = 0.0

    def copy_out(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Copy pages to slots, one to one."""
        self._copy(self._pages, pages, self._slots, slots)

    def copy_in(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Copy slots to pages, one to one."""
        self._copy(self._slots, slots, self._pages, pages)

    def store(self, tensors: Sequence[Tensor], slots: Sequence[int]) -> None:
        """Copy whole tensors to slots, end to end; the tensors may be freed then."""
        flat = self._slots.view(-1)
        with self._own_stream():
            for tensor, places in zip(tensors, self._places(tensors, slots), strict=True):
                source, start = tensor.contiguous().view(-1).view(torch.uint8), 0
                for place in places:
                    size = place.stop - place.start
                    flat[place].copy_(source[start : start + size], non_blocking=self._is_cuda)
                    start += size
                if self._stream is not None and source.is_cuda:
                    source.record_stream(self._stream)

    def load(
        self, shapes: Sequence[Tensor], slots: Sequence[int], *, on_device: bool = True
    ) -> list[Tensor]:
        """Copy slots to new tensors.

        Args:
            shapes: Tensors whose shapes and types they have.
            slots: The slots that `store` was given.
            on_device: Whether they lie on the device, or in the host's memory.
        """
        if self._stream is not None and not on_device:
            self._stream.synchronize()
        flat, device = self._slots.view(-1), self._device if on_device else torch.device("cpu")
        tensors = [torch.empty(each.shape, dtype=each.dtype, device=device) for each in shapes]
        with self._own_stream() if on_device else nullcontext():
            for tensor, places in zip(tensors, self._places(shapes, slots), strict=True):
                target, start = tensor.view(-1).view(torch.uint8), 0
                for place in places:
                    size = place.stop - place.start
                    target[start : start + size].copy_(flat[place], non_blocking=self._is_cuda)
                    start += size
        if on_device:
            self.wait()
        return tensors

    def wait(self) -> None:
        """Have the device begin what it is given from now on after the copies."""
        if self._stream is not None and self._is_copying:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._is_copying = False

    def take_seconds(self) -> float:
        """Return the seconds for which callers were held up by copies since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _copy(
        self, source: Tensor, sources: Sequence[int], target: Tensor, targets: Sequence[int]
    ) -> None:
        started_s = time.perf_counter()
        with self._own_stream():
            for first, to, number in _runs(sources, targets):
                target[to : to + number].copy_(
                    source[first : first + number], non_blocking=self._is_cuda
                )
        self._seconds += time.perf_counter() - started_s

    def _places(self, tensors: Sequence[Tensor], slots: Sequence[int]) -> Iterator[list[slice]]:
        """Yield the bytes of the slots where each tensor lies, in order."""
        size = self._slots.shape[1]
        runs = [(first * size, number * size) for first, _, number in _runs(slots, slots)][::-1]
        for tensor in tensors:
            places, left = [], tensor.numel() * tensor.element_size()
            while left:
                start, length = runs.pop()
                used = min(left, length)
                places.append(slice(start, start + used))
                left -= used
                if used < length:
                    runs.append((start + used, length - used))
            yield places

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """Run copies after all that the device was given before, which may still write or read the
        pages.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._is_copying = True
        with torch.cuda.stream(self._stream):
            yield


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors without memory that have the shapes and types of these, in place of stored
    ones.
    """
    return {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}


def is_away(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether tensors are such as `shapes_of` returns."""
    return any(tensor.device.type == "meta" for tensor in tensors.values())


def _runs(sources: Sequence[int], targets: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield neighbours that go to neighbours as one copy: first source, first target, number."""
    start = 0
    for end in range(1, len(sources) + 1):
        is_next = end < len(sources) and (sources[end], targets[end]) == (
            sources[end - 1] + 1,
            targets[end - 1] + 1,
        )
        if not is_next:
            yield sources[start], targets[start], end - start
            start = end

"""Pages that go from one device to another through a file that both map: shared memory, on a file system in memory.

A file has a place of a page's size for each page that goes through it, page after page as the pool lays them out. So
both pools must be of the same model, dtype and number of tokens per page; `coserve.handover` sees to that.
"""

import mmap
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from coserve.memory.paged_kv import PagedKv


class PageFiles:
    """Copies between a pool and page files; all are done when they return."""

    def __init__(self, pages: PagedKv) -> None:
        self._storage, self._page_bytes = pages.storage, pages.page_bytes
        self._seconds = 0.0

    def export(self, path: str, pages: Sequence[int], places: Sequence[int]) -> None:
        """Pages to places, one to one; OSError if the file is not there."""
        self._mapped(path)[list(places)] = self._storage[list(pages)].cpu()

    def take(self, path: str, pages: Sequence[int], places: Sequence[int], data: bytes = b"") -> None:
        """The inverse. data: takes the file's place."""
        started_s = time.perf_counter()
        if data:
            found = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, self._page_bytes)
        else:
            found = self._mapped(path)[list(places)]
        self._storage[list(pages)] = found.to(self._storage.device)
        self._seconds += time.perf_counter() - started_s

    def take_seconds(self) -> float:
        """For which steps were held up since this was asked last."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _mapped(self, path: str) -> Tensor:
        """The file as uint8 [num_places, page_bytes]; unmapped when nobody refers to it any more."""
        with open(path, "r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0)
        return torch.frombuffer(mapped, dtype=torch.uint8).view(-1, self._page_bytes)

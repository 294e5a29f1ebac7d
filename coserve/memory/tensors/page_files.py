"""Pages that go from one device to another through a file that both map: shared memory, on a file
system in memory.

A file has a place for each page that goes through it, page after page as the pool of a device with
one rank lays them out. So both pools must be of the same model, dtype and number of tokens per page
(`coserve.handover` checks that), and may be divided among different numbers of ranks, each of which
writes and reads its own columns of a place.
"""

import mmap
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from coserve.kernels.cuts import Cut
from coserve.memory.tensors.paged_kv import PagedKv, whole_page_bytes


class PageFiles:
    """Copies between a page pool and page files; all are done when they return."""

    def __init__(self, pages: PagedKv) -> None:
        """Set the layout of places.

        Args:
            pages: the pool. Where ranks divide it and its model has states, nothing can be copied.
        """
        self._places = _Pages(pages) if pages.backbone.group.size == 1 else _Columns(pages)
        self._place_bytes = whole_page_bytes(pages.backbone, pages.block_tokens)
        self._seconds = 0.0

    def export(self, path: str, pages: Sequence[int], places: Sequence[int]) -> None:
        """Copy pages to places, one to one.

        Raises:
            OSError: The file is not there.
        """
        self._places.write(self._mapped(path), list(pages), list(places))

    def take(
        self, path: str, pages: Sequence[int], places: Sequence[int], data: bytes = b""
    ) -> None:
        """Copy places to pages, one to one.

        Args:
            path: Path of the file.
            pages: Page for each place.
            places: Places to copy.
            data: Content of the places, in place of the file's.
        """
        started_s = time.perf_counter()
        if data:
            content = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(
                -1, self._place_bytes
            )
            self._places.read(content, list(pages), list(range(len(places))))
        else:
            self._places.read(self._mapped(path), list(pages), list(places))
        self._seconds += time.perf_counter() - started_s

    def take_seconds(self) -> float:
        """Return the seconds for which steps were held up since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _mapped(self, path: str) -> Tensor:
        """Return the file as uint8 [num_places, bytes of a place]; it is unmapped when nobody
        refers to it.
        """
        with open(path, "r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0)
        return torch.frombuffer(mapped, dtype=torch.uint8).view(-1, self._place_bytes)


class _Pages:
    """Places as a device with one rank has its pages, byte by byte."""

    def __init__(self, pages: PagedKv) -> None:
        self._storage = pages.storage

    def write(self, file: Tensor, pages: list[int], places: list[int]) -> None:
        """Copy pages to places of a file, uint8 [num_places, bytes of a place]."""
        file[places] = self._storage[pages].cpu()

    def read(self, file: Tensor, pages: list[int], places: list[int]) -> None:
        """Copy places to pages."""
        self._storage[pages] = file[places].to(self._storage.device)


class _Columns:
    """Places as one of several ranks sees them: it has some columns of all keys and values."""

    def __init__(self, pages: PagedKv) -> None:
        backbone, self._num_state_pages = pages.backbone, pages.num_state_pages
        self._rank, self._dtype, self._pages = backbone.group.rank, backbone.dtype, pages.pages
        # Of each tensor of keys or values: its block's number among those with attention, 0 or 1,
        # and its columns.
        self._cuts: list[tuple[int, int, Cut]] = []
        for number, layer in enumerate(backbone.local.kv_layers):
            for which, name in enumerate(backbone.local.graphs[layer].kv_tensors):
                cut = backbone.local.state(layer, name)
                assert isinstance(cut, Cut), "each rank has keys and values of its heads"
                self._cuts.append((number, which, cut))

    def write(self, file: Tensor, pages: list[int], places: list[int]) -> None:
        """Copy this rank's columns to places; of heads that several ranks hold the first of these
        ranks does.
        """
        for number, which, cut in self._cuts:
            own = self._pages[number, which, pages].cpu()
            whole = self._whole(file, number, which, cut)
            for start, run in cut.owned_runs(self._rank):
                whole[places, :, run.start : run.stop] = own[
                    ..., start : start + run.stop - run.start
                ]

    def read(self, file: Tensor, pages: list[int], places: list[int]) -> None:
        """Copy this rank's columns of places to pages."""
        for number, which, cut in self._cuts:
            own = cut.take(self._whole(file, number, which, cut)[places], self._rank)
            self._pages[number, which, pages] = own.to(self._pages.device)

    def _whole(self, file: Tensor, number: int, which: int, cut: Cut) -> Tensor:
        """Return all keys, or all values, of a block in a file: [num_places, block_tokens, Hkv *
        D].
        """
        assert not self._num_state_pages, (
            "ranks have parts of a state that do not add up to whole pages"
        )
        num_layers, _, _, block_tokens, _ = self._pages.shape
        used = num_layers * 2 * block_tokens * cut.width * self._dtype.itemsize
        places = file[:, :used].view(self._dtype)
        return places.view(-1, num_layers, 2, block_tokens, cut.width)[:, number, which]

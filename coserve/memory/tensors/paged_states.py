"""States of requests in pages of the pool, for models whose blocks carry one (gated delta layers).

A request has as many pages for its states as all of them together fill, beside those of its keys
and values. In these pages, laid end to end, the state of each block has its place.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from coserve.graph.states import StateRun
from coserve.kernels.transfer import on_device
from coserve.models.local import LocalModel

_FLOAT_BYTES, _ALIGNMENT = 4, 64


def num_state_pages(local: LocalModel, page_bytes: int) -> int:
    """Return the number of pages of a request's states; 0 for a model without states."""
    return -(-sum(map(_aligned_bytes, local.state_sizes.values())) // page_bytes)


class PagedStates:
    """States of one block, of some requests; a place is a request's number among these."""

    def __init__(self, storage: Tensor, tables: Tensor, local: LocalModel, layer: int) -> None:
        """Find the bytes of the block's states.

        Args:
            storage: All pages, uint8 [num_pages, page_bytes].
            tables: Pages of each request's states, int64 [requests, pages].
            local: The model as it runs here.
            layer: Number of the block.
        """
        sizes, page_bytes = local.state_sizes, storage.shape[1]
        # States of all blocks lie one after another in a request's pages, each aligned.
        start = sum(_aligned_bytes(size) for other, size in sizes.items() if other < layer)
        end = start + _FLOAT_BYTES * sizes[layer]
        self._storage, self._tables = storage, tables
        # Of each page that it lies in: which of a request's pages, and the bytes there.
        self._parts = [
            (page, max(0, start - page * page_bytes), min(page_bytes, end - page * page_bytes))
            for page in range(start // page_bytes, -(-end // page_bytes))
        ]

    def read(self, places: Tensor) -> Tensor:
        pages = self._tables[places]
        parts = [self._storage[pages[:, page], first:last] for page, first, last in self._parts]
        # Bytes of the pages side by side are the state again, float32 [places, size].
        return torch.cat(parts, 1).view(torch.float32)

    def write(self, places: Tensor, states: Tensor) -> None:
        pages, values = self._tables[places], states.contiguous().view(torch.uint8)
        sizes = [last - first for _, first, last in self._parts]
        for (page, first, last), part in zip(
            self._parts, torch.split(values, sizes, 1), strict=True
        ):
            self._storage[pages[:, page], first:last] = part


def state_runs(
    starts: Sequence[int], lengths: Sequence[int], device: torch.device
) -> list[StateRun]:
    """Return the next rows of sequences as runs; sequences of equal length run at once.

    Args:
        starts: Number of rows that each sequence has had; its number among these is its place.
        lengths: Number of rows that each has now; the rows stand one sequence after another.
        device: Device of the runs' tensors.
    """
    first, by_length = 0, dict[int, list[tuple[int, int]]]()
    for place, length in enumerate(lengths):
        by_length.setdefault(length, []).append((place, first))
        first += length
    return [_run(length, pieces, starts, device) for length, pieces in by_length.items()]


def _run(
    length: int, pieces: Sequence[tuple[int, int]], starts: Sequence[int], device: torch.device
) -> StateRun:
    places = on_device([place for place, _ in pieces], device)
    # A sequence's first rows begin without a state.
    fresh = [not starts[place] for place, _ in pieces]
    begin, num_rows = pieces[0][1], length * len(pieces)
    rows: slice | Tensor = slice(begin, begin + num_rows)
    if pieces[-1][1] + length != begin + num_rows:  # others stand between them
        rows = on_device([first + row for _, first in pieces for row in range(length)], device)
    return StateRun(
        num_rows=length,
        rows=rows,
        before=places,
        after=places,
        fresh=on_device(fresh, device, torch.bool) if any(fresh) else None,
    )


def _aligned_bytes(size: int) -> int:
    return -(-_FLOAT_BYTES * size // _ALIGNMENT) * _ALIGNMENT

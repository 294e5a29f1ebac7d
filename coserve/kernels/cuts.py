"""Cuts of a tensor's dimension among ranks: which entries each of them holds.

Pieces are equally large on all ranks. They need not be neighbours (a fused projection is divided
part by part), and several ranks may hold the same piece (key heads, where there are fewer than
ranks).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from coserve.errors import GraphError


@dataclass(frozen=True, kw_only=True, order=True)
class CutRun:
    """Neighbouring entries of a dimension."""

    start: int
    """First entry."""
    stop: int
    """Entry after the last."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A division of one dimension among the ranks of a group, each of which has as many entries as
    the others.
    """

    width: int
    """Entries of the whole dimension."""
    runs: tuple[tuple[CutRun, ...], ...]
    """Entries that each rank holds, in their order in the whole. Entries from `width` on are zeros.
    """
    dim: int = -1
    """The dimension, counted from the last one (-1), so that it is the same with and without rows
    in front."""

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.runs)

    @cached_property
    def local(self) -> int:
        """Return the number of entries that each rank holds."""
        return sum(run.stop - run.start for run in self.runs[0])

    def num_held(self, rank: int) -> int:
        """Return the number of entries of the whole that a rank holds: fewer than `local` where its
        piece is padded.
        """
        return sum(max(0, min(run.stop, self.width) - run.start) for run in self.runs[rank])

    @cached_property
    def copies(self) -> tuple[int, int]:
        """Return the smallest and the largest number of ranks that hold the same entry.

        They differ where a fused projection is divided: each query head may be on one rank, each
        key head on two.
        """
        return int(self._counts.min()), int(self._counts.max())

    @property
    def is_disjoint(self) -> bool:
        """Return whether no entry is on several ranks, so that products over the ranks' entries add
        up.
        """
        return self.copies[1] == 1

    @property
    def is_padded(self) -> bool:
        """Return whether the last ranks hold zeros beyond the whole dimension."""
        return any(run.stop > self.width for run in self.runs[-1])

    def owned(self, piece: Tensor, rank: int) -> Tensor:
        """Return a rank's piece with zeros for the entries that a rank before it holds as well.

        The pieces of all ranks then add up to the whole, each entry once.
        """
        if self.is_disjoint:
            return piece
        shape = [1] * piece.ndim
        shape[self.dim] = self.local
        return piece * self._is_owned[rank].to(piece.device).view(shape)

    def copied(self, piece: Tensor, rank: int) -> Tensor:
        """Return the entries of a tensor that several ranks hold, with zeros for those that this
        rank does not hold.

        The tensors of all ranks have one shape, and each entry the same place in all of them.
        """
        local, places = self._copied[rank]
        shape = list(piece.shape)
        shape[self.dim] = self._num_copied
        entries = piece.index_select(self.dim, local.to(piece.device))
        return piece.new_zeros(shape).index_copy_(self.dim, places.to(piece.device), entries)

    def put_copied(self, piece: Tensor, entries: Tensor, rank: int) -> None:
        """Write the entries that several ranks hold (see `copied`) to a rank's piece."""
        local, places = self._copied[rank]
        piece.index_copy_(
            self.dim,
            local.to(piece.device),
            entries.index_select(self.dim, places.to(piece.device)),
        )

    @cached_property
    def _counts(self) -> Tensor:
        """Return by entry the number of ranks that hold it, int64 [width]."""
        counts = torch.zeros(self.width, dtype=torch.int64)
        for run in chain.from_iterable(self.runs):
            counts[run.start : run.stop] += 1
        return counts

    @cached_property
    def _num_copied(self) -> int:
        return int((self._counts > 1).sum())

    @cached_property
    def _copied(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Return by rank, for its entries that several ranks hold, their numbers in its piece, and
        their numbers among all such entries.
        """
        is_copied = self._counts > 1
        number, entries = is_copied.cumsum(0) - 1, self.along(-1)
        copies = []
        for rank in range(self.size):
            local = entries.take(is_copied, rank).nonzero()[:, 0]
            copies.append((local, entries.take(number, rank)[local]))
        return tuple(copies)

    @cached_property
    def _is_owned(self) -> tuple[Tensor, ...]:
        """Return by rank which of its entries no rank before it holds, bool [local]."""
        owners = torch.zeros(self.width, dtype=torch.int64)
        for rank in reversed(range(self.size)):
            for run in self.runs[rank]:
                owners[run.start : run.stop] = rank
        entries = self.along(-1)
        return tuple(entries.take(owners, rank) == rank for rank in range(self.size))

    def along(self, dim: int) -> "Cut":
        """Return the same cut of another dimension."""
        return replace(self, dim=dim)

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a rank's piece of a tensor of this whole shape."""
        assert shape[self.dim] == self.width, f"a cut of {self.width} entries on {shape}"
        place = len(shape) + self.dim
        return (*shape[:place], self.local, *shape[place + 1 :])

    def owned_runs(self, rank: int) -> list[tuple[int, CutRun]]:
        """Return the entries of a rank that no rank before it holds, each run with its place in the
        rank's piece.
        """
        others = [run for runs in self.runs[:rank] for run in runs]
        owned, start = list[tuple[int, CutRun]](), 0
        for run in self.runs[rank]:
            low, stop = run.start, min(run.stop, self.width)
            for other in merged(others):
                if other.start < stop and other.stop > low:
                    if low < other.start:
                        owned.append((start + low - run.start, CutRun(start=low, stop=other.start)))
                    low = max(low, other.stop)
            if low < stop:
                owned.append((start + low - run.start, CutRun(start=low, stop=stop)))
            start += run.stop - run.start
        return owned

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """Return a rank's piece of a whole tensor, contiguous and a copy."""
        pieces = [
            whole.narrow(self.dim, run.start, max(0, min(run.stop, self.width) - run.start))
            for run in self.runs[rank]
            if run.start < self.width
        ]
        missing = self.local - sum(piece.shape[self.dim] for piece in pieces)
        if missing:
            shape = list(whole.shape)
            shape[self.dim] = missing
            pieces.append(whole.new_zeros(shape))
        return torch.cat(pieces, self.dim)

    def put(self, whole: Tensor, piece: Tensor, rank: int) -> None:
        """Write a rank's piece, as `take` returns it, to its place in the whole tensor."""
        start = 0
        for run in self.runs[rank]:
            num_there = max(0, min(run.stop, self.width) - run.start)
            if num_there:
                whole.narrow(self.dim, run.start, num_there).copy_(
                    piece.narrow(self.dim, start, num_there)
                )
            start += run.stop - run.start


def even_cut(width: int, size: int, *, padded: bool = False) -> Cut | None:
    """Return a cut into neighbouring pieces of equal width; None where the width does not divide.

    Args:
        width: entries of the whole dimension.
        size: number of ranks.
        padded: whether the last pieces may end in zeros, so that every width divides.
    """
    if width % size and not padded:
        return None
    local = -(-width // size)
    runs = tuple((CutRun(start=rank * local, stop=(rank + 1) * local),) for rank in range(size))
    return Cut(width=width, runs=runs)


def head_cut(
    num_heads: int, head_width: int, size: int, *, name: str, may_copy: bool = False
) -> Cut:
    """Return a cut into whole heads; with fewer heads than ranks, neighbouring ranks hold the same
    one.

    Args:
        num_heads: number of heads of the whole tensor.
        head_width: entries of each.
        size: number of ranks.
        name: what the heads are called in a message.
        may_copy: whether ranks may hold the same head.

    Raises:
        GraphError: the heads cannot be divided among the ranks.
    """
    if num_heads % size == 0:
        cut = even_cut(num_heads * head_width, size)
        assert cut is not None
        return cut
    if not may_copy or size % num_heads:
        fitting = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
        multiples = ", or a multiple of it" if may_copy else ""
        raise GraphError(
            f"{num_heads} {name} cannot be divided among {size} ranks; a number of ranks that fits "
            f"is "
            f"{' or '.join(map(str, fitting))}{multiples}"
        )
    copies = size // num_heads
    return Cut(
        width=num_heads * head_width,
        runs=tuple(
            (CutRun(start=rank // copies * head_width, stop=(rank // copies + 1) * head_width),)
            for rank in range(size)
        ),
    )


def side_by_side(parts: Sequence[Cut]) -> Cut:
    """Return the cut of a tensor whose columns are those of several tensors, one after another."""
    start, runs = 0, [list[CutRun]() for _ in parts[0].runs]
    for part in parts:
        for own, of_rank in zip(runs, part.runs, strict=True):
            own += [CutRun(start=run.start + start, stop=run.stop + start) for run in of_rank]
        start += part.width
    return Cut(width=start, runs=tuple(merged(own) for own in runs))


def united(cuts: Sequence[Cut]) -> Cut:
    """Return the cut in which each rank has everything that it has in any of several cuts of one
    tensor.
    """
    if all(cut == cuts[0] for cut in cuts):
        return cuts[0]
    return replace(
        cuts[0],
        runs=tuple(
            merged(run for cut in cuts for run in cut.runs[rank]) for rank in range(cuts[0].size)
        ),
    )


def merged(runs: Iterable[CutRun]) -> tuple[CutRun, ...]:
    """Return runs in their order, with those that touch or overlap as one."""
    result: list[CutRun] = []
    for run in sorted(runs):
        if result and run.start <= result[-1].stop:
            result[-1] = CutRun(start=result[-1].start, stop=max(result[-1].stop, run.stop))
        else:
            result.append(run)
    return tuple(result)


def mapped(cut: Cut, width: int, place: Mapping[int, int]) -> Cut | None:
    """Return the cut of another dimension whose entries correspond to those of this one.

    Args:
        cut: the cut to map.
        width: entries of the other dimension.
        place: entry -> the entry that corresponds to it there; entries without one are left out.

    Returns:
        The cut; None where ranks would hold different numbers of entries, or none.
    """
    of_ranks = tuple(
        merged(
            CutRun(start=place[entry], stop=place[entry] + 1)
            for run in runs
            for entry in range(run.start, run.stop)
            if entry in place
        )
        for runs in cut.runs
    )
    sizes = {sum(run.stop - run.start for run in runs) for runs in of_ranks}
    return Cut(width=width, runs=of_ranks) if len(sizes) == 1 and sizes != {0} else None


def repeated(cut: Cut, times: int) -> Cut:
    """Return the cut of several tensors side by side that are all cut like this one."""
    return side_by_side([cut] * times)


def pattern(cut: Cut, times: int) -> Cut | None:
    """Return the cut that this one repeats `times` times; None if it repeats none."""
    width = cut.width // times
    first = mapped(cut, width, {entry: entry for entry in range(width)})
    return first if first is not None and repeated(first, times) == cut else None

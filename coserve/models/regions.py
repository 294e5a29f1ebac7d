"""Places of a rank's piece of a tensor in files, whose tensors are whole whatever the number of
ranks.

A tensor of a file is a view of the whole weight or parameter: the same, transposed, or a part of
it. The view determines which block of the file's tensor a rank reads or writes, and which elements
of the rank's piece these are.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from coserve.graph.layouts import FIRST, AnyState
from coserve.kernels.cuts import Cut, CutRun, merged


@dataclass(frozen=True, kw_only=True)
class Region:
    """A block of a file's tensor, and the same elements in a rank's piece."""

    at: tuple[slice, ...]
    """The block: a slice for each dimension of the file's tensor."""
    part: Tensor
    """View of the rank's tensor that has the shape of the block."""

    def blocks(self, shape: tuple[int, ...]) -> Iterator["ElementRuns"]:
        """Yield the region's elements as runs of neighbours in a file's tensor of this shape."""
        sizes = [each.stop - each.start for each in self.at]
        # After the last dimension of which the block has only a part, elements are neighbours.
        dim = max((dim for dim, size in enumerate(sizes) if size < shape[dim]), default=0)
        starts, stride = [0], prod(shape)
        for each, (own, size) in enumerate(zip(self.at[: dim + 1], shape, strict=False)):
            stride //= max(1, size)
            numbers = range(own.start, own.stop if each < dim else own.start + 1)
            # All places of the block in the dimensions so far; of `dim` only the first, where a run
            # begins.
            starts = [start + number * stride for start in starts for number in numbers]
        if self.part.numel():
            yield ElementRuns(starts=starts, rows=self.part.reshape(len(starts), -1))


@dataclass(frozen=True, kw_only=True)
class ElementRuns:
    """Runs of neighbouring elements of a file's tensor, all of one length."""

    starts: Sequence[int]
    """Number of each run's first element in the tensor, counted row by row."""
    rows: Tensor
    """Elements, [runs, length]."""


Blocks = Callable[[], Iterator[ElementRuns]]


@dataclass(frozen=True, kw_only=True)
class TensorView:
    """A tensor of a file as a view of a whole tensor."""

    shape: tuple[int, ...]
    """Shape of the file's tensor."""
    dims: tuple[int | None, ...]
    """Dimension of the whole tensor by dimension of the file's; None where that has one entry and
    none corresponds.
    """
    starts: tuple[int, ...]
    """First entry that is in the file's tensor, by dimension of the whole tensor."""

    @classmethod
    def of(cls, tensor: Tensor, whole: Tensor) -> "TensorView | None":
        """Return a tensor as a view of another one, which is contiguous; None if it is none, or
        splits or joins dimensions.
        """
        if tensor is not whole and tensor._base is not whole:
            return None
        offset, starts = tensor.storage_offset() - whole.storage_offset(), list[int]()
        for size, stride in zip(whole.shape, whole.stride(), strict=True):
            # The offset in mixed radix: the whole tensor is contiguous, so each stride is a digit's
            # weight.
            starts.append(offset // stride if size > 1 else 0)
            offset -= starts[-1] * stride
        dims = list[int | None]()
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            # A view's dimension is the whole's dimension with that stride, if it stays within it.
            fits = [
                dim
                for dim, most in enumerate(whole.shape)
                if most > 1
                and whole.stride(dim) == stride
                and starts[dim] + size <= most
                and dim not in dims
            ]
            if size != 1 and not fits:
                return None
            dims.append(fits[0] if size != 1 else None)
        return cls(shape=tuple(tensor.shape), dims=tuple(dims), starts=tuple(starts))

    @classmethod
    def all_of(cls, shape: tuple[int, ...]) -> "TensorView":
        """Return the view of a tensor of this shape as it is."""
        return cls(shape=shape, dims=tuple(range(len(shape))), starts=(0,) * len(shape))

    def regions(self, piece: Tensor, state: AnyState, rank: int) -> Iterator[Region]:
        """Yield a rank's regions of the file's tensor, for reading.

        Args:
            piece: The rank's piece of the whole tensor.
            state: How ranks divide the whole tensor.
            rank: Number of the rank.
        """
        if isinstance(state, Cut):
            yield from self._cut_regions(piece, state, held_runs(state, rank))
        # Ranks above 0 have zeros of a FIRST tensor, whatever is in the file.
        elif rank == 0 or state is not FIRST:
            yield self._region(piece, None, 0, 0, 0)

    def owned_regions(self, piece: Tensor, state: AnyState, rank: int) -> Iterator[Region]:
        """Yield the regions of the file's tensor that a rank writes: what it holds and no rank
        before it does; see `regions`.
        """
        if isinstance(state, Cut):
            yield from self._cut_regions(piece, state, owned_runs(state, rank))
        elif rank == 0:
            yield self._region(piece, None, 0, 0, 0)

    def _cut_regions(
        self, piece: Tensor, cut: Cut, runs: Sequence[tuple[CutRun, int]]
    ) -> Iterator[Region]:
        dim = piece.ndim + cut.dim
        first = self.starts[dim]
        # Entries of the cut dimension that are in the file's tensor: one, where it has no such
        # dimension.
        stop = first + (self.shape[self.dims.index(dim)] if dim in self.dims else 1)
        for run, start in runs:
            low, high = max(run.start, first), min(run.stop, stop)
            if low < high:
                # The overlap, counted in the file's tensor and in the piece.
                yield self._region(piece, dim, low - first, high - low, start + low - run.start)

    def _region(self, piece: Tensor, dim: int | None, first: int, size: int, local: int) -> Region:
        """Return the region of `size` entries of a dimension of the whole tensor, from `first` on
        in the file's tensor and from `local` on in the piece; of all entries, where there is no
        such dimension.
        """
        index = list[int | slice]()
        for each, start in enumerate(self.starts):
            is_cut = each == dim
            begin = local if is_cut else start
            if each not in self.dims:
                index.append(begin)
            else:
                length = size if is_cut else self.shape[self.dims.index(each)]
                index.append(slice(begin, begin + length))
        part = piece[tuple(index)]
        own = [each for each in self.dims if each is not None]
        # Indexing left the whole tensor's order of dimensions; the file's may be transposed.
        part = part.permute([sorted(own).index(each) for each in own])
        at = list[slice]()
        for place, (shown, length) in enumerate(zip(self.dims, self.shape, strict=True)):
            if shown is None:
                part = part.unsqueeze(place)
            at.append(
                slice(first, first + size)
                if shown is not None and shown == dim
                else slice(0, length)
            )
        return Region(at=tuple(at), part=part)


def held_runs(cut: Cut, rank: int) -> list[tuple[CutRun, int]]:
    """Return the runs of entries that a rank holds, and the start of each in the rank's piece;
    without padding.
    """
    found, start = list[tuple[CutRun, int]](), 0
    for run in cut.runs[rank]:
        stop = min(run.stop, cut.width)
        if run.start < stop:
            found.append((CutRun(start=run.start, stop=stop), start))
        start += run.stop - run.start
    return found


def owned_runs(cut: Cut, rank: int) -> list[tuple[CutRun, int]]:
    """Return the runs of entries that a rank holds and no rank before it, and the start of each in
    the rank's piece.
    """
    others = merged(run for runs in cut.runs[:rank] for run in runs)
    found = list[tuple[CutRun, int]]()
    for run, start in held_runs(cut, rank):
        begin = run.start
        # An empty run at the end closes the last gap.
        for other in (*others, CutRun(start=run.stop, stop=run.stop)):
            if begin < min(other.start, run.stop):
                own = CutRun(start=begin, stop=min(other.start, run.stop))
                found.append((own, start + own.start - run.start))
            begin = max(begin, other.stop)
    return found


def marked_blocks(values: Tensor, marks: Tensor) -> Iterator[ElementRuns]:
    """Yield the marked elements of a file's tensor, run by run.

    Args:
        values: The tensor, of which only these elements are right.
        marks: Marks, bool, of the same shape.
    """
    flat, values = marks.reshape(-1).to(torch.int8), values.reshape(-1)
    steps = (
        torch.diff(flat, prepend=flat.new_zeros(1), append=flat.new_zeros(1))
        .nonzero()[:, 0]
        .tolist()
    )
    # Differences of 0 and 1 alternate: a run begins, a run ends.
    for start, stop in zip(steps[::2], steps[1::2], strict=True):
        yield ElementRuns(starts=[start], rows=values[None, start:stop])


def region_blocks(regions: Callable[[], Iterator[Region]], shape: tuple[int, ...]) -> Blocks:
    """Return a function that yields the blocks of regions of a file's tensor of this shape."""
    return lambda: (block for region in regions() for block in region.blocks(shape))

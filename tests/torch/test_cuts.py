"""Cuts: what ranks hold of a dimension, taken and put back."""

import pytest
import torch

from coserve.errors import GraphError
from coserve.kernels.cuts import (
    Cut,
    CutRun,
    even_cut,
    head_cut,
    mapped,
    pattern,
    repeated,
    side_by_side,
    united,
)


def runs(*pieces: list[tuple[int, int]]) -> tuple[tuple[CutRun, ...], ...]:
    return tuple(tuple(CutRun(start=start, stop=stop) for start, stop in piece) for piece in pieces)


def test_pieces_taken_and_put_back_are_the_whole():
    for cut in (
        even_cut(12, 3),
        even_cut(11, 3, padded=True),
        head_cut(2, 6, 4, name="heads", may_copy=True),
    ):
        assert cut is not None
        for dim, shape in ((-1, (5, cut.width)), (-2, (cut.width, 5)), (-2, (3, cut.width, 2))):
            own, whole = cut.along(dim), torch.randn(shape)
            back = torch.full(shape, torch.nan)
            for rank in range(own.size):
                piece = own.take(whole, rank)
                assert tuple(piece.shape) == own.local_shape(shape) and piece.is_contiguous()
                own.put(back, piece, rank)
            assert torch.equal(back, whole)


def test_what_is_beyond_the_whole_is_zero():
    cut = even_cut(5, 4, padded=True)
    assert cut is not None and cut.local == 2
    pieces = [cut.take(torch.ones(5), rank).tolist() for rank in range(4)]
    assert pieces == [[1, 1], [1, 1], [1, 0], [0, 0]]


def test_a_width_that_does_not_divide_is_cut_only_if_padded():
    assert even_cut(5, 4) is None


def test_ranks_beyond_the_heads_hold_copies():
    cut = head_cut(2, 3, 4, name="key heads", may_copy=True)
    assert cut.runs == runs([(0, 3)], [(0, 3)], [(3, 6)], [(3, 6)]) and cut.copies == (2, 2)
    assert not cut.is_disjoint
    assert [bool(cut.owned(torch.ones(3), rank).any()) for rank in range(4)] == [
        True,
        False,
        True,
        False,
    ]


def test_each_entry_of_a_fused_cut_has_one_owner():
    """The query heads are on a rank each, and the key head is on both."""
    q, k = even_cut(4, 2), head_cut(1, 2, 2, name="key heads", may_copy=True)
    assert q is not None
    fused = side_by_side([q, k])
    assert fused.copies == (1, 2) and not fused.is_disjoint and q.is_disjoint
    assert [fused.owned(torch.ones(4), rank).tolist() for rank in (0, 1)] == [
        [1, 1, 1, 1],
        [1, 1, 0, 0],
    ]
    rows = fused.along(-2)
    assert rows.owned(torch.ones(2, 4, 3), 1)[0, :, 0].tolist() == [1, 1, 0, 0]


def test_heads_that_cannot_be_divided_are_refused_with_what_fits():
    with pytest.raises(
        GraphError, match=r"6 heads cannot be divided among 4 ranks; .* fits is 1 or 2 or 3 or 6$"
    ):
        head_cut(6, 8, 4, name="heads")
    with pytest.raises(GraphError, match="fits is 1 or 3, or a multiple of it"):
        head_cut(3, 8, 4, name="key heads", may_copy=True)


def test_a_fused_cut_has_every_part_of_every_rank():
    q, k = even_cut(8, 2), even_cut(4, 2)
    assert q is not None and k is not None
    fused = side_by_side([q, k])
    assert fused == Cut(width=12, runs=runs([(0, 4), (8, 10)], [(4, 8), (10, 12)]))
    parts = [
        mapped(q, 12, {column: column for column in range(8)}),
        mapped(k, 12, {c: c + 8 for c in range(4)}),
    ]
    assert united([part for part in parts if part is not None]) == fused


def test_what_is_repeated_is_recognised():
    cut = even_cut(4, 2)
    assert cut is not None
    assert repeated(cut, 3) == Cut(
        width=12, runs=runs([(0, 2), (4, 6), (8, 10)], [(2, 4), (6, 8), (10, 12)])
    )
    assert pattern(repeated(cut, 3), 3) == cut
    whole = even_cut(12, 2)
    assert whole is not None and pattern(whole, 3) is None


def test_ranks_that_would_hold_unequally_many_have_no_cut():
    cut = even_cut(8, 2)
    assert cut is not None
    assert mapped(cut, 8, {0: 0, 1: 1, 4: 4}) is None


@pytest.mark.parametrize("dim", [-1, -2])
def test_what_several_ranks_hold_has_one_place_on_all_of_them(dim):
    """Two query heads on a rank each, and a key head on both, of which the sum comes back to
    both."""
    q, k = even_cut(4, 2), head_cut(1, 2, 2, name="key heads", may_copy=True)
    assert q is not None
    cut = side_by_side([q, k]).along(dim)
    whole = torch.arange(18.0).view(3, 6) if dim == -1 else torch.arange(18.0).view(6, 3)
    pieces = [cut.take(whole, rank) * 10**rank for rank in range(2)]
    copied = [cut.copied(piece, rank) for rank, piece in enumerate(pieces)]
    shared = whole.narrow(dim, 4, 2)
    assert torch.equal(copied[0], shared) and torch.equal(copied[1], 10 * shared)
    for rank, piece in enumerate(pieces):
        expected = cut.take(whole * 10**rank, rank)
        expected.narrow(dim, 2, 2).copy_(11 * shared)
        cut.put_copied(piece, copied[0] + copied[1], rank)
        assert torch.equal(piece, expected)


def test_ranks_that_hold_other_entries_bring_zeros():
    cut = head_cut(2, 1, 4, name="key heads", may_copy=True)
    assert [cut.copied(torch.ones(1), rank).tolist() for rank in range(4)] == [
        [1, 0],
        [1, 0],
        [0, 1],
        [0, 1],
    ]

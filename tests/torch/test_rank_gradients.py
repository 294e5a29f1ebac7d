"""Gradients of an optimizer step on ranks."""

import torch
from torch import Tensor

from coserve.graph.layouts import FIRST, AnyState
from coserve.kernels.cuts import head_cut, side_by_side
from coserve.kernels.groups.base import RankGroup
from coserve.kernels.groups.threads import run_ranks
from coserve.tuning.rank_gradients import RankGradients

# Two ranks: heads that are on one each, and a key head that is on both.
EVEN = head_cut(2, 2, 2, name="heads")
FUSED = side_by_side([EVEN, head_cut(1, 2, 2, name="key heads", may_copy=True)]).along(-2)
STATES: dict[str, AnyState] = {"cut": EVEN, "fused": FUSED, "first": FIRST}
SHAPES = {"cut": (3, 4), "fused": (6, 2), "first": (5,), "summed": (2, 2), "whole": (3,)}


def number(name: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SHAPES[name], generator=generator)


def given(name: str, rank: int) -> Tensor:
    """Return a rank's gradient: a part of a sum where several ranks hold a parameter."""
    if name == "first":
        return number(name, 7) * (rank == 0)
    if name == "cut":
        return EVEN.take(number(name, 7), rank)
    if name == "fused":
        return FUSED.take(number(name, rank), rank)
    return number(name, rank if name == "summed" else 7) * (
        1 + 1e-6 * rank if name == "whole" else 1
    )


def step(group: RankGroup) -> tuple[dict[str, Tensor], Tensor]:
    ranks = RankGradients(group, STATES, ("fused", "summed"))
    found = ranks.complete({name: given(name, group.rank) for name in SHAPES})
    return found, ranks.norm(found)


def test_parts_are_added_up_once_and_what_is_whole_is_rank_0s():
    for rank, (found, _) in enumerate(run_ranks(2, step)):
        assert torch.equal(found["cut"], given("cut", rank)) and torch.equal(
            found["first"], given("first", rank)
        )
        assert torch.equal(found["summed"], given("summed", 0) + given("summed", 1))
        assert torch.equal(found["whole"], given("whole", 0)), (
            "though rank 1 has come to other bits"
        )
        own = given("fused", rank)
        assert torch.equal(found["fused"][:2], own[:2]), "the query heads are on a rank each"
        assert torch.equal(found["fused"][2:], given("fused", 0)[2:] + given("fused", 1)[2:])


def test_the_norm_counts_each_entry_once():
    (first, norm), (second, other) = run_ranks(2, step)
    entries = [first[name] for name in SHAPES] + [second["cut"], second["fused"][:2]]
    assert torch.equal(norm, other)
    torch.testing.assert_close(norm, torch.cat([each.flatten() for each in entries]).norm())

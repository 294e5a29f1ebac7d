"""Collectives that every group of ranks has, and groups whose ranks are threads."""

import pytest
import torch
from torch import Tensor

from coserve.errors import RankError, RankGoneError
from coserve.kernels import backend_names
from coserve.kernels.groups import transport_names
from coserve.kernels.groups.base import SUMMED_TYPES, RankGroup, SingleRank
from coserve.kernels.groups.threads import run_ranks, thread_groups


def part(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A rank's part of a sum: any test can make that of every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def test_transports_are_found_by_their_files_and_are_no_backends():
    assert {"threads"} <= set(transport_names())
    assert "groups" not in backend_names()


@pytest.mark.parametrize("dtype", SUMMED_TYPES)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_are_added_in_rank_order_and_rounded_once(size: int, dtype: torch.dtype):
    parts = [part(rank, 5, 7, dtype=dtype) for rank in range(size)]
    expected = parts[0].float()
    for each in parts[1:]:
        expected = expected + each.float()

    found = run_ranks(size, lambda group: group.sum_(parts[group.rank].clone()))

    for each in found:
        assert torch.equal(each, expected.to(dtype))


def test_a_sum_is_made_in_place():
    def run(group: RankGroup) -> bool:
        x = part(group.rank, 3)
        return group.sum_(x) is x

    assert run_ranks(2, run) == [True, True]


@pytest.mark.parametrize("max_bytes", [1, 40, 1 << 20])
def test_several_tensors_are_summed_in_as_few_collectives_as_they_fit_into(
    monkeypatch, max_bytes: int
):
    monkeypatch.setattr("coserve.kernels.groups.base._MAX_BUFFER_BYTES", max_bytes)
    shapes = [(2, 3), (4,), (1, 5), (0,)]

    def run(group: RankGroup) -> tuple[list[Tensor], int]:
        num_sums, whole = 0, group._sum

        def count(x: Tensor, y: Tensor, name: str) -> None:
            nonlocal num_sums
            num_sums += 1
            whole(x, y, name)

        group._sum = count  # type: ignore[method-assign]
        return group.sum_several([part(group.rank, *shape) for shape in shapes]), num_sums

    expected = [part(0, *shape) + part(1, *shape) for shape in shapes]
    for found, num_sums in run_ranks(2, run):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert num_sums == {1: 3, 40: 2, 1 << 20: 1}[max_bytes]


def test_a_sum_can_leave_its_parts_as_they_are():
    def run(group: RankGroup) -> tuple[Tensor, Tensor]:
        x = part(group.rank, 4, 3)
        return group.sum(x.t()), x

    for rank, (total, x) in enumerate(run_ranks(2, run)):
        assert torch.equal(total, (part(0, 4, 3) + part(1, 4, 3)).t())
        assert torch.equal(x, part(rank, 4, 3))


def test_many_collectives_follow_each_other():
    def run(group: RankGroup) -> list[float]:
        x = torch.tensor([float(group.rank + 1)])
        return [float(group.sum_(x.clone() * number)) for number in range(300)]

    assert run_ranks(3, run) == [[6.0 * number for number in range(300)]] * 3


def test_gathers_have_every_rank_in_order():
    def run(group: RankGroup) -> tuple[Tensor, Tensor | None, Tensor]:
        x = part(group.rank, 2, 3)
        return group.all_gather(x), group.gather(x, to=1), group.gather_columns(x)

    parts = [part(rank, 2, 3) for rank in range(3)]
    for rank, (everywhere, on_one, columns) in enumerate(run_ranks(3, run)):
        assert torch.equal(everywhere, torch.stack(parts))
        assert torch.equal(columns, torch.cat(parts, -1))
        assert (on_one is None) == (rank != 1)
        assert on_one is None or torch.equal(on_one, torch.stack(parts))


def test_all_ranks_have_rank_0s_number():
    numbers = (-(2**63), 2**63 - 1, 7)
    found = run_ranks(
        3, lambda group: [group.agree(number if group.rank == 0 else 5) for number in numbers]
    )
    assert found == [list(numbers)] * 3


def test_ranks_agree_on_the_smallest_number_and_on_rank_0s_bytes():
    def run(group: RankGroup) -> tuple[int, bool, bool, bytes, bytes]:
        return (
            group.agree_min(2**62 - group.rank),
            group.agree_all(is_so=group.rank < 5),
            group.agree_all(is_so=group.rank != 1),
            group.agree_bytes(b"of rank 0" if group.rank == 0 else b"another"),
            group.agree_bytes(b"" if group.rank == 0 else b"another"),
        )

    assert run_ranks(3, run) == [(2**62 - 2, True, False, b"of rank 0", b"")] * 3
    assert run(SingleRank()) == (2**62, True, True, b"of rank 0", b"")


def test_an_error_of_one_rank_ends_the_collectives_of_the_others():
    seen = list[str]()

    def run(group: RankGroup) -> None:
        if group.rank == 1:
            raise ValueError("no such row")
        try:
            group.sum_(torch.ones(3))
        except RankError as error:
            seen.append(str(error))
            raise

    with pytest.raises(ValueError, match="no such row"):
        run_ranks(3, run)
    assert seen == ["rank 1 failed: ValueError: no such row"] * 2


def test_a_group_works_again_after_a_reset_on_all_ranks():
    def run(group: RankGroup) -> float:
        if group.rank == 0:
            group.fail("out of memory")
        with pytest.raises(RankError, match="rank 0 failed: out of memory"):
            group.sum_(torch.ones(3))
        group.reset()
        return float(group.sum_(torch.ones(1)))

    assert run_ranks(3, run) == [3.0] * 3


@pytest.mark.parametrize("rank_1", [("h.1", 3), ("h.0", 4)])
def test_ranks_at_different_collectives_are_told_both(rank_1: tuple[str, int]):
    def run(group: RankGroup) -> str:
        name, width = rank_1 if group.rank == 1 else ("h.0", 3)
        with pytest.raises(RankError, match="ranks are at different collectives") as caught:
            group.sum_(torch.ones(width), name)
        return str(caught.value)

    for message in run_ranks(2, run):
        assert (
            "sum h.0 [3] float32" in message and f"sum {rank_1[0]} [{rank_1[1]}] float32" in message
        )


def test_a_rank_that_does_not_come_is_not_waited_for_forever():
    first, _ = thread_groups(2, timeout_s=0.01)
    with pytest.raises(RankGoneError, match=r"did not come within 0\.01 s"):
        first.barrier()


def test_a_group_of_one_returns_what_it_is_given():
    group, x = SingleRank(), part(0, 2, 3)
    assert group.sum_(x) is x and group.sum(x) is x
    assert torch.equal(group.all_gather(x), x[None]) and torch.equal(group.gather(x), x[None])
    assert group.gather_columns(x) is x
    assert group.agree(4) == 4
    group.fail("nothing comes of it")
    group.reset()
    group.barrier()
    group.close()


def test_only_contiguous_tensors_of_known_types_are_summed():
    for wrong in (torch.ones(2, 3).t(), torch.ones(2, dtype=torch.int64)):
        with pytest.raises(AssertionError):
            SingleRank().sum_(wrong)

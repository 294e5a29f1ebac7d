"""Collectives through PyTorch's process groups: gloo, between processes."""

import pytest
import torch
from rank_processes import KILLED, run_torch_processes
from rank_tasks import (
    call_different_once,
    collect,
    fail_and_reset,
    many,
    part,
    raise_on_one,
    sum_all,
    sum_until_killed,
)
from torch import distributed as dist

from coserve.errors import RankError, RankGoneError
from coserve.kernels.groups.torch_distributed import RankStore, TorchGroup

pytestmark = pytest.mark.skipif(
    not dist.is_available(), reason="PyTorch was built without torch.distributed"
)


@pytest.mark.parametrize("size", [2, 3])
def test_sums_have_the_bits_of_a_sum_in_rank_order(size: int):
    found = run_torch_processes(size, sum_all, [1, 7, 896, 70_000])
    assert [wrong for wrong, _ in found] == [[]] * size
    assert [bits for _, bits in found] == [found[0][1]] * size


def test_gathers_and_agreement():
    parts = [part(rank, 0, 5, 2) for rank in range(3)]
    for rank, found in enumerate(run_torch_processes(3, collect, 5)):
        everywhere, on_one, columns, numbers = found
        assert torch.equal(everywhere, torch.stack(parts))
        assert torch.equal(columns, torch.cat(parts, -1).bfloat16())
        assert (on_one is None) == (rank != 2)
        assert numbers == [-(2**63), 2**63 - 1, 0]


def test_many_collectives_with_pauses():
    assert run_torch_processes(2, many, 300) == [[], []]


def test_the_others_learn_that_a_rank_was_killed():
    first, killed = run_torch_processes(2, sum_until_killed)
    assert killed == KILLED
    assert first.startswith("RankGoneError: a rank has ended or does not answer: ")


def test_the_others_learn_that_a_rank_raised():
    first, raised, last = run_torch_processes(3, raise_on_one)
    assert isinstance(raised, ValueError)
    assert first == last == "RankError: rank 1 failed: ValueError: no such row"


def test_ranks_connect_anew_after_a_failure():
    expected = [
        each for number in range(5) for each in (f"RankError: rank 0 failed: failure {number}", 3.0)
    ]
    assert run_torch_processes(3, fail_and_reset) == [expected] * 3


def test_the_check_names_the_collectives_that_differ():
    first, second = run_torch_processes(
        2, call_different_once, environment={"COSERVE_RANK_CHECK": "1"}
    )
    assert first.endswith("rank 0 at sum h.0 [3] float32") and second.endswith(
        "rank 1 at sum h.1 [3] float32"
    )


def test_a_failure_is_raised_until_the_ranks_reset():
    store = RankStore()
    group = TorchGroup(rank=0, size=1, host=store.HOST, port=store.port, own_address=store.HOST)
    group.fail("out of memory")
    group.fail("what follows from that")
    for _ in range(2):
        with pytest.raises(RankError, match=r"^rank 0 failed: out of memory$"):
            group._agree(1)
    group.reset()
    assert group._agree(1) == 1


def test_a_store_that_is_not_there_is_an_error():
    with pytest.raises(RankGoneError, match=r"rank 0 of 2 cannot join at 127\.0\.0\.1:1: "):
        TorchGroup(rank=0, size=2, host="127.0.0.1", port=1, own_address="127.0.0.1", timeout_s=0.1)

"""Collectives of ranks that are processes of one machine, compiled and in Python."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lengths import long_but
from rank_processes import IMPLEMENTATIONS, KILLED, run_processes
from rank_tasks import (
    call_different,
    call_different_kinds,
    collect,
    fail_and_reset,
    fail_within_a_trace,
    many,
    part,
    raise_on_one,
    stand_still,
    sum_all,
    sum_special,
    sum_until_killed,
    sum_until_killed_anywhere,
    trace_sums,
    wait_for_one_that_pauses,
)

from coserve.errors import RankGoneError
from coserve.kernels.cpu import CpuBackend
from coserve.kernels.cpu.compiled import compiled_kernels
from coserve.kernels.groups._arena import RankArena
from coserve.kernels.groups.shared_memory import SharedMemoryGroup
from coserve.kernels.groups.threads import thread_groups
from coserve.kernels.trace import UntraceableError

needs_kernels = pytest.mark.skipif(compiled_kernels() is None, reason="needs g++")
BUFFER_BYTES = 128 << 10
CHECKED = {"COSERVE_RANK_CHECK": "1"}


def lengths_around_the_limits() -> list[int]:
    """Of what is summed at once, of a slice's cache line, and of a buffer; for elements of two and
    four bytes."""
    limits = [64, 512, *(each // size for each in (64 << 10, BUFFER_BYTES) for size in (2, 4))]
    around = {limit + step for limit in limits for step in (-1, 0, 1)}
    return sorted({1, 2, 896, 3 * BUFFER_BYTES // 2 + 5, *around})


@IMPLEMENTATIONS
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_have_the_bits_of_a_sum_in_rank_order(size: int, is_plain: bool):
    found = run_processes(
        size, sum_all, lengths_around_the_limits(), is_plain=is_plain, buffer_bytes=BUFFER_BYTES
    )
    assert [wrong for wrong, _ in found] == [[]] * size
    assert [bits for _, bits in found] == [found[0][1]] * size


@IMPLEMENTATIONS
def test_special_numbers_are_summed_as_numbers_are(is_plain: bool):
    for found in run_processes(2, sum_special, is_plain=is_plain):
        assert found[0] == float("inf") and found[1] != found[1] and found[2] == float("inf")
        assert found[3] == float(torch.tensor(2e-40).bfloat16())


@IMPLEMENTATIONS
@pytest.mark.parametrize("length", [3, 100_000])
def test_gathers_and_agreement(length: int, is_plain: bool):
    parts = [part(rank, 0, length, 2) for rank in range(3)]
    for rank, found in enumerate(
        run_processes(3, collect, length, is_plain=is_plain, environment=CHECKED)
    ):
        everywhere, on_one, columns, numbers = found
        assert torch.equal(everywhere, torch.stack(parts))
        assert torch.equal(columns, torch.cat(parts, -1).bfloat16())
        assert (on_one is None) == (rank != 2)
        assert on_one is None or torch.equal(on_one, torch.stack(parts))
        assert numbers == [-(2**63), 2**63 - 1, 0]


@IMPLEMENTATIONS
def test_ten_thousand_collectives_with_pauses(is_plain: bool):
    """Epochs pass the end of 32 bits on their way."""
    count = 2_000 if is_plain else 10_000
    assert run_processes(3, many, count, is_plain=is_plain) == [[], [], []]


@IMPLEMENTATIONS
def test_the_others_learn_that_a_rank_was_killed(is_plain: bool):
    *others, killed = run_processes(3, sum_until_killed, is_plain=is_plain)
    assert killed == KILLED
    for each in others:
        assert each.startswith("RankGoneError: rank 2 (process ") and each.endswith(") has ended")


@IMPLEMENTATIONS
def test_waits_for_other_ranks_are_counted(is_plain: bool):
    _, second = run_processes(2, wait_for_one_that_pauses, 0.5, is_plain=is_plain)
    assert second > 0


@IMPLEMENTATIONS
@pytest.mark.parametrize("seed", long_but(0, 1, of=range(30)))
def test_a_rank_is_killed_at_any_moment(seed: int, is_plain: bool):
    found = run_processes(3, sum_until_killed_anywhere, seed, is_plain=is_plain)
    victim = found.index(KILLED)
    for each in found[:victim] + found[victim + 1 :]:
        assert each.startswith(f"RankGoneError: rank {victim} (process ") and each.endswith(
            ") has ended"
        )


@IMPLEMENTATIONS
def test_the_others_learn_that_a_rank_raised(is_plain: bool):
    first, raised, last = run_processes(3, raise_on_one, is_plain=is_plain)
    assert isinstance(raised, ValueError)
    assert first == last == "RankError: rank 1 failed: ValueError: no such row"


@IMPLEMENTATIONS
def test_ranks_meet_again_after_a_failure(is_plain: bool):
    expected = [
        each for number in range(5) for each in (f"RankError: rank 0 failed: failure {number}", 3.0)
    ]
    assert run_processes(3, fail_and_reset, is_plain=is_plain) == [expected] * 3


@IMPLEMENTATIONS
def test_the_check_names_the_collectives_that_differ(is_plain: bool):
    for message in run_processes(
        3, call_different, "h.1", 3, is_plain=is_plain, environment=CHECKED
    ):
        assert "at different collectives" in message
        assert "sum h.0 [3] float32" in message and "sum h.1 [3] float32" in message


@IMPLEMENTATIONS
def test_other_sizes_and_kinds_are_noticed_without_the_check(is_plain: bool):
    for message in run_processes(2, call_different, "h.0", 4, is_plain=is_plain):
        assert message.endswith("are at different collectives: COSERVE_RANK_CHECK=1 says which")
    for message in run_processes(2, call_different_kinds, is_plain=is_plain):
        assert "are at different collectives" in message


@IMPLEMENTATIONS
def test_a_rank_that_does_not_come_is_not_waited_for_forever(is_plain: bool):
    first, second = run_processes(2, stand_still, is_plain=is_plain, timeout_s=0.05)
    assert first == second
    assert first.startswith("RankGoneError: rank 1 (process ") and first.endswith(
        ") did not come within 0.05 s"
    )


@needs_kernels
def test_ranks_with_different_implementations_are_refused():
    for error in run_processes(2, sum_all, [1], is_plain=[False, True]):
        assert isinstance(error, RankGoneError) and "compiled on some, plain on others" in str(
            error
        )


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_among_traced_calls_have_the_same_bits(dtype: torch.dtype):
    assert run_processes(2, trace_sums, dtype, environment=CHECKED) == [[True] * 3] * 2


@needs_kernels
def test_a_failure_among_traced_calls_is_raised_after_them():
    assert run_processes(3, fail_within_a_trace) == [["rank 0 failed: out of memory", True]] * 3


@needs_kernels
@pytest.mark.parametrize("collective", ["sum", "sum_", "all_gather", "gather"])
def test_other_groups_and_collectives_cannot_be_traced(collective: str):
    group, _ = thread_groups(2)

    def run(trace: Any) -> Any:
        return getattr(trace.group(group), collective)(trace.input("x", 16))

    with pytest.raises(UntraceableError):
        CpuBackend(torch.device("cpu")).trace(torch.float32, run)


def test_an_arena_is_a_file_without_a_name():
    arena = RankArena.create(2, BUFFER_BYTES)
    assert os.readlink(f"/proc/self/fd/{arena.fd}") == "/memfd:coserve-ranks (deleted)"
    arena.close()


PARENT = """
import os, signal, sys, time
from coserve.errors import RankError
from coserve.kernels.groups._arena import RankArena
from coserve.kernels.groups.shared_memory import SharedMemoryGroup

arena = RankArena.create(2, 4096)
if os.fork() == 0:
    group = SharedMemoryGroup(arena, 0, may_be_compiled=sys.argv[1] == "compiled")
    try:
        group.barrier()
    except RankError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
elif os.fork() == 0:
    group = SharedMemoryGroup(arena, 1, may_be_compiled=sys.argv[1] == "compiled")
    print("joined", flush=True)
    while not arena.header.ended:
        time.sleep(0.01)
else:
    time.sleep(600)
"""


@pytest.mark.parametrize("implementation", ["compiled", "plain"])
def test_ranks_learn_that_their_parent_was_killed(implementation: str):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, implementation], stdout=subprocess.PIPE, text=True
    )
    with parent.stdout as said:
        assert said.readline() == "joined\n"
        parent.kill()
        expected = f"RankGoneError: the process that started the ranks ({parent.pid}) has ended\n"
        assert said.read() == expected, "the pipe ends with the last rank"
    parent.wait()


def test_ranks_learn_of_one_that_ended_before_it_joined():
    """The process that started it notices that, and ends the group."""
    arena = RankArena.create(2, 4096)
    arena.end("rank 1 has ended with status 1")
    with pytest.raises(RankGoneError, match="rank 1 has ended with status 1"):
        SharedMemoryGroup(arena, 0)
    arena.close()


def test_other_files_are_no_arenas(tmp_path: Path):
    path = tmp_path / "file"
    for content in (b"", bytes(8192)):
        path.write_bytes(content)
        with path.open("r+b") as file, pytest.raises(ValueError, match="is not an arena of ranks"):
            RankArena(os.dup(file.fileno()))

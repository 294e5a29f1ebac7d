"""Functions that the processes of a group of ranks run in tests, which a rank can import by their
names.
"""

import os
import random
import signal
import threading
import time
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from coserve.devices.ranks.verdicts import Failure, agree_on_end
from coserve.errors import DeviceMemoryError, RankError
from coserve.kernels.attention import Segment
from coserve.kernels.cpu import CpuBackend
from coserve.kernels.groups.base import SUMMED_TYPES, RankGroup
from coserve.kernels.trace import TracedStep


def part(rank: int, seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A rank's part of a sum, which every rank can make of every other."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * seed + rank)).to(
        dtype
    )


def expected_sum(size: int, seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The parts, added in rank order in float32, and rounded once."""
    total = part(0, seed, *shape, dtype=dtype).float()
    for rank in range(1, size):
        total = total + part(rank, seed, *shape, dtype=dtype).float()
    return total.to(dtype)


def bits(x: Tensor) -> int:
    return crc32(x.contiguous().view(torch.uint8).numpy().tobytes())


def sum_all(group: RankGroup, lengths: list[int]) -> tuple[list[str], list[int]]:
    """Sums of every type and length: those that are wrong, and the bits of all."""
    wrong, found = [], []
    for dtype in SUMMED_TYPES:
        for seed, length in enumerate(lengths):
            x = group.sum_(part(group.rank, seed, length, dtype=dtype))
            if not torch.equal(x, expected_sum(group.size, seed, length, dtype=dtype)):
                wrong.append(f"{dtype} {length}")
            found.append(bits(x))
    return wrong, found


def sum_special(group: RankGroup) -> list[float]:
    """Infinities, NaN, what is too large for the type, and denormal numbers."""
    mine, others = [float("inf"), float("nan"), 3e38, 1e-40], [1.0, 1.0, 3e38, 1e-40]
    x = torch.tensor(mine if group.rank == 0 else others).bfloat16()
    return [float(each) for each in group.sum_(x)]


def collect(group: RankGroup, length: int) -> tuple[Tensor, Tensor | None, Tensor, list[int]]:
    """Every other collective."""
    x = part(group.rank, 0, length, 2)
    numbers = [group.agree(number if group.rank == 0 else 5) for number in (-(2**63), 2**63 - 1, 0)]
    group.barrier()
    assert group.agree_min(7 - group.rank) == 8 - group.size
    assert group.agree_bytes(b"0123" if group.rank == 0 else b"") == b"0123"
    return (
        group.all_gather(x),
        group.gather(x, to=group.size - 1),
        group.gather_columns(x.bfloat16()),
        numbers,
    )


def many(group: RankGroup, num_collectives: int) -> list[int]:
    """A random mixture, the same on all ranks, with pauses that each rank draws for itself: those
    that are wrong."""
    shared, own, wrong = random.Random(0), random.Random(group.rank), []
    for number in range(num_collectives):
        if own.random() < 0.01:
            time.sleep(own.random() * 0.003)
        kind, length = (
            shared.choice(["sum", "sum", "gather", "agree", "to"]),
            shared.choice([1, 7, 896, 20_000]),
        )
        x = torch.full((length,), float(group.rank + number % 97))
        every = [float(rank + number % 97) for rank in range(group.size)]
        if kind == "sum":
            is_right = bool((group.sum_(x) == sum(every)).all())
        elif kind == "gather":
            is_right = group.all_gather(x)[:, -1].tolist() == every
        elif kind == "to":
            found = group.gather(x, to=number % group.size)
            is_right = found is None or found[:, 0].tolist() == every
        else:
            is_right = group.agree(number if group.rank == 0 else -1) == number
        if not is_right:
            wrong.append(number)
    return wrong


def sum_until_killed(group: RankGroup) -> str:
    """The last rank is killed while the others wait for it."""
    for _ in range(200):
        group.sum_(torch.ones(8))
    if group.rank == group.size - 1:
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    return error_of(group)


def sum_until_killed_anywhere(group: RankGroup, seed: int) -> str:
    """One rank is killed after some milliseconds, wherever it is then; all ranks sum until they
    notice."""
    shared = random.Random(seed)
    victim, after_s = shared.randrange(group.size), shared.random() * 0.03
    if group.rank == victim:
        threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        x = torch.ones(shared.choice([1, 896, 20_000, 100_000]))
        try:
            total = group.sum_(x)
        except RankError as error:
            return f"{type(error).__name__}: {error}"
        assert bool((total == group.size).all())


def fail_and_reset(group: RankGroup) -> list[Any]:
    """Rank 0 fails between two collectives, some times; the ranks meet again."""
    found: list[Any] = []
    for number in range(5):
        for _ in range(number):
            group.sum_(torch.ones(3))
        if group.rank == 0:
            group.fail(f"failure {number}")
        found.append(error_of(group))
        group.reset()
        found.append(float(group.sum_(torch.ones(1))))
    return found


def raise_on_one(group: RankGroup) -> str:
    """Rank 1 raises, which its process tells the others."""
    group.barrier()
    if group.rank == 1:
        raise ValueError("no such row")
    return error_of(group)


def call_different(group: RankGroup, name: str, width: int) -> str:
    """Rank 1 is at a collective of this name and width; the others at that of h.0, 3 wide."""
    group.sum_(torch.ones(3), "before")
    theirs = (name, width) if group.rank == 1 else ("h.0", 3)
    try:
        group.sum_(torch.ones(theirs[1]), theirs[0])
    except RankError as error:
        group.reset()
        assert float(group.sum_(torch.ones(1))) == group.size
        return str(error)
    return ""


def call_different_once(group: RankGroup) -> str:
    """Rank 1 is at h.1, the others at h.0."""
    try:
        group.sum_(torch.ones(3), f"h.{int(group.rank == 1)}")
    except RankError as error:
        return str(error)
    return ""


def call_different_kinds(group: RankGroup) -> str:
    try:
        group.agree(3) if group.rank == 1 else group.sum_(torch.ones(3))
    except RankError as error:
        return str(error)
    return ""


def trace_sums(group: RankGroup, dtype: torch.dtype) -> list[bool]:
    """Return whether steps of calls that were written down, two sums among them, have the bits of
    the same one by one.
    """
    backend, width = CpuBackend(torch.device("cpu")), 64
    calls = backend.trace(
        dtype, lambda trace: _two_sums(trace.backend, trace.group(group), trace.input("x", width))
    )
    assert calls is not None
    return [
        torch.equal(calls.run(_step(backend, x)), _two_sums(backend, group, x))
        for x in (
            part(group.rank, seed, n, width, dtype=dtype) for seed, n in enumerate((1, 3, 700))
        )
    ]


def fail_within_a_trace(group: RankGroup) -> list[Any]:
    """Rank 0 is not at the calls of the others; then all are."""
    backend, found = CpuBackend(torch.device("cpu")), list[Any]()
    calls = backend.trace(
        torch.float32,
        lambda trace: _two_sums(trace.backend, trace.group(group), trace.input("x", 16)),
    )
    assert calls is not None
    try:
        if group.rank == 0:
            group.fail("out of memory")
            group.barrier()
        calls.run(_step(backend, torch.ones(2, 16)))
    except RankError as error:
        found.append(str(error))
    group.reset()
    x = torch.ones(2, 16)
    return [*found, torch.equal(calls.run(_step(backend, x)), _two_sums(backend, group, x))]


def _two_sums(backend: Any, group: RankGroup, x: Any) -> Any:
    y = backend.silu_mul(x, x)
    return group.sum(group.sum(y, "h.0") + y, "h.1")


def _step(backend: CpuBackend, x: Tensor) -> TracedStep:
    """A step of as many requests as there are rows, of one token each."""
    segments = [Segment(num_rows=1, num_keys=1, pages=(index,)) for index in range(len(x))]
    return TracedStep(
        inputs={"x": x},
        attention=backend.prepare_attention(segments, block_tokens=16),
        pages=torch.arange(len(x)),
        offsets=torch.zeros(len(x), dtype=torch.int64),
        adapters=None,
    )


def stand_still(group: RankGroup) -> str:
    """Rank 1 comes after the others have given up."""
    if group.rank == 1:
        time.sleep(0.5)
    return error_of(group)


def error_of(group: RankGroup) -> str:
    """The class and text of the error of a sum that cannot be made."""
    try:
        group.sum_(torch.ones(3))
    except RankError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def end_steps(group: RankGroup, number: int) -> list[Failure | None]:
    """Steps of two sums, before, between or after which some ranks fail: how each ended."""
    found: list[Failure | None] = []
    for step in range(number):
        own, drawn = None, random.Random(step)
        # By rank: before which of the sums it fails, if it does; 2: after both.
        failing = {rank: drawn.randrange(3) for rank in range(group.size) if drawn.random() < 0.25}
        is_memory = drawn.random() < 0.5
        error = (
            DeviceMemoryError(f"no room in step {step}")
            if is_memory
            else ValueError(f"a defect in step {step}")
        )
        try:
            for place in range(3):
                if failing.get(group.rank) == place:
                    raise error
                if place < 2:
                    assert group.sum(torch.ones(9))[0] == group.size
        except (DeviceMemoryError, ValueError) as raised:
            group.fail(str(raised))
            own = Failure.of(raised, group.rank, broken_update="job" if step % 2 else None)
        except RankError as stopped:
            own = Failure.of(stopped, group.rank)
        found.append(agree_on_end(group, own))
        assert (found[-1] is not None) == bool(failing), f"step {step}"
    return found


def wait_for_one_that_pauses(group: RankGroup, pause_s: float) -> float:
    """Return how long a rank has waited in a sum that rank 0 begins later than the others."""
    group.barrier()
    before_s = group.waited_s
    if group.rank == 0:
        time.sleep(pause_s)
    group.sum_(torch.ones(8))
    return group.waited_s - before_s

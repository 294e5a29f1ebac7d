"""Times of a sum over ranks: over an arena, compiled and in Python, and through gloo on loopback.

    python -m experiments.rank_sums [--ranks 2] [--width 896] [--rows 1 8 128 512]

Every rank is a process, bound to a core of its own and with one thread; there must be as many idle
cores. A turn is a number of sums of bfloat16, one after the other. Prints the median and the
fastest turn as microseconds per sum, for rank 0, the machine's load, and one line of JSON.
"""

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from typing import Any, TypeVar

import torch
from torch import distributed as dist

from coserve.kernels.cpu.compiled import compiled_kernels
from coserve.kernels.groups._arena import RankArena
from coserve.kernels.groups.base import RankGroup
from coserve.kernels.groups.shared_memory import SharedMemoryGroup
from coserve.kernels.groups.torch_distributed import TorchGroup
from experiments.results import add_save_option, print_result

T = TypeVar("T")
Join = Callable[[], RankGroup]
_NUM_TURNS = 40
# Short, so that some turns are not interrupted on a machine that is not quite idle.
_TURN_S = 0.002


def times_us(group: RankGroup, num_rows: int, width: int) -> list[float]:
    """Return microseconds a sum of [num_rows, width], turn by turn."""
    x = torch.ones(num_rows, width, dtype=torch.bfloat16)

    def turn(count: int) -> float:
        x.fill_(1.0)
        group.barrier()
        start_s = time.perf_counter()
        for _ in range(count):
            group.sum_(x)
        return (time.perf_counter() - start_s) / count

    # Rank 0's clock decides for all ranks.
    turn(10)
    count = group.agree(min(200, max(5, int(_TURN_S / turn(10)))))
    return [1e6 * turn(count) for _ in range(_NUM_TURNS)]


def times_of_sizes_us(sizes: Sequence[int], width: int, group: RankGroup) -> list[list[float]]:
    """Return microseconds a sum for every number of rows, turn by turn."""
    return [times_us(group, num_rows, width) for num_rows in sizes]


def run_rank(join: Join, rank: int, work: Callable[[RankGroup], Any], results: Connection) -> None:
    """Run a piece of work on one rank, on its own core, and send what it returns."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    group = join()
    results.send(work(group))
    group.barrier()
    group.close()


def join_arena(arena: Any, rank: int, may_be_compiled: bool) -> RankGroup:
    """Return a rank of an arena; with nothing compiled it is never the compiled one."""
    return SharedMemoryGroup(RankArena(arena.detach()), rank, may_be_compiled=may_be_compiled)


def join_gloo(rank: int, size: int, port: int) -> RankGroup:
    """Return a rank of a group that gloo connects on loopback."""
    return TorchGroup(rank=rank, size=size, host="127.0.0.1", port=port, own_address="127.0.0.1")


def on_ranks(joins: Callable[[Any], list[Join]], work: Callable[[RankGroup], T]) -> T:
    """Run a piece of work on every rank, each in a process of its own, and return rank 0's result.

    Args:
        joins: Function that returns the ranks' functions, within the start of a process.
        work: Work that can be sent to a process.
    """
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank, join in enumerate(joins(context)):
        ours, theirs = context.Pipe(duplex=False)
        processes.append(
            context.Process(target=run_rank, args=(join, rank, work, theirs), daemon=True)
        )
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    result: T = pipes[0].recv()
    for process in processes:
        process.join()
    return result


def transports(size: int) -> dict[str, Callable[[Any], list[Join]]]:
    """Return how the ranks of each transport join."""

    def arena(may_be_compiled: bool) -> Callable[[Any], list[Join]]:
        def joins(_: Any) -> list[Join]:
            arena = RankArena.create(size)
            return [
                partial(join_arena, DupFdLater(arena), rank, may_be_compiled)
                for rank in range(size)
            ]

        return joins

    def gloo(_: Any) -> list[Join]:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        _kept.append(store)
        return [partial(join_gloo, rank, size, store.port) for rank in range(size)]

    compiled = {"arena, compiled": arena(True)} if compiled_kernels() is not None else {}
    return {**compiled, "arena, in Python": arena(False), "gloo": gloo}


# Stores must live as long as their ranks.
_kept: list[Any] = []


class DupFdLater:
    """An arena's file, duplicated for a process when it is sent there."""

    def __init__(self, arena: RankArena) -> None:
        self._arena = arena

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return _same, (DupFd(self._arena.fd),)


def _same(each: Any) -> Any:
    return each


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=896)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 128, 512])
    add_save_option(parser)
    options = parser.parse_args()
    loads, rows = [os.getloadavg()[0]], []
    print("| transport | " + " | ".join(f"[{n}, {options.width}]" for n in options.rows) + " |")
    print("|---" * (1 + len(options.rows)) + "|")
    for name, joins in transports(options.ranks).items():
        times = on_ranks(joins, partial(times_of_sizes_us, options.rows, options.width))
        rows.append(
            {"transport": name, "us": [[statistics.median(each), min(each)] for each in times]}
        )
        cells = [f"{statistics.median(each):,.1f} ({min(each):,.1f})" for each in times]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    loads.append(os.getloadavg()[0])
    print(f"load of the machine: {loads[0]:.1f} before, {loads[1]:.1f} after")
    print_result(
        "rank_sums",
        {
            "ranks": options.ranks,
            "width": options.width,
            "num_rows": options.rows,
            "load": loads,
            "rows": rows,
        },
        options.save,
    )


if __name__ == "__main__":
    main()

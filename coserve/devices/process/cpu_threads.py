"""Number of CPU threads that a model is worth, and cores that a rank of a group has."""

import os
from contextlib import suppress
from math import prod
from pathlib import Path

import torch

from coserve.models.families import build_architecture
from coserve.models.source import find_fetched, find_model

# Threads meet at the end of every product. Those of smaller models take microseconds, so that
# threads wait for one another longer than they compute; and far longer yet if another process has
# one of their cores for a moment.
_FEW_WEIGHTS = 16_000_000
_CPUS = Path("/sys/devices/system/cpu")


def worthwhile_threads(model: str, num_ranks: int = 1) -> int:
    """Return the threads of each rank: one for a model of few weights, otherwise an equal share of
    PyTorch's own.
    """
    source = find_model(model, with_weights=False) if num_ranks == 1 else find_fetched(model)
    shapes = build_architecture(source.config).weight_shapes
    is_small = sum(map(prod, shapes.values())) < _FEW_WEIGHTS
    return 1 if is_small else max(1, torch.get_num_threads() // num_ranks)


def bind_to_share(rank: int, size: int) -> None:
    """Have this thread, and all that it starts from now on, run on the rank's share of the
    process's cores.

    Cores that are near each other go to one rank. Nothing is done where there are fewer cores than
    ranks, or where the system cannot do it.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    if share := share_of_cores(os.sched_getaffinity(0), rank, size):
        os.sched_setaffinity(0, share)


def share_of_cores(cores: set[int], rank: int, size: int) -> set[int]:
    """Return a rank's cores, as many for each rank; none if there are fewer cores than ranks."""
    each = len(cores) // size
    by_place = sorted(cores, key=lambda core: (*_place(core), core))
    return set(by_place[rank * each : (rank + 1) * each])


def _place(core: int) -> tuple[int, ...]:
    """Return where a logical core is: its NUMA node, package and physical core; zeros where the
    system does not say.
    """
    directory = _CPUS / f"cpu{core}"
    node = min(
        [int(path.name.removeprefix("node")) for path in directory.glob("node[0-9]*")], default=0
    )
    topology = directory / "topology"
    return node, _number(topology / "physical_package_id"), _number(topology / "core_id")


def _number(path: Path) -> int:
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return 0

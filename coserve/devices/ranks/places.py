"""Places of ranks on a machine: what there must be for a group, and what slows it down."""

import os

import torch

from coserve.errors import ModelError
from coserve.kernels.groups._arena import MAX_RANKS, RankArena

# Without these a group cannot share memory, or would learn of a rank's end too late.
_SYSTEM_CALLS = ("memfd_create", "pidfd_open")


def check_places(num_ranks: int, device: str) -> None:
    """Check that a machine has a place for each rank.

    Args:
        num_ranks: Number of ranks; one rank can be anywhere.
        device: Name such as "cpu" or "cuda"; "auto" takes GPUs if there are any.

    Raises:
        ModelError: There are too few GPUs or CPU cores, GPUs have no NCCL, or the device is a
            single one.
    """
    if num_ranks == 1:
        return
    if missing := [name for name in _SYSTEM_CALLS if not hasattr(os, name)]:
        raise ModelError(
            f"{num_ranks} ranks cannot run on this system: it has no {missing[0]}, which Linux has"
        )
    kind = kind_of(device)
    if ":" in device:
        raise ModelError(
            f"{num_ranks} ranks cannot run on the single device {device!r}: set the device to "
            f"{kind!r}"
        )
    if kind == "cuda":
        needed, there = "GPUs", torch.cuda.device_count()
    else:
        needed, there = "CPU cores", num_usable_cores()
    if num_ranks > MAX_RANKS:
        raise ModelError(f"{num_ranks} ranks are too many: a group has {MAX_RANKS} at most")
    if num_ranks > there:
        raise ModelError(
            f"{num_ranks} ranks need {num_ranks} {needed}, one for each, and this machine has "
            f"{there}"
        )
    if kind == "cuda" and not _has_nccl():
        raise ModelError(
            f"{num_ranks} ranks on GPUs need a PyTorch with NCCL, which this one was built without"
        )


def why_not(num_ranks: int, device: str, threads: int) -> str:
    """Return what speaks against ranks on a machine, as one line; "" if nothing does.

    Args:
        num_ranks: Number of ranks.
        device: See `check_places`.
        threads: CPU threads of each rank.
    """
    try:
        check_places(num_ranks, device)
        if kind_of(device) == "cuda":
            return ""
        RankArena.create(num_ranks).close()
    except ModelError as error:
        return str(error)
    except (OSError, ValueError) as error:
        return f"{num_ranks} ranks cannot share memory on this system: {error}"
    return crowding(num_ranks, threads)


def num_usable_cores() -> int:
    """Return the number of CPU cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def crowding(num_ranks: int, threads: int) -> str:
    """Return a warning if ranks would share CPU cores, as one line; "" if each thread can have its
    own.

    A rank that waits for another one spins, so ranks without cores of their own take time from one
    another.
    """
    cores = num_usable_cores()
    if num_ranks == 1 or num_ranks * threads <= cores:
        return ""
    return (
        f"{num_ranks} ranks of {threads} thread{'s' * (threads > 1)} have {cores} CPU "
        f"core{'s' * (cores > 1)}: a step may take several times as long; lower --threads or "
        "--tensor-parallel, so that each thread has a core"
    )


def kind_of(device: str) -> str:
    """Return the kind of a device: "auto" is "cuda" where there is a GPU."""
    kind = device.partition(":")[0]
    return kind if kind != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def _has_nccl() -> bool:
    """Return whether this PyTorch can connect GPUs."""
    return torch.distributed.is_available() and torch.distributed.is_nccl_available()

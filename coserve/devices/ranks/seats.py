"""Places of ranks in a group of processes, by transport: what the parent makes, and what a rank's
process joins by.

Seats of one group share an arena of memory (ranks on CPUs), or find each other by a store on
loopback (ranks on GPUs).
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch

from coserve.devices.ranks.places import kind_of
from coserve.kernels.groups._arena import RankArena
from coserve.kernels.groups.base import RankGroup
from coserve.kernels.groups.shared_memory import SharedMemoryGroup
from coserve.models.backbone import find_device

RankTransport = Literal["auto", "shared_memory", "torch_distributed"]


class SeatedRanks(ABC):
    """Places of a group's ranks, in the process that starts them."""

    @property
    @abstractmethod
    def arguments(self) -> Sequence[str]:
        """Return the first arguments of `seat_of` in a rank's process."""

    @property
    def inherited(self) -> Sequence[int]:
        """Return the file descriptors that a rank's process inherits."""
        return ()

    def end(self, reason: str) -> None:  # noqa: B027 - ranks that are killed need not be told
        """Tell ranks that wait for another one that the group is over."""

    def close(self) -> None:  # noqa: B027 - a store goes with the object
        """Release what the places are made of."""


class Seat(ABC):
    """Place of a rank in a group, in the rank's process."""

    has_own_cores = False
    """Whether the rank's threads are to run on a share of the process's CPU cores."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    @abstractmethod
    def join(self, device: torch.device) -> RankGroup:
        """Return this rank's end of the group once all ranks have come.

        Args:
            device: Device of this rank.

        Raises:
            RankGoneError: A rank has ended or did not come.
        """

    @abstractmethod
    def end(self, reason: str) -> None:
        """Tell ranks that wait for this one that it ends."""


def seat_ranks(transport: RankTransport, size: int, kind: str) -> SeatedRanks:
    """Make the places of a group's ranks.

    Args:
        transport: "auto" takes shared memory on CPUs, and torch.distributed on GPUs.
        size: Number of ranks.
        kind: Kind of their devices: "cpu" or "cuda".
    """
    if transport == "auto":
        transport = "shared_memory" if kind == "cpu" else "torch_distributed"
    return _ArenaRanks(size) if transport == "shared_memory" else _StoreRanks()


def device_of_rank(device: str, rank: int) -> torch.device:
    """Return the device of a rank, which is this process's from now on: of GPUs the one with the
    rank's number.

    Args:
        device: Name such as "cpu" or "cuda"; "auto" takes GPUs if there are any.
        rank: Number of this process's rank.

    Raises:
        ModelError: The device cannot be used.
    """
    if kind_of(device) != "cuda":
        return find_device(device)
    gpu = find_device(f"cuda:{rank}")
    torch.cuda.set_device(gpu)
    return gpu


def seat_of(transport: str, place: str, rank: str, size: str) -> Seat:
    """Return the seat that the arguments of a rank's process name."""
    if transport == "shared_memory":
        return _ArenaSeat(RankArena(int(place)), int(rank), int(size))
    return _StoreSeat(int(place), int(rank), int(size))


class _ArenaRanks(SeatedRanks):
    """Places in shared memory."""

    def __init__(self, size: int) -> None:
        self._arena = RankArena.create(size)

    @property
    def arguments(self) -> Sequence[str]:
        # The number stays the same in the child, which inherits the descriptor.
        return ("shared_memory", str(self._arena.fd))

    @property
    def inherited(self) -> Sequence[int]:
        return (self._arena.fd,)

    def end(self, reason: str) -> None:
        self._arena.end(reason)

    def close(self) -> None:
        self._arena.close()


class _ArenaSeat(Seat):
    """A place in shared memory."""

    has_own_cores = True

    def __init__(self, arena: RankArena, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._arena = arena

    def join(self, device: torch.device) -> RankGroup:
        return SharedMemoryGroup(self._arena, self.rank)

    def end(self, reason: str) -> None:
        self._arena.end(reason)


class _StoreRanks(SeatedRanks):
    """Places by a store."""

    def __init__(self) -> None:
        from coserve.kernels.groups.torch_distributed import RankStore

        self._store = RankStore()

    @property
    def arguments(self) -> Sequence[str]:
        return ("torch_distributed", str(self._store.port))


class _StoreSeat(Seat):
    """A place by a store. The threads of GPUs and of NCCL may run on any core."""

    def __init__(self, port: int, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._port = port

    def join(self, device: torch.device) -> RankGroup:
        # Not above: ranks on CPUs start sooner without it.
        from coserve.kernels.groups.torch_distributed import RankStore, TorchGroup

        host = RankStore.HOST
        if device.type == "cuda":  # all ranks are on this machine: nothing is to be open to others
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        return TorchGroup(
            rank=self.rank,
            size=self.size,
            host=host,
            port=self._port,
            own_address=host,
            device=device,
        )

    def end(self, reason: str) -> None:
        from coserve.kernels.groups.torch_distributed import tell_end

        tell_end(self._port, reason)

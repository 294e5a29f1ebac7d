"""Ranks that PyTorch's process groups connect: gloo between CPUs of any machines, NCCL between GPUs.

NCCL is written by its documentation: no machine with several GPUs has run it yet.
"""

import os
from contextlib import suppress
from datetime import timedelta
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch import distributed as dist

from coserve.errors import RankError, RankGoneError
from coserve.kernels.groups.base import RankGroup, describe, sum_in_rank_order

_TIMEOUT_S = 600.0
_CPU = torch.device("cpu")


class TorchGroup(RankGroup):
    """A rank that is a process of any machine. A failure of one rank ends the group on all.

    A sum gathers all ranks' tensors and adds them here, so that its bits are those of every other transport. Decisions
    (`agree`) always go through gloo, since no GPU takes part in them.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        host: str,
        port: int,
        own_address: str = "",
        device: torch.device = _CPU,
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        """Join a group; return once all ranks have.

        Args:
            rank: number of this rank.
            size: number of ranks.
            host: address of the `torch.distributed.TCPStore` that the ranks find each other by.
            port: of that store.
            own_address: address at which the other ranks reach this one; "" for that of the machine's name.
            device: of the tensors: a CPU (gloo) or a GPU (NCCL).
            timeout_s: longest time that a rank waits for another one.

        Raises:
            RankGoneError: the store or another rank cannot be reached.
        """
        super().__init__(rank=rank, size=size)
        self._limit = timedelta(seconds=timeout_s)
        self._checks = os.environ.get("COSERVE_RANK_CHECK") == "1"
        # Why the group is over; "" while it is not.
        self._ended = ""
        try:
            self._store = dist.TCPStore(host, port, timeout=self._limit, wait_for_workers=False)
            self._host_group: Any = self._gloo(own_address)
            self._data_group: Any = self._nccl() if device.type == "cuda" else self._host_group
        except RuntimeError as error:
            raise RankGoneError(f"rank {rank} of {size} cannot join at {host}:{port}: {_first_line(error)}") from error

    def fail(self, reason: str) -> None:
        with suppress(RuntimeError):  # the store may be gone
            self._store.set("failure", f"rank {self.rank} failed: {reason}")
        self._end(f"rank {self.rank} failed: {reason}")

    def reset(self) -> None:
        self.barrier()

    def close(self) -> None:
        self._end("the group is closed")

    def _sum(self, x: Tensor, y: Tensor, name: str) -> None:
        self._compare("sum", name, x)
        y.copy_(sum_in_rank_order(list(self._gathered(self._data_group, x))))

    def _all_gather(self, x: Tensor, name: str) -> Tensor:
        self._compare("gather", name, x)
        return self._gathered(self._data_group, x)

    def _agree(self, number: int) -> int:
        return int(self._gathered(self._host_group, torch.tensor([number]))[0])

    def all_gather_on_hosts(self, x: Tensor) -> Tensor:
        return self._gathered(self._host_group, x)

    def _compare(self, kind: str, name: str, x: Tensor) -> None:
        """Raise on all ranks if they are at different collectives; for the debug check."""
        if not self._checks:
            return
        label = describe(kind, name, x)
        digests = self._gathered(self._host_group, torch.tensor([crc32(label.encode())])).view(-1).tolist()
        if len(set(digests)) > 1:
            raise RankError(f"ranks are at different collectives: rank {self.rank} at {label}")

    def _gathered(self, group: Any, x: Tensor) -> Tensor:
        """Return every rank's tensor, [size, *x.shape]."""
        if self._ended:
            raise RankGoneError(self._ended)
        out = x.new_empty((self.size, *x.shape))
        # As bytes, which every backend can move.
        parts = [each.reshape(-1).view(torch.uint8) for each in out]
        try:
            group.allgather([parts], [x.reshape(-1).view(torch.uint8)]).wait()
        except RuntimeError as error:
            reason = self._failure() or f"a rank has ended or does not answer: {_first_line(error)}"
            self._end(reason)
            raise RankGoneError(reason) from error
        return out

    def _failure(self) -> str:
        """Return what a rank has said that failed; "" if none has."""
        with suppress(RuntimeError):
            if self._store.check(["failure"]):
                return self._store.get("failure").decode()
        return ""

    def _end(self, reason: str) -> None:
        """Close this rank's connections, which ends what others wait for."""
        self._ended = self._ended or reason
        self._host_group = self._data_group = None

    def _gloo(self, own_address: str) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=own_address) if own_address else gloo.create_default_device()]
        options._timeout = self._limit
        return gloo(dist.PrefixStore("gloo", self._store), self.rank, self.size, options)

    def _nccl(self) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._limit
        return dist.ProcessGroupNCCL(dist.PrefixStore("nccl", self._store), self.rank, self.size, options)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]

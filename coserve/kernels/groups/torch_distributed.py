"""Ranks that PyTorch's process groups connect: gloo between CPUs of any machines, NCCL between
GPUs.

NCCL is written by its documentation: no machine with several GPUs has run it yet. There are no
collectives on symmetric memory, which graphs of CUDA could capture.
"""

import os
import socket
import time
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
# Ranks on GPUs wait no longer than this for one that may stand in a collective of GPUs, which
# nothing interrupts.
_GPU_RESET_S = 10.0
# Seconds between checks whether all ranks have come, and for telling them that one ends.
_POLL_S, _TELL_S = 0.002, 5.0
_CPU = torch.device("cpu")
_ENDED = "ended"


class TorchGroup(RankGroup):
    """A rank that is a process of any machine.

    A sum gathers all ranks' tensors and adds them here, so that its bits are those of every other
    transport. Tensors in the host's memory, and decisions (`agree`), go through gloo, since no GPU
    takes part in them.

    A rank that fails says why in the store and closes its connections of gloo, which ends what
    others wait for; they close theirs. At `reset` all meet in the store and connect anew. That
    needs ranks that have done the same collectives. Where one has done more, among them any on GPUs
    that the others have not launched, the group is over.
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
            own_address: address at which the other ranks reach this one; "" for that of the
                machine's name.
            device: where tensors lie that are not in the host's memory: a GPU (NCCL); a CPU if
                there are none.
            timeout_s: longest time that a rank waits for another one.

        Raises:
            RankGoneError: the store or another rank cannot be reached, or has said that it ends.
        """
        super().__init__(rank=rank, size=size)
        self._limit = timedelta(seconds=timeout_s)
        self._own_address = own_address
        self._checks = os.environ.get("COSERVE_RANK_CHECK") == "1"
        self._generation = 0
        """How often the ranks have connected anew."""
        self._num_done = self._num_launched = 0
        """Collectives of this generation that this rank has seen the end of, and those that it has
        given to a GPU."""
        self._failed = self._gone = ""
        """Why collectives raise until `reset`, and why the group is over; "" while that is not
        so."""
        self._host_group: Any = None
        self._gpu_group: Any = None
        try:
            self._store = dist.TCPStore(host, port, timeout=self._limit, wait_for_workers=False)
            self._meet("joined", "", timeout_s)
            self._host_group = self._gloo()
            if device.type == "cuda":
                self._gpu_group = self._nccl()
                # It connects and takes its memory at the first collective; pages get what is left.
                self._gathered(torch.zeros(1, device=device))
        except RuntimeError as error:
            raise RankGoneError(
                f"rank {rank} of {size} cannot join at {host}:{port}: {_first_line(error)}"
            ) from error

    def fail(self, reason: str) -> None:
        if self._failed or self._gone:
            return
        text = f"rank {self.rank} failed: {reason}"
        try:  # the first rank's reason is that of all
            # Keys have the generation in them, so a failure that was reset is not found again.
            text = self._store.compare_set(self._failure_key, "", text).decode()
        except RuntimeError as error:
            self._gone = f"the ranks' store has gone: {_first_line(error)}"
        self._leave(text)

    def reset(self) -> None:
        limit_s = self._limit.total_seconds()
        if self._gpu_group is not None:
            limit_s = min(limit_s, _GPU_RESET_S)
        self._leave("the ranks meet again")
        if self._gone:
            raise self._error()
        try:
            counts = self._meet(
                f"reset/{self._generation}", f"{self._num_done} {self._num_launched}", limit_s
            )
            # A rank that saw the end of one more collective has gone on with what the others lack.
            if len(set(counts)) > 1:
                raise RankGoneError("ranks have done different collectives")
            self._generation += 1
            self._num_done = self._num_launched = 0
            self._host_group = self._gloo()
            self._failed = ""
        except (RankGoneError, RuntimeError) as error:
            self._gone = f"{self._failed}; the group ends, since {_first_line(error)}"
            raise RankGoneError(self._gone) from error

    def limit_waits(self, timeout_s: float) -> None:
        self._limit = timedelta(seconds=timeout_s)
        self._host_group.set_timeout(self._limit)
        if self._gpu_group is not None:
            self._gpu_group.set_timeout(self._limit)

    def close(self) -> None:
        self._gone = self._gone or "the group is closed"
        self._leave(self._gone)
        self._gpu_group = None

    def _sum(self, x: Tensor, y: Tensor, name: str) -> None:
        self._compare("sum", name, x)
        y.copy_(sum_in_rank_order(list(self._gathered(x))))

    def _all_gather(self, x: Tensor, name: str) -> Tensor:
        self._compare("gather", name, x)
        return self._gathered(x)

    def _agree(self, number: int) -> int:
        return int(self._gathered(torch.tensor([number]))[0])

    def _compare(self, kind: str, name: str, x: Tensor) -> None:
        """Raise on all ranks if they are at different collectives; for the debug check."""
        if not self._checks:
            return
        label = describe(kind, name, x)
        digests = self._gathered(torch.tensor([crc32(label.encode())])).view(-1).tolist()
        if len(set(digests)) > 1:
            raise RankError(f"ranks are at different collectives: rank {self.rank} at {label}")

    def _gathered(self, x: Tensor) -> Tensor:
        """Return every rank's tensor, [size, *x.shape]."""
        if self._gone or self._failed:
            raise self._error()
        out = x.new_empty((self.size, *x.shape))
        try:
            self._gather_into(out, x)
        except RuntimeError as error:
            reason = _first_line(error)
        else:
            return out
        # The failure is read here and not above, where the error would hold the group, whose
        # connections are to close.
        failure = self._failure()
        self._gone = self._gone or (
            "" if failure else f"a rank has ended or does not answer: {reason}"
        )
        self._leave(failure or self._gone)
        raise self._error()

    def _gather_into(self, out: Tensor, x: Tensor) -> None:
        # Copied as bytes, which every backend can move.
        parts = [each.reshape(-1).view(torch.uint8) for each in out]
        own = [x.reshape(-1).view(torch.uint8)]
        if x.device.type == "cuda":
            self._num_launched += 1
            self._gpu_group.allgather([parts], own).wait()  # the stream waits, not this thread
        else:
            # Counted once it is done; those of a GPU when they are launched.
            self._host_group.allgather([parts], own).wait()
            self._num_done += 1

    def _error(self) -> RankError:
        return RankGoneError(self._gone) if self._gone else RankError(self._failed)

    def _failure(self) -> str:
        """Return what a rank has said that failed; "" if none has. If one has said that it ends,
        the group is over.
        """
        with suppress(RuntimeError):
            if self._store.check([_ENDED]):
                self._gone = self._store.get(_ENDED).decode()
            elif self._store.check([self._failure_key]):
                return self._store.get(self._failure_key).decode()
        return ""

    @property
    def _failure_key(self) -> str:
        return f"failure/{self._generation}"

    def _meet(self, name: str, value: str, timeout_s: float) -> list[str]:
        """Wait until all ranks have come here, and return what each has brought.

        Raises:
            RankGoneError: a rank does not come, or has said that it ends. RuntimeError: the store
                has gone.
        """
        keys = [f"{name}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], value)
        start_s = time.monotonic()
        while not self._store.check(keys):
            if self._store.check([_ENDED]):
                raise RankGoneError(self._store.get(_ENDED).decode())
            if time.monotonic() - start_s > timeout_s:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                raise RankGoneError(f"ranks {missing} did not come within {timeout_s:g} s")
            time.sleep(_POLL_S)
        return [self._store.get(key).decode() for key in keys]

    def _leave(self, reason: str) -> None:
        """Close this rank's connections of gloo, which ends what others wait for."""
        # The first reason stays: what follows it are consequences.
        self._failed = self._failed or reason
        self._host_group = None

    def _gloo(self) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        address = self._own_address
        options._devices = [
            gloo.create_device(hostname=address) if address else gloo.create_default_device()
        ]
        options._timeout = self._limit
        return gloo(
            dist.PrefixStore(f"gloo/{self._generation}", self._store), self.rank, self.size, options
        )

    def _nccl(self) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._limit
        return dist.ProcessGroupNCCL(
            dist.PrefixStore("nccl", self._store), self.rank, self.size, options
        )


class RankStore:
    """The store by which the ranks of one machine find each other, in the process that starts them.

    It listens on loopback alone.
    """

    HOST = "127.0.0.1"

    def __init__(self) -> None:
        with socket.create_server((self.HOST, 0)) as listening:
            self.port: int = listening.getsockname()[1]
            """Where the ranks find it."""
            self._store = dist.TCPStore(
                self.HOST,
                self.port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )


def tell_end(port: int, reason: str) -> None:
    """Have all ranks of a `RankStore` that wait for another one raise RankGoneError, also those
    that still join.
    """
    with suppress(RuntimeError):  # the store may have gone
        store = dist.TCPStore(
            RankStore.HOST, port, timeout=timedelta(seconds=_TELL_S), wait_for_workers=False
        )
        store.compare_set(_ENDED, "", reason)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]

"""The interface of groups of ranks: collectives, which all ranks call in the same order with
tensors of the same shape.

A collective never waits forever. When a rank fails, ends or does not come, every other rank raises
`RankError` in the collective where it is, or in its next one. After that, every rank calls `reset`
before the next collective; a group that raised `RankGoneError` is over.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Types that can be summed. Those of two bytes are added in float32 and rounded once.
SUMMED_TYPES = (torch.float32, torch.bfloat16, torch.float16)
# Maximum bytes of a buffer in which several tensors are summed at once.
_MAX_BUFFER_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The number of a rank and the size of its group."""

    rank: int = 0
    """Number of the rank in its group, from 0 on."""
    size: int = 1
    """Number of ranks in the group."""


class RankGroup(ABC):
    """One rank's end of a group. The public methods check what they are given; the others move the
    data.
    """

    def __init__(self, *, rank: int, size: int) -> None:
        assert 0 <= rank < size, f"rank {rank} of {size}"
        self.rank = rank
        """Number of this rank in its group, from 0 on."""
        self.size = size
        """Number of ranks in the group."""
        self.link_flops_per_byte: float | None = None
        """FLOPs that a rank computes while a gather moves a byte (`link_pace`); None: not measured
        yet."""

    def sum_(self, x: Tensor, name: str = "") -> Tensor:
        """Replace a tensor by the sum of all ranks' tensors, which has the same bits on every rank.

        The ranks' values are added one after the other, rank 0's first, in float32, and rounded
        once.

        Args:
            x: a contiguous tensor of one of `SUMMED_TYPES`; overwritten.
            name: of the graph's node, for the debug check and messages.

        Returns:
            The same tensor.

        Raises:
            RankError: another rank has failed, or calls another collective.
        """
        # In place, hence contiguous; `sum` can copy.
        assert x.is_contiguous() and x.dtype in SUMMED_TYPES, (
            f"{name}: a sum of {x.dtype}, strides {x.stride()}"
        )
        if self.size > 1 and x.numel() > 0:
            self._sum(x, x, name)
        return x

    def sum(self, x: Tensor, name: str = "") -> Tensor:
        """Return the sum of all ranks' tensors, which is a new tensor unless the group has one
        rank; see `sum_`.
        """
        if self.size == 1:
            return x
        assert x.dtype in SUMMED_TYPES, f"{name}: a sum of {x.dtype}"
        x = x.contiguous()
        y = torch.empty_like(x)
        if x.numel() > 0:
            self._sum(x, y, name)
        return y

    def sum_several(self, tensors: Sequence[Tensor], name: str = "") -> list[Tensor]:
        """Return the sum of each tensor over all ranks, as `sum_` gives it, in few collectives.

        Tensors lie end to end in one buffer, as many as fit; the results lie there, too.

        Args:
            tensors: of one type, as many on every rank and of the same shapes; not changed, so that
                they can be summed again if a later buffer fails.
            name: for messages.
        """
        if self.size == 1:
            return list(tensors)
        found: list[Tensor] = []
        # Sizes are the same on all ranks, hence the buffers and the collectives, too.
        for some in _in_buffers(tensors):
            if len(some) == 1:  # which may be larger than a buffer
                found.append(self.sum(some[0], name))
                continue
            buffer = self.sum_(torch.cat([tensor.flatten() for tensor in some]), name)
            parts = torch.split(buffer, [tensor.numel() for tensor in some])
            found += [part.view(tensor.shape) for part, tensor in zip(parts, some, strict=True)]
        return found

    def all_gather(self, x: Tensor, name: str = "") -> Tensor:
        """Return all ranks' tensors, [size, *x.shape], on every rank; see `sum_` for the rest."""
        if self.size == 1:
            return x.unsqueeze(0)
        if x.numel() == 0:
            return x.new_empty((self.size, *x.shape))
        return self._all_gather(x.contiguous(), name)

    def all_gather_on_hosts(self, x: Tensor) -> Tensor:
        """Return all ranks' tensors, [size, *x.shape], of tensors in the host's memory; no GPU
        takes part.
        """
        return (
            self._all_gather(x, "on hosts")
            if self.size > 1 and x.numel() > 0
            else self.all_gather(x)
        )

    def gather(self, x: Tensor, to: int = 0, name: str = "") -> Tensor | None:
        """Return all ranks' tensors, [size, *x.shape], on the rank `to`, and None on all others."""
        assert 0 <= to < self.size
        if self.size == 1:
            return x.unsqueeze(0)
        if x.numel() == 0:
            return x.new_empty((self.size, *x.shape)) if self.rank == to else None
        return self._gather(x.contiguous(), to, name)

    def gather_columns(self, x: Tensor, name: str = "") -> Tensor:
        """Return the ranks' columns beside each other, [..., size * columns], of x [...,
        columns].
        """
        if self.size == 1:
            return x
        return torch.cat(list(self.all_gather(x, name)), -1)

    def agree(self, number: int) -> int:
        """Return rank 0's number on every rank: of a decision that depends on a rank's own clock or
        memory.

        Args:
            number: an integer of at most 64 bits, with its sign.
        """
        return number if self.size == 1 else self._agree(number)

    def agree_min(self, number: int) -> int:
        """Return the smallest of all ranks' numbers on every rank: of what each rank's own memory
        allows.

        Args:
            number: an integer of at most 64 bits, with its sign.
        """
        return (
            number
            if self.size == 1
            else int(self.all_gather_on_hosts(torch.tensor([number])).min())
        )

    def agree_all(self, *, is_so: bool) -> bool:
        """Return whether something is so on all ranks."""
        return bool(self.agree_min(int(is_so)))

    def agree_bytes(self, data: bytes) -> bytes:
        """Return rank 0's bytes on every rank."""
        # Rank 0's length first, so that all ranks bring tensors of one shape.
        if self.size == 1 or not (num_bytes := self.agree(len(data))):
            return data if self.size == 1 else b""
        own = torch.zeros(num_bytes, dtype=torch.uint8)
        if self.rank == 0:
            own.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return self.all_gather_on_hosts(own)[0].numpy().tobytes()

    def barrier(self) -> None:
        """Return once all ranks have called it."""
        self.agree(0)

    @property
    def waited_s(self) -> float:
        """Return the seconds for which this rank has waited for others in collectives; 0.0 where
        the transport does not count.
        """
        return 0.0

    def compiled_sum(self, name: str) -> tuple[int, int] | None:
        """Return what a list of compiled calls needs for a sum of this group: the address of the
        rank's state, and the digest of the debug check (`rank_sum` in `kernels/cpu/kernels.h`).
        None: its sums are not compiled.
        """
        return None

    def raise_failure(self) -> None:  # noqa: B027 - most transports raise where they fail
        """Raise the error of a compiled call that was not completed; the calls after it have done
        nothing.
        """

    @abstractmethod
    def fail(self, reason: str) -> None:
        """Make every collective of the group raise `RankError`, those that wait included, until all
        ranks `reset`.

        Args:
            reason: one line for the message.
        """

    @abstractmethod
    def reset(self) -> None:
        """Wait until all ranks have called this, then clear the failure and what was under way."""

    def limit_waits(self, timeout_s: float) -> None:  # noqa: B027
        """Set the longest time that this rank waits for another one from now on. By default do
        nothing: most transports keep the limit of their start.
        """

    def close(self) -> None:  # noqa: B027
        """Release what the group holds; no collective is called afterwards. By default there is
        nothing.
        """

    @abstractmethod
    def _sum(self, x: Tensor, y: Tensor, name: str) -> None:
        """Write the sum of all ranks' x into y, which may be x; for several ranks and tensors that
        are not empty.
        """

    @abstractmethod
    def _all_gather(self, x: Tensor, name: str) -> Tensor:
        """Do what `all_gather` says, for several ranks and a contiguous tensor."""

    @abstractmethod
    def _agree(self, number: int) -> int:
        """Do what `agree` says, for several ranks."""

    def _gather(self, x: Tensor, to: int, name: str) -> Tensor | None:
        found = self._all_gather(x, name)
        return found if self.rank == to else None


class SingleRank(RankGroup):
    """A group of one rank: its collectives return what they are given."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)

    def fail(self, reason: str) -> None:
        """Do nothing: there are no other ranks."""

    def reset(self) -> None:
        """Do nothing."""

    def _sum(self, x: Tensor, y: Tensor, name: str) -> None:
        raise AssertionError("a group of one moves no data")

    def _all_gather(self, x: Tensor, name: str) -> Tensor:
        raise AssertionError("a group of one moves no data")

    def _agree(self, number: int) -> int:
        raise AssertionError("a group of one moves no data")


def _in_buffers(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield neighbouring tensors that fit into one buffer, and larger ones alone."""
    some, num_bytes = list[Tensor](), 0
    for tensor in tensors:
        if some and num_bytes + tensor.nbytes > _MAX_BUFFER_BYTES:
            yield some
            some, num_bytes = [], 0
        some.append(tensor)
        num_bytes += tensor.nbytes
    if some:
        yield some


def sum_in_rank_order(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of equal tensors, added in their order in float32 and rounded once to their
    type.
    """
    # A copy: parts may be memory that other ranks still read.
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)


def describe(kind: str, name: str, x: Tensor) -> str:
    """Return a collective as one line of a message, such as "sum h.0.mlp [8, 896] bfloat16"."""
    return f"{kind} {name or '(unnamed)'} {list(x.shape)} {str(x.dtype).removeprefix('torch.')}"

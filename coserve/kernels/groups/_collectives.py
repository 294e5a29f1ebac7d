"""Collectives over an arena: those compiled with the CPU's kernels, and a twin in Python where
nothing is compiled.

A collective that is not complete leaves its reason in the rank's state.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from zlib import crc32

import torch
from torch import Tensor

from coserve.kernels.cpu.compiled import Library
from coserve.kernels.groups._arena import fence
from coserve.kernels.groups._arena_rank import ArenaRank, CollectiveOutcome
from coserve.kernels.groups.base import sum_in_rank_order

# Seconds for which the plain twin offers its core to others, and for which it then sleeps at a
# time.
_YIELD_S, _SLEEP_S = 0.0005, 0.0001


class Collectives(ABC):
    """The collectives that a group of an arena calls.

    Each takes a digest: 32 bits of the debug check, equal on all ranks; 0 without it.
    """

    @abstractmethod
    def sum(self, x: Tensor, y: Tensor, digest: int) -> None:
        """Write the sum of all ranks' x into y, which may be x: both contiguous, of float32 or
        bfloat16.
        """

    @abstractmethod
    def gather(self, x: Tensor, out: Tensor | None, to: int, digest: int) -> None:
        """Copy the ranks' x into out [size, *x.shape] of the rank `to`, or of all ranks if it is
        -1.
        """

    @abstractmethod
    def agree(self, number: int, digest: int) -> int:
        """Return rank 0's number."""


class CompiledCollectives(Collectives):
    """The collectives of `kernels/cpu/common/collectives.cpp`."""

    def __init__(self, kernels: Library, rank: ArenaRank) -> None:
        self._kernels, self._rank = kernels, rank
        self._address = rank.address
        self._number = torch.zeros(1, dtype=torch.int64)

    def sum(self, x: Tensor, y: Tensor, digest: int) -> None:
        is_bfloat16 = x.dtype == torch.bfloat16
        self._kernels.rank_sum(
            self._address, x.data_ptr(), y.data_ptr(), 1, x.numel(), is_bfloat16, digest
        )

    def gather(self, x: Tensor, out: Tensor | None, to: int, digest: int) -> None:
        address = 0 if out is None else out.data_ptr()
        self._kernels.rank_gather(self._address, x.data_ptr(), address, x.nbytes, to, digest)

    def agree(self, number: int, digest: int) -> int:
        self._number[0] = number
        self._kernels.rank_agree(self._address, self._number.data_ptr(), digest)
        return int(self._number)


class PlainCollectives(Collectives):
    """The twin in Python: the same meetings, always in one phase, and slower."""

    def __init__(self, rank: ArenaRank) -> None:
        self._rank, self._arena, self._state = rank, rank.arena, rank.state

    def sum(self, x: Tensor, y: Tensor, digest: int) -> None:
        for piece, out in zip(self._pieces(x), self._pieces(y), strict=True):
            parts = self._exchange(piece, _word(f"sum {x.dtype} {x.numel()}", digest))
            if not parts:
                return
            out.copy_(sum_in_rank_order(parts))

    def gather(self, x: Tensor, out: Tensor | None, to: int, digest: int) -> None:
        start, word = 0, _word(f"gather to {to} {x.nbytes}", digest)
        for piece in self._pieces(x):
            parts = self._exchange(piece, word)
            if not parts:
                return
            if out is not None:
                for mine, part in zip(out.view(self._arena.size, -1), parts, strict=True):
                    mine[start : start + len(part)] = part
            start += len(piece)

    def agree(self, number: int, digest: int) -> int:
        slot = self._state.epoch & 1
        self._arena.pages[self._rank.rank].numbers[slot] = number
        is_complete = self._begin() and self._meet(_word("agree", digest))
        return self._arena.pages[0].numbers[slot] if is_complete else number

    def _pieces(self, x: Tensor) -> Sequence[Tensor]:
        """Return a tensor in pieces that fit into a buffer."""
        return torch.split(x.view(-1), self._arena.buffer_bytes // x.itemsize)

    def _exchange(self, piece: Tensor, word: int) -> list[Tensor]:
        """Return what every rank brought, in rank order, as it lies in the arena; nothing if that
        failed.
        """
        if not self._begin():
            return []
        epoch = self._state.epoch
        parts = [
            torch.frombuffer(
                self._arena.buffer(rank, epoch), dtype=piece.dtype, count=piece.numel()
            )
            for rank in range(self._arena.size)
        ]
        # In the rank's own buffer, which nobody reads before this rank publishes its epoch.
        parts[self._rank.rank].copy_(piece)
        return parts if self._meet(word) else []

    def _begin(self) -> bool:
        # A failure elsewhere fails the next collective here, before any data is moved.
        if self._state.outcome == CollectiveOutcome.COMPLETE and self._rank.has_failed():
            self._state.outcome = CollectiveOutcome.FAILED
        return bool(self._state.outcome == CollectiveOutcome.COMPLETE)

    def _meet(self, word: int) -> bool:
        """Publish what this rank has written, and wait for all others."""
        state, pages = self._state, self._arena.pages
        slot = state.epoch & 1
        pages[self._rank.rank].words[slot] = word
        # The buffer, and the word, are written before the epoch that announces them.
        fence()
        state.epoch += 1
        pages[self._rank.rank].epoch = state.epoch & 0xFFFFFFFF
        if not all(self._wait_for(rank) for rank in range(state.size)):
            return False
        fence()
        for rank, page in enumerate(pages):
            # Compared only now, when each rank's word of this epoch is there.
            if page.words[slot] != word:
                state.outcome, state.detail = CollectiveOutcome.DIFFERENT, rank
                return False
        return True

    def _wait_for(self, rank: int) -> bool:
        state, page, start_s = self._state, self._arena.pages[rank], time.monotonic()

        def is_there() -> bool:
            # Epochs are counted modulo 2^32.
            return bool((page.epoch - state.epoch) & 0xFFFFFFFF < 2**31)

        while not is_there():
            waited_s = time.monotonic() - start_s
            if self._rank.has_failed():
                state.outcome = CollectiveOutcome.FAILED
                return False
            if waited_s < _YIELD_S:
                time.sleep(0)
                continue
            time.sleep(_SLEEP_S)
            # The parent counts, too: without it nobody would end the ranks.
            for index in (rank, state.size):
                if self._rank.is_gone(index) and not is_there():
                    state.outcome, state.detail = CollectiveOutcome.GONE, index
                    return False
            if waited_s * 1e9 > state.timeout_ns:
                state.outcome, state.detail = CollectiveOutcome.LATE, rank
                return False
        self._arena.pages[self._rank.rank].waited_ns += int(1e9 * (time.monotonic() - start_s))
        return True


def _word(collective: str, digest: int) -> int:
    """Return what tells one collective from another: its kind and size, and the digest."""
    # Two hashes in one int64, which stays positive.
    return crc32(collective.encode()) << 31 ^ digest

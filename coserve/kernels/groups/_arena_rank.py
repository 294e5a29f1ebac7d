"""A rank's place in an arena: it joins, learns who the others are, notices their end, and resets
after failures.
"""

import ctypes
import os
import select
import time
from contextlib import suppress
from enum import IntEnum

from coserve.errors import RankError, RankGoneError
from coserve.kernels.groups._arena import ArenaRankState, RankArena, as_text, fence, from_text

# Shortly before 32 bits are used up, so that every group passes that point early.
_FIRST_EPOCH = 2**32 - 100
_POLL_S = 0.0002


class CollectiveOutcome(IntEnum):
    """An outcome of a collective; `collectives.cpp` has the same numbers."""

    COMPLETE = 0
    FAILED = 1
    GONE = 2
    LATE = 3
    DIFFERENT = 4


class ArenaRank:
    """A base of both implementations of collectives. One thread at a time uses it."""

    def __init__(
        self,
        arena: RankArena,
        rank: int,
        *,
        implementation: int,
        timeout_s: float,
        start_timeout_s: float,
    ) -> None:
        """Join the group; return once all ranks have.

        Args:
            arena: of the group.
            rank: number of this rank.
            implementation: number of that of this rank, which must be that of all others.
            timeout_s: longest time to wait for another rank in a collective or a reset.
            start_timeout_s: longest time to wait until all ranks have joined.

        Raises:
            RankGoneError: not all of them have joined, or they have another implementation.
        """
        self.arena, self.rank = arena, rank
        # (process, pidfd) of the ranks and of the parent; a process of 0 is never gone.
        self._processes = (ctypes.c_int64 * 2 * (arena.size + 1))()
        self.state = ArenaRankState(
            arena=arena.address,
            rank=rank,
            size=arena.size,
            buffer_bytes=arena.buffer_bytes,
            epoch=_FIRST_EPOCH,
            timeout_ns=int(start_timeout_s * 1e9),
            processes=ctypes.addressof(self._processes),
        )
        for pair in self._processes:
            pair[1] = -1
        page = arena.pages[rank]
        # Before `reset`, by which the others learn that this rank has come.
        page.process, page.implementation, page.epoch = os.getpid(), implementation, _FIRST_EPOCH
        # The parent first: a rank whose parent has ended must not wait for the others.
        self._watch(arena.size, arena.header.parent)
        self.reset()
        self.state.timeout_ns = int(timeout_s * 1e9)
        # Only now, since all ranks have written their process.
        for other, each in enumerate(arena.pages):
            self._watch(other, each.process)
        if any(each.implementation != implementation for each in arena.pages):
            raise self._gone(
                "ranks have different implementations of collectives: compiled on some, plain on "
                "others"
            )

    @property
    def address(self) -> int:
        """Return the address of the state for the compiled collectives."""
        return ctypes.addressof(self.state)

    def has_failed(self) -> bool:
        """Return whether a failure of this generation, or the end of the group, is written in the
        arena.
        """
        header = self.arena.header
        return bool(header.failed >> 16 >= self.state.generation or header.ended)

    def fail(self, reason: str) -> None:
        """Implement `RankGroup.fail`."""
        self.arena.fail(self.rank, self.state.generation, reason)

    def reset(self) -> None:
        """Implement `RankGroup.reset`.

        Ranks may be at different epochs when they fail. All of them continue after the latest.
        """
        state, page = self.state, self.arena.pages[self.rank]
        number = state.generation + 1
        # The epoch before the count: who sees the count finds the epoch. By parity, since a fast
        # rank may be at the next reset while a slow one still reads this one.
        page.reset_epochs[number & 1] = state.epoch
        fence()
        page.num_resets = number
        for other in range(state.size):
            self._wait_for_reset(number, other)
        fence()
        # The same on all ranks, and later than anything that was under way.
        state.epoch = max(each.reset_epochs[number & 1] for each in self.arena.pages)
        state.generation, state.outcome = number, CollectiveOutcome.COMPLETE

    def is_gone(self, index: int) -> bool:
        """Return whether the process of a rank, or for `size` the parent, has ended."""
        process, pidfd = self._processes[index]
        if pidfd >= 0:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            return bool(poll.poll(0))
        with suppress(PermissionError):
            try:
                os.kill(process, 0)
            except ProcessLookupError:
                return True
        return False

    def note_label(self, label: str) -> None:
        """Write down which collective comes next, for other ranks' messages."""
        epoch = self.state.epoch
        self.arena.pages[self.rank].labels[epoch & 1].value = as_text(f"{epoch} {label}")

    def error(self) -> RankError:
        """Return the error of the last collective, which was not complete, once all other ranks are
        to have it.
        """
        state = self.state
        if state.outcome == CollectiveOutcome.FAILED:
            return self._error_of_arena()
        if state.outcome == CollectiveOutcome.GONE:
            return self._gone(f"{self._named(state.detail)} has ended")
        if state.outcome == CollectiveOutcome.LATE:
            return self._gone(
                f"{self._named(state.detail)} did not come within {state.timeout_ns / 1e9:g} s"
            )
        assert state.outcome == CollectiveOutcome.DIFFERENT
        labels = [self._label(rank) for rank in (self.rank, state.detail)]
        said = ", ".join(filter(None, labels)) or "COSERVE_RANK_CHECK=1 says which"
        reason = f"ranks {self.rank} and {state.detail} are at different collectives: {said}"
        self.fail(reason)
        return RankError(reason)

    def close(self) -> None:
        """Close the descriptors of the other processes."""
        for pair in self._processes:
            if pair[1] >= 0:
                os.close(pair[1])
                pair[1] = -1

    def _wait_for_reset(self, number: int, rank: int) -> None:
        """Wait until a rank has arrived at a reset, as long as `timeout_ns` allows."""
        page, start_s = self.arena.pages[rank], time.monotonic()

        def is_there() -> bool:
            return bool(page.num_resets >= number)

        while not is_there():
            if self.arena.header.ended:
                raise self._error_of_arena()
            for index in (rank, self.arena.size):
                # In this order: a rank that has arrived may end right after.
                if self.is_gone(index) and not is_there():
                    raise self._gone(f"{self._named(index)} has ended")
            if time.monotonic() - start_s > self.state.timeout_ns / 1e9:
                raise self._gone(
                    f"{self._named(rank)} did not come within {self.state.timeout_ns / 1e9:g} s"
                )
            time.sleep(_POLL_S)

    def _watch(self, index: int, process: int) -> None:
        """Have a process's end noticed, unless it is this one."""
        if process == os.getpid():
            return
        self._processes[index][0] = process
        try:
            self._processes[index][1] = os.pidfd_open(process)
        except ProcessLookupError:
            raise self._gone(f"{self._named(index)} has ended") from None
        except OSError:  # the system has none, or forbids it: the number of the process has to do
            pass

    def _label(self, rank: int) -> str:
        """Return the collective that a rank noted for the last epoch; "" if it noted none, as
        compiled calls do.
        """
        # The meeting has counted on: the label was noted for the epoch before.
        epoch = self.state.epoch - 1
        noted, _, label = from_text(self.arena.pages[rank].labels[epoch & 1].value).partition(" ")
        return label if noted == str(epoch) else ""

    def _named(self, index: int) -> str:
        process = self._processes[index][0]
        if index == self.arena.size:
            return f"the process that started the ranks ({process})"
        return f"rank {index}" + (f" (process {process})" if process else "")

    def _gone(self, reason: str) -> RankGoneError:
        """Return an error that ends the group, once it has ended it for all ranks."""
        self.arena.end(reason)
        return RankGoneError(reason)

    def _error_of_arena(self) -> RankError:
        header = self.arena.header
        fence()
        if header.ended:
            return RankGoneError(from_text(header.reason))
        # See `ArenaHeader.failed`.
        rank = header.failed & 0xFFFF
        return RankError(f"rank {rank} failed: {from_text(self.arena.pages[rank].reason)}")

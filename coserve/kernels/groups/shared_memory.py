"""Ranks that are processes of one machine, on its CPU: they share an arena (`_arena.py`)."""

import os
from functools import cache
from zlib import crc32

import torch
from torch import Tensor

from coserve.kernels.cpu.compiled import Library, compiled_kernels
from coserve.kernels.groups._arena import RankArena
from coserve.kernels.groups._arena_rank import ArenaRank, CollectiveOutcome
from coserve.kernels.groups._collectives import Collectives, CompiledCollectives, PlainCollectives
from coserve.kernels.groups.base import RankGroup, describe

_TIMEOUT_S = 600.0
_COMPILED, _PLAIN = 1, 2


class SharedMemoryGroup(RankGroup):
    """A rank that is a process. One thread at a time may use it.

    With COSERVE_RANK_CHECK=1 every collective compares the names that ranks give; without, only
    kinds and sizes.
    """

    def __init__(
        self,
        arena: RankArena,
        rank: int,
        *,
        timeout_s: float = _TIMEOUT_S,
        start_timeout_s: float = _TIMEOUT_S,
        may_be_compiled: bool = True,
    ) -> None:
        """Join the group of an arena; return once all ranks have.

        Args:
            arena: made by the process that started the ranks.
            rank: number of this rank.
            timeout_s: longest time that a rank waits for another one in a collective.
            start_timeout_s: longest time to wait until all ranks have joined.
            may_be_compiled: False takes the plain twin even where the kernels are compiled.

        Raises:
            RankGoneError: a rank has ended or did not come.
        """
        super().__init__(rank=rank, size=arena.size)
        kernels = compiled_kernels() if may_be_compiled else None
        self._rank = ArenaRank(
            arena,
            rank,
            implementation=_PLAIN if kernels is None else _COMPILED,
            timeout_s=timeout_s,
            start_timeout_s=start_timeout_s,
        )
        self._state = self._rank.state
        self._collectives = _collectives(kernels, self._rank)
        self._checks = os.environ.get("COSERVE_RANK_CHECK") == "1"

    @property
    def waited_s(self) -> float:
        return float(self._rank.arena.pages[self.rank].waited_ns) / 1e9

    def fail(self, reason: str) -> None:
        self._rank.fail(reason)

    def reset(self) -> None:
        self._rank.reset()

    def limit_waits(self, timeout_s: float) -> None:
        self._state.timeout_ns = int(timeout_s * 1e9)

    def close(self) -> None:
        self._rank.close()

    def compiled_sum(self, name: str) -> tuple[int, int] | None:
        if not isinstance(self._collectives, CompiledCollectives):
            return None
        return self._rank.address, _crc(f"sum {name}") if self._checks else 0

    def raise_failure(self) -> None:
        if self._state.outcome != CollectiveOutcome.COMPLETE:
            raise self._rank.error()

    def _sum(self, x: Tensor, y: Tensor, name: str) -> None:
        digest = self._digest("sum", name, x)
        if x.dtype == torch.float16:
            # The same bits: a sum in float32 that is rounded once.
            wide = x.float()
            self._collectives.sum(wide, wide, digest)
            y.copy_(wide)
        else:
            self._collectives.sum(x, y, digest)
        self.raise_failure()

    def _all_gather(self, x: Tensor, name: str) -> Tensor:
        out = x.new_empty((self.size, *x.shape))
        self._collectives.gather(x, out, -1, self._digest("gather", name, x))
        self.raise_failure()
        return out

    def _gather(self, x: Tensor, to: int, name: str) -> Tensor | None:
        out = x.new_empty((self.size, *x.shape)) if self.rank == to else None
        self._collectives.gather(x, out, to, self._digest("gather", name, x))
        self.raise_failure()
        return out

    def _agree(self, number: int) -> int:
        found = self._collectives.agree(number, self._digest("agree", "", None))
        self.raise_failure()
        return found

    def _digest(self, kind: str, name: str, x: Tensor | None) -> int:
        """Return what the debug check compares; 0 without it."""
        if not self._checks:
            return 0
        self._rank.note_label(kind if x is None else describe(kind, name, x))
        return _crc(f"{kind} {name}")


@cache
def _crc(text: str) -> int:
    return crc32(text.encode())


def _collectives(kernels: Library | None, rank: ArenaRank) -> Collectives:
    return PlainCollectives(rank) if kernels is None else CompiledCollectives(kernels, rank)

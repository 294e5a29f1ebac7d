"""What a storm of real processes knows: its server, what is asked of it, the right answers, and
what came of it."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from small_disk import SmallDisk
from storm.real.http import Answer, NoAnswerError, Request, ask
from storm.real.server import Resources, StormServer
from torch import Tensor

# An answer that takes longer than this is none, faults and all.
ANSWER_LIMIT_S = 150.0
# After its processes are there again, answers still have to come.
_RECOVERY_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A job that is made again and again, and what it makes when nothing disturbs it. adapter: its
    final weights. directory: where they lie, in PEFT's format. answers: greedy, by prompt.
    """

    name: str
    body: Mapping[str, Any]
    data: bytes
    num_steps: int
    adapter: Mapping[str, Tensor]
    directory: Path
    answers: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Of a storm. is_exact: the server is deterministic, so that adapters are equal bit for bit."""

    seed: int
    storm_s: float
    num_streams: int
    num_jobs: int
    is_exact: bool


@dataclass(kw_only=True)
class World:
    """The storm and its records."""

    settings: Settings
    server: StormServer
    disk: SmallDisk | None
    recipes: tuple[Recipe, ...]
    base_answers: Mapping[str, str]
    counts: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    recovery_s: dict[str, list[float]] = field(default_factory=dict)
    # Ids of uploads that were acknowledged, and their contents; of those that were deleted.
    uploads: dict[str, bytes] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)
    # Ids of jobs that were acknowledged, and their recipes; of those that somebody asked to cancel.
    jobs: dict[str, Recipe] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    batches: dict[str, Mapping[str, str | None]] = field(default_factory=dict)
    """Ids of batches that were acknowledged, and by custom_id the right text of each line; None:
    the line is deadly."""
    idle: list[Resources] = field(default_factory=list)
    # From its undisturbed adapter, of all jobs' parameters.
    farthest: float = 0.0
    is_finished: bool = False
    started_s: float = field(default_factory=time.monotonic)
    _num_disturbances: int = 0
    _disturbed_until_s: float = 0.0

    def rng(self, who: str) -> Random:
        """Each actor draws from its own."""
        return Random(f"{self.settings.seed} {who}")

    def check(self, holds: bool, problem: str) -> None:
        """An invariant."""
        if not holds:
            self.broken.append(f"{problem}   (after {time.monotonic() - self.started_s:.1f} s)")

    @contextmanager
    def disturbance(self) -> Iterator[None]:
        """While a fault is at work, and for a moment after."""
        self._num_disturbances += 1
        try:
            yield
        finally:
            self._num_disturbances -= 1
            self._disturbed_until_s = time.monotonic() + _RECOVERY_S

    @property
    def is_disturbed(self) -> bool:
        """Whether answers may be slow because of a fault."""
        now_s = time.monotonic()
        is_down = self.server.was_down(now_s - _RECOVERY_S)
        return is_down or self._num_disturbances > 0 or now_s < self._disturbed_until_s

    async def ask(self, request: Request) -> Answer | None:
        """None where the server went away meanwhile. What no fault explains is noted."""
        since_s = time.monotonic()
        try:
            answer = await ask(self.server.port, request, limit_s=ANSWER_LIMIT_S)
        except TimeoutError:
            self.check(
                False,
                f"{request.method} {request.path} was not answered within {ANSWER_LIMIT_S:.0f} s",
            )
            return None
        except NoAnswerError as error:
            self.check(
                self.server.was_down(since_s), f"{request.method} {request.path} broke off: {error}"
            )
            self.counts["connections lost with the server"] += 1
            return None
        self.check(
            answer.status != 500, f"{request.method} {request.path}: 500 {answer.body[:300]!r}"
        )
        return answer

    async def ask_until_done(
        self, request: Request, limit_s: float = ANSWER_LIMIT_S
    ) -> Answer | None:
        """Again and again while the server is away, busy or without room; None if that lasts."""
        until_s = time.monotonic() + limit_s
        while time.monotonic() < until_s:
            answer = await self.ask(request)
            if answer is not None and answer.status not in (503, 507):
                return answer
            await asyncio.sleep(0.3)
        return None

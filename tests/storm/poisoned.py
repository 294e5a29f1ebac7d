"""Storms of batches with poisoned lines: engines and servers die of them, and are killed by others
now and then.

Other lines bring a grammar that crashes the sandbox it is tried in: no process of the server dies
of these, and they are refused.

Seeded, without a clock: the rule and the turns are the real ones (`batches.deaths`,
`batches.turns`), a process is a few lines that say who was with it when it died. A server that dies
takes all turns with it; the next one knows what was on record.
"""

import asyncio
from collections import Counter
from random import Random
from typing import Any

from coserve.server.batches.deaths import LineDeaths, LineKey, after_death
from coserve.server.batches.turns import BatchTurns

_MAX_STARTS = 10_000


class PoisonedStorm:
    """One storm. counts: of what happened. broken: invariants that did not hold."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)
        rng, num_lines = self._rng, self._rng.choice((1, 3, 20, 100, 400))
        self.lines: list[LineKey] = [
            (f"batch {rng.randrange(5)}", str(number)) for number in range(num_lines)
        ]
        self.kills_engine = set(rng.sample(self.lines, rng.randrange(min(num_lines, 4) + 1)))
        self.kills_server = set(rng.sample(self.lines, rng.randrange(min(num_lines, 3) + 1)))
        harmless = [
            line for line in self.lines if line not in self.kills_engine | self.kills_server
        ]
        self.crashes_sandbox = set(rng.sample(harmless, rng.randrange(min(len(harmless), 20) + 1)))
        self._outside_rate = rng.choice((0.0, 0.001))
        self.ends: dict[LineKey, str] = {}
        self.counts: Counter[str] = Counter()
        self.broken: list[str] = []
        self._recorded: dict[LineKey, LineDeaths] = {}
        self._with_it: dict[LineKey, asyncio.Future[None]] = {}
        self._excused: set[LineKey] = set()  # with a process that somebody killed
        self._server = asyncio.Event()  # set when it is dead

    async def run(self) -> None:
        """Start server after server until every line has come to its end."""
        for _ in range(_MAX_STARTS):
            if len(self.ends) == len(self.lines):
                break
            await self._serve()
        for line in self.lines:
            end, expected = self.ends.get(line, "never ended"), self._expected_end(line)
            if end != expected and not (line in self._excused and end == "set aside"):
                self.broken.append(f"{line} {end}, not {expected}")
        self.counts |= Counter(self.ends.values())

    def _expected_end(self, line: LineKey) -> str:
        """Return how a line ends unless somebody kills processes that it is with."""
        if line in self.crashes_sandbox:
            return "refused"
        return "set aside" if line in self.kills_engine | self.kills_server else "answered"

    async def _serve(self) -> None:
        self.counts["servers"] += 1
        self._server, self._with_it = asyncio.Event(), {}
        self._turns = BatchTurns()
        self._turns.add_deaths(self._recorded)
        left = [line for line in self.lines if line not in self.ends]
        tasks = [asyncio.create_task(self._ask(line)) for line in left]
        dead = asyncio.create_task(self._server.wait())
        over = asyncio.gather(*tasks, return_exceptions=True)
        ends: list[asyncio.Future[Any]] = [over, dead]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for task in (*tasks, dead):
            task.cancel()
        await asyncio.gather(over, dead, return_exceptions=True)
        if self._turns.num_under_way or self._turns.num_waiting:
            self.broken.append("turns are left")

    async def _ask(self, line: LineKey) -> None:
        while not self._server.is_set():
            async with self._turns.turn(line):
                lost = self._with_it[line] = asyncio.get_running_loop().create_future()
                for _ in range(self._rng.randrange(1, 6)):
                    await asyncio.sleep(0)
                    self._maybe_kill()
                if self._server.is_set():
                    return
                if line in self.kills_server:
                    self._server_dies("server deaths")
                    return
                if line in self.kills_engine and not lost.done():
                    self._engine_dies("engine deaths")
                self._with_it.pop(line, None)
                if not lost.done():
                    self.ends[line] = "refused" if line in self.crashes_sandbox else "answered"
                    return
                self._recorded[line] = deaths = self._turns.died(line)
                if deaths.is_guilty:
                    self.ends[line] = "set aside"
                    return

    def _maybe_kill(self) -> None:
        if self._rng.random() < self._outside_rate:
            self._excused |= self._with_it.keys()
            if self._rng.random() < 0.5:
                self._engine_dies("engines killed")
            else:
                self._server_dies("servers killed")

    def _engine_dies(self, what: str) -> None:
        self.counts[what] += 1
        self._turns.engine_died()
        for lost in self._with_it.values():
            if not lost.done():
                lost.set_result(None)
        self._with_it.clear()

    def _server_dies(self, what: str) -> None:
        """What the next server does at its start: all that were under way are charged."""
        if self._server.is_set():
            return
        self.counts[what] += 1
        self._server.set()
        under_way = [line for line in self._with_it if line not in self.ends]
        for line in under_way:
            found = self._recorded[line] = after_death(
                self._recorded.get(line), num_lines=len(under_way)
            )
            if found.is_guilty:
                self.ends[line] = "set aside"


def run_poisoned_storm(seed: int) -> tuple[Counter[str], list[str]]:
    """What happened, and what was broken."""
    storm = PoisonedStorm(seed)
    asyncio.run(asyncio.wait_for(storm.run(), 120))
    return storm.counts, storm.broken

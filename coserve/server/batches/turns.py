"""Turns of all batches' lines: suspects of a death (see `deaths`) run apart from other lines."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from coserve.server.batches.deaths import LineDeaths, LineKey, after_death, next_group


class BatchTurns:
    """Admission of lines, and count of their deaths; it belongs to one event loop.

    Without suspects every line is admitted at once. While a suspect waits, no further line is
    admitted; once the running ones have ended, one group of suspects is, and so on until no suspect
    is left.
    """

    def __init__(self) -> None:
        self._deaths: dict[LineKey, LineDeaths] = {}
        self._waiting: dict[LineKey, asyncio.Future[bool]] = {}
        # Lines that have been admitted, and how many ran together at an engine's death that they
        # have not noticed yet.
        self._under_way: dict[LineKey, int | None] = {}
        self._is_trial = False
        self._group_size = 0  # of the trial under way

    @property
    def num_under_way(self) -> int:
        """Number of admitted lines."""
        return len(self._under_way)

    @property
    def num_waiting(self) -> int:
        """Number of lines that wait to be admitted."""
        return len(self._waiting)

    def add_deaths(self, deaths: Mapping[LineKey, LineDeaths]) -> None:
        """Add recorded deaths."""
        self._deaths |= deaths

    def forget(self, batch: str) -> None:
        """Drop the deaths of a finished batch's lines."""
        for line in [line for line in self._deaths if line[0] == batch]:
            del self._deaths[line]

    @asynccontextmanager
    async def turn(self, line: LineKey) -> AsyncIterator[bool]:
        """Wait until a line may run, and hold its place within the block; yield whether it is a
        suspect.
        """
        admitted = self._waiting[line] = asyncio.get_running_loop().create_future()
        self._admit()
        try:
            is_tried = await admitted
            yield is_tried
        finally:
            self._waiting.pop(line, None)
            self._under_way.pop(line, None)
            self._admit()

    def engine_died(self) -> None:
        """Record which lines ran together; called before they notice that the engine is gone."""
        for line in self._under_way:
            self._under_way[line] = len(self._under_way)

    def died(self, line: LineKey) -> LineDeaths:
        """Charge a death to a running line, and return its deaths."""
        # In a trial the whole group counts, including lines that have ended since it began.
        num_lines = (
            self._group_size if self._is_trial else self._under_way[line] or len(self._under_way)
        )
        return self.charge(line, num_lines=num_lines)

    def charge(self, line: LineKey, *, num_lines: int) -> LineDeaths:
        """Charge a death at which `num_lines` lines ran to one of them, and return its deaths."""
        deaths = self._deaths[line] = after_death(self._deaths.get(line), num_lines=num_lines)
        return deaths

    def _admit(self) -> None:
        # A trial runs to its end before any other line is admitted.
        if self._under_way and self._is_trial:
            return
        self._is_trial = False
        group = next_group(self._waiting, self._deaths)
        # Suspects wait for the running lines; nothing else is admitted meanwhile.
        if group and self._under_way:
            return
        self._is_trial, self._group_size = bool(group), len(group)
        for line in group or list(self._waiting):
            admitted = self._waiting.pop(line)
            if not admitted.done():  # else its task was cancelled
                self._under_way[line] = None
                admitted.set_result(self._is_trial)

"""What the server does for clients who do not wait for it: runs that make events, which may be
watched.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Run:
    """events: so far. state: what it is at now, as clients see it."""

    state: Callable[[], dict[str, Any]]
    on_cancel: Callable[[], Awaitable[None]]
    events: list[dict[str, Any]] = field(default_factory=list)
    is_finished: bool = False
    task: "asyncio.Task[None] | None" = None
    _more: asyncio.Event = field(default_factory=asyncio.Event)

    async def watch(self, start: int = 0) -> AsyncGenerator[dict[str, Any], None]:
        """Events from this one on, until it is over."""
        while True:
            more = self._more
            for event in self.events[start:]:
                start += 1
                yield event
            if self.is_finished:
                return
            if more is self._more:
                await more.wait()

    def add(self, event: dict[str, Any]) -> None:
        """Tell those who watch."""
        self.events.append(event)
        self._wake()

    def end(self) -> None:
        """There are no more."""
        self.is_finished = True
        self._wake()

    def _wake(self) -> None:
        more, self._more = self._more, asyncio.Event()
        more.set()


class BackgroundRuns:
    """Those that are under way, by a key. Belongs to the event loop."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, ...], Run] = {}

    def begin(
        self,
        key: tuple[str, ...],
        events: AsyncGenerator[dict[str, Any], None],
        state: Callable[[], dict[str, Any]],
        on_cancel: Callable[[], Awaitable[None]],
    ) -> Run:
        """Have a run make its events. on_cancel: what there is to do when it was cancelled."""
        run = self._runs[key] = Run(state, on_cancel)
        run.task = asyncio.create_task(self._run(key, run, events))
        return run

    def find(self, key: tuple[str, ...]) -> Run | None:
        """None if it is over, or was never there."""
        return self._runs.get(key)

    async def cancel(self, key: tuple[str, ...]) -> None:
        """End a run, and wait for its end; no error if it is over."""
        if (run := self._runs.get(key)) is not None and run.task is not None:
            run.task.cancel()
            await asyncio.wait([run.task])

    async def close(self) -> None:
        """End them all, without telling them: what is left of them is found at the next start."""
        runs = list(self._runs.values())
        for run in runs:
            run.on_cancel = _nothing
            if run.task is not None:
                run.task.cancel()
        await asyncio.gather(
            *(run.task for run in runs if run.task is not None), return_exceptions=True
        )

    async def _run(
        self, key: tuple[str, ...], run: Run, events: AsyncGenerator[dict[str, Any], None]
    ) -> None:
        try:
            async with aclosing(events):
                async for event in events:
                    run.add(event)
        except asyncio.CancelledError:
            await run.on_cancel()
        except Exception:
            _log.exception("a response in the background failed")
        finally:
            del self._runs[key]
            run.end()


async def _nothing() -> None:
    pass

"""Responses that run in the background, whose events clients can watch."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class BackgroundRun:
    """One response that runs in the background."""

    state: Callable[[], dict[str, Any]]
    """Function that returns its current state, as clients see it."""
    on_cancel: Callable[[], Awaitable[None]]
    """Function that is called when it was cancelled."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """Events so far."""
    is_finished: bool = False
    """Whether there are no further events."""
    task: "asyncio.Task[None] | None" = None
    """Task that makes the events."""
    _more: asyncio.Event = field(default_factory=asyncio.Event)

    async def watch(self, start: int = 0) -> AsyncGenerator[dict[str, Any], None]:
        """Yield events from a position on, until the end."""
        while True:
            # Taken before the events are read: one that is added meanwhile replaces it.
            more = self._more
            for event in self.events[start:]:
                start += 1
                yield event
            if self.is_finished:
                return
            if more is self._more:
                await more.wait()

    def add(self, event: dict[str, Any]) -> None:
        """Add an event, and wake those that watch."""
        self.events.append(event)
        self._wake()

    def end(self) -> None:
        """Mark the response as finished, and wake those that watch."""
        self.is_finished = True
        self._wake()

    def _wake(self) -> None:
        more, self._more = self._more, asyncio.Event()
        more.set()


class BackgroundRuns:
    """Running responses by key; it belongs to the event loop."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, ...], BackgroundRun] = {}

    def begin(
        self,
        key: tuple[str, ...],
        events: AsyncGenerator[dict[str, Any], None],
        state: Callable[[], dict[str, Any]],
        on_cancel: Callable[[], Awaitable[None]],
    ) -> BackgroundRun:
        """Start a response in the background.

        Args:
            key: Key to find it by.
            events: Generator of its events.
            state: Function that returns its current state.
            on_cancel: Function that is called when it was cancelled.
        """
        run = self._runs[key] = BackgroundRun(state, on_cancel)
        run.task = asyncio.create_task(self._run(key, run, events))
        return run

    def find(self, key: tuple[str, ...]) -> BackgroundRun | None:
        """Return the running response of a key; None if there is none."""
        return self._runs.get(key)

    async def cancel(self, key: tuple[str, ...]) -> None:
        """Cancel a response and wait for its end; does nothing if it has ended."""
        if (run := self._runs.get(key)) is not None and run.task is not None:
            run.task.cancel()
            await asyncio.wait([run.task])

    async def close(self) -> None:
        """Cancel all responses without `on_cancel`; the next start finds them unfinished."""
        runs = list(self._runs.values())
        for run in runs:
            run.on_cancel = _nothing
            if run.task is not None:
                run.task.cancel()
        await asyncio.gather(
            *(run.task for run in runs if run.task is not None), return_exceptions=True
        )

    async def _run(
        self, key: tuple[str, ...], run: BackgroundRun, events: AsyncGenerator[dict[str, Any], None]
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

"""A mailbox: everything that changes jobs is handled serially in one task, so that no two changes
ever meet.

It has two lanes. Calls of clients are answered in the order in which they came. What engines have
reported stays, in order, until the store has taken it; meanwhile clients' calls are answered all
the same.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from coserve.errors import CoserveError, EngineGoneError, StoreError
from coserve.jobs.lifecycle.events import EngineEvent, EngineReported
from coserve.jobs.lifecycle.store_retry import store_error

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class _ClientCall:
    """Something to do, and the future of the caller that waits for it."""

    do: Callable[[], Awaitable[Any]]
    result: "asyncio.Future[Any]"


class JobMailbox:
    """Belongs to one event loop.

    `settle` is awaited whenever an event or a timer woke the task, and after every call; it takes
    the events. blocked: why the first event could not be taken when that was last tried.
    """

    def __init__(self, settle: Callable[[], Awaitable[None]]) -> None:
        self._settle = settle
        self._events: deque[EngineEvent] = deque()
        self._calls: deque[_ClientCall] = deque()
        self._awake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.blocked: CoserveError | None = None
        self.is_closing = False

    def start(self) -> None:
        """Begin; calls are taken from now on."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Settle once more, and end; calls whose turn has not come get an EngineGoneError."""
        self.is_closing = True
        self._awake.set()
        if self._task is not None:
            with contextlib.suppress(
                asyncio.CancelledError
            ):  # thrown away before, as at the end of a process
                await self._task

    # -- events ---------------------------------------------------------------------

    def put(self, event: EngineEvent) -> None:
        """Add the newest event; returns at once."""
        self._events.append(event)
        self._awake.set()

    def wake(self) -> None:
        """Have the task settle, though nothing was put."""
        self._awake.set()

    @property
    def num_events(self) -> int:
        """Number of events that have not been taken."""
        return len(self._events)

    async def take_events(self, take: Callable[[Sequence[EngineEvent]], Awaitable[None]]) -> None:
        """Hand over all events, neighbouring reports together, until `take` raises StoreError or
        OSError: nothing of what it was given has been taken then, and that comes first the next
        time. Any other error costs only the events that it was raised for.
        """
        self.blocked = None
        while self._events:
            events = self._next_events()
            try:
                await take(events)
            except (StoreError, OSError) as error:
                self._events.extendleft(reversed(events))
                self.blocked = store_error(error)
                return
            except Exception as error:  # the next job's fate must not hang on this one's
                _log.exception("a job's report could not be taken in: %s", error)

    def _next_events(self) -> list[EngineEvent]:
        """Take the first event, or all reports at the beginning."""
        events = [self._events.popleft()]
        while self._events and all(
            isinstance(each, EngineReported) for each in (events[0], self._events[0])
        ):
            events.append(self._events.popleft())
        return events

    # -- calls ----------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Number of calls whose turn has not come."""
        return len(self._calls)

    async def call(self, do: Callable[[], Awaitable[_Result]]) -> _Result:
        """Have something done in its turn; returns what it returns, and raises what it raises."""
        if self.is_closing or self._task is None or self._task.done():
            raise EngineGoneError("the server is shutting down")
        future: asyncio.Future[_Result] = asyncio.get_running_loop().create_future()
        self._calls.append(_ClientCall(do=do, result=future))
        self._awake.set()
        return await future

    async def _run(self) -> None:
        while not self.is_closing:
            await self._awake.wait()
            self._awake.clear()
            await self._settle()
            while self._calls:
                await self._serve(self._calls.popleft())
                await self._settle()
        await self._settle()
        for call in self._calls:
            if not call.result.done():  # the caller may have given up
                call.result.set_exception(EngineGoneError("the server is shutting down"))

    async def _serve(self, call: _ClientCall) -> None:
        try:
            result = await call.do()
        except Exception as error:
            if not call.result.done():
                call.result.set_exception(error)
        else:
            if not call.result.done():
                call.result.set_result(result)

"""Mailbox of jobs: all mutations run serially in one task, so that no two changes ever meet.

It has two lanes. Client calls run in the order in which they arrived. Reports of engines stay
queued, in order, until the store has recorded them; client calls are answered meanwhile.
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
    """A call of a client that waits for its turn."""

    do: Callable[[], Awaitable[Any]]
    """Function to run in the mailbox's task."""
    result: "asyncio.Future[Any]"
    """Future of the caller."""


class JobMailbox:
    """A queue of events and calls with one task that handles them. Belongs to one event loop.

    `settle` is awaited whenever an event or a timer woke the task, and after every call; it takes
    the events. `blocked` is the reason why the first event could not be taken at the last attempt.
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
        """Start the task; calls are accepted from now on."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Settle once more and stop; calls whose turn has not come get an EngineGoneError."""
        self.is_closing = True
        self._awake.set()
        if self._task is not None:
            # The task may have been cancelled before, as at the end of a process.
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    # -- events ---------------------------------------------------------------------

    def put(self, event: EngineEvent) -> None:
        """Append an event and return at once."""
        self._events.append(event)
        self._awake.set()

    def wake(self) -> None:
        """Make the task settle, although no event was put."""
        self._awake.set()

    @property
    def num_events(self) -> int:
        """Number of events that have not been taken."""
        return len(self._events)

    async def take_events(self, take: Callable[[Sequence[EngineEvent]], Awaitable[None]]) -> None:
        """Pass all events to `take`, consecutive reports together.

        StoreError and OSError stop the loop: the events of the failed call stay queued, and come
        first the next time. Any other error is logged, and drops only the events of its call.
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
            except Exception as error:  # reports about other jobs are still handled
                _log.exception("a report about a job could not be handled: %s", error)

    def _next_events(self) -> list[EngineEvent]:
        """Pop the first event, or all reports at the beginning of the queue."""
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
        """Run a function in its turn; return its result, or raise its error."""
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
            if not call.result.done():  # the caller may have been cancelled
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

"""One task that does everything that changes jobs, one thing after the other, so that no two changes ever meet."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from coserve.errors import EngineGoneError

_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class _Call:
    """Something to do, and who waits for it."""

    do: Callable[[], Awaitable[Any]]
    result: "asyncio.Future[Any]"


class Turns:
    """Belongs to one event loop. `settle` is done whenever something woke the task, and after every call."""

    def __init__(self, settle: Callable[[], Awaitable[None]]) -> None:
        self._settle = settle
        self._calls: deque[_Call] = deque()
        self._awake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.is_closing = False

    def start(self) -> None:
        """Begin; calls are taken from now on."""
        self._task = asyncio.create_task(self._run())

    def wake(self) -> None:
        """There is something to settle."""
        self._awake.set()

    async def close(self) -> None:
        """Settle once more, and end; calls whose turn has not come get an EngineGoneError."""
        self.is_closing = True
        self._awake.set()
        if self._task is not None:
            with contextlib.suppress(asyncio.CancelledError):  # thrown away before, as at the end of a process
                await self._task

    @property
    def num_waiting(self) -> int:
        """Calls whose turn has not come."""
        return len(self._calls)

    async def call(self, do: Callable[[], Awaitable[_Result]]) -> _Result:
        """Have something done when it is its turn; returns what it returns, and raises what it raises."""
        if self.is_closing or self._task is None or self._task.done():
            raise EngineGoneError("the server is shutting down")
        future: asyncio.Future[_Result] = asyncio.get_running_loop().create_future()
        self._calls.append(_Call(do=do, result=future))
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
            if not call.result.done():  # who waited may have given up
                call.result.set_exception(EngineGoneError("the server is shutting down"))

    async def _serve(self, call: _Call) -> None:
        try:
            result = await call.do()
        except Exception as error:
            if not call.result.done():
                call.result.set_exception(error)
        else:
            if not call.result.done():
                call.result.set_result(result)

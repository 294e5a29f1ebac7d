"""Fronts of which one answers: whichever has the home. The others stand by, with the model's files
read, and one of them takes over when that one's process ends.

More than one cannot answer: the placement's queue, tenants' limits and jobs are in one place, so
that all requests see the same nodes, wait in the same order and are held to the same limits.
"""

import asyncio
import logging
from contextlib import suppress
from math import inf

from starlette.types import ASGIApp, Receive, Scope, Send

from coserve.cluster.front.choice import ANSWERS
from coserve.cluster.front.front import Front
from coserve.cluster.front.lost_front import refuse

_log = logging.getLogger(__name__)


class StandbyFront:
    """A front that answers as soon as it has the home: an ASGI application. Belongs to one event
    loop.
    """

    def __init__(self, front: Front) -> None:
        self.front = front
        self._app: ASGIApp | None = None
        self._taking_over: asyncio.Task[None] | None = None
        self._is_ending = False

    @property
    def stats(self) -> dict[str, bool]:
        """Routing stats of this front."""
        return {ANSWERS: self._app is not None}

    async def begin(self, *, others: bool) -> None:
        """Answer as soon as the home is free.

        Args:
            others: Whether there are other fronts; then this returns at once, even if one of them
                has the home.

        Raises:
            CoserveError: As in `Front.start`.
        """
        if not others:
            self._app = await self.front.start()
            return
        await self.front.prepare()
        self._taking_over = asyncio.create_task(self._take_over())

    async def _take_over(self) -> None:
        self._app = await self.front.start(inf)
        _log.warning("this front answers from now on")

    def check(self) -> None:
        """Raise CoserveError if this front cannot answer though it has the home."""
        if self._taking_over is not None and self._taking_over.done() and not self._is_ending:
            self._taking_over.result()

    async def stop(self) -> None:
        """Stop the front: `Front.stop`."""
        self._is_ending = True
        if self._taking_over is not None:
            self._taking_over.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await self._taking_over
        await self.front.stop()

    async def end(self, wait_s: float) -> None:
        """Refuse new requests, wait for open ones for `wait_s`, and stop; if called again, the
        later call's time counts. To be called on all fronts at once, or another one takes over.
        """
        if self._app is not None:
            self._is_ending = True
            await self.front.finish(wait_s)
        await self.stop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._is_ending and scope["type"] == "http":
            await refuse(
                "The server is shutting down: ask another, or later.", scope, receive, send
            )
        elif self._app is not None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await refuse(
                "This front stands by for another: try again in a few seconds.",
                scope,
                receive,
                send,
            )

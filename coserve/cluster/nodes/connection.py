"""The front's end of one node: commands to it, reports from it, and another session whenever one is
lost.
"""

import asyncio
import dataclasses
import logging
import time
from contextlib import suppress
from typing import Any
from uuid import uuid4

from msgspec.structs import replace

from coserve.cluster.nodes.messages import (
    CommandBatch,
    NodeCalls,
    NodeEngineLost,
    decode_node_report,
)
from coserve.engine_client.supervisor import EngineOwner
from coserve.errors import CoserveError, EngineGoneError
from coserve.protocol.messages import StepReport, encode

_log = logging.getLogger(__name__)

# A node without reports is asked again after this long, by which it knows that its front lives.
_POLL_S = 1.0
# A node that does not answer for this long is gone.
_LIMIT_S = 30.0
# Wait before a lost node is asked again.
_RETRY_S = 0.5


class NodeConnection:
    """Connection to one node. Belongs to one event loop; implements `EngineHost`."""

    def __init__(self, name: str, calls: NodeCalls, owner: EngineOwner) -> None:
        self._name = name
        self._calls = calls
        self._owner = owner
        self._commands: list[bytes] = []
        self._has_commands = asyncio.Event()
        self._closing = False
        self._session: str | None = None
        self._seen = 0  # reports of the session that have been taken in
        self._heard_s = time.monotonic()
        self._silent_s = 0.0
        self._offset_s = float("inf")  # from the node's clock to this one
        self.jobs_at_death: tuple[str, ...] | None = ()
        """See `EngineHost`."""

    @property
    def silent_s(self) -> float:
        """Seconds since the node's engine was heard of."""
        # A node answers within _POLL_S even without reports, so that less is no silence.
        unheard_s = time.monotonic() - self._heard_s
        return self._silent_s + (unheard_s if unheard_s > _POLL_S else 0.0)

    # -- life -----------------------------------------------------------------------

    async def run(self) -> None:
        """Keep a session with the node until `close`."""
        was_told, wait_s = False, _RETRY_S
        while not self._closing:
            try:
                await self._live()
            except (CoserveError, TimeoutError) as error:
                reason = str(error) or f"it has not answered for {_LIMIT_S:g} s"
                if not was_told and not self._closing:
                    _log.warning("the node %s is lost: %s", self._name, reason)
                was_told, wait_s = True, _RETRY_S
            except Exception:
                _log.exception(
                    "what the node %s said could not be taken in; it is lost", self._name
                )
                wait_s = min(2 * wait_s, _LIMIT_S)
            else:
                was_told = False
            if not self._closing:
                await asyncio.sleep(wait_s)

    def close(self) -> None:
        """Begin no other session when this one ends."""
        self._closing = True

    async def end(self, wait_s: float) -> None:
        """End the session: the node's engine forgets its requests and jobs."""
        session, self._session = self._session, None
        if session is not None:
            with suppress(CoserveError, TimeoutError):
                await asyncio.wait_for(self._calls.detach(session), max(wait_s, _POLL_S))

    def send(self, command: Any) -> None:
        if self._session is not None:
            self._commands.append(encode(command))
            self._has_commands.set()

    async def _live(self) -> None:
        """Run one session until it is lost or ended, then raise CoserveError or TimeoutError."""
        session = uuid4().hex
        self.jobs_at_death = ()
        await asyncio.wait_for(self._calls.attach(session), _LIMIT_S)
        self._session = session
        self._seen = 0
        self._heard_s, self._offset_s = time.monotonic(), float("inf")
        tasks = [
            asyncio.create_task(self._send_all(session)),
            asyncio.create_task(self._receive_all(session)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            done.pop().result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._session = None
            self._commands.clear()
            self._owner.engine_lost(f"the node {self._name} was lost")

    async def _send_all(self, session: str) -> None:
        number = 0
        while True:
            await self._has_commands.wait()
            self._has_commands.clear()
            batch, self._commands = self._commands, []
            if batch:
                number += 1
                batch_message = CommandBatch(
                    number=number, now_s=time.monotonic(), seen=self._seen, commands=batch
                )
                await asyncio.wait_for(self._calls.send(session, batch_message), _LIMIT_S)

    async def _receive_all(self, session: str) -> None:
        while True:
            answer = await asyncio.wait_for(
                self._calls.reports(session, self._seen, _POLL_S), _LIMIT_S
            )
            self._heard_s, self._silent_s = time.monotonic(), answer.silent_s
            # The fastest answer is nearest to the true offset of the clocks.
            self._offset_s = min(self._offset_s, self._heard_s - answer.now_s)
            for each in answer.reports:
                self._take(decode_node_report(each))
            self._seen = answer.last
            if self._session is None:
                raise EngineGoneError("the session was ended")

    def _take(self, report: Any) -> None:
        if isinstance(report, NodeEngineLost):
            self._commands.clear()
            # Valid during the callback alone.
            self.jobs_at_death = report.jobs_at_death
            self._owner.engine_lost(f"{report.reason} on the node {self._name}")
            self.jobs_at_death = ()
        elif isinstance(report, StepReport):
            self._owner.take_report(self._by_this_clock(report))
        else:
            self._owner.take_report(report)

    def _by_this_clock(self, report: StepReport) -> StepReport:
        """Return a report with times as this machine's clock shows them."""
        offset_s = self._offset_s
        return replace(
            report,
            job_events=[
                dataclasses.replace(each, now_s=each.now_s + offset_s) for each in report.job_events
            ],
            records=[
                dataclasses.replace(each, arrival_s=each.arrival_s + offset_s)
                for each in report.records
            ],
            steps=[replace(each, end_s=each.end_s + offset_s) for each in report.steps],
        )

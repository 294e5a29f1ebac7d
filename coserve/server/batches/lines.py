"""Answers to lines of batches, each of which is retried until it is answered, refused, or set
aside.

A line is set aside for the deaths of processes that it causes.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from coserve.errors import CoserveError, EngineGoneError
from coserve.jobs.files.blobs import Files
from coserve.jobs.records import BatchRecord, FileRecord, new_id
from coserve.server.batches.deaths import LineDeaths
from coserve.server.batches.files import BatchLine, BatchResults, read_body
from coserve.server.batches.retries import FIRST_WAIT_S, MAX_WAIT_S, until_done
from coserve.server.batches.turns import BatchTurns
from coserve.server.errors import ApiError, as_api_error

_log = logging.getLogger(__name__)

# Statuses of errors that pass by themselves.
_TRANSIENT = (429, 503)
# The code of a line that was set aside, as of a job.
ENGINE_DIED = "engine_died"


@dataclass(frozen=True, kw_only=True)
class LineRequest:
    """One request of a batch, as its answer needs it."""

    endpoint: str
    """Path of the route that would answer it."""
    body: Any
    """Body of the request, as JSON."""
    tenant: str
    """Tenant of the batch."""
    due_s: float
    """Time by which it should be done, by the engine's clock."""
    is_suspect: bool
    """Whether a process may have died of it, so that it runs beside no other batch work and no job.
    """


# Raises ApiError or CoserveError.
Answer = Callable[[LineRequest], Awaitable[dict[str, Any]]]


class BatchLines:
    """Runner of the lines of all batches; it belongs to one event loop."""

    def __init__(self, files: Files, *, answer: Answer) -> None:
        self._files, self._answer = files, answer
        self.turns = BatchTurns()

    async def run(
        self, record: BatchRecord, line: BatchLine, due_at: float, results: BatchResults
    ) -> bool:
        """Run a line until it has a result, and record that; return whether it was answered.

        Args:
            record: The batch.
            line: Place of the line in the file.
            due_at: Unix time by which the line should be done.
            results: Where the result is recorded.
        """
        request = new_id("req_")
        path = await until_done(self._files.path, _input_of(record))
        wait_s = FIRST_WAIT_S
        while True:
            async with self.turns.turn((record.id, line.custom_id)) as is_suspect:
                # Before any work: if a process dies of this line, the journal has to name it.
                await until_done(results.journal.begin, line.custom_id)
                try:
                    body = await asyncio.to_thread(read_body, path, line)
                    # From Unix time to the engine's clock.
                    due_s = time.monotonic() + due_at - time.time()
                    asked = LineRequest(
                        endpoint=record.endpoint,
                        body=body,
                        tenant=record.tenant,
                        due_s=due_s,
                        is_suspect=is_suspect,
                    )
                    answer = await self._answer(asked)
                    await until_done(results.add, line.custom_id, 200, request, answer)
                    return True
                except Exception as found:
                    error = _as_api_error(found, record)
                if _is_lost(error):
                    deaths = self.turns.died((record.id, line.custom_id))
                    await until_done(results.journal.died, {line.custom_id: deaths})
                    if deaths.is_guilty:
                        await set_aside(results, line.custom_id, deaths)
                        return False
                    wait_s = FIRST_WAIT_S
                elif error.status not in _TRANSIENT:
                    await until_done(
                        results.add, line.custom_id, error.status, request, error.body()
                    )
                    return False
                else:
                    # Neither answered nor to blame: the line comes again after a wait.
                    await until_done(results.journal.leave, line.custom_id)
            await asyncio.sleep(wait_s)
            wait_s = min(MAX_WAIT_S, 2 * wait_s)


async def set_aside(results: BatchResults, custom_id: str, deaths: LineDeaths) -> None:
    """Record that a line is not retried, and why."""
    _log.error(
        "a line of a batch was set aside: processes died %d times while it ran",
        deaths.num,
    )
    message = (
        f"A process of the server died {deaths.num} times while this request ran, the last "
        f"{deaths.num_alone} times while no other request of a batch ran. The request was set "
        f"aside and is not retried."
    )
    await until_done(results.add_missing, custom_id, ENGINE_DIED, message)


def _as_api_error(error: Exception, record: BatchRecord) -> ApiError:
    """Return the error that a line ends with, or is retried for."""
    if isinstance(error, OSError):
        return ApiError(f"The file {record.input_file} no longer exists.", status=404)
    if isinstance(error, ApiError):
        return error
    if isinstance(error, CoserveError):
        return as_api_error(error)
    _log.error("a request of batch %s failed", record.id, exc_info=error)
    return ApiError("the server had an error", status=500, kind="server_error")


def _is_lost(error: ApiError) -> bool:
    """Return whether the engine died after the request was sent; before, there is an
    EngineGoneError.
    """
    return isinstance(error.__cause__, EngineGoneError)


def _input_of(record: BatchRecord) -> FileRecord:
    """Return a record of the input file with its id, which locates its content."""
    return FileRecord(
        id=record.input_file,
        tenant=record.tenant,
        purpose="batch",
        filename="",
        num_bytes=0,
        created_at=0,
    )

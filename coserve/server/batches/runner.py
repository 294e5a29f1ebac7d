"""Runner of batches: it answers the requests of a file in engine time that others leave.

A batch is a task of the event loop. Its requests go to the engine as batch work, each with a due
time that lets the batch finish within its window. Results are on disk, one answer per line: a
restarted server resumes with the requests that have none.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from coserve.home import make_private
from coserve.jobs.files.blobs import Files
from coserve.jobs.files.shared_files import discard, entries
from coserve.jobs.records import BatchRecord, FileRecord
from coserve.jobs.sql.store import Store
from coserve.jobs.sql.transaction import Transaction
from coserve.server.batches.files import ERRORS, OUTPUT, BatchLine, BatchResults, read_input
from coserve.server.batches.lines import Answer, BatchLines, set_aside
from coserve.server.batches.places import BatchPlaces
from coserve.server.batches.retries import until_done

_log = logging.getLogger(__name__)


class BatchRunner:
    """Runner of all batches; it belongs to the event loop."""

    def __init__(
        self,
        store: Store,
        files: Files,
        directory: Path,
        *,
        answer: Answer,
        most: Callable[[], int],
    ) -> None:
        """Create a runner; `start` must follow.

        Args:
            store: Store of the records of batches.
            files: Input and output files.
            directory: Directory for the results of running batches.
            answer: Function that answers a request; it raises ApiError or CoserveError.
            most: Function that returns the current maximum number of concurrent requests.
        """
        self._store, self._files, self._directory = store, files, directory
        self._lines = BatchLines(files, answer=answer)
        self._resuming: asyncio.Task[None] | None = None
        self._results: dict[str, BatchResults] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._live: dict[str, BatchRecord] = {}
        self._places = BatchPlaces(most)
        self._cancelling = asyncio.Lock()
        make_private(directory)

    def start(self) -> None:
        """Resume unfinished batches as soon as they can be read."""
        self._resuming = asyncio.create_task(self._resume())
        self._resuming.add_done_callback(_log_failure)

    async def close(self) -> None:
        """Stop all batches; they resume at the next start."""
        tasks = list(self._tasks.values()) + ([] if self._resuming is None else [self._resuming])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for results in self._results.values():
            with suppress(
                OSError
            ):  # without room, lines count as under way when this process ended
                await asyncio.to_thread(results.journal.rest)

    def engine_died(self) -> None:
        """Record which lines ran together; called before their requests end."""
        self._lines.turns.engine_died()

    def begin(self, record: BatchRecord) -> None:
        """Run a batch that is in the store, unless it runs already.

        It waits until the batches of the previous process have been read.
        """
        if record.id in self._tasks:
            return
        self._live[record.id] = record
        task = self._tasks[record.id] = asyncio.create_task(self._run(record.id))
        task.add_done_callback(lambda task: self._ended(record.id, task))

    def live(self, record: BatchRecord) -> BatchRecord:
        """Return the current state of a batch, which may be newer than its record in the store."""
        return self._live.get(record.id, record)

    async def cancel(self, record: BatchRecord) -> BatchRecord:
        """Cancel a batch, and return its current state; results so far are kept."""
        if self._resuming is not None:
            await asyncio.wait([self._resuming])
        async with self._cancelling:  # concurrent calls cancel once
            batch = self._live.get(record.id)
            if batch is not None and batch.status in ("validating", "in_progress"):
                if (task := self._tasks.pop(record.id, None)) is not None:  # None: it has failed
                    task.cancel()
                    await asyncio.wait([task])
                await self._change(record.id, "cancelling")
                self.begin(self._live[record.id])
        if (batch := self._live.get(record.id)) is None:
            batch = await until_done(self._written, record)
        return batch

    # -- after the death of a server ------------------------------------------------

    async def _resume(self) -> None:
        """Charge the death of the previous server process to lines that it left running, then run
        all.
        """
        # All journals are read before any line runs: lines of this process would look like lines
        # that the previous one left.
        records = await until_done(self._unfinished)
        under_way: dict[str, set[str]] = {}
        for record in records:
            try:
                self._results[record.id] = await until_done(
                    BatchResults, self._directory / record.id
                )
                under_way[record.id] = await until_done(self._take_in, record.id)
            except (OSError, ValueError, KeyError):
                _log.exception("the results of batch %s cannot be read; it is not run", record.id)
        # Of all batches, since any of these lines may have ended the process.
        num_lines = sum(map(len, under_way.values()))
        await asyncio.to_thread(self._tidy, {record.id for record in records})
        for id, lines in under_way.items():
            await self._charge(id, lines, num_lines)
        for record in records:
            if record.id in under_way:
                self.begin(record)

    def _tidy(self, unfinished: set[str]) -> None:
        """Remove results of finished batches, which a killed server left. Blocks."""
        for path in entries(self._directory):
            if path.name not in unfinished and path.name not in self._live:
                discard(path)

    def _take_in(self, id: str) -> set[str]:
        """Read the journal of a batch; return the lines that it shows as running. Blocks."""
        results = self._results[id]
        under_way, deaths = results.journal.read()
        answered, failed = results.done()
        self._lines.turns.add_deaths({(id, line): each for line, each in deaths.items()})
        return under_way - answered - failed

    async def _charge(self, id: str, lines: set[str], num_lines: int) -> None:
        """Charge one more death to lines of a batch, and set the guilty ones aside.

        Only deaths remain in the batch's journal.
        """
        results = self._results[id]
        deaths = {line: self._lines.turns.charge((id, line), num_lines=num_lines) for line in lines}
        if deaths:
            await until_done(results.journal.died, deaths)
        await until_done(results.journal.rest)
        for line, each in deaths.items():
            if each.is_guilty:
                await set_aside(results, line, each)

    # -- one batch ------------------------------------------------------------------

    def _ended(self, id: str, task: "asyncio.Task[None]") -> None:
        if self._tasks.get(id) is not task:  # another task has replaced it
            return
        del self._tasks[id]
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            _log.error(
                "batch %s failed; it resumes at the next start of the server", id, exc_info=error
            )
        else:
            del self._live[id], self._results[id]
            self._lines.turns.forget(id)

    async def _run(self, id: str) -> None:
        if self._resuming is not None:  # it must not see lines of this process
            await asyncio.wait([self._resuming])
        if id not in self._results:
            self._results[id] = await until_done(BatchResults, self._directory / id)
        results = self._results[id]
        lines, errors = await self._read(self._live[id])
        if errors and self._live[id].status == "validating":
            await self._change(id, "failed", errors=errors)
        else:
            await self._carry_out(id, results, lines, errors)
        await asyncio.to_thread(results.remove)

    async def _carry_out(
        self, id: str, results: BatchResults, lines: list[BatchLine], errors: list[dict[str, Any]]
    ) -> None:
        """Run a batch from its current state to its end.

        Args:
            id: The batch.
            results: Its results.
            lines: Its requests.
            errors: Reasons why not all requests can be read.
        """
        # The file may be gone since: the number that was counted first stays.
        num_total = self._live[id].num_total or len(lines)
        self._live[id] = replace(self._live[id], num_total=num_total)
        done = await self._recount(id, results)
        if self._live[id].status == "validating":
            await self._change(id, "in_progress", num_total=num_total)
        end = "cancelled" if self._live[id].status == "cancelling" else "completed"
        if self._live[id].status == "in_progress":
            # The input file is gone, and requests are left in it.
            if errors and len(done) < num_total:
                await self._finish(id, results, "failed", errors=errors)
                return
            left = [(place, line) for place, line in enumerate(lines) if line.custom_id not in done]
            is_whole = await self._answer_all(id, results, left, len(lines))
            end = "completed" if is_whole else "expired"
            # With the end on record, with which a restarted server continues.
            await self._change(id, "finalizing", end=end)
        await self._finish(id, results, self._live[id].times.get("end", end))

    async def _read(self, record: BatchRecord) -> tuple[list[BatchLine], list[dict[str, Any]]]:
        """Return the requests of a batch, and the errors of its input file."""
        file = await until_done(self._files.find, record.tenant, record.input_file)
        if file is not None:
            with suppress(FileNotFoundError):
                return await until_done(lambda: read_input(self._files.path(file), record.endpoint))
        message = f"The file {record.input_file} no longer exists."
        if record.num_total:
            message += (
                " Requests that are neither in the output file nor in the error file were not "
                "answered."
            )
        return [], [
            {"code": "invalid_file", "line": None, "message": message, "param": "input_file_id"}
        ]

    async def _answer_all(
        self, id: str, results: BatchResults, left: list[tuple[int, BatchLine]], num_lines: int
    ) -> bool:
        """Answer the remaining lines until the window ends; return whether all were answered.

        Lines that are left then are recorded as expired.
        """
        record = self._live[id]
        begun_s = record.times["in_progress_at"]
        window_s = record.expires_at - begun_s

        async def work(line: BatchLine, due_at: float) -> None:
            self._count(id, is_good=await self._lines.run(record, line, due_at, results))

        try:
            async with (
                asyncio.timeout(max(0.0, record.expires_at - time.time())),
                asyncio.TaskGroup() as group,
            ):
                for place, line in left:
                    self._places.grow()
                    await self._places.acquire(record.tenant)
                    # Due times spread over the window: not all lines become urgent at its end.
                    task = group.create_task(
                        work(line, begun_s + window_s * (place + 1) / num_lines)
                    )
                    # A callback, since a task that is cancelled before it begins runs no `finally`.
                    task.add_done_callback(lambda task: self._places.release(record.tenant))
        except TimeoutError:
            message = "This request could not be executed before the completion window expired."
            done = await self._recount(
                id, results
            )  # with answers that were being written when the window ended
            missing = [line.custom_id for _, line in left if line.custom_id not in done]
            for custom_id in missing:
                await until_done(results.add_missing, custom_id, "batch_expired", message)
                self._count(id, is_good=False)
            return not missing
        return True

    async def _finish(self, id: str, results: BatchResults, end: str, **values: Any) -> None:
        """Make the output files, and write the final status.

        Args:
            id: The batch.
            results: Its results.
            end: Final status.
            values: Further fields of the record.
        """
        for name, field in ((OUTPUT, "output_file"), (ERRORS, "error_file")):
            if getattr(self._live[id], field) is not None:  # an earlier process has made it
                continue
            file = await until_done(self._keep, self._live[id], results, name, field)
            if file is not None:
                changed: dict[str, Any] = {field: file.id}
                self._live[id] = replace(self._live[id], **changed)
        await self._change(id, end, **values)

    def _keep(
        self, record: BatchRecord, results: BatchResults, name: str, field: str
    ) -> FileRecord | None:
        """Return one of the output files, created if it has any content. Blocks.

        It is created only once, even if an earlier task that waited for it was cancelled.
        """
        if (id := getattr(self._written(record), field)) is not None:
            return self._files.find(record.tenant, id)
        if not any(results.chunks(name)):
            return None

        def also(transaction: Transaction, file: FileRecord) -> None:
            transaction.change_batch(record.id, **{field: file.id})

        return self._files.create_of(
            results.chunks(name),
            record.tenant,
            purpose="batch_output",
            filename=f"{record.id}_{name}",
            expires_after_s=record.output_expires_after_s,
            also=also,
        )

    # -- writing down ---------------------------------------------------------------

    async def _recount(self, id: str, results: BatchResults) -> set[str]:
        """Count the recorded results, and return the ids of their requests. Nothing may be written
        meanwhile.
        """
        answered, failed = await until_done(results.done)
        self._live[id] = replace(
            self._live[id], num_completed=len(answered), num_failed=len(failed)
        )
        return answered | failed

    def _count(self, id: str, *, is_good: bool) -> None:
        record = self._live[id]
        self._live[id] = replace(
            record,
            num_completed=record.num_completed + is_good,
            num_failed=record.num_failed + (not is_good),
        )

    async def _change(self, id: str, status: str, *, end: str | None = None, **values: Any) -> None:
        """Write a new status.

        Args:
            id: The batch.
            status: The status.
            end: Status that will follow it.
            values: Further fields of the record.
        """
        record = self._live[id]
        times = {
            **record.times,
            f"{status}_at": int(time.time()),
            **({} if end is None else {"end": end}),
        }
        record = self._live[id] = replace(record, status=status, times=times, **values)
        counts = {"num_completed": record.num_completed, "num_failed": record.num_failed}

        def write() -> None:
            with self._store.write() as transaction:
                transaction.change_batch(id, status=status, times=times, **counts, **values)

        await until_done(write)

    def _unfinished(self) -> tuple[BatchRecord, ...]:
        with self._store.read() as transaction:
            return transaction.unfinished_batches()

    def _written(self, record: BatchRecord) -> BatchRecord:
        """Return a batch's record in the store."""
        with self._store.read() as transaction:
            return transaction.batch(record.tenant, record.id) or record


def _log_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error(
            "batches could not be resumed; the next start of the server retries them",
            exc_info=error,
        )

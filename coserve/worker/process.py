"""The engine's process: it owns the device, runs the server's commands, and reports the results.

The first line of its standard input is its settings. When the server ends, so does this process,
whatever it is doing: a thread waits for the end of the input, and on Linux the kernel kills a
process that hangs. Signals that a terminal or a supervisor sends to all processes are left to the
server. An error that no request or job caused ends the process; the server then starts another.
"""

import logging
import os
import signal
import threading
import time
from dataclasses import replace
from typing import Any

import msgspec
import zmq

from coserve.devices.messages.steps import StepResult
from coserve.devices.process.child import StartProcess, start_program
from coserve.devices.process.cpu_threads import worthwhile_threads
from coserve.devices.torch.process_memory import (
    bound_compiled_products,
    give_back_freed_memory,
    keep_freed_memory,
)
from coserve.engine.commands import CancelJob, PauseJob, UnloadAdapter
from coserve.engine.engine import Engine
from coserve.engine.jobs.events import JobEvent
from coserve.engine.outbox import Event
from coserve.engine.recording import record
from coserve.engine.records import EngineStats, HandoverStats
from coserve.engine.request import Chunk
from coserve.errors import CoserveError
from coserve.handover.base import HandoverEnd, NoHandover
from coserve.home import home_directory
from coserve.jobs.files.remote_files import shared_files
from coserve.jobs.files.shared_files import SharedFiles
from coserve.logs import configure_logs
from coserve.protocol.messages import (
    STATS_S,
    EngineSettings,
    Ping,
    Pong,
    Shutdown,
    StartFailed,
    StartProgress,
    StepRecord,
    StepReport,
    decode_command,
    encode,
)
from coserve.sandbox.parent_death import end_with_parent
from coserve.worker.activity import Activity, WatchedDevice
from coserve.worker.commands import Commands
from coserve.worker.handover import open_handover
from coserve.worker.job_commands import JobCommands
from coserve.worker.rank_forks import rank_starter
from coserve.worker.ranks import RankStates, ending_with
from coserve.worker.ready import ready_report
from coserve.worker.refinement import ProfileRefinement

_log = logging.getLogger(__name__)

# Longest time for new commands between two steps.
_COMMANDS_S = 5e-3
# Wait while there is work, but the policy plans nothing.
_NO_PLAN_WAIT_MS = 10
# Wait while there is no work, but files are being read or written.
_FILES_WAIT_MS = 10
# Wait while there is nothing at all; threads may still release copies, which the device must learn.
_IDLE_WAIT_MS = 1000
# Time without work after which memory that is kept for future requests is released.
_REST_S = 5.0
# Number of unread reports beyond which the engine waits for its server.
_MAX_WAITING_REPORTS = 10_000
_LINGER_MS = 2000
_STDIN = 0


class EngineProcess:
    """The loop of the engine's process: commands in, steps, reports out."""

    def __init__(
        self,
        engine: Engine,
        socket: "zmq.Socket[bytes]",
        activity: Activity | None = None,
        handover: HandoverEnd | None = None,
        shared: SharedFiles | None = None,
    ) -> None:
        """Connect an engine with its server.

        Args:
            engine: Engine to run.
            socket: Socket of commands and reports.
            activity: Record of the engine's device.
            handover: Handover to other instances.
            shared: See `JobCommands`.
        """
        self._engine, self._socket, self._activity = engine, socket, activity or Activity(None)
        self._handover = handover or NoHandover()
        self._handover_stats: HandoverStats | None = None
        self._refinement, self._ranks = ProfileRefinement(engine), RankStates(engine.device)
        self._jobs = JobCommands(engine, self._activity, shared)
        self._commands = Commands(engine, self._jobs, self._send, self._activity, self._handover)
        self._steps: list[StepRecord] = []
        # Pages by owner after the step that left fewest free, since the last report.
        self._fullest: dict[str, int] | None = None
        self._reported_s = 0.0
        self._unreported = True
        self._running = True
        self._busy_s = time.monotonic()  # time of the last work
        self._has_freed = False  # whether memory can be released when there is no work

    def run(self) -> None:
        """Run until the shutdown command."""
        while self._running:
            self._take_commands()
            if not self._running:
                break
            # One piece of the measurement per round, so that commands and steps take turns with it.
            if self._refinement.run_piece():
                _log.info("the device is measured: its profile replaces the provisional one")
                self._report([], whole=True)
            elif self._refinement.progress is not None:
                self._unreported |= time.monotonic() - self._reported_s > STATS_S
            if self._engine.has_work:
                self._step()
        # Send what is left, before threads end: replies to the shutdown are among it.
        self._report_batch()
        self._handover.close()
        self._commands.close()
        self._jobs.close()

    # -- commands -------------------------------------------------------------------

    def _take_commands(self) -> None:
        """Take the commands that have arrived, for a limited time; without work, wait for one."""
        wait_ms = 0
        if not self._engine.has_work:
            self._activity.note(frozenset())
            self._report_batch()
            # Without a step to carry them, commands that the device still has to get are sent now.
            self._engine.flush_commands()
            waits_for_files = self._jobs.is_waiting or self._commands.is_waiting
            wait_ms = _FILES_WAIT_MS if waits_for_files else _IDLE_WAIT_MS
            if (measures_in_s := self._refinement.wait_s) is not None:
                wait_ms = min(wait_ms, int(1e3 * measures_in_s))
            is_at_rest = not waits_for_files and time.monotonic() - self._busy_s > _REST_S
            # Compiled grammars are kept for a while, since the next request often has the same.
            if is_at_rest and self._engine.grammars.rest():
                self._has_freed = self._unreported = True
            if self._has_freed and not waits_for_files:
                give_back_freed_memory()
                self._has_freed = False
        elif self._engine.last_plan.runs_nothing:
            wait_ms = _NO_PLAN_WAIT_MS
        until_s: float | None = None
        while self._running and self._has_command(wait_ms):
            self._take(decode_command(self._socket.recv()))
            # Only the first command is waited for, and the limit runs from its arrival.
            wait_ms, until_s = 0, until_s or time.monotonic() + _COMMANDS_S
            if time.monotonic() > until_s:
                break
        self._commands.poll()
        self._poll_handover()
        if self._jobs.has_pending:
            self._report([], whole=True)

    def _poll_handover(self) -> None:
        """Poll other instances, whose state is reported even if nothing else is."""
        self._handover.poll()
        stats = self._handover.stats()
        self._unreported |= stats != self._handover_stats
        self._handover_stats = stats

    def _has_command(self, wait_ms: int) -> bool:
        """Return whether a command has arrived; messages of other instances end the wait, too."""
        others = self._handover.waits_on() if wait_ms else ()
        if not others:
            return bool(self._socket.poll(wait_ms))
        poller = zmq.Poller()
        for each in (self._socket, *others):
            poller.register(each, zmq.POLLIN)
        return any(each is self._socket for each, _ in poller.poll(wait_ms))

    def _take(self, command: Any) -> None:
        if isinstance(command, Ping):
            self._send(Pong())
            return
        self._unreported = True
        # These free memory, which goes back to the system once there is no work.
        self._has_freed |= isinstance(command, CancelJob | PauseJob | UnloadAdapter)
        if isinstance(command, Shutdown):
            self._jobs.checkpoint_all(command.call)
            self._running = False
        else:
            self._commands.take(command)

    # -- steps ----------------------------------------------------------------------

    def _step(self) -> None:
        start_s = time.monotonic()
        events = self._handover.take(self._engine.step())
        end_s = self._busy_s = time.monotonic()
        self._unreported = True
        result = self._engine.last_result
        if result is not None and result.failure is None:
            self._steps.append(_step_record(self._engine, result, end_s, end_s - start_s))
        pages = self._engine.pool.num_pages_by_owner()
        if self._fullest is None or sum(pages.values()) > sum(self._fullest.values()):
            self._fullest = pages
        job_events = [event for event in events if isinstance(event, JobEvent)]
        self._jobs.take(job_events)
        self._has_freed |= any(event.kind in ("succeeded", "failed") for event in job_events)
        self._report(events, whole=bool(job_events) or end_s - self._reported_s >= STATS_S)

    # -- reports --------------------------------------------------------------------

    def _report(self, events: list[Event], *, whole: bool) -> None:
        """Send chunks at once; everything else goes with the next whole report."""
        chunks = [event for event in events if isinstance(event, Chunk)]
        if not whole:
            if chunks:
                self._send(StepReport(chunks=chunks))
            return
        pending = self._jobs.take_pending()
        records = list(self._engine.records)
        self._engine.records.clear()
        self._send(
            StepReport(
                chunks=chunks,
                job_events=pending.events,
                checkpoints=pending.checkpoints,
                contributions=pending.contributions,
                records=records,
                steps=self._steps,
                stats=self._stats(),
            )
        )
        for reply in pending.replies:  # after the effects of their commands
            self._send(reply)
        self._steps, self._fullest = [], None
        self._reported_s, self._unreported = time.monotonic(), False

    def _stats(self) -> EngineStats:
        """Return counts as of now; while jobs run, pages as of the fullest moment since the last
        report.

        Reports are sent when an optimizer step is done, and just then a job holds no pages.
        """
        stats = replace(
            self._engine.stats(),
            handover=self._handover.stats(),
            measured_share=self._refinement.progress,
            ranks=self._ranks.take(),
        )
        if self._fullest is None or not stats.num_jobs:
            return stats
        num_free = stats.num_pages - sum(self._fullest.values())
        return replace(stats, num_pages_free=num_free, num_pages_by_owner=self._fullest)

    def _report_batch(self) -> None:
        if self._unreported:
            self._report([], whole=True)

    def _send(self, report: Any) -> None:
        self._socket.send(encode(report))


def _step_record(engine: Engine, result: StepResult, end_s: float, step_s: float) -> StepRecord:
    """Return the record of a step that has run, with the tasklets that there was time for."""
    plan = engine.last_plan
    rows = {"decode": 0, "prefill": 0, "window": 0}
    for planned in plan.rows:
        rows[planned.kind] += planned.rows
    num_reversed = sum(part.rows * result.num_tasklets[part.job] for part in plan.tasklets)
    num_reversed += sum(piece.rows for piece in plan.losses)
    # A tasklet reverses one layer: divided by the layers, rows count as of whole models.
    num_parts = engine.device.info.num_layers + 1  # and the head
    return StepRecord(
        end_s=end_s,
        step_s=step_s,
        predicted_s=plan.predicted_s,
        decode_rows=rows["decode"],
        prefill_rows=rows["prefill"],
        window_rows=rows["window"],
        backward_rows=num_reversed / num_parts,
    )


def start(
    settings: EngineSettings,
    socket: "zmq.Socket[bytes]",
    activity: Activity,
    start_rank: StartProcess = start_program,
) -> tuple[Engine, HandoverEnd, SharedFiles] | None:
    """Start the engine.

    Returns:
        The engine once it is ready, its handover and its shared storage; None if it cannot be
        started, which has been reported.
    """

    def progress(stage: str, done: int, total: int) -> None:
        socket.send(encode(StartProgress(stage, done, total)))

    progress("starting the engine", 0, 0)
    keep_freed_memory()
    bound_compiled_products()
    shared = shared_files(
        settings.files_url, home_directory(), most_bytes=settings.files_cache_bytes
    )
    try:
        shared.check()
        # The ranks of a group choose their own shares of the threads.
        threads = settings.threads
        if threads is None and settings.engine.tensor_parallel == 1:
            threads = worthwhile_threads(settings.model)
        engine = Engine.load(
            settings.model,
            settings.engine,
            dtype=settings.dtype,
            weights=settings.weights,
            device=settings.device,
            threads=threads,
            max_positions=settings.max_model_len,
            with_text=False,
            may_be_provisional=not settings.measures_first,
            progress=progress,
            start_rank=start_rank,
            wrap=lambda device: WatchedDevice(ending_with(device), activity),
        )
        if settings.record is not None:
            engine = record(engine, settings.record)
        ready = ready_report(engine)
        handover = open_handover(engine, settings)
    except (CoserveError, ValueError, MemoryError, OSError) as error:
        _log.debug("the engine cannot start", exc_info=True)
        socket.send(encode(StartFailed(" ".join(str(error).split()) or type(error).__name__)))
        return None
    socket.send(encode(ready))
    return engine, handover, shared


def _end_with_the_server() -> None:
    """Wait for the end of standard input, then end the process, whatever other threads do."""
    while os.read(_STDIN, 4096):
        pass
    os._exit(0)


def _read_settings() -> EngineSettings | None:
    """Read the first line of standard input; None if the server has ended before."""
    line = b""
    while not line.endswith(b"\n"):
        # Unbuffered: a waiting thread would hold a buffer's lock at the end.
        more = os.read(_STDIN, 1 << 16)
        if not more:
            return None
        line += more
    return msgspec.json.decode(line, type=EngineSettings)


def main() -> int:
    """Run the process; return 0 after a shutdown, 1 if the engine could not start. An error ends it
    with another status.
    """
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    settings = _read_settings()
    if settings is None:
        return 0
    configure_logs(settings.log_format, settings.log_level)
    start_rank = rank_starter(settings.engine.tensor_parallel)
    threading.Thread(target=_end_with_the_server, daemon=True).start()
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(_MAX_WAITING_REPORTS)
    socket.linger = _LINGER_MS
    socket.connect(settings.address)
    try:
        activity = Activity(settings.activity)
        started = start(settings, socket, activity, start_rank)
        if started is None:
            return 1
        engine, handover, shared = started
        EngineProcess(engine, socket, activity, handover, shared).run()
        return 0
    finally:
        socket.close()
        context.term()


if __name__ == "__main__":
    raise SystemExit(main())

"""The other end of an engine process's socket, in the same thread: a script says what is commanded,
look by look."""

import time
from collections.abc import Callable, Iterator
from typing import Any

from coserve.engine.engine import Engine
from coserve.protocol.messages import Shutdown, StepRecord, StepReport, decode_report, encode
from coserve.worker.process import EngineProcess

MOST_LOOKS = 3000


class Server:
    """The other end of the process's socket, in the same thread: whenever the process looks for a
    command, the script says what has come (None: nothing). `waits_ms`: how long the process was
    ready to wait each time.
    """

    def __init__(self, script: Iterator[Any], reports: list[Any]) -> None:
        self._script = script
        self._command: Any = None
        self.waits_ms: list[int | None] = []
        self.reports = reports

    def poll(self, wait_ms: int | None) -> bool:
        self.waits_ms.append(wait_ms)
        self._command = next(self._script)
        if self._command is None and wait_ms != 0:
            time.sleep(0.001)
        return self._command is not None

    def recv(self) -> bytes:
        return encode(self._command)

    def send(self, report: bytes) -> None:
        self.reports.append(decode_report(report))

    @property
    def steps(self) -> list[StepRecord]:
        return [
            step
            for report in self.reports
            if isinstance(report, StepReport)
            for step in report.steps
        ]


def run(
    engine: Engine, script: Callable[[], Iterator[Any]], reports: list[Any] | None = None
) -> Server:
    """Run the process until the script is over, which ends with a shutdown. reports: filled
    meanwhile."""

    def until_shutdown() -> Iterator[Any]:
        yield from script()
        while True:
            yield Shutdown(99)

    server = Server(until_shutdown(), [] if reports is None else reports)
    process: Any = EngineProcess(engine, server)  # type: ignore[arg-type]
    process.run()
    return server


def looks_until(done: Callable[[], bool]) -> Iterator[None]:
    """No command until something is so; for a test that fails, not for ever."""
    for _ in range(MOST_LOOKS):
        if done():
            return
        yield None

"""The engine's process from within: when it waits, what it has its device let go of, and what it reports of steps."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engines import examples_of, greedy, make_engine, prompts_of, watched
from msgspec.structs import replace
from random_plans import PlannedBy

from coserve.adapters import LoraConfig
from coserve.devices.job_messages import DropCheckpoint, DropTrainer, TakeCheckpoint
from coserve.devices.step_messages import StepFailure
from coserve.engine.commands import AddRequest, JobStart, StartJob
from coserve.engine.engine import Engine
from coserve.jobs.examples import write_examples_file
from coserve.protocol.messages import Shutdown, StepRecord, StepReport, decode_report, encode
from coserve.server.ledger import Ledger
from coserve.server.status import StatusBoard
from coserve.tuning.config import TuningConfig
from coserve.worker.process import EngineProcess

LORA = LoraConfig(r=2, target_modules="all-linear")
MOST_LOOKS = 3000


class Server:
    """The other end of the process's socket, in the same thread: whenever the process looks for a command, the script
    says what has come (None: nothing). `waits_ms`: how long the process was ready to wait each time.
    """

    def __init__(self, script: Iterator[Any]) -> None:
        self._script = script
        self._command: Any = None
        self.waits_ms: list[int | None] = []
        self.reports: list[Any] = []

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
        return [step for report in self.reports if isinstance(report, StepReport) for step in report.steps]


def run(engine: Engine, script: Callable[[], Iterator[Any]]) -> Server:
    """The process until the script is over, which ends with a shutdown."""

    def until_shutdown() -> Iterator[Any]:
        yield from script()
        while True:
            yield Shutdown(99)

    server = Server(until_shutdown())
    process: Any = EngineProcess(engine, server)  # type: ignore[arg-type]
    process.run()
    return server


def looks_until(done: Callable[[], bool]) -> Iterator[None]:
    """No command until something is so; for a test that fails, not for ever."""
    for _ in range(MOST_LOOKS):
        if done():
            return
        yield None


def test_a_policy_that_runs_no_requests_does_not_have_the_process_spin():
    engine = make_engine(policy="tuning-only")
    (prompt,) = prompts_of((5,))

    def script() -> Iterator[Any]:
        yield AddRequest(id="r", prompt=prompt, params=greedy(3), arrival_s=0.0)
        yield from [None] * 20

    server = run(engine, script)
    assert "r" in engine.requests
    # The first look finds the command, the second that there is no other; a plan was made before the later ones.
    assert all(wait_ms and wait_ms >= 10 for wait_ms in server.waits_ms[2:-1])


def test_an_idle_process_has_its_device_let_go_of_what_a_job_left(tmp_path: Path):
    engine = make_engine()
    told = watched(engine).commands
    examples = tmp_path / "examples"
    write_examples_file(examples, examples_of([8] * 4))
    job = JobStart(
        id="j",
        name="learned",
        examples=str(examples),
        config=TuningConfig(batch_size=2),
        adapter=LORA.to_peft(),
        checkpoints=str(tmp_path / "checkpoints"),
        checkpoint_every_steps=1,
    )

    def count(kind: type) -> int:
        return sum(isinstance(command, kind) for command in told)

    found: list[tuple[int, int, int]] = []

    def script() -> Iterator[Any]:
        yield StartJob(1, job)
        yield from looks_until(lambda: "j" in engine.jobs)
        yield from looks_until(lambda: "j" not in engine.jobs)
        yield from looks_until(lambda: count(DropTrainer) == 1 and count(DropCheckpoint) == count(TakeCheckpoint))
        found.append((count(DropTrainer), count(DropCheckpoint), count(TakeCheckpoint)))

    run(engine, script)
    assert found == [(1, 2, 2)]


def test_steps_are_reported_with_what_has_run_of_them():
    """Tasklets that there was no time for, and steps that failed, have not."""
    engine = make_engine()
    slack = engine.policy
    engine.policy = PlannedBy(
        function=lambda view, latency: replace(slack.plan(view, latency), backward_limit_s=0.0)  # one tasklet a step
    )
    device = watched(engine)
    device.fail = lambda batch: StepFailure(message="full") if len(device.batches) == 4 else None
    job = engine.submit(examples_of((9, 14)), TuningConfig(batch_size=2), adapter=LORA)

    def script() -> Iterator[Any]:
        yield from looks_until(lambda: engine.jobs[job].is_terminal)

    server = run(engine, script)
    assert engine.jobs[job].state == "succeeded"
    ran = [(b, r) for b, r in zip(device.batches, device.results, strict=True) if r.failure is None]
    assert len(server.steps) == len(ran) == len(device.batches) - 1
    num_reversed = sum(
        part.num_rows * result.num_tasklets[part.job] for batch, result in ran for part in batch.tasklets
    )
    num_reversed += sum(piece.num_rows for batch, _ in ran for piece in batch.losses)
    planned = sum(part.num_rows * part.num_tasklets for batch, _ in ran for part in batch.tasklets)
    assert planned > num_reversed
    num_parts = engine.device.info.num_layers + 1
    assert sum(step.backward_rows for step in server.steps) * num_parts == num_reversed


def test_a_paused_job_does_not_count_as_running():
    engine = make_engine()
    jobs = [engine.submit(examples_of((9,)), adapter=LORA) for _ in range(2)]
    engine.pause_job(jobs[0])
    board = StatusBoard(Ledger())
    board.engine_reported(StepReport(stats=engine.stats()))
    assert board.status(None, "none", None)["jobs"]["running"] == 1
    engine.resume_job(jobs[0])
    board.engine_reported(StepReport(stats=engine.stats()))
    assert board.status(None, "none", None)["jobs"]["running"] == 2

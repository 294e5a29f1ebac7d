"""The engine's process from within: when it waits, what it has its device let go of, and what it
reports of steps."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engines import examples_of, greedy, make_engine, prompts_of, watched
from msgspec.structs import replace
from process_server import looks_until, run
from random_plans import PlannedBy

from coserve.adapters import LoraConfig
from coserve.devices.messages.jobs import DropCheckpoint, DropTrainer, TakeCheckpoint
from coserve.devices.messages.steps import StepFailure
from coserve.engine.commands import AddRequest, JobStart, StartJob
from coserve.jobs.datasets.examples import write_examples_file
from coserve.protocol.messages import StepReport
from coserve.server.observability.status import StatusBoard
from coserve.server.tenancy.ledger import RequestLedger
from coserve.tuning.config import TuningConfig

LORA = LoraConfig(r=2, target_modules="all-linear")


def test_a_policy_that_runs_no_requests_does_not_have_the_process_spin():
    engine = make_engine(policy="tuning-only")
    (prompt,) = prompts_of((5,))

    def script() -> Iterator[Any]:
        yield AddRequest(id="r", prompt=prompt, params=greedy(3), arrival_s=0.0)
        yield from [None] * 20

    server = run(engine, script)
    assert "r" in engine.requests
    # The first look finds the command, the second that there is no other; a plan was made before
    # the later ones.
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
        yield from looks_until(
            lambda: count(DropTrainer) == 1 and count(DropCheckpoint) == count(TakeCheckpoint)
        )
        found.append((count(DropTrainer), count(DropCheckpoint), count(TakeCheckpoint)))

    run(engine, script)
    assert found == [(1, 2, 2)]


def test_steps_are_reported_with_what_has_run_of_them():
    """Tasklets that there was no time for, and steps that failed, have not."""
    engine = make_engine()
    slack = engine.policy
    engine.policy = PlannedBy(
        function=lambda view, latency: replace(
            slack.plan(view, latency), backward_limit_s=0.0
        )  # one tasklet a step
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
        part.num_rows * result.num_tasklets[part.job]
        for batch, result in ran
        for part in batch.tasklets
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
    board = StatusBoard(RequestLedger())
    board.engine_reported(StepReport(stats=engine.stats()))
    assert board.status(None, "none", None)["jobs"]["running"] == 1
    engine.resume_job(jobs[0])
    board.engine_reported(StepReport(stats=engine.stats()))
    assert board.status(None, "none", None)["jobs"]["running"] == 2

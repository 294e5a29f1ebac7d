"""Jobs in the engine's process: checkpoints, and the order of reports."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import examples_of, make_engine

from coserve.adapters import LoraConfig
from coserve.engine.commands import CancelJob, JobStart, PauseJob, ResumeJob, StartJob
from coserve.engine.jobs.events import JobEvent
from coserve.errors import AdapterError, JobOverError
from coserve.jobs.datasets.examples import write_examples_file
from coserve.protocol.messages import CallReply
from coserve.tuning.config import TuningConfig
from coserve.tuning.shard import Shard
from coserve.worker.job_commands import JobCommands
from coserve.worker.job_reports import ReadyReports

NUM_STEPS = 6


class Process:
    """An engine and its commands, driven by hand."""

    def __init__(self) -> None:
        self.engine = make_engine(max_adapters=1)
        self.commands = JobCommands(self.engine)
        self.news = ReadyReports()

    def step(self) -> None:
        self.commands.take([event for event in self.engine.step() if isinstance(event, JobEvent)])
        self.hear()

    def hear(self) -> None:
        """Take in what may be told now."""
        found = self.commands.take_pending()
        self.news.events += found.events
        self.news.checkpoints += found.checkpoints
        self.news.replies += found.replies

    def hear_all(self) -> None:
        while self.commands.is_waiting:
            self.hear()
            time.sleep(0.001)

    def run(self, num_steps: int | None = None) -> None:
        """Run to the end, or until this many optimizer steps are made."""
        while self.engine.has_work or self.commands.is_waiting:
            self.step()
            if num_steps is not None and self.engine.job("j").num_steps_done == num_steps:
                break
        self.hear_all()

    def kinds(self) -> list[str]:
        return [
            event.kind
            for event in self.news.events
            if event.kind in ("step", "succeeded", "failed", "cancelled")
        ]


@pytest.fixture
def process() -> Process:
    return Process()


def job(directory: Path, **more: Any) -> JobStart:
    path = directory / "examples"
    write_examples_file(path, examples_of([8] * 6))
    settings: dict[str, Any] = {
        "id": "j",
        "name": "learned",
        "examples": str(path),
        "config": TuningConfig(batch_size=1),
        "adapter": LoraConfig(r=2, target_modules="all-linear").to_peft(),
        "checkpoints": str(directory / "checkpoints"),
        "checkpoint_every_steps": 2,
        **more,
    }
    return JobStart(**settings)


def test_checkpoints_come_before_what_follows_from_them(process: Process, tmp_path: Path):
    process.commands.handle(StartJob(1, job(tmp_path)))
    process.run()
    assert process.kinds() == ["step"] * NUM_STEPS + ["succeeded"]
    assert [reply.call for reply in process.news.replies] == [1]
    assert [(each.step, each.listed) for each in process.news.checkpoints] == [
        (2, True),
        (4, True),
        (6, True),
    ]
    for each in process.news.checkpoints:
        assert (Path(each.directory) / "adapter_config.json").exists()
    assert process.engine.jobs == {}  # nothing is kept of it
    assert "learned" in process.engine.versions


def test_a_pause_is_answered_when_it_is_on_disk(process: Process, tmp_path: Path):
    process.commands.handle(StartJob(1, job(tmp_path, checkpoint_every_steps=0)))
    process.run(3)
    process.commands.handle(PauseJob(2, "j"))
    process.hear_all()
    assert not process.engine.has_work
    [checkpoint] = process.news.checkpoints
    assert (checkpoint.step, checkpoint.listed) == (3, False)
    assert [reply.call for reply in process.news.replies] == [1, 2]
    process.commands.handle(ResumeJob(3, "j"))
    process.run()
    assert process.kinds() == ["step"] * NUM_STEPS + ["succeeded"]
    assert [(each.step, each.listed) for each in process.news.checkpoints] == [
        (3, False),
        (6, True),
    ]


def test_a_pause_holds_although_its_checkpoint_cannot_be_written(
    process: Process, tmp_path: Path, caplog: Any
):
    (tmp_path / "checkpoints").write_text("in the way")
    process.commands.handle(StartJob(1, job(tmp_path, checkpoint_every_steps=0)))
    process.run(3)
    process.commands.handle(PauseJob(2, "j"))
    process.hear_all()
    assert process.news.replies == [CallReply(1), CallReply(2)]
    assert (process.news.checkpoints, process.engine.job("j").state) == ([], "paused")
    assert "cannot write a checkpoint" in caplog.text
    process.commands.handle(ResumeJob(3, "j"))
    (tmp_path / "checkpoints").unlink()
    process.run()
    assert process.kinds() == ["step"] * NUM_STEPS + ["succeeded"]


def test_what_is_asked_of_a_job_that_is_over_is_refused_as_that(process: Process, tmp_path: Path):
    process.commands.handle(StartJob(1, job(tmp_path)))
    process.run()
    for command in (PauseJob(2, "j"), ResumeJob(3, "j"), CancelJob(4, "j")):
        with pytest.raises(JobOverError, match="does not have the job 'j': it is over"):
            process.commands.handle(command)


def test_another_engine_resumes_where_one_was_shut_down(process: Process, tmp_path: Path):
    process.commands.handle(StartJob(1, job(tmp_path)))
    process.run(3)
    process.commands.checkpoint_all(9)
    process.hear_all()
    assert process.news.replies[-1].call == 9
    last = process.news.checkpoints[-1]
    assert (last.step, last.listed) == (3, False)
    other = Process()
    other.commands.handle(StartJob(1, job(tmp_path, checkpoint=last.directory)))
    other.run()
    assert [event.step for event in other.news.events if event.kind == "step"] == [4, 5, 6]
    assert [each.step for each in other.news.checkpoints] == [4, 6]
    # Each counts what it has done itself.
    assert (
        other.engine.stats().num_tokens_trained
        == process.engine.stats().num_tokens_trained
        == 3 * 8
    )


def test_a_cancelled_job_keeps_what_it_had(process: Process, tmp_path: Path):
    process.commands.handle(StartJob(1, job(tmp_path, checkpoint_every_steps=0)))
    process.run(2)
    process.commands.handle(CancelJob(2, "j"))
    process.run()
    assert [(each.step, each.listed) for each in process.news.checkpoints] == [(2, False)]
    assert (Path(process.news.checkpoints[0].directory) / "optimizer.safetensors").exists()
    assert process.kinds() == ["step", "step", "cancelled"]
    with pytest.raises(JobOverError):
        process.commands.handle(CancelJob(3, "j"))


def test_the_end_of_a_cancelled_job_is_told_before_the_reply_and_not_again(
    process: Process, tmp_path: Path
):
    """A client that has the reply may start the job anew: a later report of the end would end it
    again.
    """
    process.commands.handle(StartJob(1, job(tmp_path)))
    process.run(2)
    process.news = ReadyReports()
    process.commands.handle(CancelJob(2, "j", keeps=False))
    process.hear_all()
    assert process.kinds() == ["cancelled"]
    assert process.news.replies == [CallReply(2)]
    process.commands.handle(StartJob(3, job(tmp_path)))
    process.news = ReadyReports()
    process.run()
    assert process.kinds() == ["step"] * NUM_STEPS + ["succeeded"]


def test_a_job_whose_result_cannot_be_kept_has_failed(process: Process, tmp_path: Path):
    (tmp_path / "checkpoints").write_text("in the way")
    process.commands.handle(StartJob(1, job(tmp_path)))
    process.run()
    assert process.kinds() == ["step"] * NUM_STEPS + ["failed"]
    assert "cannot write a checkpoint" in process.news.events[-1].message
    assert process.news.checkpoints == []


def test_what_jobs_made_makes_room_on_the_device(process: Process, tmp_path: Path):
    for name in ("first", "second"):
        process.commands.handle(
            StartJob(1, job(tmp_path, id=name, name=name, checkpoints=str(tmp_path / name)))
        )
        process.run()
    assert "second" in process.engine.versions
    assert "first" not in process.engine.versions


def test_nothing_stays_on_the_device_of_a_live_job_that_was_cancelled(
    process: Process, tmp_path: Path
):
    process.commands.handle(
        StartJob(1, job(tmp_path, config=TuningConfig(batch_size=1, live=True)))
    )
    process.run(2)
    assert "learned" in process.engine.versions
    process.commands.handle(CancelJob(2, "j"))
    process.run()
    assert "learned" not in process.engine.versions


def test_a_part_of_a_job_begins_again_where_it_had_come_to_its_end_before_another_node_died(
    process: Process, tmp_path: Path
):
    first = job(tmp_path)
    process.commands.handle(StartJob(call=0, job=first))
    process.run()
    assert process.kinds()[-1] == "succeeded" and "learned" in process.engine.versions
    with pytest.raises(AdapterError, match="there is an adapter 'learned' already"):
        process.commands.handle(StartJob(call=1, job=replace(first, id="another")))
    shard = Shard(
        job="j",
        index=0,
        count=2,
        synchronization="asynchronous",
        every_steps=100,
        meet_every_steps=0,
        directory=str(tmp_path),
    )
    process.commands.handle(StartJob(call=2, job=replace(first, id="j.0", shard=shard)))
    while process.engine.job("j.0").num_steps_done < 2:
        process.step()

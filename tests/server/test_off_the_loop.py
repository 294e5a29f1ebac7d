"""What takes long is not done between steps: text, files of jobs and adapters, and the disk."""

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import examples_of, make_engine, prompts_of, word_tokenizer
from lengths import long_but
from support import make_backbone

from coserve.adapters import Adapter, LoraConfig
from coserve.adapters.peft_directory import save_adapter
from coserve.devices.sampling_params import SamplingParams
from coserve.engine.commands import (
    AdapterRef,
    AddRequest,
    CancelRequest,
    JobStart,
    LoadAdapter,
    PauseJob,
    StartJob,
    StopSequence,
    UnloadAdapter,
)
from coserve.engine.jobs.checkpoint import Checkpoint
from coserve.engine.jobs.events import JobEvent
from coserve.engine.outbox import Event
from coserve.engine.request import Chunk
from coserve.engine_client.streams import RequestStream
from coserve.errors import RequestError
from coserve.jobs.datasets.examples import write_examples_file
from coserve.protocol.messages import CallReply, RequestRefused
from coserve.tuning.config import TuningConfig
from coserve.worker.command_queue import CommandQueue
from coserve.worker.commands import Commands
from coserve.worker.job_commands import JobCommands

LIMIT_S = 60.0


class Worker:
    """An engine with its commands, driven by hand."""

    def __init__(self) -> None:
        self.engine = make_engine()
        self.jobs = JobCommands(self.engine)
        self.said: list[Any] = []
        self.commands = Commands(self.engine, self.jobs, self.said.append)
        self.events: list[Event] = []

    def step(self) -> None:
        """What the process does in each turn of its loop."""
        self.commands.poll()
        found = self.engine.step()
        self.jobs.take([event for event in found if isinstance(event, JobEvent)])
        self.said += self.jobs.take_pending().replies
        self.events += found

    def tokens(self, request: str) -> list[int]:
        return [
            t
            for event in self.events
            if isinstance(event, Chunk) and event.request == request
            for t in event.tokens
        ]

    def ends(self, request: str) -> list[str | None]:
        chunks = [
            event for event in self.events if isinstance(event, Chunk) and event.request == request
        ]
        return [chunk.finish_reason for chunk in chunks if chunk.finish_reason is not None]

    def until(self, question: Any) -> None:
        until_s = time.monotonic() + LIMIT_S
        while not question():
            assert time.monotonic() < until_s, "it takes too long"
            self.step()

    def answer(self, name: str, **more: Any) -> list[int]:
        """A request from its start to its end."""
        self.commands.take(request(name, **more))
        self.until(lambda: self.ends(name))
        return self.tokens(name)


def request(name: str, *, max_tokens: int = 5, **more: Any) -> AddRequest:
    [prompt] = prompts_of([6])
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return AddRequest(id=name, prompt=prompt, params=params, arrival_s=0.0, **more)


@pytest.fixture
def worker() -> Any:
    made = Worker()
    yield made
    made.commands.close()
    made.jobs.close()


class SlowDisk:
    """Of one file: who reads it waits until it is let go."""

    def __init__(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._may_read = threading.Event()
        for name in ("open", "read_text", "read_bytes"):
            monkeypatch.setattr(Path, name, self._slow(file, getattr(Path, name)))

    def _slow(self, file: Path, read: Any) -> Any:
        def slow_read(path: Path, *arguments: Any, **more: Any) -> Any:
            if path == file:
                assert self._may_read.wait(LIMIT_S)
            return read(path, *arguments, **more)

        return slow_read

    def let_go(self) -> None:
        self._may_read.set()


def adapter_on_disk(directory: Path) -> AdapterRef:
    adapter = Adapter(make_backbone(), LoraConfig(r=2, target_modules="all-linear"), seed=1)
    save_adapter(adapter, directory)
    return AdapterRef(name=directory.name, directory=str(directory))


def test_a_slow_adapter_holds_up_only_those_who_name_it(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    slow, quick = (adapter_on_disk(tmp_path / name) for name in ("slow", "quick"))
    disk = SlowDisk(tmp_path / "slow" / "adapter_config.json", monkeypatch)
    for name in ("first", "second"):
        worker.commands.take(request(name, adapter=slow))
    assert len(worker.answer("bare")) == 5
    assert len(worker.answer("other", adapter=quick)) == 5
    assert worker.commands.is_waiting
    assert "slow" not in worker.engine.versions
    disk.let_go()
    worker.until(lambda: worker.ends("first") and worker.ends("second"))
    assert worker.tokens("first") == worker.tokens("second")
    assert not worker.commands.is_waiting
    assert worker.said == []


def test_commands_for_one_adapter_stay_in_order(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    slow = adapter_on_disk(tmp_path / "slow")
    disk = SlowDisk(tmp_path / "slow" / "adapter_config.json", monkeypatch)
    worker.commands.take(LoadAdapter(1, slow))
    worker.commands.take(request("before", adapter=AdapterRef(name="slow")))
    worker.commands.take(request("given up", adapter=slow))
    worker.commands.take(UnloadAdapter(2, "slow"))
    worker.commands.take(request("after", adapter=AdapterRef(name="slow")))
    worker.commands.take(CancelRequest("given up"))
    worker.answer("bare")
    assert worker.said == []
    disk.let_go()
    worker.until(lambda: not worker.commands.is_waiting and worker.ends("before"))
    assert [each.call for each in worker.said if isinstance(each, CallReply)] == [1, 2]
    assert [each.id for each in worker.said if isinstance(each, RequestRefused)] == ["after"]
    assert worker.ends("given up") == []


def test_an_adapter_that_cannot_be_read_is_refused_to_all_who_wait(worker: Worker, tmp_path: Path):
    nowhere = AdapterRef(name="gone", directory=str(tmp_path / "nowhere"))
    for name in ("first", "second"):
        worker.commands.take(request(name, adapter=nowhere))
    worker.commands.take(LoadAdapter(3, nowhere))
    worker.until(lambda: len(worker.said) == 3)
    assert all("nowhere has no adapter_config.json" in str(each.error) for each in worker.said)
    assert [each.kind for each in worker.said] == ["AdapterError"] * 3


def test_an_adapter_whose_files_are_nonsense_is_refused_and_the_engine_lives(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    nested, broken, odd = (adapter_on_disk(tmp_path / name) for name in ("nested", "broken", "odd"))
    (tmp_path / "nested" / "adapter_config.json").write_text("[" * 200_000)
    open_file = Path.open

    def failing_open(path: Path, *arguments: Any, **named: Any) -> Any:
        if path.parent.name == "broken":
            raise OSError(errno.EIO, "Input/output error")
        if path.parent.name == "odd":
            raise ZeroDivisionError
        return open_file(path, *arguments, **named)

    monkeypatch.setattr(Path, "open", failing_open)
    for call, adapter in enumerate((nested, broken, odd)):
        worker.commands.take(LoadAdapter(call, adapter))
    worker.until(lambda: len(worker.said) == 3)
    errors = {each.call: each.error for each in worker.said}
    assert "nested too deeply" in errors[0] and "cannot be read: Input/output error" in errors[1]
    assert "odd could not be read as an adapter: ZeroDivisionError()" in errors[2]
    assert [each.kind for each in worker.said] == ["AdapterError"] * 3
    assert len(worker.answer("bare")) == 5


def job(directory: Path, id: str = "j", **more: Any) -> JobStart:
    path = directory / f"{id}-examples"
    write_examples_file(path, examples_of([8] * 6))
    settings: dict[str, Any] = {
        "id": id,
        "name": f"of-{id}",
        "examples": str(path),
        "config": TuningConfig(batch_size=1),
        "adapter": LoraConfig(r=2, target_modules="all-linear").to_peft(),
        "checkpoints": str(directory / f"{id}-checkpoints"),
        "checkpoint_every_steps": 1,
        **more,
    }
    return JobStart(**settings)


def test_examples_are_read_beside_steps(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    start = job(tmp_path)
    disk = SlowDisk(Path(start.examples), monkeypatch)
    worker.commands.take(StartJob(1, start))
    assert len(worker.answer("bare")) == 5
    assert "j" not in worker.engine.jobs
    assert worker.said == []
    disk.let_go()
    worker.until(lambda: worker.said)
    assert worker.said == [CallReply(1)]


def test_what_is_slow_comes_one_at_a_time_after_what_is_not():
    done: list[str] = []
    queue = CommandQueue(lambda command, _: done.append(command))
    for job in ("a", "b", "c"):
        queue.put(f"start {job}", (job,), is_slow=True)
    queue.put("pause b", ("b",))
    queue.put("request", ("adapter",))
    turns = []
    while queue.is_waiting:
        turns.append(tuple(done))
        done.clear()
        queue.poll()
    queue.close()
    assert [*turns, tuple(done)] == [
        ("request",),
        ("start a",),
        ("start b",),
        ("pause b", "start c"),
    ]


def test_a_command_that_puts_another_does_not_have_a_third_done_twice():
    done: list[str] = []
    may_read = threading.Event()

    def do(command: str, read: Callable[[], Any]) -> None:
        read()
        done.append(command)
        if command == "first":
            queue.put("its own", ("adapter",))

    queue = CommandQueue(do)
    for command in ("first", "second"):
        queue.put(command, (command,), lambda: may_read.wait)
    may_read.set()
    deadline_s = time.monotonic() + LIMIT_S
    while queue.is_waiting and time.monotonic() < deadline_s:
        time.sleep(0.1)  # until both have been read
        queue.poll()
    queue.close()
    assert sorted(done) == ["first", "its own", "second"]


def test_jobs_that_resume_at_once_start_with_a_step_after_each(worker: Worker, tmp_path: Path):
    for number in range(4):
        worker.commands.take(StartJob(number, job(tmp_path, id=f"job {number}")))
    worker.commands.take(request("r"))
    num_started = [0]
    while not worker.ends("r") or num_started[-1] < 4:
        worker.step()
        num_started.append(len(worker.said))
        assert num_started[-1] <= num_started[-2] + 1


def test_a_job_that_is_faster_than_the_disk_is_held_back_alone(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The device copies six times; the disk takes nothing until it is told to."""
    write, may_write = Checkpoint.write, threading.Event()

    def slow_write(self: Checkpoint, parent: str | Path) -> Path:
        if "slow" in str(parent):
            assert may_write.wait(LIMIT_S)
        return write(self, parent)

    monkeypatch.setattr(Checkpoint, "write", slow_write)
    worker.commands.take(StartJob(1, job(tmp_path, "slow")))
    worker.commands.take(StartJob(2, job(tmp_path, "quick", checkpoint_every_steps=0)))
    worker.until(lambda: "slow" in worker.engine.jobs and "quick" in worker.engine.jobs)
    quick = worker.engine.job("quick")
    worker.until(lambda: quick.is_terminal)
    assert worker.engine.job("slow").num_steps_done == 2, (
        "two copies wait for the disk, and there is no third"
    )
    assert len(worker.answer("bare")) == 5
    worker.commands.take(StartJob(3, job(tmp_path, "other", checkpoint_every_steps=0, paused=True)))
    worker.commands.take(PauseJob(4, "other"))
    worker.until(lambda: CallReply(4) in worker.said)
    assert len(list((tmp_path / "other-checkpoints").iterdir())) == 1, (
        "written, while another job's disk takes nothing"
    )
    may_write.set()
    worker.until(lambda: "slow" not in worker.engine.jobs and not worker.jobs.is_waiting)
    assert len(list((tmp_path / "slow-checkpoints").iterdir())) == 6


# -- text ---------------------------------------------------------------------------------

STOPS: list[tuple[tuple[str, ...], int]] = [
    ((), 0),
    (("e",), 0),
    (("e",), 9),
    (("t", "zz"), 3),
    (("you can",), 0),
]


def whole(chunks: list[Chunk]) -> tuple[Any, ...]:
    return (
        "".join(chunk.text for chunk in chunks),
        [token for chunk in chunks for token in chunk.tokens],
        [len(chunk.logprobs) for chunk in chunks if chunk.tokens],
        chunks[-1].finish_reason,
        chunks[-1].stop_reason,
    )


@pytest.mark.parametrize(("stop", "min_tokens"), STOPS)
@pytest.mark.parametrize("seed", long_but(0, of=range(4)))
def test_text_made_of_reports_is_what_an_engine_with_text_says(
    stop: tuple[str, ...], min_tokens: int, seed: int
):
    [prompt] = prompts_of([5], seed=seed)
    params = SamplingParams(
        max_tokens=24,
        n=2,
        seed=seed,
        stop=stop,
        min_tokens=min_tokens,
        logprobs=1,
        stop_token_ids=(3,),
    )
    plain = make_engine(tokenizer=word_tokenizer())
    plain.add_tokens(prompt, params, request_id="r")
    expected: list[Chunk] = []
    while plain.has_work:
        expected += [event for event in plain.step() if isinstance(event, Chunk)]

    engine = make_engine()
    stream = RequestStream(
        [AddRequest(id="r", prompt=prompt, params=params, arrival_s=0.0)], word_tokenizer()
    )
    [sent] = stream.for_engine()
    engine.add_tokens(sent.prompt, sent.params, request_id="r")
    found: list[Chunk] = []
    late: list[StopSequence] = []  # the engine hears of a stop two steps later, as over a link
    while engine.has_work:
        for event in engine.step():
            assert isinstance(event, Chunk)
            if any(chunk.index == event.index and chunk.finish_reason for chunk in found):
                continue
            chunk, stopped = stream.read(event)
            found.append(chunk)
            late += [stopped] if stopped is not None else []
        if late and engine.num_steps % 3 == 0:
            told = late.pop(0)
            engine.stop(told.id, told.index, told.num_tokens)
    engine.check_integrity()
    for index in (0, 1):
        mine, theirs = (
            [chunk for chunk in chunks if chunk.index == index] for chunks in (found, expected)
        )
        assert whole(mine) == whole(theirs)
    assert sorted(record.num_output_tokens for record in engine.records) == sorted(
        record.num_output_tokens for record in plain.records
    )


def test_stop_strings_need_a_tokenizer():
    asked = AddRequest(id="r", prompt=[1], params=SamplingParams(stop=("x",)), arrival_s=0.0)
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        RequestStream([asked])


def test_an_engine_is_told_where_a_sequence_ended():
    engine = make_engine()
    [prompt] = prompts_of([6])
    engine.add_tokens(prompt, SamplingParams(max_tokens=50, n=2, ignore_eos=True), request_id="r")
    while engine.num_steps < 6:
        engine.step()
    assert engine.stop("r", 1, 2)
    assert not engine.stop("r", 1, 2)
    ends = [event for event in engine.step() if isinstance(event, Chunk) and event.finish_reason]
    assert [(chunk.index, chunk.finish_reason, chunk.tokens) for chunk in ends] == [(1, "stop", ())]
    assert engine.records[-1].num_output_tokens == 2
    assert engine.has_requests
    engine.stop("r", 0, 1)
    assert not engine.has_requests
    engine.check_integrity()

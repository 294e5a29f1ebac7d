"""A recording run again: on torch here and in another process the same tokens and losses, anywhere
the same plans."""

import json
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest
from engines import BLOCK, WatchedDevice, adapter_directory, examples_of, greedy, prompts_of
from lengths import long_but
from peft_embeddings import Cell, made_by_peft
from recordings import plain_frames, steps_in, write_frames
from support import VOCAB, make_backbone
from typer.testing import CliRunner

from coserve.adapters.methods.lora import LoraConfig
from coserve.cli.main import app
from coserve.devices.base import WallClock
from coserve.devices.loading import torch_device
from coserve.devices.messages.steps import StepBatch, StepFailure, StepResult
from coserve.devices.process.wire import Call, Done
from coserve.devices.profiles.store import write_profile
from coserve.devices.recording.device import FrameWriter, RecordingDevice
from coserve.devices.sampling_params import SamplingParams
from coserve.engine.commands import AddRequest
from coserve.engine.config import EngineConfig
from coserve.engine.engine import Engine
from coserve.engine.recorded_lines import read_recording
from coserve.engine.recording import RecordingEngine, record
from coserve.engine.replay import replay
from coserve.errors import AdapterError, DataError, RequestError
from coserve.memory.tensors.paged_kv import kv_page_bytes
from coserve.scheduling.profile import Profile
from coserve.simulate.hardware import Hardware
from coserve.simulate.modelled_device import ModelledDevice
from coserve.simulate.roofline import roofline_profile
from coserve.tuning.config import OptimizerConfig, TuningConfig

NUM_PAGES = 50
# About what the tiny model takes here, so that the policy has something to decide.
HARDWARE = Hardware(name="here", flops_per_s=2e9, bytes_per_s=5e9, call_s=1e-5)
LORA: dict[str, Any] = {"r": 3, "target_modules": ["q_proj", "down_proj"]}
TUNING = TuningConfig(
    num_epochs=2,
    batch_size=2,
    max_pack_tokens=16,
    evaluate_every_steps=2,
    publish_every_steps=1,
    optimizer=OptimizerConfig(learning_rate=1e-2),
)


def profile() -> Profile:
    return roofline_profile(make_backbone(), HARDWARE)


def make_device():
    backbone = make_backbone()
    memory_bytes = NUM_PAGES * kv_page_bytes(backbone, BLOCK)
    return torch_device(backbone, memory_bytes=memory_bytes, block_tokens=BLOCK, profile=profile())


def test_an_engine_whose_adapters_were_saved_is_run_again(tmp_path):
    """Saving has commands carried in that would have come with the next step."""
    engine = record(
        Engine(WatchedDevice(make_device(), WallClock()), EngineConfig(block_tokens=BLOCK)),
        str(tmp_path / "file"),
    )
    engine.load_adapter("served", adapter_directory(**LORA))
    for name, prompt, num_tokens in zip("ab", prompts_of((9, 12)), (2, 12), strict=True):
        engine.add_tokens(prompt, greedy(num_tokens, ignore_eos=True), request_id=name)
    while "a" in engine.requests:
        engine.step()
    assert engine.log.has_commands
    engine.save_adapter("served", tmp_path / "saved")
    while engine.has_work:
        engine.step()
    engine.device.close()
    (tmp_path / "saved").rename(tmp_path / "kept")
    report = replay(*read_recording(tmp_path / "file"), make_device())
    assert report.plans_equal and report.tokens_equal, report.diverged
    assert not (tmp_path / "saved").exists()


def out_of_memory_once(device: WatchedDevice) -> None:
    """In the first step with an optimizer step, which had been made, and tokens of requests, which
    had not come."""

    def fail(batch: StepBatch) -> StepFailure | None:
        if (
            batch.windows
            and batch.requests
            and len(device.batches) > 20
            and not any(r.failure for r in device.results)
        ):
            return StepFailure(message="out of memory")
        return None

    device.fail = fail


def run_eventfully(engine: RecordingEngine, parent: Path) -> None:
    """Requests of all kinds, adapters, jobs that publish, evaluate, pause, resume from a
    checkpoint, and too few pages.
    """
    engine.load_adapter("served", adapter_directory(**LORA))
    with pytest.raises(AdapterError):
        engine.load_adapter("broken", "/nowhere")
    for number, prompt in enumerate(prompts_of((30, 17, 25, 9, 41, 3))):
        params = [
            greedy(30, logprobs=1, prompt_logprobs=2),
            SamplingParams(max_tokens=40, temperature=1.0, frequency_penalty=0.3, seed=number),
            SamplingParams(max_tokens=25, top_p=0.8, min_tokens=20, n=2),
        ][number % 3]
        engine.add_tokens(
            prompt, params, adapter="served" if number % 2 else None, request_id=str(number)
        )
    with pytest.raises(RequestError):
        engine.add_tokens([], greedy())
    engine.submit_examples(
        examples_of((9, 14, 5, 11)),
        TUNING,
        adapter=LoraConfig(r=3, target_modules="all-linear"),
        validation=examples_of((6,), seed=9),
        job_id="job",
        name="mine",
    )
    for number in range(25):
        if number == 10:  # read by another thread while steps run
            load = engine.begin_load("late", adapter_directory(**LORA))
            reading = Thread(target=load.read)
            reading.start()
        engine.step()
    reading.join()
    engine.finish_load(load)
    engine.add_tokens(
        prompts_of((7,))[0], greedy(20, ignore_eos=True), adapter="late", request_id="late"
    )
    while not any(request.num_output > 2 for request in engine.requests.members("late")):
        engine.step()
    assert engine.stop("late", 0, 2)
    engine.cancel("3")
    engine.pause_job("job")
    for _ in range(5):
        engine.step()
    engine.resume_job("job")
    while engine.has_work:
        engine.step()
        if engine.jobs["job"].num_steps_done == 1 and "again" not in engine.jobs:
            directory = engine.checkpoint("job").write(parent)
            engine.ensure_adapter("served", adapter_directory(**LORA))
            engine.submit_examples(
                examples_of((9, 14, 5, 11)),
                TUNING,
                validation=examples_of((6,), seed=9),
                job_id="again",
                checkpoint=directory,
            )
            engine.add_tokens(prompts_of((9,))[0], greedy(4), adapter="mine")
    engine.unload_adapter("served")
    engine.step()
    engine.forget_job("job")
    engine.step()


@pytest.fixture(scope="module")
def recording(tmp_path_factory) -> Path:
    parent = tmp_path_factory.mktemp("recorded")
    watched = WatchedDevice(make_device(), WallClock())
    out_of_memory_once(watched)
    plain = Engine(
        watched, EngineConfig(block_tokens=BLOCK, tpot_s=0.05, ttft_s=0.5), end_tokens={7, 90}
    )
    engine = record(plain, str(parent / "file"))
    run_eventfully(engine, parent / "checkpoints")
    stats = engine.stats()
    assert stats.num_preemptions and stats.num_packs_dropped
    assert any(result.failure for result in watched.results)
    assert {job.state for job in engine.jobs.values()} == {"succeeded"}
    engine.device.close()
    return parent / "file"


def run_again(file: Path, *options: str) -> tuple[int, dict, str]:
    result = CliRunner().invoke(app, ["replay", str(file), *options])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, json.loads(result.stdout.splitlines()[-1]), result.stderr


@pytest.mark.parametrize("device", long_but("torch", of=["torch", "process"]))
def test_on_torch_tokens_and_losses_are_the_same(recording, device):
    status, report, _ = run_again(recording, "--device", device)
    _, lines = read_recording(recording)
    num_steps = len(steps_in(lines))
    assert report == {
        "steps": num_steps,
        "plans_equal": True,
        "tokens_equal": True,
        "max_loss_difference": 0.0,
    }
    assert num_steps > 50 and status == 0


def test_on_a_modelled_device_plans_are_the_same(recording):
    status, report, _ = run_again(recording, "--device", "modelled")
    assert report.pop("steps") > 50 and status == 0
    assert report == {"plans_equal": True, "tokens_equal": None, "max_loss_difference": None}


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
def test_adapters_with_more_tokens_than_the_model_are_run_again(tmp_path):
    """One that was loaded, and one that a job has made; a token that only they have is none of the
    model's."""
    made, new = made_by_peft(Cell(tied=False, resized=True)), VOCAB + 3
    assert not isinstance(made, str)
    plain = Engine(WatchedDevice(make_device(), WallClock()), EngineConfig(block_tokens=BLOCK))
    engine = record(plain, str(tmp_path / "file"))
    engine.load_adapter("wide", str(made[1]))
    engine.submit_examples(examples_of((9, 7)), TUNING, adapter="wide", job_id="more", name="more")
    only = SamplingParams(max_tokens=2, allowed_token_ids=(new,))
    for name in ("wide", "more", None):
        engine.add_tokens([1, 2], only if name else greedy(2), adapter=name, request_id=f"{name}")
        while engine.has_work:
            engine.step()
    engine.device.close()
    status, report, message = run_again(tmp_path / "file", "--device", "torch")
    assert status == 0, message
    assert report["plans_equal"] and report["tokens_equal"]
    frames = plain_frames(tmp_path / "file")
    results = [
        frame["reply"] for frame in frames if frame["type"] == "Done" and frame["reply"] is not None
    ]
    collected = [result["tokens"] for result in results if result["type"] == "StepResult"]
    next(tokens["None/0"] for tokens in collected if "None/0" in tokens)["token"] = new
    write_frames(tmp_path / "wrong", frames)
    status, _, message = run_again(tmp_path / "wrong", "--device", "torch")
    assert status == 1 and f"token {new} was recorded for request 'None/0'" in message


def test_a_recording_needs_no_other_files(recording):
    """Adapters and checkpoints are in it."""
    _, lines = read_recording(recording)
    named = [line.command for line in lines if isinstance(line, Call)]
    assert any(getattr(command, "checkpoint", None) for command in named)
    assert any(getattr(command, "version", "").startswith("served") for command in named)
    for path in (recording.parent / "checkpoints").rglob("*"):
        if path.is_file():
            path.unlink()
    assert run_again(recording)[0] == 0


def changed(recording: Path, file: Path, change) -> Path:
    """The recording with other lines."""
    header, lines = read_recording(recording)
    recorder = FrameWriter(file)
    recorder.write(header)
    for line in lines:
        recorder.write(change(line))
    recorder.close()
    return file


def test_another_plan_is_found_and_said(recording, tmp_path):
    def change(line):
        if isinstance(line, AddRequest) and line.id == "1":
            return msgspec.structs.replace(
                line, prompt=[*line.prompt[:-1], (line.prompt[-1] + 1) % 97]
            )
        return line

    status, report, error = run_again(
        changed(recording, tmp_path / "f", change), "--device", "modelled"
    )
    assert status == 1 and not report["plans_equal"] and report["steps"] < 20
    assert "after 0 equal steps: step 0 had commands" in error and ", now " in error


def test_other_tokens_and_losses_are_found(recording, tmp_path):
    def change(line):
        if isinstance(line, Done) and isinstance(line.reply, StepResult) and line.reply.packs:
            packs = {
                job: msgspec.structs.replace(sums, loss=sums.loss + 0.25 * sums.num_trained)
                for job, sums in line.reply.packs.items()
            }
            return Done(line.call, msgspec.structs.replace(line.reply, packs=packs))
        return line

    status, report, _ = run_again(changed(recording, tmp_path / "f", change))
    assert (
        report["max_loss_difference"] == pytest.approx(0.25)
        and report["plans_equal"]
        and status == 0
    )


def test_the_end_of_a_killed_process_is_no_error(recording, tmp_path):
    whole = recording.read_bytes()
    for share in (0.3, 0.6):
        (tmp_path / "cut").write_bytes(whole[: int(share * len(whole))])
        status, report, _ = run_again(tmp_path / "cut", "--device", "modelled")
        assert status == 0 and report["plans_equal"]


def test_the_end_of_a_process_between_what_a_command_read_and_the_command_is_no_error(tmp_path):
    engine = record(Engine(make_device(), EngineConfig(block_tokens=BLOCK)), str(tmp_path / "file"))
    engine.add_tokens(range(1, 4), greedy(3))  # any sequence
    while engine.has_work:
        engine.step()
    engine.load_adapter("late", adapter_directory(r=3, target_modules=["q_proj"]))
    engine.device.close()
    frames = plain_frames(tmp_path / "file")
    place = max(number for number, frame in enumerate(frames) if frame.get("type") == "Read")
    write_frames(tmp_path / "cut", frames[: place + 1])
    header, lines = read_recording(tmp_path / "cut")
    report = replay(header, lines, make_device())
    assert report.plans_equal and report.tokens_equal and report.diverged is None


def test_what_is_no_recording_or_of_another_device_is_refused(recording, tmp_path):
    (tmp_path / "text").write_text("hello")
    with pytest.raises(DataError, match="is not a recording"):
        read_recording(tmp_path / "text")
    (tmp_path / "other").write_bytes(b"\xff" * 100)  # as a length, more than any memory
    with pytest.raises(DataError, match="is not a recording"):
        read_recording(tmp_path / "other")
    header, lines = read_recording(recording)
    backbone = make_backbone()
    small = torch_device(
        backbone,
        memory_bytes=8 * kv_page_bytes(backbone, BLOCK),
        block_tokens=BLOCK,
        profile=profile(),
    )
    with pytest.raises(DataError, match="num_pages 50; this one has 8"):
        replay(header, lines, small)


def test_a_recording_is_never_overwritten(tmp_path):
    for name in ("file", "file.1"):
        engine = record(
            Engine(make_device(), EngineConfig(block_tokens=BLOCK)), str(tmp_path / "file")
        )
        engine.add_tokens([1, 2], greedy(1))
        engine.step()
        engine.device.close()
        _, lines = read_recording(tmp_path / name)
        assert len(list(lines)) > 4
    with pytest.raises(DataError, match="cannot be written"):
        record(
            Engine(make_device(), EngineConfig(block_tokens=BLOCK)), str(tmp_path / "no" / "file")
        )


def test_adapters_may_be_loaded_after_others_whose_loading_began_beside_steps(tmp_path):
    engine = record(Engine(make_device(), EngineConfig(block_tokens=BLOCK)), str(tmp_path / "file"))
    abandoned = engine.begin_load("abandoned", adapter_directory(**LORA))
    beside = engine.begin_load("beside", adapter_directory(**LORA))
    assert abandoned is not None and beside is not None
    engine.load_adapter("first", adapter_directory(**LORA))
    engine.finish_load(beside.read())
    engine.ensure_adapter("second", adapter_directory(**LORA))
    for name in ("first", "beside", "second"):
        engine.add_tokens([1, 2], greedy(2), adapter=name)
    while engine.has_work:
        engine.step()
    engine.device.close()
    header, lines = read_recording(tmp_path / "file")
    report = replay(header, lines, make_device())
    assert report.plans_equal and report.tokens_equal, report.diverged


def test_a_replay_leaves_this_machines_profile_alone(tmp_path):
    """Though the recorded engine corrected its own: its device took ten times what the profile
    said."""
    slow = Hardware(name="slow", flops_per_s=2e8, bytes_per_s=5e8, call_s=1e-4)
    backbone, path = make_backbone(), tmp_path / "profile.json"

    def device() -> ModelledDevice:
        made = ModelledDevice(
            backbone, roofline_profile(backbone, slow), num_pages=NUM_PAGES, block_tokens=BLOCK
        )
        made.info = msgspec.structs.replace(made.info, profile=profile(), profile_path=str(path))
        return made

    write_profile(path, {}, profile())
    before = path.read_text()
    engine = record(
        Engine(device(), EngineConfig(block_tokens=BLOCK, ttft_s=60.0, tpot_s=10.0)),
        str(tmp_path / "file"),
    )
    while engine.num_steps < 520:
        if not engine.has_requests:
            engine.add_tokens([1, 2, 3], greedy(90))
        engine.step()
    engine.device.close()
    assert path.read_text() != before, "it has corrected its own"
    path.write_text(before)
    header, lines = read_recording(tmp_path / "file")
    report = replay(header, lines, device())
    assert (report.steps, report.plans_equal) == (520, True)
    assert path.read_text() == before


def lines_of(file: Path) -> list[Any]:
    return list(read_recording(file)[1])


def test_the_step_that_killed_the_process_is_in_the_recording(tmp_path):
    """It is there before the device runs it, and what came of it before anything else happens."""
    watched = WatchedDevice(make_device(), WallClock())
    engine = record(Engine(watched, EngineConfig(block_tokens=BLOCK)), str(tmp_path / "file"))
    seen: list[Any] = []

    def look(batch: StepBatch) -> None:
        seen.append(lines_of(tmp_path / "file")[-1])

    watched.fail = look
    engine.add_tokens([1, 2, 3], greedy(8))
    engine.step()
    assert steps_in(seen) == watched.batches

    device = RecordingDevice(watched, FrameWriter(tmp_path / "device"))
    device.submit(StepBatch(step=9))
    device.collect()
    (tmp_path / "headed").write_bytes(
        (tmp_path / "file").read_bytes() + (tmp_path / "device").read_bytes()
    )
    last = lines_of(tmp_path / "headed")[-1]
    assert isinstance(last, Done) and isinstance(last.reply, StepResult) and last.reply.step == 9
    device.close()
    engine.device.close()


def test_a_step_that_raised_an_error_raises_it_again_and_is_compared(tmp_path, monkeypatch):
    inner = make_device()
    engine = record(Engine(inner, EngineConfig(block_tokens=BLOCK)), str(tmp_path / "file"))
    engine.add_tokens([1, 2, 3], greedy(8))
    engine.step()
    collect = inner.collect

    def break_down():
        collect()
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(inner, "collect", break_down)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine.device.close()
    header, lines = read_recording(tmp_path / "file")
    report = replay(header, lines, make_device())
    assert (report.steps, report.plans_equal, report.diverged) == (2, True, None)


def test_tokens_that_did_not_come_are_a_difference_and_no_error(tmp_path):
    engine = record(Engine(make_device(), EngineConfig(block_tokens=BLOCK)), str(tmp_path / "file"))
    engine.add_tokens([1, 2, 3], greedy(3))
    engine.step()
    engine.device.close()
    device = make_device()
    collect = device.collect
    device.collect = lambda: msgspec.structs.replace(collect(), tokens={})
    header, lines = read_recording(tmp_path / "file")
    report = replay(header, lines, device)
    assert (report.steps, report.plans_equal, report.tokens_equal) == (1, True, False)


def test_a_recording_without_steps_says_nothing_about_plans(tmp_path):
    record(
        Engine(make_device(), EngineConfig(block_tokens=BLOCK)), str(tmp_path / "file")
    ).device.close()
    header, lines = read_recording(tmp_path / "file")
    report = replay(header, lines, make_device())
    assert (report.steps, report.plans_equal, report.diverged) == (
        0,
        False,
        "the recording has no step",
    )

"""A recording of anyone's is data: it names no file, method or size that `coserve replay` did not
expect."""

import os
import tempfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import count
from math import inf, nan
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from engines import BLOCK, adapter_directory, examples_of, greedy, prompts_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recordings import plain_frames, steps_in, write_frames
from support import make_backbone
from typer.testing import CliRunner

from coserve.adapters.methods.lora import LoraConfig
from coserve.cli.main import app
from coserve.devices.loading import torch_device
from coserve.devices.process.wire import Call
from coserve.engine.config import EngineConfig
from coserve.engine.engine import Engine
from coserve.engine.recorded_lines import read_recording
from coserve.engine.recording import record
from coserve.errors import CoserveError, DataError
from coserve.memory.tensors.paged_kv import kv_page_bytes
from coserve.simulate.hardware import Hardware
from coserve.simulate.roofline import roofline_profile
from coserve.tuning.config import OptimizerConfig, TuningConfig

# More of them with COSERVE_FUZZ_RECORDINGS, each time others.
_NUM_EXAMPLES = int(os.environ.get("COSERVE_FUZZ_RECORDINGS", "0"))
LORA: dict[str, Any] = {"r": 3, "target_modules": ["q_proj", "down_proj"]}
TUNING = TuningConfig(
    num_epochs=2, batch_size=2, max_pack_tokens=16, optimizer=OptimizerConfig(learning_rate=1e-2)
)
HARDWARE = Hardware(name="here", flops_per_s=2e9, bytes_per_s=5e9, call_s=1e-5)
# Deeper than msgspec's decoder goes.
_DEEP = msgspec.Raw(b"\x91" * 100_000 + b"\x90")
_HOSTILE: tuple[Any, ...] = (
    *(-1, 0, 1, 7, 2**31, 2**62, 2**63 - 1, -(2**63), 1e300, -1e300, nan, inf, -inf, True, None),
    *(
        "",
        "../../outside",
        "/tmp/outside",
        "job",
        "__class__",
        "shell\x00",
        b"",
        b"\xff" * 64,
        [],
        {},
        [-1],
        _DEEP,
    ),
)


@pytest.fixture(scope="module")
def recording(tmp_path_factory) -> Path:
    """Requests, adapters, a job, its checkpoint, and pages that came from another instance, in few
    steps."""
    parent = tmp_path_factory.mktemp("recorded")
    backbone = make_backbone()
    device = torch_device(
        backbone,
        memory_bytes=50 * kv_page_bytes(backbone, BLOCK),
        block_tokens=BLOCK,
        profile=roofline_profile(backbone, HARDWARE),
    )
    plain = Engine(
        device, EngineConfig(block_tokens=BLOCK, tpot_s=0.05, ttft_s=0.5), end_tokens={7, 90}
    )
    engine = record(plain, str(parent / "file"))
    engine.load_adapter("served", adapter_directory(**LORA))
    load = engine.begin_load("late", adapter_directory(**LORA))
    engine.finish_load(load.read())
    for number, prompt in enumerate(prompts_of((9, 5))):
        engine.add_tokens(
            prompt,
            greedy(6, logprobs=1),
            adapter="served" if number else None,
            request_id=str(number),
        )
    engine.submit_examples(
        examples_of((9, 5)), TUNING, adapter=LoraConfig(**LORA), job_id="job", name="mine"
    )
    while engine.has_work:
        engine.step()
        if engine.jobs["job"].num_steps_done == 1 and "again" not in engine.jobs:
            directory = engine.checkpoint("job").write(parent)
            engine.pause_job("job")
            engine.resume_job("job")
            engine.submit_examples(
                examples_of((9, 5)), TUNING, job_id="again", checkpoint=directory
            )
            engine.cancel("0")
    engine.forget_job("job")
    engine.unload_adapter("served")
    engine.device.close()
    return parent / "file"


def find(frames: list[Any], is_wanted: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    return next(frame for frame in frames if is_wanted(frame))


def run(file: Path, device: str = "modelled") -> tuple[int, str]:
    """Status and message of a replay, as its user sees them; anything but an error of coserve's own
    is a traceback."""
    result = CliRunner().invoke(app, ["replay", str(file), "--device", device])
    if isinstance(result.exception, CoserveError):
        return 1, str(result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(
        result.exception
    )
    return result.exit_code, result.stderr


@pytest.fixture
def closed(tmp_path, monkeypatch) -> Iterator[Path]:
    """Temporary files come into a directory some levels down; what a replay leaves anywhere around
    it is a fault."""
    inner = tmp_path / "closed" / "inner" / "temporary"
    inner.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(inner))
    yield tmp_path
    assert sorted(path.name for path in (tmp_path / "closed").rglob("*")) == ["inner", "temporary"]


def test_it_is_replayed_as_it_was(recording, closed):
    for device in ("modelled", "torch"):
        assert run(recording, device)[0] == 0
    _, lines = read_recording(recording)
    found = list(lines)
    kinds = {type(line).__name__ for line in found}
    assert kinds >= {
        "ReadFiles",
        "LoadAdapter",
        "StartJob",
        "PauseJob",
        "CancelRequest",
        "UnloadAdapter",
        "CopyCheckpoint",
    }
    assert len(steps_in(found)) < 60


@pytest.mark.parametrize(
    "name", ["../../outside", "../outside", "/tmp/outside", "inner/outside", "outside", "", "."]
)
@pytest.mark.parametrize("number", range(3))
def test_no_file_of_another_name_is_written(recording, closed, number, name):
    """Adapters that are read at once and beside steps, and a checkpoint."""
    frames = plain_frames(recording)
    with_files = [frame for frame in frames if frame.get("type") == "Read" and frame["directories"]]
    assert len(with_files) == 3
    with_files[number]["directories"][0][name] = b"owned"
    status, message = run(write_frames(closed / "file", frames))
    assert status == 1 and "is damaged at frame" in message and "Invalid enum value" in message


@pytest.mark.parametrize("kind", ["Shutdown", "__init__", "step", "OpenVersion", "close"])
def test_no_other_command_is_handled(recording, closed, kind):
    frames = plain_frames(recording)
    find(frames, lambda frame: frame["type"] == "PauseJob")["type"] = kind
    status, message = run(write_frames(closed / "file", frames))
    assert status == 1 and f"Invalid value '{kind}'" in message


@pytest.mark.parametrize("device", ["torch", "process", "modelled"])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_pages", 2**40, "num_pages must be"),
        ("num_pages", 2**23, "bytes of memory"),
        ("num_host_pages", 2**23, "bytes of memory"),
        ("block_tokens", 2**20, "block_tokens must be"),
        ("block_tokens", 2**15, "of a device with page_bytes"),
        ("threads", 10**6, "threads must be"),
        ("max_positions", 10**6, "positions are more than"),
        ("page_bytes", 64, "of a device with page_bytes"),
        ("model", "nobody/nothing", "is not a model on this machine"),
        ("model", "dummy:llama-3.1-8b", "of a device with"),
        ("model", "../../nowhere", "is not a directory"),
    ],
)
def test_sizes_are_checked_before_memory_is_taken(
    recording, closed, monkeypatch, device, name, value, message
):
    frames = plain_frames(recording)
    frames[0]["info"][name] = value
    monkeypatch.setattr(
        "coserve.devices.torch.process_memory.available_bytes", lambda device: 1 << 30
    )
    if device != "modelled":
        monkeypatch.setattr("coserve.devices.loading.build_backbone", _unexpected)
        monkeypatch.setattr("coserve.devices.process.device.ProcessDevice.__init__", _unexpected)
    status, said = run(write_frames(closed / "file", frames), device)
    assert status == 1
    if device != "modelled" or "memory" not in message:  # a modelled device takes none
        assert message in said


def _unexpected(*_: Any, **__: Any) -> None:
    raise AssertionError("a model was loaded")


def test_profiles_have_finite_numbers(recording, closed):
    for value in (nan, inf, 1e200):
        frames = plain_frames(recording)
        frames[0]["info"]["profile"]["forward"]["seconds"][-1] = value
        status, message = run(write_frames(closed / "file", frames))
        assert status == 1 and "profile.forward.seconds must have finite numbers" in message


def test_tokens_that_the_model_does_not_have_do_not_reach_the_device(recording, closed):
    for token in (-1, make_backbone().architecture.vocab_size, 2**40):
        frames = plain_frames(recording)
        ended = find(
            frames, lambda frame: frame["type"] == "Done" and (frame["reply"] or {}).get("tokens")
        )
        next(iter(ended["reply"]["tokens"].values()))["token"] = token
        status, message = run(write_frames(closed / "file", frames), "torch")
        assert status == 1 and f"token {token} was recorded" in message


def test_a_damaged_line_is_an_error_wherever_it_is(recording, closed):
    """Also in the middle of a step, where the engine handles errors of its device."""
    whole = plain_frames(recording)
    for number in range(1, len(whole)):
        frames = [*whole[:number], {"type": "nothing"}, *whole[number:]]
        if number % 7 == 0 or whole[number]["type"] in ("Call", "Done"):
            status, message = run(write_frames(closed / "file", frames))
            assert status == 1 and f"is damaged at frame {number + 1}" in message


# -- all of it at once ----------------------------------------------------------------------


def places_in(value: Any) -> list[tuple[Any, Any]]:
    """Every container within a value, with each of its keys or indices."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        each = waiting.pop()
        keys = (
            list(each)
            if isinstance(each, dict)
            else range(len(each))
            if isinstance(each, list)
            else ()
        )
        found += [(each, key) for key in keys]
        waiting += [each[key] for key in keys]
    return found


def change_value(random: Random, frames: list[Any]) -> None:
    container, key = random.choice(
        places_in(random.choice(frames[:1] if random.random() < 0.2 else frames))
    )
    old = container[key]
    if isinstance(old, int) and random.random() < 0.5:
        container[key] = old + random.choice((-1, 1, 2, 1000))
    else:
        container[key] = random.choice(_HOSTILE)


def drop_or_add(random: Random, frames: list[Any]) -> None:
    container, key = random.choice(places_in(random.choice(frames)))
    if isinstance(container, list) and random.random() < 0.7:
        container.insert(key, deepcopy(random.choice(container)))
    elif isinstance(container, dict) and random.random() < 0.7:
        container[random.choice(("../outside", "x", "job", "0"))] = deepcopy(container[key])
    else:
        del container[key]


def swap_frames(random: Random, frames: list[Any]) -> None:
    a, b = random.randrange(len(frames)), random.randrange(len(frames))
    frames[a], frames[b] = frames[b], frames[a]


def repeat_frame(random: Random, frames: list[Any]) -> None:
    frames.insert(random.randrange(len(frames)), deepcopy(random.choice(frames)))


def drop_frame(random: Random, frames: list[Any]) -> None:
    del frames[random.randrange(len(frames))]


CHANGES = (
    change_value,
    change_value,
    change_value,
    drop_or_add,
    swap_frames,
    repeat_frame,
    drop_frame,
)


def changed_file(random: Random, file: Path, frames: list[Any]) -> Path:
    """A recording with some changes: of values, of lines, or of bytes."""
    frames = deepcopy(frames)
    for _ in range(random.randint(1, 3)):
        random.choice(CHANGES)(random, frames)
    write_frames(file, frames)
    if random.random() < 0.2:
        content = bytearray(file.read_bytes())
        for _ in range(random.randint(1, 8)):
            content[random.randrange(len(content))] = random.randrange(256)
        file.write_bytes(content)
    return file


_numbers = count(1)


@settings(
    max_examples=_NUM_EXAMPLES or 40,
    deadline=None,
    database=None,
    derandomize=not _NUM_EXAMPLES,
    suppress_health_check=list(HealthCheck),
)
@given(seed=st.integers(0, 2**48))
def test_changed_recordings_end_with_a_line(recording, closed, seed):
    random = Random(seed)
    file = changed_file(random, closed / "file", plain_frames(recording))
    status, message = run(file, "torch" if random.random() < 0.3 else "modelled")
    assert status in (0, 1) and (status == 0 or message.strip()), (seed, message)
    if _NUM_EXAMPLES and (number := next(_numbers)) % 100 == 0:
        print(f"{number:,} recordings", flush=True)


def test_a_recording_has_frames_of_the_kinds_that_are_changed(recording):
    _, lines = read_recording(recording)
    found = list(lines)
    assert steps_in(found) and any(
        isinstance(line, Call) and line.command not in steps_in(found) for line in found
    )
    with pytest.raises(DataError, match="is not a recording"):
        read_recording(Path(__file__))

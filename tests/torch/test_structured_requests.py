"""Requests whose output follows a grammar, with logits that know nothing of it, on every device."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import served
from engines import BLOCK, FAST, TickingClock, WatchedDevice, drain
from hostile_grammars import rules
from peft import LoraConfig, get_peft_model
from recordings import plain_frames, write_frames
from served import tokenizer

from coserve.devices.base import Device
from coserve.devices.grammars.grammar import CANNOT_FOLLOW, STATE_BYTES, TOO_MANY_STATES, Grammar
from coserve.devices.loading import torch_device
from coserve.devices.messages.commands import OpenRequest
from coserve.devices.messages.pages import SwapIn
from coserve.devices.messages.steps import StepFailure
from coserve.devices.process.device import ProcessDevice
from coserve.devices.sampling_params import SamplingParams
from coserve.devices.settings import DeviceSettings
from coserve.engine.config import EngineConfig
from coserve.engine.engine import Engine
from coserve.engine.grammars import MIN_STATES
from coserve.engine.recorded_lines import read_recording
from coserve.engine.recording import record
from coserve.engine.replay import replay as run_again
from coserve.engine.request import Chunk
from coserve.engine.vocabulary import TokenBytes
from coserve.errors import RequestError
from coserve.memory.tensors.paged_kv import kv_page_bytes
from coserve.models import Backbone, load_backbone
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.profile import Profile
from coserve.simulate.modelled_device import ModelledDevice
from coserve.simulate.roofline import roofline_profile

END = 0
PROMPT = [9, 40, 77]
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", None]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def is_person(text: str) -> bool:
    return jsonschema_rs.is_valid(PERSON, json.loads(text))


CASES: dict[str, tuple[Grammar, Callable[[str], object]]] = {
    "schema": (Grammar.json_schema(PERSON), is_person),
    "regex": (
        Grammar.regex(r"[a-f]{2,9}(-[0-9é日]{1,3})?"),
        re.compile(r"[a-f]{2,9}(-[0-9é日]{1,3})?").fullmatch,
    ),
    "choice": (Grammar.choice(["yes", "no", "日本"]), ["yes", "no", "日本"].__contains__),
    "gbnf": (Grammar.notation('root ::= "(" root? ")" | "x"'), re.compile(r"\(*x?\)*").fullmatch),
}


@cache
def backbone() -> Backbone:
    return load_backbone(str(served.model_directory()), dtype="float32")


@cache
def profile() -> Profile:
    return roofline_profile(backbone(), FAST)


def torch_here(
    num_pages: int = 600, num_host_pages: int = 0, measured: Profile | None = None
) -> Device:
    page_bytes = kv_page_bytes(backbone(), BLOCK)
    return torch_device(
        backbone(),
        memory_bytes=num_pages * page_bytes,
        host_memory_bytes=num_host_pages * page_bytes,
        block_tokens=BLOCK,
        profile=measured or profile(),
    )


@pytest.fixture(scope="module")
def process_device() -> Iterator[Device]:
    device = ProcessDevice(
        DeviceSettings(
            model=str(served.model_directory()),
            dtype="float32",
            device="cpu",
            threads=1,
            memory_bytes=600 * kv_page_bytes(backbone(), BLOCK),
            block_tokens=BLOCK,
            profile=profile(),
        )
    )
    yield device
    device.close()


def engine_on(device: Device, **named: Any) -> Engine:
    config = EngineConfig(block_tokens=BLOCK, tpot_s=1.0)
    settings: dict[str, Any] = {
        "tokenizer": tokenizer(),
        "end_tokens": (END,),
        "latency": LatencyModel(profile()),
    }
    return Engine(WatchedDevice(device, TickingClock()), config, **settings | named)


@pytest.fixture(params=["torch", "process", "modelled"])
def engine(request) -> Engine:
    if request.param == "process":
        return engine_on(request.getfixturevalue("process_device"))
    if request.param == "modelled":
        meta = load_backbone(str(served.model_directory()), device="meta", dtype="float32")
        return engine_on(ModelledDevice(meta, profile(), num_pages=600, block_tokens=BLOCK))
    return engine_on(torch_here())


def test_every_output_is_valid_whatever_the_logits(engine):
    requests = {}
    for name, (grammar, is_valid) in CASES.items():
        for seed in range(6):
            params = SamplingParams(
                max_tokens=300, seed=61 * seed, grammar=grammar, temperature=seed % 2 * 1.0
            )
            requests[engine.add(PROMPT, params)] = (name, is_valid)
    texts: dict[str, str] = {}
    reasons = {}
    for event in drain(engine):
        assert isinstance(event, Chunk)
        texts[event.request] = texts.get(event.request, "") + event.text
        if event.finish_reason is not None:
            reasons[event.request] = event.finish_reason
    for request, (name, is_valid) in requests.items():
        assert reasons[request] == "stop" or name == "gbnf", (name, texts[request])
        assert is_valid(texts[request]), (name, texts[request])
    assert len({texts[request] for request, (name, _) in requests.items() if name == "regex"}) > 1


@pytest.fixture(scope="module")
def here() -> Engine:
    return engine_on(torch_here())


@pytest.mark.parametrize(
    "more",
    [
        {"n": 3},
        {"logprobs": 2, "prompt_logprobs": 1},
        {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "logit_bias": {5: 10.0, 90: -100.0}},
        {"ignore_eos": True},
        {"min_tokens": 30},
        {"top_k": 5},
        {"top_p": 0.3},
        {"min_p": 0.5},
        {"stop": ("ü",)},
    ],
)
def test_output_is_valid_with_other_settings(here, more):
    params = SamplingParams(max_tokens=300, seed=4, grammar=Grammar.json_schema(PERSON), **more)
    for completion in here.generate([PROMPT, [5, 6]], params):
        assert completion.finish_reason == "stop" and is_person(completion.text)
        assert len(completion.logprobs) == (len(completion.tokens) if "logprobs" in more else 0)


def test_a_stop_string_and_the_limit_cut_the_output(here):
    grammar = Grammar.json_schema(PERSON)
    [whole] = here.generate([PROMPT], SamplingParams(max_tokens=300, seed=1, grammar=grammar))
    [stopped] = here.generate(
        [PROMPT], SamplingParams(max_tokens=300, seed=1, grammar=grammar, stop=('"age',))
    )
    assert (stopped.text, stopped.finish_reason) == (whole.text.partition('"age')[0], "stop")
    number = len(whole.tokens)
    for most, reason in ((number - 1, "length"), (number, "stop"), (number + 1, "stop")):
        [cut] = here.generate([PROMPT], SamplingParams(max_tokens=most, seed=1, grammar=grammar))
        assert (cut.tokens, cut.finish_reason) == (whole.tokens[:most], reason)
        assert whole.text.startswith(cut.text)


def test_what_may_continue_ends_where_the_model_ends_it(here):
    """A number has no end of its own: the end token is one of those that may come."""
    params = SamplingParams(
        max_tokens=40, seed=0, grammar=Grammar.regex("[0-9]+"), logit_bias={END: 100.0}
    )
    [completion] = here.generate([PROMPT], params)
    assert re.fullmatch("[0-9]", completion.text) and completion.finish_reason == "stop"
    assert len(completion.tokens) == 2 and completion.tokens[-1] == END, (
        "the first token must be a digit"
    )
    [long] = here.generate(
        [PROMPT], SamplingParams(max_tokens=9, grammar=params.grammar, logit_bias={END: -100.0})
    )
    assert re.fullmatch("[0-9]+", long.text) and long.finish_reason == "length"


def test_rows_beside_them_are_as_without_and_adapters_serve_them(here, tmp_path):
    plain = SamplingParams(max_tokens=12, temperature=0.0)
    [alone] = here.generate([PROMPT], plain)
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(served.model(), lora).save_pretrained(tmp_path)
    served.model.cache_clear()
    here.load_adapter("mine", str(tmp_path))
    masked = SamplingParams(max_tokens=300, seed=3, grammar=Grammar.json_schema(PERSON))
    names = [
        here.add(PROMPT, plain),
        here.add(PROMPT, masked),
        here.add(PROMPT, masked, adapter="mine"),
    ]
    found = {
        name: [event for event in drain(here) if isinstance(event, Chunk) and event.request == name]
        for name in names[:1]
    }
    assert tuple(token for chunk in found[names[0]] for token in chunk.tokens) == alone.tokens
    [other] = here.generate([PROMPT], masked, adapter="mine")
    assert is_person(other.text)


def _outputs(engine: Engine, number: int = 14) -> list[str]:
    texts = ["" for _ in range(number)]
    for seed in range(number):
        params = SamplingParams(
            max_tokens=300, seed=seed, grammar=Grammar.json_schema(PERSON), frequency_penalty=0.1
        )
        engine.add([*PROMPT, *range(5, 5 + 3 * seed)], params, request_id=str(seed))
    for event in drain(engine):
        assert isinstance(event, Chunk)
        texts[int(event.request)] += event.text
    return texts


def test_preempted_requests_continue_where_they_were():
    wide, narrow = engine_on(torch_here()), engine_on(torch_here(num_pages=90))
    expected = _outputs(wide)
    assert _outputs(narrow) == expected and narrow.num_preemptions and not wide.num_preemptions
    opened = [command for batch in _watched(narrow).batches for command in batch.commands]
    assert any(isinstance(command, OpenRequest) and command.output for command in opened)
    assert all(is_person(text) for text in expected)


def test_swapped_requests_continue_where_they_were():
    bus = roofline_profile(backbone(), _with_fast_bus())
    device = torch_here(num_pages=90, num_host_pages=100, measured=bus)
    swapping = engine_on(device, latency=LatencyModel(bus))
    assert _outputs(swapping) == _outputs(engine_on(torch_here()))
    sent = [command for batch in _watched(swapping).batches for command in batch.commands]
    assert any(isinstance(command, SwapIn) for command in sent)


def _with_fast_bus() -> Any:
    return replace(FAST, host_bytes_per_s=1e15)


def _watched(engine: Engine) -> WatchedDevice:
    assert isinstance(engine.device, WatchedDevice)
    return engine.device


def test_a_step_that_fails_changes_nothing():
    failing = engine_on(torch_here())
    device = _watched(failing)
    device.fail = lambda batch: (
        StepFailure(message="no memory")
        if len(batch.requests) > 1 and len(device.batches) % 3 == 0
        else None
    )
    assert _outputs(failing) == _outputs(engine_on(torch_here()))
    assert any(result.failure for result in device.results)


def test_a_request_that_no_token_continues_fails_alone(here):
    """The vocabulary of the engine lacks what the grammar asks for after many tokens."""
    poor = engine_on(torch_here(), tokenizer=None)
    pieces, special = TokenBytes(tokenizer()).all(backbone().architecture.vocab_size)
    poor.use_vocabulary([piece if b"z" not in piece else b"" for piece in pieces], special)
    bad = poor.add(PROMPT, SamplingParams(max_tokens=80, grammar=Grammar.regex("a{40}z")))
    good = poor.add(PROMPT, SamplingParams(max_tokens=80, grammar=Grammar.regex("b{40}y")))
    last = {
        event.request: event
        for event in drain(poor)
        if isinstance(event, Chunk) and event.finish_reason
    }
    assert (last[bad].finish_reason, last[good].finish_reason) == ("error", "stop")
    assert "none" in last[bad].error or "no text" in last[bad].error


def test_a_request_that_needs_more_of_its_grammar_than_there_is_room_for_fails_alone(
    here, monkeypatch
):
    monkeypatch.setattr("coserve.engine.grammars.MAX_TENANT_BYTES", 2 * MIN_STATES * STATE_BYTES)
    long: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}
    bad = here.add(
        PROMPT, SamplingParams(grammar=Grammar.regex(r"[0-9]{60}(\p{L}|\p{N}){900}"), **long)
    )
    good = here.add(PROMPT, SamplingParams(**long))
    last = {
        event.request: event
        for event in drain(here)
        if isinstance(event, Chunk) and event.finish_reason
    }
    assert (last[bad].finish_reason, last[good].finish_reason) == ("error", "length")
    assert last[bad].error.startswith(CANNOT_FOLLOW) and TOO_MANY_STATES in last[bad].error


def test_a_recorded_stream_gives_the_same_tokens_again(tmp_path):
    plain = engine_on(torch_here(num_pages=90), tokenizer=None)
    engine = record(plain, str(tmp_path / "file"))
    engine.use_vocabulary(*TokenBytes(tokenizer()).all(backbone().architecture.vocab_size))
    for seed in range(8):
        params = SamplingParams(
            max_tokens=300, seed=seed, grammar=Grammar.json_schema(PERSON), n=1 + seed % 2
        )
        engine.add([*PROMPT, *range(5, 5 + 3 * seed)], params)
    with pytest.raises(RequestError):
        engine.add(PROMPT, SamplingParams(grammar=Grammar.regex("(")))
    drain(engine)
    assert engine.num_preemptions
    engine.device.close()
    report = run_again(*read_recording(Path(tmp_path / "file")), torch_here(num_pages=90))
    assert report.plans_equal and report.tokens_equal, report


@pytest.mark.long
def test_a_recording_cannot_say_that_its_grammar_was_tried(tmp_path):
    """A grammar that crashes its compiler is tried in a sandbox again, so that the replay ends with
    a line."""
    file = tmp_path / "file"
    engine = record(engine_on(torch_here(), tokenizer=None), str(file))
    engine.use_vocabulary(*TokenBytes(tokenizer()).all(backbone().architecture.vocab_size))
    engine.add(PROMPT, SamplingParams(max_tokens=2, grammar=Grammar.choice(["yes"])))
    drain(engine)
    engine.device.close()
    frames = plain_frames(file)
    asked = next(frame for frame in frames if frame["type"] == "AddRequest")
    asked["params"]["grammar"].update(text=rules(9000), num_bytes=1)
    write_frames(file, frames)
    command = [sys.executable, "-m", "coserve", "replay", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "was recorded" in done.stderr, (
        done.returncode,
        done.stderr[-2000:],
    )


def test_what_is_missing_is_said_in_one_line(here, monkeypatch):
    params = SamplingParams(grammar=Grammar.choice(["a"]))
    with pytest.raises(RequestError, match="needs a tokenizer, and this model has none"):
        engine_on(torch_here(), tokenizer=None).add(PROMPT, params)
    with pytest.raises(RequestError, match="unclosed group"):
        here.add(PROMPT, SamplingParams(grammar=Grammar.regex("(")))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    bare = engine_on(torch_here())
    with pytest.raises(
        RequestError, match=r"^structured output needs the package llguidance: pip install"
    ):
        bare.add(PROMPT, params)
    assert [len(each.tokens) for each in bare.generate([PROMPT], SamplingParams(max_tokens=2))] == [
        2
    ]

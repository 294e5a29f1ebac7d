"""Engines on the tiny models of `support`, whose plans do not depend on how fast this machine
is."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any

import torch
from lockstep import LockstepDevice
from msgspec.structs import replace
from support import VOCAB, make_backbone, make_model, peft_twin, random_tokens
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from coserve.devices.base import Clock, Device
from coserve.devices.loading import torch_device
from coserve.devices.messages.commands import (
    CloseRequest,
    Command,
    CountCommands,
    DropVersion,
    OpenRequest,
    OpenVersion,
    Reply,
)
from coserve.devices.messages.jobs import PublishVersion
from coserve.devices.messages.steps import RequestRows, StepBatch, StepFailure, StepResult
from coserve.devices.sampling_params import SamplingParams
from coserve.devices.torch.device import TorchDevice
from coserve.engine.config import EngineConfig
from coserve.engine.engine import Engine
from coserve.engine.outbox import Event
from coserve.engine.request import Chunk
from coserve.engine.token_engine import TokenEngine
from coserve.memory.tensors.paged_kv import kv_page_bytes
from coserve.models import Backbone
from coserve.models.dividing import divided_backbone
from coserve.scheduling import LatencyModel
from coserve.scheduling.corrections import Corrections, StepOverhead
from coserve.scheduling.profile import Profile
from coserve.simulate.hardware import Hardware
from coserve.simulate.roofline import roofline_profile
from coserve.tuning.examples import Example

FAST = Hardware(name="fast", flops_per_s=1e14, bytes_per_s=1e14, call_s=1e-8)
BLOCK = 4


class _NoCorrections(Corrections):
    def observe(self, *args: Any, **named: Any) -> None:
        pass

    def observe_step(self, **named: Any) -> None:
        pass


class _NoOverhead(StepOverhead):
    def observe(self, *args: Any, **named: Any) -> None:
        pass


class FixedLatency(LatencyModel):
    """Believes its profile, whatever this machine's steps take."""

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile)
        self.corrections, self.overhead = _NoCorrections(), _NoOverhead()


class TickingClock:
    """A moment later each time."""

    def __init__(self, tick_s: float = 1e-6) -> None:
        self._now_s, self._tick_s = 0.0, tick_s

    def now(self) -> float:
        self._now_s += self._tick_s
        return self._now_s


@cache
def _profile(name: str, hardware: Hardware) -> Any:
    return roofline_profile(make_backbone(name), hardware)


class WatchedDevice:
    """A device as it is, what it was told and said, and failures on demand.

    versions: that it holds now. fail: says of a step, before it runs, what it fails of (None:
    nothing). refuse: called with each other command before it is done; raises what it fails of.
    """

    def __init__(self, device: Device, clock: Clock) -> None:
        self.inner, self.info, self.clock = device, device.info, clock
        self.versions: set[str] = set()
        self.commands: list[Command] = []
        self.batches: list[StepBatch] = []
        self.results: list[StepResult] = []
        self.fail: Callable[[StepBatch], StepFailure | None] = lambda batch: None
        self.refuse: Callable[[Command], None] = lambda command: None
        self._failed: StepResult | None = None
        self._new_pages: dict[
            str, tuple[int, ...]
        ] = {}  # told in steps that failed before the device saw them

    def execute(self, command: Command) -> Reply:
        if isinstance(command, CountCommands):
            return self.inner.execute(command)
        self.refuse(command)
        reply = self.inner.execute(command)
        self._note(command)
        return reply

    def submit(self, batch: StepBatch) -> None:
        self.batches.append(batch)
        failure = self.fail(batch)
        if failure is not None:
            for command in batch.commands:
                self.execute(command)
            for rows in batch.requests:
                self._new_pages[rows.request] = (
                    self._new_pages.get(rows.request, ()) + rows.new_pages
                )
            self._failed = StepResult(step=batch.step, failure=failure)
            return
        for command in batch.commands:
            self._note(command)
        self.inner.submit(replace(batch, requests=tuple(map(self._with_pages, batch.requests))))

    def collect(self) -> StepResult:
        result, self._failed = self._failed or self.inner.collect(), None
        self.results.append(result)
        return result

    def close(self) -> None:
        self.inner.close()

    def _with_pages(self, rows: RequestRows) -> RequestRows:
        return replace(rows, new_pages=self._new_pages.pop(rows.request, ()) + rows.new_pages)

    def _note(self, command: Command) -> None:
        self.commands.append(command)
        if isinstance(command, PublishVersion | OpenVersion):
            self.versions.add(command.version)
        elif isinstance(command, DropVersion):
            self.versions.discard(
                command.version
            )  # no error if an interrupted command had not made it
        elif isinstance(command, OpenRequest | CloseRequest):
            self._new_pages.pop(command.request, None)


def make_engine(
    name: str = "llama",
    *,
    dtype: str = "float32",
    kernels: str | None = None,
    num_pages: int = 600,
    num_host_pages: int = 0,
    hardware: Hardware = FAST,
    tokenizer: Any = None,
    num_ranks: int = 1,
    **settings: Any,
) -> Engine:
    """An engine on `support.make_backbone(name, dtype, kernels)`, which that many ranks hold
    together; settings: of EngineConfig, and `end_tokens`.
    """
    backbone = make_backbone(name, dtype, kernels)
    end_tokens = settings.pop("end_tokens", ())
    block = settings.setdefault("block_tokens", BLOCK)
    settings.setdefault("tpot_s", 1.0)
    latency = FixedLatency(_profile(name, hardware))
    page_bytes = kv_page_bytes(backbone, block)
    config = EngineConfig(
        memory_bytes=num_pages * page_bytes,
        host_memory_bytes=num_host_pages * page_bytes,
        **settings,
    )

    def device_of(own: Backbone) -> TorchDevice:
        own_page_bytes = kv_page_bytes(own, block)
        return torch_device(
            own,
            memory_bytes=num_pages * own_page_bytes,
            host_memory_bytes=num_host_pages * own_page_bytes,
            block_tokens=block,
            profile=latency.profile,
            deterministic=config.deterministic,
        )

    device: Device
    if num_ranks == 1:
        device = device_of(backbone)
    else:
        device = LockstepDevice(
            lambda group: device_of(divided_backbone(backbone, group)), num_ranks
        )
    watched = WatchedDevice(device, TickingClock())
    return Engine(watched, config, tokenizer=tokenizer, end_tokens=end_tokens, latency=latency)


def watched(engine: TokenEngine) -> WatchedDevice:
    """The device of an engine that `make_engine` made."""
    assert isinstance(engine.device, WatchedDevice)
    return engine.device


def prompts_of(lengths: Iterable[int], seed: int = 0) -> list[list[int]]:
    return [
        random_tokens(length, seed + 1000 * index).tolist() for index, length in enumerate(lengths)
    ]


def examples_of(lengths: Iterable[int], seed: int = 0) -> list[Example]:
    """Examples of these lengths, with some tokens that are not trained on."""
    rng = Random(seed)
    return [
        Example(
            tokens=tuple(rng.choices(range(VOCAB), k=length)),
            trained=tuple(rng.random() < 0.7 or index == length - 1 for index in range(length)),
        )
        for length in lengths
    ]


def expected_tokens(
    prompt: Sequence[int], max_tokens: int, name: str = "llama", **lora: Any
) -> tuple[int, ...]:
    """What transformers' greedy search says; lora: settings of `peft_twin`."""
    return _expected(
        name, tuple(prompt), max_tokens, tuple(sorted((k, _frozen(v)) for k, v in lora.items()))
    )


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@cache
def _expected(
    name: str, prompt: tuple[int, ...], max_tokens: int, lora: tuple[Any, ...]
) -> tuple[int, ...]:
    model = oracle(name, lora)
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return tuple(out[0, len(prompt) :].tolist())


@cache
def oracle(name: str, lora: tuple[Any, ...] = ()) -> Any:
    """The transformers or PEFT model."""
    if not lora:
        return make_model(name)
    settings: dict[str, Any] = {
        key: list(value) if isinstance(value, tuple) else value for key, value in lora
    }
    return peft_twin(name, **settings)[0].eval()


def adapter_directory(name: str = "llama", **lora: Any) -> str:
    """Where `peft_twin(name, **lora)` is saved by PEFT."""
    directory = Path(mkdtemp(prefix="coserve-served-"))
    peft_twin(name, **lora)[0].save_pretrained(directory)
    return str(directory)


def greedy(max_tokens: int = 8, **named: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **named)


def drain(engine: TokenEngine, *, most_steps: int = 3000) -> list[Event]:
    """Step until no request is left, with every invariant checked; the events."""
    events: list[Event] = []
    for _ in range(most_steps):
        if not engine.has_requests:
            return events + engine.step()
        events += engine.step()
        engine.check_integrity()
    raise AssertionError(f"requests are left after {most_steps} steps: {engine.stats()}")


def tokens_by_request(events: Iterable[Event]) -> dict[str, tuple[int, ...]]:
    """What came of each request (of its first sequence)."""
    found: dict[str, tuple[int, ...]] = {}
    for event in events:
        if isinstance(event, Chunk) and event.index == 0:
            found[event.request] = found.get(event.request, ()) + event.tokens
    return found


def assert_nothing_is_held(engine: TokenEngine) -> None:
    """Every page is free or a cached prefix, and those can be had."""
    engine.check_integrity()
    assert not engine.has_requests
    owners = engine.pool.num_pages_by_owner()
    assert owners.get("kv", 0) == engine.cache.prefixes.num_evictable
    engine.cache.evict(engine.pool.num_pages)
    assert engine.pool.num_free == engine.pool.num_pages - owners.get("activations", 0)
    assert not engine.stats().num_host_pages_used


@cache
def word_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of `VOCAB` tokens: most of ASCII's characters, and the bytes of
    U+2028."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [letter for letter in alphabet if letter.isascii()]
    vocab = {letter: token for token, letter in enumerate(["<end>", *"ĠĊâĢ¨", *letters][:VOCAB])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")

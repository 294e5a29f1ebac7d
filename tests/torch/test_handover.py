"""Prompts that another instance computes: two engines in one process."""

import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from engines import (
    BLOCK,
    FAST,
    WatchedDevice,
    adapter_directory,
    assert_nothing_is_held,
    drain,
    examples_of,
    expected_tokens,
    greedy,
    make_engine,
    prompts_of,
    tokens_by_request,
    watched,
)
from lengths import long_but
from random_plans import random_policy
from support import make_backbone, random_tokens

from coserve.adapters.methods.lora import LoraConfig
from coserve.devices.base import WallClock
from coserve.devices.loading import torch_device
from coserve.devices.messages.commands import ImportPages
from coserve.devices.sampling_params import SamplingParams
from coserve.engine.command_log import LostCommandError
from coserve.engine.config import EngineConfig
from coserve.engine.engine import Engine
from coserve.engine.outbox import Event
from coserve.engine.recorded_lines import read_recording
from coserve.engine.recording import record
from coserve.engine.replay import replay
from coserve.engine.request import Chunk
from coserve.engine.token_engine import TokenEngine
from coserve.errors import CoserveError, DeviceMemoryError
from coserve.handover.decode import DecodeEnd
from coserve.handover.messages import ComputePrompt, ForgetPrompt
from coserve.handover.prefill import PrefillEnd
from coserve.handover.transport import Listener, LocalTransport, connect, local_pair
from coserve.memory.tensors.page_files import PageFiles
from coserve.memory.tensors.paged_kv import PagedKv, kv_page_bytes
from coserve.protocol.run_directory import (
    clear_socket_directories,
    make_pages_directory,
    make_socket_directory,
    socket_address,
)
from coserve.simulate.modelled_device import ModelledDevice
from coserve.simulate.roofline import roofline_profile
from coserve.tuning.config import OptimizerConfig, TuningConfig

# On the tiny model copying never pays with a bus that is as fast as this one's.
FAST_BUS = replace(FAST, host_bytes_per_s=1e15)
LENGTHS = (5, 1, 17, 9, 30, 4, 13, 40)
NUM_TOKENS = 9


class Pair:
    """A decode instance and a prefill instance. Time passes when it is told to: `now_s`.

    is_there: whether the prefill instance can be found; runs: whether it takes steps.
    """

    def __init__(
        self, directory: Path, decode: Engine, prefill: Engine, *, min_tokens: int | None = 1
    ) -> None:
        self.decode, self.prefill, self.directory = decode, prefill, directory
        self.now_s, self.is_there, self.runs = 0.0, True, True
        directory.mkdir(exist_ok=True)
        self._connecting: list[LocalTransport] = []
        self.ends: list[LocalTransport] = []
        self.prefill_end = PrefillEnd(prefill, self._accept)
        self.decode_end = DecodeEnd(
            decode, self._connect, directory, min_tokens=min_tokens, now=lambda: self.now_s
        )
        self.meet()

    def _connect(self) -> LocalTransport:
        if not self.is_there:
            raise FileNotFoundError(2, "No such file or directory")
        mine, other = local_pair()
        self._connecting.append(other)
        return mine

    def _accept(self) -> list[Any]:
        found, self._connecting = self._connecting, []
        self.ends += found
        return found

    def meet(self) -> None:
        """Exchange messages between two steps."""
        for end in (self.decode_end, self.prefill_end, self.decode_end):
            if end is not self.prefill_end or self.runs:
                end.poll()

    def add(self, prompt: Sequence[int], params: SamplingParams, **named: Any) -> str:
        name = self.decode.add_tokens(prompt, params, **named)
        self.decode_end.added(name)
        return name

    def step(self) -> list[Event]:
        if self.runs:
            self.prefill_end.poll()
            assert self.prefill_end.take(self.prefill.step()) == []
            self.prefill.check_integrity()
        self.decode_end.poll()
        events = self.decode_end.take(self.decode.step())
        self.decode.check_integrity()
        return events

    def drain(self) -> list[Event]:
        """Step until no request waits for anything."""
        events: list[Event] = []
        for _ in range(2000):
            if not self.decode.has_requests:
                break
            events += self.step()
        events += self.step()
        self.meet()
        if self.runs:
            drain(self.prefill)
        assert not self.decode.has_requests
        return events

    def die(self) -> None:
        """The prefill instance is killed."""
        for end in self.ends:
            end.close()
        self.is_there = self.runs = False

    def assert_nothing_is_left(self) -> None:
        assert not [path for path in self.directory.iterdir() if path.name.startswith("pages")]
        assert_nothing_is_held(self.decode)
        if self.runs:
            assert_nothing_is_held(self.prefill)

    def counts(self) -> tuple[int, int]:
        stats = self.decode_end.stats()
        assert stats is not None
        return stats.num_handed_over, stats.num_not_handed_over


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path, make_engine(), make_engine())


def num_rows_run(engine: TokenEngine) -> int:
    return sum(len(rows.tokens) for batch in watched(engine).batches for rows in batch.requests)


def imported(engine: TokenEngine) -> int:
    commands = watched(engine).commands
    return sum(len(command.pages) for command in commands if isinstance(command, ImportPages))


# -- outputs ------------------------------------------------------------------------------


def test_greedy_tokens_are_those_of_one_instance_and_prompts_run_elsewhere(pair):
    asked = {pair.add(prompt, greedy(NUM_TOKENS)): prompt for prompt in prompts_of(LENGTHS)}
    got = tokens_by_request(pair.drain())
    for request, prompt in asked.items():
        assert got[request] == expected_tokens(prompt, NUM_TOKENS), len(prompt)
    full = [(length - 1) // BLOCK for length in LENGTHS]
    assert pair.counts() == (sum(number > 0 for number in full), 0)
    assert imported(pair.decode) == sum(full)
    decoded = len(LENGTHS) * (NUM_TOKENS - 1)
    assert num_rows_run(pair.decode) == sum(LENGTHS) - BLOCK * sum(full) + decoded
    pair.assert_nothing_is_left()


@pytest.mark.parametrize(
    "num_ranks", long_but((2, 1), (1, 2), of=[(2, 1), (1, 2), (2, 4)]), ids=str
)
def test_instances_may_have_different_numbers_of_ranks(tmp_path, num_ranks):
    pair = Pair(tmp_path, *[make_engine(num_ranks=each) for each in num_ranks])
    asked = {pair.add(prompt, greedy(NUM_TOKENS)): prompt for prompt in prompts_of(LENGTHS)}
    got = tokens_by_request(pair.drain())
    for request, prompt in asked.items():
        assert got[request] == expected_tokens(prompt, NUM_TOKENS), len(prompt)
    assert imported(pair.decode) == sum((length - 1) // BLOCK for length in LENGTHS)
    pair.assert_nothing_is_left()
    for engine in (pair.decode, pair.prefill):
        engine.device.close()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=7, logprobs=3),
        SamplingParams(
            max_tokens=NUM_TOKENS,
            temperature=0.8,
            top_p=0.9,
            repetition_penalty=1.2,
            n=3,
            logprobs=1,
        ),
        SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, logprobs=2, prompt_logprobs=2),
    ],
    ids=["seeded", "penalized", "scored"],
)
def test_everything_that_comes_of_a_request_is_that_of_one_instance(tmp_path, params):
    """Bit for bit."""
    one = make_engine(deterministic=True)
    both = Pair(tmp_path, make_engine(deterministic=True), make_engine(deterministic=True))
    for prompt in prompts_of(LENGTHS):
        one.add_tokens(prompt, params)
        both.add(prompt, params)
    assert chunks_by_sequence(drain(one)) == chunks_by_sequence(both.drain())
    assert imported(both.decode) > 0 or params.prompt_logprobs is not None
    both.assert_nothing_is_left()


def chunks_by_sequence(events: Sequence[Event]) -> dict[tuple[str, int], list[Any]]:
    found: dict[tuple[str, int], list[Any]] = {}
    for event in events:
        assert isinstance(event, Chunk)
        told = (event.tokens, event.logprobs, event.prompt_logprobs, event.finish_reason)
        found.setdefault((event.request, event.index), []).append(told)
    return found


def test_adapters_go_along_in_the_version_that_a_request_names(pair):
    pair.decode.load_adapter("a", adapter_directory(r=3))
    pair.decode.load_adapter("b", adapter_directory(r=5))
    asked = {}
    for number, prompt in enumerate(prompts_of(LENGTHS)):
        label, rank = (("a", 3), ("b@0", 5), (None, 0))[number % 3]
        asked[pair.add(prompt, greedy(NUM_TOKENS), adapter=label)] = prompt, rank
    got = tokens_by_request(pair.drain())
    for request, (prompt, rank) in asked.items():
        lora: dict[str, Any] = {"r": rank} if rank else {}
        assert got[request] == expected_tokens(prompt, NUM_TOKENS, **lora), request
    assert pair.counts()[1] == 0 and imported(pair.decode) > 0
    pair.assert_nothing_is_left()


def test_what_a_job_here_has_just_published_goes_along_too(pair):
    prompt, answers = prompts_of([30])[0], {}
    events: list[Event] = []
    for name in ("first", "second"):
        job = pair.decode.submit_examples(
            examples_of((9, 14, 5, 11)),
            TuningConfig(
                num_epochs=2, max_pack_tokens=16, optimizer=OptimizerConfig(learning_rate=0.3)
            ),
            adapter=LoraConfig(r=2) if name == "first" else "first",
            name=name,
        )
        while not pair.decode.jobs[job].is_terminal:
            pair.step()
        answers[pair.add(prompt, greedy(NUM_TOKENS), adapter=name)] = name
        events += pair.drain()
    assert pair.counts() == (2, 0)
    pair.decode.cache.evict(pair.decode.pool.num_pages)
    alone = {
        pair.decode.add_tokens(prompt, greedy(NUM_TOKENS), adapter=name): name
        for name in answers.values()
    }
    got, expected = tokens_by_request(events), tokens_by_request(drain(pair.decode))
    assert [got[name] for name in answers] == [expected[name] for name in alone]
    assert len({*got.values()}) == 2, "the versions differ"


def test_what_is_known_here_is_not_asked_for_and_what_is_known_there_is_not_computed(pair):
    shared = random_tokens(22, 5).tolist()
    first, second, third = ([*shared, *rest] for rest in prompts_of((8, 9, 30), seed=7))
    for prompt in (first, second):
        request = pair.add(prompt, greedy(NUM_TOKENS))
        assert tokens_by_request(pair.drain())[request] == expected_tokens(prompt, NUM_TOKENS)
    whole = len(first) - 1 - (len(first) - 1) % BLOCK
    assert imported(pair.decode) == whole // BLOCK + (len(second) - 1) // BLOCK - 22 // BLOCK
    num_run = num_rows_run(pair.prefill)
    pair.decode.cache.evict(pair.decode.pool.num_pages)
    for prompt, num_more in (
        (first, 0),
        (third, 28),
    ):  # whole blocks of which nothing was known there
        request = pair.add(prompt, greedy(NUM_TOKENS))
        assert tokens_by_request(pair.drain())[request] == expected_tokens(prompt, NUM_TOKENS)
        assert num_rows_run(pair.prefill) - num_run == num_more
    pair.assert_nothing_is_left()


def test_a_prefill_instance_shares_prefixes_within_a_tenant_alone(pair):
    """Rows that it runs when the decode instance has forgotten what it knew."""
    prompt = prompts_of([30])[0]
    whole = len(prompt) - 1 - (len(prompt) - 1) % BLOCK
    for tenant, num_new in (("a", whole), ("b", whole), ("a", 0), ("b", 0)):
        pair.decode.cache.evict(pair.decode.pool.num_pages)
        num_run = num_rows_run(pair.prefill)
        request = pair.add(prompt, greedy(NUM_TOKENS), tenant=tenant)
        assert tokens_by_request(pair.drain())[request] == expected_tokens(prompt, NUM_TOKENS)
        assert num_rows_run(pair.prefill) - num_run == num_new
    pair.assert_nothing_is_left()


def test_whole_blocks_of_a_public_beginning_are_computed_once_for_all_tenants(pair):
    prompt, public = prompts_of([30])[0], 3 * BLOCK + 1
    whole = len(prompt) - 1 - (len(prompt) - 1) % BLOCK
    for tenant, num_new in (("a", whole), ("b", whole - 3 * BLOCK)):
        pair.decode.cache.evict(pair.decode.pool.num_pages)
        num_run = num_rows_run(pair.prefill)
        pair.add(prompt, replace(greedy(NUM_TOKENS), num_public_tokens=public), tenant=tenant)
        pair.drain()
        assert num_rows_run(pair.prefill) - num_run == num_new
    pair.assert_nothing_is_left()


def test_prompts_that_are_cheaper_to_compute_than_to_copy_stay_here(tmp_path):
    cheap = Pair(tmp_path / "a", make_engine(), make_engine(), min_tokens=None)
    by_length = Pair(tmp_path / "b", make_engine(), make_engine(), min_tokens=10 * BLOCK)
    for one in (cheap, by_length):
        for length in (100, 10 * BLOCK, 10 * BLOCK + 1):
            one.add(prompts_of([length])[0], greedy(2))
        one.drain()
    fast_bus = Pair(tmp_path / "c", make_engine(hardware=FAST_BUS), make_engine(), min_tokens=None)
    fast_bus.add(prompts_of([100])[0], greedy(2))
    fast_bus.drain()
    assert (cheap.counts(), by_length.counts(), fast_bus.counts()) == ((0, 0), (2, 0), (1, 0))


@pytest.mark.parametrize("seed", long_but(0, of=range(4)))
def test_tokens_are_the_same_under_any_plan(tmp_path, seed):
    """Both sides have too few pages, adapters, shared prefixes, and requests that end early; a job
    takes pages on the decode side, and the prefill instance dies and comes back, or hangs.
    """
    rng = Random(seed)
    decode = make_engine(num_pages=44, num_host_pages=rng.choice((0, 100)), hardware=FAST_BUS)
    prefill = make_engine(num_pages=30, max_step_rows=8)
    decode.policy, prefill.policy = random_policy(seed), random_policy(seed + 100)
    pair = Pair(tmp_path, decode, prefill)
    decode.load_adapter("a", adapter_directory(r=3))
    decode.submit_examples(
        examples_of((9, 14, 5, 11)),
        TuningConfig(num_epochs=2, max_pack_tokens=16),
        adapter=LoraConfig(r=2),
    )
    shared = random_tokens(11, 3).tolist()
    asked: dict[str, tuple[list[int], str | None]] = {}
    events, cancelled = [], set()
    for number, prompt in enumerate(prompts_of([rng.randint(5, 40) for _ in range(16)])):
        prompt = [*shared[: rng.randrange(12)], *prompt]
        adapter = rng.choice((None, "a"))
        params = greedy(25, prompt_logprobs=0 if number % 5 == 4 else None)
        asked[pair.add(prompt, params, adapter=adapter)] = prompt, adapter
        for _ in range(rng.randrange(7)):
            pair.now_s += 0.3
            events += pair.step()
        if rng.random() < 0.2:
            cancelled.add(gone := rng.choice(list(asked)))
            pair.decode.cancel(gone)
        if rng.random() < 0.1:
            pair.die()
        elif not pair.is_there:
            pair.is_there = pair.runs = True
        elif not pair.runs or rng.random() < 0.1:
            pair.runs = not pair.runs
    pair.now_s += 100  # nothing is waited for any longer
    got = tokens_by_request(events + pair.drain())
    for request, (prompt, adapter) in asked.items():
        if request not in cancelled:
            lora: dict[str, Any] = {"r": 3} if adapter else {}
            assert got[request] == expected_tokens(prompt, 25, **lora), request
    assert imported(pair.decode) > 0
    for job in list(pair.decode.jobs):
        pair.decode.cancel_job(job)
        pair.decode.step()
    pair.assert_nothing_is_left()


# -- endings and failures -----------------------------------------------------------------


def slow_pair(directory: Path, **settings: Any) -> Pair:
    """Return a pair whose prefill instance computes two blocks per step."""
    return Pair(directory, make_engine(), make_engine(max_step_rows=2 * BLOCK, **settings))


def ask_long(pair: Pair, num_steps: int = 3) -> tuple[str, list[int]]:
    """A prompt that is on its way: some blocks of it are there."""
    prompt = prompts_of([61])[0]
    name = pair.add(prompt, greedy(NUM_TOKENS))
    for _ in range(num_steps):
        assert pair.step() == []
    assert num_rows_run(pair.decode) == 0
    return name, prompt


def test_a_request_that_is_cancelled_meanwhile_is_cancelled_there_too(tmp_path):
    pair = slow_pair(tmp_path)
    name, _ = ask_long(pair)
    assert pair.prefill.has_requests
    assert pair.decode.cancel(name)
    pair.step()
    pair.step()
    assert not pair.prefill.has_requests and not pair.decode.has_requests
    pair.assert_nothing_is_left()
    assert pair.counts() == (0, 0) and imported(pair.decode) == 0


def test_a_prefill_instance_that_dies_leaves_what_it_has_computed(tmp_path, caplog):
    pair = slow_pair(tmp_path)
    name, prompt = ask_long(pair)
    pair.die()
    other = pair.add(prompts_of([20], seed=3)[0], greedy(NUM_TOKENS))
    got = tokens_by_request(pair.drain())
    assert got[name] == expected_tokens(prompt, NUM_TOKENS)
    assert got[other] == expected_tokens(prompts_of([20], seed=3)[0], NUM_TOKENS)
    assert 0 < imported(pair.decode) < 15
    assert pair.counts() == (0, 2)
    lines = [record.getMessage() for record in caplog.records]
    assert (
        len(lines) == 1
        and "no prefill instance (the other end has closed the connection)" in lines[0]
    ), lines
    pair.assert_nothing_is_left()


def test_one_that_comes_back_is_used_again(tmp_path):
    pair = slow_pair(tmp_path)
    pair.die()
    pair.meet()
    pair.add(prompts_of([20])[0], greedy(2))
    pair.drain()
    assert pair.counts() == (0, 1)
    pair.is_there = pair.runs = True
    pair.now_s += 1.1
    pair.meet()
    pair.add(prompts_of([20], seed=1)[0], greedy(2))
    pair.drain()
    assert pair.counts() == (1, 1)


def test_one_that_is_slow_is_not_waited_for_beyond_the_slo(tmp_path, caplog):
    pair = slow_pair(tmp_path)
    name, prompt = ask_long(pair)
    pair.runs = False
    pair.now_s += 1.9
    assert pair.step() == []
    pair.now_s += 0.2
    got = tokens_by_request(pair.drain())
    assert got[name] == expected_tokens(prompt, NUM_TOKENS)
    other = prompts_of([20], seed=9)[0]
    later = pair.add(other, greedy(NUM_TOKENS))  # nothing is asked of one that says nothing
    assert tokens_by_request(pair.drain())[later] == expected_tokens(other, NUM_TOKENS)
    assert pair.counts() == (0, 2)
    assert [record.getMessage() for record in caplog.records] == [
        f"the prefill instance is slow: the prompts of {name} are computed here"
    ]
    pair.runs = True
    pair.step()
    pair.meet()
    pair.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ({"name": "qwen2"}, "the prefill instance has a model with other weights"),
        ({"dtype": "bfloat16"}, "dtype bfloat16, the decode instance float32"),
        ({"block_tokens": 8}, "block_tokens 8, the decode instance 4"),
        ({"deterministic": True}, "deterministic True, the decode instance False"),
    ],
)
def test_an_instance_of_another_model_is_refused(tmp_path, caplog, named, reason):
    pair = Pair(tmp_path, make_engine(), make_engine(**named))
    prompt = prompts_of([30])[0]
    request = pair.add(prompt, greedy(NUM_TOKENS))
    assert tokens_by_request(pair.drain())[request] == expected_tokens(prompt, NUM_TOKENS)
    assert pair.counts() == (0, 1)
    assert any(reason in record.getMessage() for record in caplog.records), caplog.text


@pytest.mark.parametrize("what", ["too long", "damaged adapter", "no adapter", "no room"])
def test_what_it_cannot_compute_is_computed_here(tmp_path, caplog, what):
    pair = Pair(tmp_path, make_engine(), make_engine(num_pages=5 if what == "too long" else 600))
    adapter = None
    if "adapter" in what:
        pair.decode.load_adapter("a", adapter_directory(r=3))
        adapter, files = "a", pair.decode_end._adapters.files_of(pair.decode.versions.resolve("a"))
        path = Path(files.directory) / "adapter_model.safetensors"
        path.write_bytes(
            path.read_bytes()[:-1] + b"!"
        ) if what == "damaged adapter" else path.unlink()
    elif what == "no room":
        pair.decode_end._directory = tmp_path / "gone"
    prompt = prompts_of([30])[0]
    request = pair.add(prompt, greedy(NUM_TOKENS), adapter=adapter)
    got = tokens_by_request(pair.drain())
    lora: dict[str, Any] = {"r": 3} if adapter else {}
    assert got[request] == expected_tokens(prompt, NUM_TOKENS, **lora)
    assert pair.counts() == (0, 1)
    assert len(caplog.records) == 1, caplog.text
    pair.assert_nothing_is_left()


def test_tokens_are_the_same_after_steps_that_failed(pair):
    """Steps with pages to import that could not begin, or whose result was lost."""
    device = watched(pair.decode)
    submit, collect, hits = device.inner.submit, device.inner.collect, [0]

    def is_hit(batch: Any) -> bool:
        if any(isinstance(command, ImportPages) for command in batch.commands):
            hits[0] += 1
            return True
        return False

    def failing_submit(batch: Any) -> None:
        if is_hit(batch) and hits[0] % 2:
            raise KeyboardInterrupt
        submit(batch)

    def failing_collect() -> Any:
        result = collect()
        if is_hit(device.batches[-1]) and hits[0] % 2:
            raise KeyboardInterrupt
        return result

    device.inner.submit = failing_submit  # type: ignore[method-assign]
    device.inner.collect = failing_collect  # type: ignore[method-assign]
    asked = {}
    events: list[Event] = []
    for prompt in prompts_of((30, 25, 40, 17, 33, 28)):
        asked[pair.add(prompt, greedy(20))] = prompt
        for _ in range(6):
            with suppress(KeyboardInterrupt):
                events += pair.step()
    events += pair.drain()
    assert hits[0] > 4
    got = tokens_by_request(events)
    assert got == {request: expected_tokens(prompt, 20) for request, prompt in asked.items()}
    pair.assert_nothing_is_left()


def test_a_request_whose_pages_fail_to_come_in_where_a_pack_begins_is_computed_again(pair):
    """The error is not the pack's, although its command has the pages carried in; nobody reads what
    lies there."""
    device, hits = watched(pair.decode), [0]

    def refuse(command: Any) -> None:
        if isinstance(command, ImportPages):
            hits[0] += 1
            raise DeviceMemoryError("no memory for pages")

    device.refuse = refuse
    config = TuningConfig(num_epochs=20, batch_size=1, max_pack_tokens=12)
    job = pair.decode.submit(examples_of((9, 11, 10)), config, adapter=LoraConfig(r=2), name="mine")
    events: list[Event] = []
    asked = {}
    for prompt in prompts_of((30, 25, 40, 17, 33, 28)):
        asked[pair.add(prompt, greedy(NUM_TOKENS))] = prompt
        asked[pair.add(prompt, greedy(NUM_TOKENS))] = (
            prompt  # reads what the first one leaves among the prefixes
        )
        for _ in range(8):
            with suppress(LostCommandError):
                events += pair.step()
    while pair.decode.has_work:
        with suppress(LostCommandError):
            events += pair.step()
    assert hits[0] > 1 and pair.decode.jobs[job].state == "succeeded"
    assert pair.decode.jobs[job].progress.memory_failures.num_in_a_row == 0
    got = tokens_by_request(events)
    assert got == {
        request: expected_tokens(prompt, NUM_TOKENS) for request, prompt in asked.items()
    }


# -- recordings ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recording(tmp_path_factory) -> Path:
    """Return the recording of a decode instance; the page files are gone."""
    directory, backbone = tmp_path_factory.mktemp("recorded"), make_backbone()
    file = directory / "file"
    device = torch_device(
        backbone,
        memory_bytes=60 * kv_page_bytes(backbone, BLOCK),
        block_tokens=BLOCK,
        profile=roofline_profile(backbone, FAST_BUS),
    )
    config = EngineConfig(block_tokens=BLOCK, tpot_s=1.0)
    decode = record(Engine(WatchedDevice(device, WallClock()), config, end_tokens=()), str(file))
    pair = Pair(directory, decode, make_engine())
    for prompt in prompts_of(LENGTHS):
        pair.add(prompt, greedy(NUM_TOKENS))
    pair.drain()
    assert pair.counts()[0] > 3
    decode.device.close()
    return file


def test_a_recording_of_a_prefill_instance_is_run_again(tmp_path):
    """It copies pages to files, which no recording has, while commands wait for the next step."""
    backbone = make_backbone()
    pages: dict[str, Any] = {
        "memory_bytes": 60 * kv_page_bytes(backbone, BLOCK),
        "block_tokens": BLOCK,
    }
    pages["profile"] = roofline_profile(backbone, FAST_BUS)
    config = EngineConfig(block_tokens=BLOCK, tpot_s=1.0, max_step_rows=16)
    file = tmp_path / "file"
    device = torch_device(backbone, **pages)
    prefill = record(Engine(WatchedDevice(device, WallClock()), config, end_tokens=()), str(file))
    pair = Pair(tmp_path / "pages", make_engine(), prefill)
    for prompt in prompts_of(LENGTHS):
        pair.add(prompt, greedy(NUM_TOKENS), adapter=None)
    pair.drain()
    assert pair.counts()[0] > 3
    prefill.device.close()
    report = replay(*read_recording(file), torch_device(backbone, **pages))
    assert report.plans_equal, report.diverged
    assert report.steps > 3 and report.tokens_equal


@pytest.mark.parametrize("kind", ["torch", "modelled"])
def test_a_recording_with_pages_from_elsewhere_is_run_again(recording, kind):
    header, lines = read_recording(recording)
    backbone, info = make_backbone(), header.info
    pages: dict[str, Any] = {"block_tokens": BLOCK, "profile": info.profile}
    if kind == "modelled":
        device: Any = ModelledDevice(backbone, num_pages=60, **pages)
    else:
        device = torch_device(backbone, memory_bytes=60 * info.page_bytes, **pages)
    report = replay(header, lines, device)
    assert report.plans_equal, report.diverged
    assert report.steps > 5 and (report.tokens_equal or kind == "modelled")


# -- transports and files -----------------------------------------------------------------


def test_pages_go_through_a_file_as_they_are(tmp_path):
    pages = PagedKv(make_backbone(), num_pages=8, block_tokens=BLOCK)
    pages.storage.random_()
    files, path, before = PageFiles(pages), tmp_path / "pages", pages.storage.clone()
    path.write_bytes(bytes(3 * pages.page_bytes))
    files.export(str(path), [4, 0], [2, 0])
    files.export(str(path), [7], [1])
    pages.storage.zero_()
    files.take(str(path), [1, 6, 2], [0, 1, 2])
    for old, new in ((0, 1), (7, 6), (4, 2)):
        assert pages.storage[new].equal(before[old])
    assert not pages.storage[[0, 3, 4, 5, 7]].any()
    assert files.take_seconds() > 0 and files.take_seconds() == 0
    with pytest.raises(FileNotFoundError):
        files.export(str(tmp_path / "none"), [1], [0])


def test_messages_come_through_a_socket_whole_and_in_order(tmp_path):
    listener = Listener(tmp_path / "socket")
    mine = connect(tmp_path / "socket")
    (other,) = listener.accept()
    sent = [ForgetPrompt(number) for number in range(3)] + [
        ComputePrompt(id=7, tokens=tuple(range(300_000)), path="p", first_block=0, ttft_s=1.0)
    ]
    for message in sent:
        mine.send(message)  # more than the system keeps: the rest waits here
    got: list[Any] = []
    while len(got) < len(sent):
        got += other.receive()
        assert mine.receive() == []
    assert got == sent
    other.send(ForgetPrompt(9))
    other.close()
    assert mine.receive() == [ForgetPrompt(9)]
    with pytest.raises(ConnectionError):
        mine.receive()
    mine.close()
    listener.close()
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_message_ends_the_connection(tmp_path):
    listener = Listener(tmp_path / "socket")
    mine = connect(tmp_path / "socket")
    (other,) = listener.accept()
    mine._end.send(b"\x03\0\0\0abc")
    with pytest.raises(ConnectionError, match="cannot be decoded"):
        other.receive()
    for each in (mine, other, listener):
        each.close()


def test_a_socket_that_a_dead_process_left_is_used_again_and_one_in_use_is_not(tmp_path):
    path = tmp_path / "socket"
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    listener = Listener(path)
    with pytest.raises(CoserveError, match="another process listens there"):
        Listener(path)
    listener.close()
    path.write_text("mine")
    with pytest.raises(CoserveError, match=r"--prefill-socket .* cannot be used"):
        Listener(path)
    assert path.read_text() == "mine"
    with pytest.raises(CoserveError, match="AF_UNIX path too long"):
        Listener(tmp_path / ("long" * 50))


def test_pages_of_an_engine_that_was_killed_with_its_server_are_removed_at_the_next_start(tmp_path):
    directory = make_socket_directory(tmp_path)
    pages = make_pages_directory(socket_address(directory))
    (pages / "pages-0").write_bytes(b"page")
    clear_socket_directories(tmp_path)
    assert not pages.exists() and list((tmp_path / "run").iterdir()) == []

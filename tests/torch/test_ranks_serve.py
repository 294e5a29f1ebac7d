"""A whole engine on ranks that are threads: requests get what one rank gives them, and ranks end
every step alike."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as dataclass_replace
from math import isnan
from random import Random
from typing import Any

import pytest
import torch
from engines import (
    FAST,
    adapter_directory,
    assert_nothing_is_held,
    drain,
    examples_of,
    greedy,
    make_engine,
    prompts_of,
    tokens_by_request,
    word_tokenizer,
)
from lengths import long_but
from lockstep import lockstep
from random_plans import random_policy
from support import VOCAB, make_backbone, random_tokens
from torch import Tensor

from coserve.adapters import LoraConfig
from coserve.adapters.methods.bottleneck import BottleneckConfig
from coserve.adapters.methods.ia3 import Ia3Config
from coserve.devices.grammars.grammar import Grammar
from coserve.devices.messages.commands import OpenVersion
from coserve.devices.messages.jobs import OpenTrainer
from coserve.devices.messages.steps import TokenLogprob
from coserve.devices.sampling_params import SamplingParams
from coserve.engine.engine import Engine
from coserve.engine.jobs.events import JobEvent
from coserve.engine.outbox import Event
from coserve.engine.request import Chunk
from coserve.errors import UnsupportedModelError
from coserve.kernels import names_for
from coserve.kernels.groups.base import RankGroup
from coserve.kernels.groups.threads import run_ranks
from coserve.kernels.weights import as_weight
from coserve.models import Backbone
from coserve.models.dividing import divided_backbone
from coserve.models.head import likeliest_on_rank_0, logits, logits_on_rank_0
from coserve.tuning.config import OptimizerConfig, TuningConfig

# With which copying to the host pays on the tiny model.
FAST_BUS = dataclass_replace(FAST, host_bytes_per_s=1e15)
# Relative to one rank's; the same bound holds between any two orders of adding float32.
BAR = 1e-5
NUM_REQUESTS = 64
LORA = LoraConfig(r=2).to_peft()


@pytest.fixture(autouse=True)
def checked_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("COSERVE_RANK_CHECK", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def every_params(rng: Random) -> SamplingParams:
    """Params of every kind that the device or the engine tells apart."""
    kinds = (
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"temperature": 0.0, "logit_bias": {5: 3.0, 9: -100.0}},
        {"temperature": 0.0, "allowed_token_ids": (3, 5, 8, 13)},
        {"temperature": 0.0, "min_tokens": 4, "stop_token_ids": tuple(range(0, 60, 2))},
        {"temperature": 0.0, "bad_words": ((40,), (51,))},
        {"temperature": 0.0, "embeds": True},
        {"temperature": 0.0, "prompt_logprobs": 2},
        {"temperature": 0.0, "grammar": Grammar.regex("[a-f]{2,6}(-[a-c]{1,3})?")},
        {"temperature": 0.9, "top_p": 0.8, "seed": rng.randrange(1000)},
        {"temperature": 1.2, "top_k": 7, "seed": rng.randrange(1000), "n": 2},
        {"temperature": 0.7, "min_p": 0.1, "seed": rng.randrange(1000), "logprobs": 0},
        {"temperature": 0.8, "presence_penalty": 0.6, "seed": rng.randrange(1000)},
        {
            "temperature": 1.0,
            "grammar": Grammar.choice(["abc", "fed", "a-b"]),
            "seed": rng.randrange(1000),
        },
        {
            "temperature": 1.0,
            "logprobs": 1,
            "logprob_token_ids": (4, 7),
            "seed": rng.randrange(1000),
        },
    )
    return SamplingParams(max_tokens=rng.randrange(6, 14), **rng.choice(kinds))


# Of four jobs: a method, and how it trains.
CLIPPED = OptimizerConfig(learning_rate=1e-3, max_grad_norm=0.1)
JOBS = (
    (LoraConfig(r=4, dropout=0.2, target_modules="all-linear"), TuningConfig(batch_size=2)),
    (
        LoraConfig(r=3, use_dora=True, target_modules=("q_proj", "down_proj")),
        TuningConfig(max_pack_tokens=16),
    ),
    (BottleneckConfig(reduction_factor=4), TuningConfig(batch_size=3, optimizer=CLIPPED)),
    (Ia3Config(), TuningConfig(batch_size=2, num_epochs=2)),
)


@dataclass
class Served:
    """Result of an engine's work."""

    engine: Engine
    """The engine."""
    chunks: dict[tuple[str, int], list[Chunk]] = field(default_factory=dict)
    """Chunks by sequence."""
    steps: dict[str, list[JobEvent]] = field(default_factory=dict)
    """Events of optimizer steps by job."""

    def take(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Chunk):
                self.chunks.setdefault((event.request, event.index), []).append(event)
            elif isinstance(event, JobEvent) and event.loss is not None:
                self.steps.setdefault(event.job, []).append(event)


def serve_every_kind(num_ranks: int, seed: int, *, num_jobs: int = 0) -> Served:
    """Run requests of every kind and jobs under any plan, with few pages."""
    engine = make_engine(
        num_pages=28 + 60 * num_jobs,
        num_host_pages=60,
        num_ranks=num_ranks,
        tokenizer=word_tokenizer(),
        hardware=FAST_BUS,
    )
    engine.policy, rng = random_policy(seed), Random(seed)
    engine.load_adapter("a", adapter_directory(r=3))
    for adapter, config in JOBS[:num_jobs]:
        engine.submit_examples(examples_of((9, 14, 5, 11, 7)), config, adapter=adapter)
    shared, served = random_tokens(11, 3).tolist(), Served(engine)
    for index in range(NUM_REQUESTS):
        prompt = random_tokens(rng.randrange(1, 24), index).tolist()
        if rng.random() < 0.4:
            prompt = shared + prompt
        engine.add(prompt, every_params(rng), adapter=rng.choice((None, None, "a")))
        for _ in range(rng.randrange(3)):
            served.take(engine.step())
            engine.check_integrity()
    while engine.has_work:
        served.take(engine.step())
    return served


def lines(chunks: list[Chunk]) -> list[TokenLogprob]:
    return [line for chunk in chunks for line in (*chunk.prompt_logprobs, *chunk.logprobs)]


def numbers(chunks: list[Chunk]) -> torch.Tensor:
    """All log-probabilities and states that a sequence was told."""
    logprobs = [[line.logprob, *(value for _, value in line.top)] for line in lines(chunks)]
    flat = [value for each in logprobs for value in each]
    return torch.tensor(
        [value for value in flat if not isnan(value)]
        + [x for each in chunks for x in each.embedding]
    )


def assert_same(found: list[Chunk], expected: list[Chunk]) -> None:
    """The same tokens, texts and reasons; log-probabilities and states to `BAR`."""

    def whole(chunks: list[Chunk]) -> object:
        tokens = [token for chunk in chunks for token in chunk.tokens]
        ends = [(chunk.finish_reason, chunk.stop_reason, chunk.error) for chunk in chunks]
        named = [
            (line.token, line.rank, [token for token, _ in line.top]) for line in lines(chunks)
        ]
        return tokens, "".join(chunk.text for chunk in chunks), ends[-1], named

    assert whole(found) == whole(expected)
    torch.testing.assert_close(numbers(found), numbers(expected), atol=BAR, rtol=BAR)


def assert_served_alike(found: Served, expected: Served) -> None:
    assert found.chunks.keys() == expected.chunks.keys() and len(expected.chunks) >= NUM_REQUESTS
    for sequence, chunks in expected.chunks.items():
        assert_same(found.chunks[sequence], chunks)


@pytest.mark.parametrize(
    "ranks_and_seed", long_but((2, 0), of=[(2, 0), (2, 1), (2, 2), (4, 1)]), ids=str
)
def test_requests_of_every_kind_get_what_one_rank_gives(ranks_and_seed):
    """Under the same plans, with shared prefixes, chunks, adapters, preemptions and pages that go
    to the host.

    No two logits that decide about a token are nearer to each other than the error of a sum: tokens
    are compared as they are.
    """
    num_ranks, seed = ranks_and_seed
    alone, divided = (serve_every_kind(number, seed) for number in (1, num_ranks))
    assert_served_alike(divided, alone)
    assert divided.engine.num_preemptions == alone.engine.num_preemptions > 0
    assert divided.engine.stats().num_swapped_in == alone.engine.stats().num_swapped_in > 0
    cached = [
        [chunk.num_cached_tokens for each in made.chunks.values() for chunk in each]
        for made in (divided, alone)
    ]
    assert cached[0] == cached[1] and any(cached[1])
    assert_nothing_is_held(divided.engine)


@pytest.mark.parametrize("seed", long_but(0, of=range(3)))
def test_jobs_beside_requests_train_as_on_one_rank(seed):
    """Four jobs of four methods: losses and norms of every optimizer step. A rank's pages are
    smaller by more than what packs keep in them, so that plans are not the same.
    """
    alone, divided = (serve_every_kind(number, seed, num_jobs=4) for number in (1, 2))
    assert_served_alike(divided, alone)
    assert len(alone.steps) == 4
    assert divided.steps.keys() == alone.steps.keys()
    for job, steps in alone.steps.items():
        found = divided.steps[job]
        assert [event.step for event in found] == [event.step for event in steps] != []
        for name in ("loss", "norm"):
            own, theirs = (
                torch.tensor([getattr(event, name) for event in each]) for each in (found, steps)
            )
            torch.testing.assert_close(own, theirs, atol=0, rtol=BAR)


@pytest.mark.parametrize(
    "name",
    long_but("qwen3.5", "opt", of=["qwen3.5", "opt", "gemma2", "gpt-oss", "mixtral", "olmo2"]),
)
def test_greedy_tokens_of_a_divided_family_are_those_of_one_rank(name):
    """One with states in pages, one with biases that rank 0 adds, one whose logits are capped after
    the head."""

    def tokens(num_ranks: int) -> list[tuple[int, ...]]:
        engine = make_engine(name, num_ranks=num_ranks)
        ids = [engine.add(prompt, greedy(9)) for prompt in prompts_of((5, 1, 17, 9))]
        found = tokens_by_request(drain(engine))
        engine.device.close()
        return [found[id] for id in ids]

    assert tokens(2) == tokens(1)


# -- the head ---------------------------------------------------------------------------


def backbone_with_logits(values: Sequence[float]) -> Backbone:
    """Return a model that gives each row these logits, times the row's first feature after the last
    norm."""
    whole = make_backbone("llama", kernels="plain")
    weight = torch.zeros(whole.architecture.weight_shapes["lm_head.weight"])
    weight[:, 0] = torch.tensor(values)
    scale = whole.weights["head"]["model.norm.weight"]
    assert isinstance(scale, torch.Tensor)
    norm = {"model.norm.weight": torch.ones_like(scale)}
    head = {**whole.weights["head"], **norm, "lm_head.weight": as_weight(weight)}
    return dataclass_replace(whole, weights={**whole.weights, "head": head})


@pytest.mark.parametrize("kernels", names_for(torch.device("cpu")))
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "largest", [(1, VOCAB - 1), (VOCAB // 2 + 3, VOCAB - 2), (VOCAB - 1,), (VOCAB // 2 - 1,)]
)
def test_of_equal_logits_the_first_is_taken_and_padding_never_comes(largest, size, kernels):
    """Every logit is below the zero that padded columns have, and the largest are on several
    ranks."""
    values = [-1.0 if token in largest else -2.0 - token % 3 for token in range(VOCAB)]
    backend = make_backbone("llama", kernels=kernels).backend
    whole = dataclass_replace(backbone_with_logits(values), backend=backend)
    hidden = torch.ones(3, whole.architecture.hidden_size)
    expected = logits(whole, hidden)
    assert (expected < 0).all()

    def on_rank(group: RankGroup) -> tuple[Tensor | None, Tensor | None]:
        own = divided_backbone(whole, group)
        return likeliest_on_rank_0(own, hidden), logits_on_rank_0(own, hidden)

    (tokens, rows), *others = run_ranks(size, on_rank)
    assert tokens.tolist() == [largest[0]] * 3 == expected.argmax(-1).tolist()
    torch.testing.assert_close(rows, expected, atol=1e-6, rtol=0)
    assert others == [(None, None)] * (size - 1)


# -- what crosses -----------------------------------------------------------------------


def counted(group: RankGroup) -> Counter[str]:
    """Count the collectives of a rank from now on, by kind and the first word of their names."""
    found = Counter[str]()
    for kind in ("_sum", "_gather", "_all_gather", "_agree"):
        real = getattr(group, kind)

        def call(*given: Any, real: Any = real, kind: str = kind) -> Any:
            found[kind] += 1
            return real(*given)

        setattr(group, kind, call)
    return found


@pytest.mark.parametrize("params", [{}, {"logprobs": 1}], ids=["likeliest", "whole rows"])
def test_a_decode_step_has_the_collectives_of_its_graphs_and_one_for_its_end(monkeypatch, params):
    monkeypatch.delenv("COSERVE_RANK_CHECK")
    engine = make_engine("llama", num_ranks=2)
    for prompt in prompts_of((5, 3)):
        engine.add(prompt, greedy(9, **params))
    engine.step()
    device = lockstep(engine)
    found = [counted(group) for group in device.groups]
    local = device.ranks[0].backbone.local
    engine.step()
    num_sums = sum(
        node.op == "rank_sum" for part in local.parts for node in local.graphs[part].nodes
    )
    assert num_sums == 1 + 2 * len(local.kv_layers), "the table of embeddings is divided, too"
    # A gather is an all_gather of threads.
    assert found[0] == found[1] == {"_sum": num_sums, "_gather": 1, "_all_gather": 1, "_agree": 1}
    drain(engine)


def test_other_ranks_keep_nothing_of_what_was_chosen():
    engine = make_engine(num_ranks=2, tokenizer=word_tokenizer())
    first, other = (device._requests for device in lockstep(engine).ranks)
    params = SamplingParams(
        temperature=0.0, max_tokens=6, presence_penalty=0.5, grammar=Grammar.regex("[a-f]{9}")
    )
    for prompt in prompts_of((5, 3)):
        engine.add(prompt, params)
    for _ in range(3):
        engine.step()
    assert all(
        handle.counts is not None and handle.matcher is not None
        for handle in first._handles.values()
    )
    assert len(other._handles) == 2
    assert all(
        handle.counts is None and handle.matcher is None for handle in other._handles.values()
    )
    assert (
        first.grammars._compiled
        and not other.grammars._compiled
        and other.grammars._compiler is None
    )
    result = lockstep(engine).results[1]
    assert not (
        result.tokens or result.ended or result.refused or result.embeddings or result.prompts
    )
    drain(engine)
    assert not first._handles and not other._handles


def test_models_beside_a_divided_one_are_refused(tmp_path):
    engine = make_engine(num_ranks=2)
    with pytest.raises(
        UnsupportedModelError, match="needs it whole on the device, where 2 ranks divide"
    ):
        engine.device.execute(
            OpenTrainer(
                job="j",
                config=TuningConfig(),
                mean_context_len=8.0,
                model="dummy:tiny",
                adapter=LORA,
            )
        )
    with pytest.raises(
        UnsupportedModelError, match="train that model, or start a server without --tensor-parallel"
    ):
        engine.device.execute(
            OpenVersion(version="v", directory=adapter_directory(r=3), model="dummy:tiny")
        )

"""Batch work: what nobody waits for runs in what requests leave, beside jobs by share, and gives
way at once."""

from collections import Counter
from typing import Any

import pytest
from engines import (
    assert_nothing_is_held,
    drain,
    expected_tokens,
    greedy,
    make_engine,
    prompts_of,
    tokens_by_request,
)

from coserve.adapters import LoraConfig
from coserve.devices.sampling_params import SamplingParams
from coserve.engine.config import EngineConfig
from coserve.engine.request import Chunk
from coserve.engine.token_engine import TokenEngine
from coserve.models import load_backbone
from coserve.scheduling import LatencyModel
from coserve.simulate.hardware import Hardware
from coserve.simulate.modelled_device import ModelledDevice
from coserve.simulate.roofline import roofline_profile
from coserve.simulate.simulation import Arrival, Simulation
from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example

CPU = Hardware(name="cpu", flops_per_s=6e11, bytes_per_s=12e9, call_s=1e-5)
SECONDS = 30.0


def simulate(
    *,
    num_batch: int = 0,
    num_jobs: int = 0,
    rate: float = 1.0,
    due_s: float = 1e6,
    num_pages: int = 4000,
    **config: Any,
) -> tuple[TokenEngine, Counter[str]]:
    """The engine after some seconds of requests every `1 / rate`, and the tokens by kind of
    request."""
    backbone = load_backbone("dummy:qwen2.5-0.5b", device="meta", dtype="bfloat16")
    profile = roofline_profile(backbone, CPU)
    device = ModelledDevice(backbone, profile, num_pages=num_pages)
    engine = TokenEngine(device, LatencyModel(profile), EngineConfig(**config))
    for _ in range(num_jobs):
        example = Example(tokens=(1,) * 256, trained=(True,) * 256)
        engine.submit_examples(
            [example] * 64,
            TuningConfig(num_epochs=1000),
            adapter=LoraConfig(r=16, target_modules="all-linear"),
        )
    for number in range(num_batch):
        params = SamplingParams(max_tokens=60, temperature=0)
        engine.add_tokens(
            [number + 2] * 100,
            params,
            request_id=f"batch-{number}",
            arrival_s=0.0,
            batch_due_s=due_s,
        )
    times = [number / rate for number in range(int(SECONDS * rate))]
    arrivals = [Arrival(at_s=at_s, num_prompt_tokens=80, num_output_tokens=30) for at_s in times]
    tokens: Counter[str] = Counter()

    def count(event: Any) -> None:
        if isinstance(event, Chunk):
            tokens["batch" if event.request.startswith("batch") else "request"] += len(event.tokens)

    for _ in Simulation(engine, arrivals).run(SECONDS, on_event=count):
        pass
    return engine, tokens


def engine_with_job(num_pages: int = 4000) -> TokenEngine:
    """Return a simulated engine with a job."""
    backbone = load_backbone("dummy:qwen2.5-0.5b", device="meta", dtype="bfloat16")
    profile = roofline_profile(backbone, CPU)
    device = ModelledDevice(backbone, profile, num_pages=num_pages)
    engine = TokenEngine(device, LatencyModel(profile), EngineConfig())
    example = Example(tokens=(1,) * 256, trained=(True,) * 256)
    engine.submit_examples([example] * 64, TuningConfig(num_epochs=1000), adapter=LoraConfig(r=16))
    return engine


def attained(engine: TokenEngine) -> float:
    return sum(record.attained for record in engine.records) / len(engine.records)


def test_requests_hold_their_slos_beside_batch_work():
    alone, _ = simulate()
    beside, tokens = simulate(num_batch=300)
    assert attained(alone) == attained(beside) == 1.0
    assert not any(record.request.startswith("batch") for record in beside.records), (
        "nobody waits for it"
    )
    assert tokens["batch"] > 100 * SECONDS
    stats = beside.stats()
    assert stats.num_batch_running + stats.num_batch_waiting > 100
    assert stats.num_running + stats.num_waiting < 10


def test_batch_work_and_jobs_share_what_requests_leave():
    tokens, trained = {}, {}
    for share in (0.2, 0.6):
        engine, found = simulate(num_batch=300, num_jobs=1, policy_settings={"batch_share": share})
        tokens[share], trained[share] = found["batch"], engine.stats().num_tokens_trained
        assert attained(engine) == 1.0
    assert 0 < tokens[0.2] < tokens[0.6]
    assert trained[0.2] > trained[0.6] > 0


def test_batch_work_that_is_late_goes_before_jobs():
    engine, late = simulate(num_batch=300, num_jobs=1, due_s=0.0)
    _, in_time = simulate(num_batch=300, num_jobs=1)
    assert late["batch"] > in_time["batch"]
    assert attained(engine) == 1.0


def test_jobs_find_memory_beside_batch_work():
    engine, tokens = simulate(num_batch=300, num_jobs=1, num_pages=2000, rate=0.5)
    assert engine.stats().num_tokens_trained > 0
    assert tokens["batch"] > 0


@pytest.mark.parametrize("policy", ["token-fusion", "temporal-sharing"])
def test_policies_that_do_not_tell_it_apart_serve_it_all_the_same(policy):
    _, tokens = simulate(num_batch=5, rate=0.2, policy=policy)
    assert tokens["batch"] == 5 * 60


def test_it_gives_way_to_requests_and_its_answers_are_the_same():
    prompts = prompts_of((20, 24, 28, 30))
    engine = make_engine(num_pages=12, max_requests=2)
    for number, prompt in enumerate(prompts[:3]):
        engine.add_tokens(prompt, greedy(20), request_id=f"batch{number}", batch_due_s=1e9)
    events = [event for _ in range(8) for event in engine.step()]
    stats = engine.stats()
    assert stats.num_batch_running
    assert stats.num_pages_free < stats.num_pages_for_requests == stats.num_pages, (
        "a request may have them all"
    )
    engine.add_tokens(prompts[3], greedy(6), request_id="mine")
    order = []
    for event in drain(engine):
        events.append(event)
        if isinstance(event, Chunk) and event.finish_reason is not None:
            order.append(event.request)
    assert order[0] == "mine"
    found = tokens_by_request(events)
    assert found["mine"] == expected_tokens(prompts[3], 6)
    assert [found[f"batch{n}"] for n in range(3)] == [
        expected_tokens(prompt, 20) for prompt in prompts[:3]
    ]
    assert engine.num_preemptions
    assert_nothing_is_held(engine)


def test_no_step_works_for_a_job_while_a_request_runs_that_is_to_be_without():
    engine = engine_with_job()
    while not engine.stats().num_tokens_trained:
        engine.step()
    params = SamplingParams(max_tokens=60, temperature=0)
    engine.add_tokens([2] * 100, params, request_id="suspect", batch_due_s=1e6, without_jobs=True)
    is_over, num_beside, num_steps = False, 0, 0
    while not is_over:
        events = engine.step()
        plan = engine.last_plan
        runs_it = any(rows.item == "suspect/0" for rows in plan.rows)
        num_steps += runs_it
        num_beside += runs_it and bool(plan.moved_jobs or plan.updates)
        is_over = any(
            isinstance(event, Chunk) and event.finish_reason is not None for event in events
        )
    assert (num_steps, num_beside) == (60, 0)
    before = engine.stats().num_tokens_trained
    for _ in range(200):
        engine.step()
    assert engine.stats().num_tokens_trained > before, "then the job continues"


def finish_steps(engine: TokenEngine, requests: set[str], *, max_steps: int) -> dict[str, int]:
    """Step until these requests have ended; returns each one's number of steps, of those that
    did."""
    ended: dict[str, int] = {}
    for step in range(max_steps):
        for event in engine.step():
            if isinstance(event, Chunk) and event.finish_reason is not None:
                ended[event.request] = step
        if requests <= ended.keys():
            break
    return ended


def engine_with_full_pool() -> tuple[TokenEngine, int]:
    """Return an engine whose pool a job's pack nearly fills, and the pages that are free beside
    it."""
    engine = engine_with_job(num_pages=900)
    while engine.cache.num_available > 100:
        engine.step()
    return engine, engine.cache.num_available


@pytest.mark.parametrize("tenant", ["", "other"])
def test_a_request_takes_a_pack_s_pages_before_one_that_is_to_be_without_jobs(tenant):
    engine, num_free = engine_with_full_pool()
    params = SamplingParams(max_tokens=5, temperature=0)
    engine.add_tokens([2] * (16 * (num_free + 4)), params, request_id="mine", tenant=tenant)
    engine.add_tokens([3] * 20, params, request_id="suspect", batch_due_s=1e6, without_jobs=True)
    assert finish_steps(engine, {"mine", "suspect"}, max_steps=200).keys() == {"mine", "suspect"}
    before = engine.stats().num_tokens_trained
    for _ in range(200):
        engine.step()
    assert engine.stats().num_tokens_trained > before, "then the job continues"


def test_a_request_takes_a_pack_s_pages_beside_one_that_is_without_jobs():
    engine, _ = engine_with_full_pool()
    params = SamplingParams(max_tokens=150, temperature=0)
    engine.add_tokens([3] * 20, params, request_id="suspect", batch_due_s=1e6, without_jobs=True)
    while not engine.requests.running:
        engine.step()
    num_tokens = 16 * (engine.cache.num_available + 4)
    params = SamplingParams(max_tokens=5, temperature=0)
    engine.add_tokens([2] * num_tokens, params, request_id="mine")
    ended = finish_steps(engine, {"mine", "suspect"}, max_steps=400)
    assert ended["mine"] < ended["suspect"]


def test_the_lowest_priority_is_admitted_first():
    prompts = prompts_of((8, 9, 10))
    engine = make_engine(max_requests=1)
    engine.add_tokens(prompts[0], greedy(4), request_id="first")
    engine.step()
    for name, prompt, priority in (("later", prompts[1], 5), ("sooner", prompts[2], -5)):
        engine.add_tokens(prompt, greedy(4), request_id=name, priority=priority)
    ended = [
        event.request for event in drain(engine) if isinstance(event, Chunk) and event.finish_reason
    ]
    assert ended == ["first", "sooner", "later"]

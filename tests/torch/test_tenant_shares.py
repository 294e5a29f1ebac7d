"""Tenants share a device under the default policy: time, memory, and what each of them may
claim."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import combinations, pairwise
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulated import GPU, chats, harvest, make_engine, submit

from coserve.devices.sampling_params import SamplingParams
from coserve.engine.records import RequestRecord
from coserve.engine.request import Chunk
from coserve.engine.token_engine import TokenEngine
from coserve.scheduling.shared_memory import MAX_LEAD_S
from coserve.scheduling.slo import Slo
from coserve.simulate.simulation import Arrival, Simulation

MODEL, SECONDS = "qwen2.5-0.5b", 12.0


def engine_of(policy: str = "slack", **config: object) -> TokenEngine:
    return make_engine(MODEL, GPU, num_pages=4000, num_jobs=0, policy=policy, **config)


def streams(tenant: str, interval_s: float = 0.5) -> list[Arrival]:
    number = int((SECONDS - 1.0) / interval_s)
    return [
        Arrival(
            at_s=0.5 + index * interval_s, num_prompt_tokens=60, num_output_tokens=32, tenant=tenant
        )
        for index in range(number)
    ]


def simulate(
    engine: TokenEngine, arrivals: list[Arrival], seconds: float = SECONDS, *, host_s: float = 0.0
) -> list[RequestRecord]:
    """Return the requests of 32 tokens, which are tenant b's; host_s: what sending a token takes
    between two steps."""
    for _ in Simulation(engine, sorted(arrivals, key=lambda each: each.at_s)).run(seconds):
        num_tokens = sum([rows.kind != "window" for rows in engine.last_plan.rows])
        engine.device.clock.advance(host_s * num_tokens)  # type: ignore[attr-defined]
    return [record for record in engine.records if record.num_output_tokens == 32]


def rows_of(engine: TokenEngine, tenant: str) -> float:
    return sum(job.num_rows_run for job in engine.jobs.values() if job.tenant == tenant)


def long_prompts(engine: TokenEngine) -> list[Arrival]:
    return [
        Arrival(at_s=1.0 + 0.02 * index, num_prompt_tokens=1400, num_output_tokens=64, tenant="a")
        for index in range(500)
    ]


def many_samples(engine: TokenEngine) -> list[Arrival]:
    return [
        Arrival(
            at_s=1.0 + 4.0 * (index // 1000),
            num_prompt_tokens=30,
            num_output_tokens=128,
            tenant="a",
        )
        for index in range(3000)
    ]


def tight_slos(engine: TokenEngine, tight: float = 1.2) -> list[Arrival]:
    slo = Slo(ttft_s=1.0, tpot_s=tight * engine.latency.decode_s(num_requests=32, context=300))
    return [
        Arrival(
            at_s=1.0 + 2.0 * (index // 32),
            num_prompt_tokens=30,
            num_output_tokens=512,
            slo=slo,
            tenant="a",
        )
        for index in range(32 * 5)
    ]


@pytest.mark.long
@pytest.mark.parametrize("attack", [long_prompts, many_samples, tight_slos])
def test_a_tenant_keeps_its_share_beside_a_flood(attack: Callable[[TokenEngine], list[Arrival]]):
    """Requests that hold their SLOs, first tokens no later than twice what they take alone, and its
    job."""
    alone, beside = engine_of(), engine_of()
    for engine in (alone, beside):
        submit(engine, length=128, tenant="b")
    before = simulate(alone, streams("b"))
    after = simulate(beside, [*streams("b"), *attack(beside)])
    assert len(after) >= 0.9 * len(before)
    assert all(record.attained for record in after)
    middle = len(after) // 2
    assert (
        sorted(each.ttft_s for each in after)[middle]
        <= 2 * sorted(each.ttft_s for each in before)[middle]
    )
    assert rows_of(beside, "b") >= 0.45 * rows_of(alone, "b")


@pytest.mark.long
@pytest.mark.parametrize("host_s", [0.0, 1e-4])
def test_a_tight_slo_leaves_the_job_of_another_tenant_its_share(host_s: float):
    """Steps at the pace of the SLO have no room for large pieces; and much of the time goes to
    sending tokens."""
    alone, beside = engine_of(), engine_of()
    for engine in (alone, beside):
        submit(engine, tenant="b", pack_tokens=512)
    simulate(alone, streams("b", 0.1), host_s=host_s)
    simulate(beside, [*streams("b", 0.1), *tight_slos(beside, 1.1)], host_s=host_s)
    assert rows_of(beside, "b") >= 0.42 * rows_of(alone, "b")


@pytest.mark.parametrize("pack_tokens", [128, 512])
def test_jobs_of_two_tenants_alone_train_as_fast_as_those_of_one(pack_tokens: int):
    """No step lasts longer than a request that arrives may wait for one."""
    rows = []
    for tenants in (("one", "one"), ("one", "other")):
        engine = engine_of()
        for tenant in tenants:
            submit(engine, length=128, tenant=tenant, pack_tokens=pack_tokens)
        ends_s = [snapshot.now_s for snapshot in Simulation(engine, []).run(3.0)]
        assert (
            max([end_s - start_s for start_s, end_s in pairwise(ends_s)]) <= 2 * engine.slo.tpot_s
        )
        rows.append({tenant: rows_of(engine, tenant) for tenant in tenants})
    apart = rows[1]
    assert sum(apart.values()) >= 0.97 * sum(rows[0].values())
    assert apart["one"] == pytest.approx(apart["other"], rel=0.05)


NUM_SLOTS, MAX_STEPS = 4, 1000


def serve_backlog(
    engine: TokenEngine, weights: dict[str, float]
) -> tuple[list[dict[str, float]], float]:
    """Return the weighted seconds that each tenant was served after every step while all have
    requests waiting, and the seconds of the longest step. Charged seconds are added up here, since
    counters that lag too far are lifted.
    """
    served, moments, longest_s = dict.fromkeys(weights, 0.0), list[dict[str, float]](), 0.0
    times = engine.loop.times
    charge = times.charge

    def count(seconds: Mapping[str, float]) -> None:
        for tenant, used_s in seconds.items():
            served[tenant] += used_s / weights[tenant]
        charge(seconds)

    times.charge = count  # type: ignore[method-assign]
    while (
        len(moments) < MAX_STEPS
        and {each.info.tenant for each in engine.requests.waiting.values()} == weights.keys()
    ):
        begin_s = engine.device.clock.now()
        engine.step()
        longest_s = max(longest_s, engine.device.clock.now() - begin_s)
        moments.append(dict(served))
    return moments, longest_s


def under_way_s(engine: TokenEngine, prompt: int, output: int) -> float:
    """Return at least what requests of this shape take that fill all slots, from their prompts to
    their ends: rows that decode cost their part of a step, beside whatever else is in it.
    """
    latency = engine.latency
    row_s = latency.prompt_s(256) / 256
    step_s = latency.decode_s(num_requests=NUM_SLOTS, context=prompt + output) + NUM_SLOTS * row_s
    return NUM_SLOTS * latency.prompt_s(prompt) + output * step_s


@pytest.mark.long
@settings(deadline=None, max_examples=8)
@given(
    st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=2, max_size=4),
    st.lists(st.tuples(st.integers(20, 600), st.integers(4, 24)), min_size=4, max_size=4),
    st.booleans(),
)
@example([3.0, 1.0], [(345, 4), (42, 4)], False)
@example([3.0, 3.0, 2.0, 1.0], [(469, 20), (130, 9), (553, 16), (399, 19)], False)
def test_backlogged_tenants_are_served_by_their_weights(
    weights: list[float], shapes: list[tuple[int, int]], tunes: bool
):
    """The bound of docs/policies.md: FlexLLM's theorem 1 in seconds."""
    weight_of = {f"tenant-{index}": weight for index, weight in enumerate(weights)}
    shape_of = dict(zip(weight_of, shapes, strict=False))
    engine = engine_of(max_requests=NUM_SLOTS, tenant_weights=weight_of)
    for number, (tenant, (prompt, output)) in enumerate(shape_of.items()):
        for index in range(300):
            tokens = [len(weights) * index + number] * prompt
            engine.add_tokens(
                tokens, SamplingParams(max_tokens=output, temperature=0.0), tenant=tenant
            )
        if tunes:
            submit(engine, length=64, tenant=tenant, pack_tokens=512)
    moments, longest_s = serve_backlog(engine, weight_of)
    assert len(moments) > 200
    bound_s = {
        tenant: MAX_LEAD_S + (under_way_s(engine, *shape_of[tenant]) + longest_s) / weight
        for tenant, weight in weight_of.items()
    }
    for first, second in combinations(weight_of, 2):
        gaps = [moment[first] - moment[second] for moment in moments[1:]]
        assert max(gaps) - min(gaps) <= bound_s[first] + bound_s[second]


@pytest.mark.long
def test_a_tenant_gets_the_part_of_its_weight():
    engine = engine_of(tenant_weights={"heavy": 3.0})
    for tenant in ("heavy", "light"):
        submit(engine, length=64, tenant=tenant)
    simulate(engine, [])
    assert rows_of(engine, "heavy") == pytest.approx(3 * rows_of(engine, "light"), rel=0.15)


@pytest.mark.long
def test_requests_of_a_tenant_take_nothing_from_the_job_of_another_beyond_their_share():
    engine = engine_of()
    submit(engine, length=64, tenant="tunes")
    simulate(engine, many_samples(engine))
    assert rows_of(engine, "tunes") > 0.45 * rows_alone()


def rows_alone() -> float:
    engine = engine_of()
    submit(engine, length=64, tenant="tunes")
    simulate(engine, [])
    return rows_of(engine, "tunes")


def add_lines(engine: TokenEngine, tenant: str, number: int, due_s: float) -> None:
    """Queue lines of a batch."""
    params = SamplingParams(max_tokens=60, temperature=0.0)
    for index in range(number):
        prompt = [index + 1] * 60
        engine.add_tokens(
            prompt, params, request_id=f"{tenant}-{index}", tenant=tenant, batch_due_s=due_s
        )


@pytest.mark.parametrize("max_requests", [8, 256])
def test_lines_of_a_batch_do_not_wait_for_the_many_lines_of_another_tenant(max_requests: int):
    """They came later and are due later; the first tenant's lines fill all slots, or a pool of
    pages."""
    engine = make_engine(MODEL, GPU, num_pages=200, num_jobs=0, max_requests=max_requests)
    add_lines(engine, "many", 300, due_s=10.0)
    for _ in range(30):
        engine.step()
    add_lines(engine, "few", 8, due_s=1000.0)
    ended = Counter[str]()
    while ended["few"] < 8:
        chunks = [event for event in engine.step() if isinstance(event, Chunk)]
        ended.update(
            [chunk.request.split("-")[0] for chunk in chunks if chunk.finish_reason is not None]
        )
    assert 0 < ended["many"] <= 40


def test_lines_of_a_batch_do_not_wait_for_the_many_requests_of_another_tenant():
    """Requests of one tenant hold all slots and wait for more; the other has nothing but the
    lines."""
    engine = make_engine(MODEL, GPU, num_pages=4000, num_jobs=0, max_requests=8)
    params = SamplingParams(max_tokens=60, temperature=0.0)
    for index in range(200):
        engine.add_tokens([index + 1] * 60, params, request_id=f"many-{index}", tenant="many")
    for _ in range(30):
        engine.step()
    add_lines(engine, "few", 8, due_s=1000.0)
    ended = Counter[str]()
    while ended["few"] < 8:
        chunks = [event for event in engine.step() if isinstance(event, Chunk)]
        ended.update(
            [chunk.request.split("-")[0] for chunk in chunks if chunk.finish_reason is not None]
        )
    assert 0 < ended["many"] <= 40


@pytest.mark.long
def test_what_a_tenant_does_not_need_goes_to_the_others():
    """A few chats of another tenant cost a job no more than the time that they take."""
    engine = engine_of()
    submit(engine, length=64, tenant="tunes")
    simulate(engine, streams("b", 2.0))
    assert rows_of(engine, "tunes") > 0.8 * rows_alone()


@pytest.mark.long
def test_nothing_changes_for_a_tenant_that_is_alone():
    """Step by step the plans of a policy that does not share time."""
    plans = []
    for policy in ("slack", "vtc"):
        engine = engine_of(policy)
        submit(engine, tenant="one")
        arrivals = [replace(each, tenant="one") for each in chats(2.0, 6.0)]
        seen = [engine.last_plan for _ in Simulation(engine, arrivals).run(6.0)]
        plans.append(seen)
        assert harvest(engine) > 0
    assert plans[0] == plans[1] and len(plans[0]) > 100


def test_a_tenant_that_holds_every_slot_makes_room_for_another():
    engine = engine_of(max_requests=4)
    params = SamplingParams(max_tokens=400, temperature=0.0)
    rng = Random(1)
    for _ in range(12):
        engine.add_tokens([rng.randrange(1000) for _ in range(40)], params, tenant="flood")
    for _ in range(20):
        engine.step()
    assert len(engine.requests.running) == 4
    for _ in range(3):
        engine.add_tokens([rng.randrange(1000) for _ in range(40)], params, tenant="calm")
    for _ in range(3):
        engine.step()
    running = [request.info.tenant for request in engine.requests.running.values()]
    assert sorted(running) == ["calm", "flood", "flood", "flood"]


def test_a_tenant_that_holds_every_page_makes_room_for_another():
    engine = make_engine(MODEL, GPU, num_pages=64, num_jobs=0)
    params = SamplingParams(max_tokens=200, temperature=0.0)
    rng = Random(1)
    for _ in range(12):
        engine.add_tokens([rng.randrange(1000) for _ in range(150)], params, tenant="flood")
    for _ in range(20):
        engine.step()
    assert engine.requests.waiting, "the flood has filled the pool"
    engine.add_tokens(
        [rng.randrange(1000) for _ in range(150)], params, request_id="calm", tenant="calm"
    )
    for _ in range(3):
        engine.step()
    assert any(request.info.tenant == "calm" for request in engine.requests.running.values())


def test_a_large_request_is_admitted_beside_a_stream_of_small_ones_of_another_tenant():
    """Small requests would otherwise overtake it forever: it wants nearly all pages."""
    engine = make_engine(MODEL, GPU, num_pages=64, num_jobs=0)
    block, rng, large_ends, num_small = engine.config.block_tokens, Random(1), False, 0
    params = SamplingParams(max_tokens=20, temperature=0.0)
    for step in range(1500):
        while len(engine.requests.running) + len(engine.requests.waiting) < (3 if step < 5 else 4):
            tokens = [rng.randrange(1000) for _ in range(4 * block)]
            small = SamplingParams(max_tokens=2 * block, temperature=0.0)
            engine.add_tokens(tokens, small, request_id=f"small-{num_small}", tenant="small")
            num_small += 1
        if step == 5:
            tokens = [rng.randrange(1000) for _ in range(60 * block)]
            engine.add_tokens(tokens, params, request_id="large", tenant="large")
        chunks = [event for event in engine.step() if isinstance(event, Chunk)]
        large_ends |= any(
            chunk.request == "large" and chunk.finish_reason is not None for chunk in chunks
        )
        if large_ends:
            return
    pytest.fail("the large request has not ended")

"""The engine in simulated time: what requests wait for, and what jobs get."""

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from random import Random
from statistics import mean, stdev
from typing import Any

import pytest

from coserve.adapters import LoraConfig
from coserve.engine.config import EngineConfig
from coserve.engine.outbox import Event
from coserve.engine.request import Chunk
from coserve.engine.token_engine import TokenEngine
from coserve.models import Backbone, load_backbone
from coserve.scheduling import LatencyModel
from coserve.scheduling.policies.slack import Slack
from coserve.scheduling.profile import Profile
from coserve.scheduling.slo.step_budget import MAX_ARRIVAL_SHARE
from coserve.simulate.hardware import Hardware
from coserve.simulate.modelled_device import ModelledDevice
from coserve.simulate.roofline import roofline_profile
from coserve.simulate.simulation import Arrival, Simulation, Snapshot
from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example

pytestmark = pytest.mark.long

CPU = Hardware(name="cpu", flops_per_s=6e11, bytes_per_s=12e9, call_s=1e-5)
FAST_CPU = Hardware(name="fast-cpu", flops_per_s=2e12, bytes_per_s=40e9, call_s=1e-5)
GPU = Hardware(name="gpu", flops_per_s=5e13, bytes_per_s=1e12, call_s=5e-6)
SLOW = Hardware(name="slow", flops_per_s=1e11, bytes_per_s=1e10, call_s=1e-4)
ALL = LoraConfig(r=16, target_modules="all-linear")
ENDLESS = TuningConfig(num_epochs=100_000)


@cache
def _backbone() -> Backbone:
    return load_backbone("dummy:qwen2.5-0.5b", device="meta", dtype="bfloat16")


@cache
def make_profile(hardware: Hardware = CPU) -> Profile:
    return roofline_profile(_backbone(), hardware)


def examples(number: int = 64, length: int = 256) -> list[Example]:
    return [Example(tokens=(1,) * length, trained=(True,) * length)] * number


def make_engine(
    policy: str = "slack",
    *,
    hardware: Hardware = CPU,
    expected: Hardware | None = None,
    num_jobs: int = 1,
    length: int = 256,
    noise: float = 0.0,
    seed: int = 0,
    num_pages: int = 4000,
    **config: float,
) -> TokenEngine:
    """expected: the hardware that the latency model takes it for."""
    device = ModelledDevice(
        _backbone(), make_profile(hardware), num_pages=num_pages, noise=noise, seed=seed
    )
    latency = LatencyModel(make_profile(expected or hardware))
    engine = TokenEngine(device, latency, EngineConfig(policy=policy, **config))  # type: ignore[arg-type]
    for _ in range(num_jobs):
        engine.submit_examples(examples(length=length), ENDLESS, adapter=ALL)
    return engine


def poisson(rate: float, seconds: float, *, seed: int = 0, start_s: float = 0.0) -> list[Arrival]:
    """Requests of some hundred tokens of prompt, and some tens to come."""
    rng, at_s, arrivals = Random(seed), start_s, []
    while rate and (at_s := at_s + rng.expovariate(rate)) < start_s + seconds:
        prompt, output = (
            min(1000, 1 + int(rng.lognormvariate(4.5, 0.8))),
            min(300, 2 + int(rng.lognormvariate(3.7, 0.6))),
        )
        arrivals.append(Arrival(at_s=at_s, num_prompt_tokens=prompt, num_output_tokens=output))
    return arrivals


def run(
    engine: TokenEngine, arrivals: list[Arrival], until_s: float, *, seed: int = 0
) -> tuple[list[Snapshot], list[Event]]:
    events: list[Event] = []
    return list(
        Simulation(engine, arrivals, seed=seed).run(until_s, on_event=events.append)
    ), events


def arrival_wait_s(engine: TokenEngine) -> float:
    """Return how long a request that arrives in an idle moment waits for the current step."""
    return Slack().arrival_wait_s(engine.slo.ttft_s, engine.slo.tpot_s)


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


# -- the simulator ----------------------------------------------------------------------


def test_the_same_seed_gives_the_same_history():
    def history(noise_seed: int) -> str:
        engine = make_engine(num_jobs=2, noise=0.1, seed=noise_seed, num_pages=1500)
        return repr((run(engine, poisson(0.5, 60), 90), engine.records, engine.stats()))

    first = history(1)
    assert first == history(1)
    assert first != history(2)


def test_an_hour_passes_and_every_page_comes_back():
    engine, arrivals = make_engine(noise=0.05), poisson(0.05, 3600, seed=3)
    events: list[Event] = []
    for number, snapshot in enumerate(
        Simulation(engine, arrivals).run(3600.0, on_event=events.append)
    ):
        if number % 500 == 0:
            engine.check_integrity()
        last = snapshot
    assert 3600.0 <= last.now_s < 3601.0
    tokens = sum(len(event.tokens) for event in events if isinstance(event, Chunk))
    assert len(engine.records) + last.num_running + last.num_waiting == len(arrivals) > 100
    assert sum(record.num_output_tokens for record in engine.records) <= tokens
    # It has been training all the time, as fast as an idle device or nearly so.
    assert last.num_tokens_trained > 0.8 * 3600 * idle_rate()
    for request in list({event.request for event in events if isinstance(event, Chunk)}):
        engine.cancel(request)
    for job in engine.jobs:
        engine.cancel_job(job)
    engine.check_integrity()
    assert engine.cache.num_available == engine.pool.num_pages, (
        "free, or the beginning of some prompt"
    )


@cache
def idle_rate() -> float:
    """Tokens that one job trains per second where nothing else is going on."""
    snapshots, _ = run(make_engine(), [], 120.0)
    return snapshots[-1].num_tokens_trained / snapshots[-1].now_s


def test_an_engine_without_work_lets_time_pass_to_the_next_arrival():
    engine = make_engine(num_jobs=0)
    snapshots, _ = run(
        engine, [Arrival(at_s=1000.0, num_prompt_tokens=10, num_output_tokens=2)], 5000.0
    )
    assert len(snapshots) == 2 and 1000.0 < snapshots[0].now_s < snapshots[1].now_s < 1001.0
    assert run(make_engine(num_jobs=0), [], 10.0) == ([], [])


def test_arrivals_may_be_given_in_any_order():
    arrivals = poisson(1.0, 30)
    shuffled = Random(5).sample(arrivals, len(arrivals))
    assert shuffled != arrivals
    assert repr(run(make_engine(), shuffled, 40)) == repr(run(make_engine(), arrivals, 40))


def test_requests_get_as_many_tokens_as_they_asked_for_in_order_of_arrival():
    engine, arrivals = make_engine(), poisson(0.5, 40)
    snapshots, events = run(engine, arrivals, 200.0)
    tokens = {f"request-{i + 1}": 0 for i in range(len(arrivals))}  # the job has the first number
    for event in events:
        if isinstance(event, Chunk):
            tokens[event.request] += len(event.tokens)
    assert list(tokens.values()) == [arrival.num_output_tokens for arrival in arrivals]
    assert all(earlier.now_s < later.now_s for earlier, later in pairwise(snapshots))
    assert all(record.ttft_s > 0 for record in engine.records)


# -- what requests may count on -------------------------------------------------------------


@pytest.mark.parametrize(("hardware", "num_jobs"), [(CPU, 1), (CPU, 3), (FAST_CPU, 1)])
def test_a_burst_in_an_idle_moment_waits_no_longer_than_it_says(hardware, num_jobs):
    """The step that runs ends in time, and the first rows enter the next."""
    rng, engine = Random(7), make_engine(hardware=hardware, num_jobs=num_jobs)
    times = [20.0 * i + rng.uniform(0, 10) for i in range(1, 30)]
    arrivals = [
        Arrival(at_s=t, num_prompt_tokens=20, num_output_tokens=3) for t in times for _ in range(4)
    ]
    simulation, bound_s = Simulation(engine, arrivals), arrival_wait_s(engine)
    ends = [0.0, *(snapshot.now_s for snapshot in simulation.run(620.0))]
    waits = [min(end for end in ends if end >= t) - t for t in times]
    assert 0.8 * bound_s < max(waits) <= bound_s + 1e-9, (
        "and there are steps that take about that long"
    )
    assert max(record.ttft_s for record in engine.records) <= 2 * bound_s + 1e-9


@dataclass(frozen=True, kw_only=True)
class Load:
    """A random load on a random device."""

    hardware: Hardware
    """Device."""
    arrivals: list[Arrival]
    """Requests."""
    noise: float
    """Relative noise of the device."""
    num_jobs: int
    """Number of jobs."""
    length: int
    """Tokens of a training sequence."""
    seed: int
    """Seed of the load."""


def random_load(seed: int, number: int = 120) -> Load:
    """Return a load between a nearly idle device and one that requests alone fill, singly or in
    bursts.
    """
    rng = Random(seed)
    hardware = rng.choice([CPU, FAST_CPU, GPU])
    profile = make_profile(hardware)
    step_s = LatencyModel(profile).decode_s(num_requests=1, context=512)
    row_s = profile.forward.at(512) / 512
    mean_prompt, mean_output = rng.choice([30, 60, 150, 300]), rng.choice([4, 12, 30, 80])
    rate = rng.uniform(0.05, 0.75) / (1.3 * mean_prompt * row_s + mean_output * step_s / 4)
    burst, spread = rng.choice([1, 1, 2, 4]), rng.choice([0.3, 0.6, 1.0])
    at_s = 0.0
    arrivals: list[Arrival] = []
    while len(arrivals) < number:
        at_s += rng.expovariate(rate / burst)
        arrivals += [
            Arrival(
                at_s=at_s,
                num_prompt_tokens=1
                + min(int(0.6 / row_s), int(mean_prompt * rng.lognormvariate(0, spread))),
                num_output_tokens=1 + min(300, int(mean_output * rng.lognormvariate(0, spread))),
            )
            for _ in range(burst)
        ]
    return Load(
        hardware=hardware,
        arrivals=arrivals,
        noise=rng.choice([0.0, 0.05, 0.1]),
        num_jobs=rng.choice([1, 1, 3]),
        length=rng.choice([64, 256, 900]),
        seed=seed,
    )


def latencies(load: Load, policy: str) -> tuple[float, float, float]:
    """p99 of TTFT and of TPOT in units of their SLOs, and tokens trained per second."""
    engine = make_engine(
        policy,
        hardware=load.hardware,
        num_jobs=0 if policy == "inference-only" else load.num_jobs,
        length=load.length,
        noise=load.noise,
        seed=load.seed,
        num_pages=8000,
    )
    for _ in Simulation(engine, load.arrivals).run(2 * load.arrivals[-1].at_s + 100):
        if len(engine.records) == len(load.arrivals):
            break
    assert len(engine.records) == len(load.arrivals)
    ttft = quantile([record.ttft_s / record.slo.ttft_s for record in engine.records], 0.99)
    tpot = quantile(
        [record.tpot_s / record.slo.tpot_s for record in engine.records if record.tpot_s], 0.99
    )
    return ttft, tpot, engine.stats().num_tokens_trained / engine.device.clock.now()


def test_loads_that_requests_alone_serve_are_served_beside_fine_tuning():
    """Invariant 7, as `policies/slack.py` states it."""
    found, trained = {}, 0.0
    for seed in range(12):
        load = random_load(seed)
        ttft, tpot, _ = latencies(load, "inference-only")
        if max(ttft, tpot) > 1.0:
            continue
        both_ttft, both_tpot, rate = latencies(load, "slack")
        spare = ttft <= 1 - MAX_ARRIVAL_SHARE and tpot <= 0.85
        held = (
            max(both_ttft, both_tpot) <= 1.0
            if spare
            else both_ttft <= ttft + MAX_ARRIVAL_SHARE and both_tpot < 1.15
        )
        found[seed] = held, (ttft, tpot), (both_ttft, both_tpot)
        trained += rate > 0
    assert all(held for held, *_ in found.values()), found
    assert len(found) >= 8 and trained == len(found), (
        "loads that say something, with training in all of them"
    )


def test_a_long_prompt_on_an_idle_device_waits_for_one_step_alone():
    """One that takes most of its TTFT SLO by itself."""
    arrivals = [
        Arrival(at_s=7.3 * i, num_prompt_tokens=1200, num_output_tokens=1) for i in range(1, 25)
    ]
    engines = make_engine(num_jobs=0), make_engine()
    for engine in engines:
        run(engine, arrivals, 200.0)
    alone_s, both_s = (max(record.ttft_s for record in engine.records) for engine in engines)
    assert 0.7 * 2.0 < alone_s < both_s <= alone_s + arrival_wait_s(engines[1]) + 1e-9


def test_fine_tuning_takes_what_was_banked_up_to_the_slo():
    """Where there is time, requests are served just in time: jobs live on that."""
    engine = make_engine(noise=0.05)
    run(engine, poisson(0.3, 300), 330.0)
    tpots = [record.tpot_s / record.slo.tpot_s for record in engine.records if record.tpot_s]
    assert quantile(tpots, 0.5) > 0.8 and quantile(tpots, 0.99) <= 1.0
    alone = make_engine("inference-only", noise=0.05)
    run(alone, poisson(0.3, 300), 330.0)
    assert (
        quantile(
            [record.tpot_s / record.slo.tpot_s for record in alone.records if record.tpot_s], 0.5
        )
        < 0.6
    )


def test_a_device_slower_than_its_profile_is_found_out():
    slower = Hardware(
        name="slower",
        flops_per_s=CPU.flops_per_s / 1.4,
        bytes_per_s=CPU.bytes_per_s / 1.4,
        call_s=1.4e-5,
    )
    engine = make_engine(hardware=slower, expected=CPU, num_jobs=2)
    run(engine, poisson(0.2, 30), 10.0)
    assert max(engine.latency.corrections.recent_errors()) > 0.25
    run(engine, poisson(0.2, 190, start_s=10.0), 200.0)
    assert quantile(list(engine.latency.corrections.recent_errors()), 0.9) < 0.02


def test_noise_is_averaged_however_many_jobs_have_pieces_in_a_step():
    """Their time is one measurement, and not one for each of them."""
    engine, untaught = (
        make_engine(hardware=GPU, num_jobs=0, noise=0.15),
        LatencyModel(make_profile(GPU)),
    )
    for _ in range(16):  # packs of 32 rows, which are in memory at once
        engine.submit_examples(examples(length=16), replace(ENDLESS, batch_size=2), adapter=ALL)
    corrections, num_pieces = [], 0
    for _ in Simulation(engine, []).run(8.0):
        num_pieces = max(num_pieces, len(engine.last_plan.tasklets))
        view = next(view for job in engine.jobs.values() if (view := job.view(0.0, 0)))
        corrections.append(engine.latency.tasklet_s(view, 128) / untaught.tasklet_s(view, 128))
    assert num_pieces > 8 and len(corrections) > 30
    assert stdev(corrections[10:]) < 0.08 and mean(corrections[10:]) == pytest.approx(1.0, abs=0.08)


# -- what jobs get ----------------------------------------------------------------------------

RATES = (0.0, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.2)


def test_harvest_falls_smoothly_as_load_rises():
    """No step between neighbouring loads takes more than a fifth of what an idle device trains."""
    harvest = []
    for rate in RATES:
        engine = make_engine()
        run(engine, poisson(rate, 300, seed=1), 300.0)
        (job,) = engine.jobs.values()
        harvest.append(job.num_rows_run / engine.device.clock.now())
    falls = [(earlier - later) / harvest[0] for earlier, later in pairwise(harvest)]
    assert min(falls) > -0.02, (harvest, "more load never brings more")
    assert max(falls) < 0.2, (harvest, "no cliff")
    assert 0.3 * harvest[0] < harvest[-1] < 0.6 * harvest[0]


def test_harvest_is_back_as_soon_as_load_ends():
    engine = make_engine(length=64)
    simulation = Simulation(engine, poisson(1.0, 100))
    rows = {}
    for snapshot in simulation.run(400.0):
        rows[snapshot.now_s] = sum(job.num_rows_run for job in engine.jobs.values())
        if snapshot.now_s < 100 or snapshot.num_running + snapshot.num_waiting:
            busy_s = snapshot.now_s

    def rate(start_s: float, end_s: float) -> float:
        within = [(now_s, ran) for now_s, ran in rows.items() if start_s <= now_s <= end_s]
        return (within[-1][1] - within[0][1]) / (within[-1][0] - within[0][0])

    idle, before = make_engine(length=64), 100.0
    run(idle, [], before)
    idle_rate = sum(job.num_rows_run for job in idle.jobs.values()) / idle.device.clock.now()
    assert busy_s < 140.0
    assert rate(0.0, busy_s) < 0.7 * idle_rate
    assert rate(busy_s, busy_s + 40.0) == pytest.approx(idle_rate, rel=0.05)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_jobs_share_the_device_about_equally(rate):
    engine = make_engine(num_jobs=0, num_pages=8000)
    kinds: list[tuple[int, Any]] = [(256, "all-linear"), (256, ("down_proj",)), (200, "all-linear")]
    for index, (length, targets) in enumerate(kinds):
        config = replace(ENDLESS, batch_size=(4, 8, 2)[index])
        engine.submit_examples(
            examples(length=length), config, adapter=LoraConfig(r=8, target_modules=targets)
        )
    run(engine, poisson(rate, 300), 300.0)
    rows = [job.num_rows_run for job in engine.jobs.values()]
    assert max(rows) - min(rows) < 0.05 * max(rows) + 1024, "up to a pack"


@pytest.mark.parametrize("hardware", [CPU, SLOW, GPU])
def test_every_row_counts_once_forward_and_once_backward(hardware):
    """However small the pieces are that it is run in."""
    engine = make_engine(hardware=hardware, length=50, ttft_s=0.5)
    run(engine, [], 120.0 if hardware is not GPU else 3.0)
    (job,) = engine.jobs.values()
    pack = 8 * 50
    assert job.num_tokens_trained >= 5 * pack
    assert (
        2 * job.num_tokens_trained - 1e-6 <= job.num_rows_run < 2 * (job.num_tokens_trained + pack)
    )


def test_a_job_that_comes_later_does_not_stop_the_others():
    engine = make_engine(num_jobs=1, length=64)
    run(engine, [], 60.0)
    (first,) = engine.jobs.values()
    ran_before = first.num_rows_run
    engine.submit_examples(examples(length=64), ENDLESS, adapter=ALL)
    run(engine, [], 120.0)
    second = list(engine.jobs.values())[1]
    assert second.num_rows_run > 0
    assert first.num_rows_run - ran_before > 0.3 * second.num_rows_run


# -- too little memory ------------------------------------------------------------------------


def test_requests_and_jobs_get_through_a_pool_that_is_too_small_for_all_of_them():
    """Packs are dropped and requests preempted; all are done in the end, with all that they asked
    for."""
    engine = make_engine(num_jobs=0, num_pages=440, ttft_s=30.0)
    for _ in range(2):
        engine.submit_examples(
            examples(400, 64), TuningConfig(batch_size=4, max_pack_tokens=128), adapter=ALL
        )
    rng = Random(2)
    arrivals = [
        Arrival(
            at_s=60.0 * burst + 5.3,
            num_prompt_tokens=rng.randint(100, 500),
            num_output_tokens=rng.randint(50, 150),
        )
        for burst in range(6)
        for _ in range(24)
    ]
    events: list[Event] = []
    for number, snapshot in enumerate(
        Simulation(engine, arrivals).run(5000.0, on_event=events.append)
    ):
        if number % 50 == 0:
            engine.check_integrity()
        assert snapshot.num_running <= 256
    engine.check_integrity()
    stats = engine.stats()
    assert stats.num_preemptions > 5 and stats.num_packs_dropped >= 2
    assert [job.state for job in engine.jobs.values()] == ["succeeded"] * 2
    assert all(job.num_tokens_trained == 400 * 64 for job in engine.jobs.values()), (
        "each example once"
    )
    assert sorted(record.num_output_tokens for record in engine.records) == sorted(
        a.num_output_tokens for a in arrivals
    )
    assert engine.cache.num_available == engine.pool.num_pages


def test_requests_keep_their_slos_while_packs_are_dropped():
    engine = make_engine(num_pages=890)
    run(engine, poisson(0.4, 300, seed=4), 330.0)
    assert engine.stats().num_packs_dropped > 0
    assert quantile([record.ttft_s / record.slo.ttft_s for record in engine.records], 0.99) <= 1.0

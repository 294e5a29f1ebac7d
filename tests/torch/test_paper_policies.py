"""The papers' policies follow their papers' own trends, in simulated time."""

from functools import cache
from random import Random
from typing import Any, NamedTuple

import pytest

from coserve.adapters import LoraConfig
from coserve.engine.config import EngineConfig
from coserve.engine.core import EngineCore
from coserve.models import Backbone, load_backbone
from coserve.scheduling import LatencyModel
from coserve.scheduling.history import StepView
from coserve.scheduling.latency import Profile
from coserve.scheduling.plan import Plan, PlannedRows, View
from coserve.scheduling.policies.dynamic_temporal_sharing import Switching, interval_at
from coserve.simulate.hardware import Hardware, roofline_profile
from coserve.simulate.modelled_device import ModelledDevice
from coserve.simulate.simulation import Arrival, Simulation
from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example

pytestmark = pytest.mark.long

DEVICE = Hardware(name="device", flops_per_s=4e12, bytes_per_s=40e9, call_s=1e-5)
SECONDS, LIGHT, HEAVY = 100.0, 0.5, 6.0


@cache
def _backbone() -> Backbone:
    return load_backbone("dummy:qwen2.5-0.5b", device="meta", dtype="bfloat16")


@cache
def _profile() -> Profile:
    return roofline_profile(_backbone(), DEVICE)


class Outcome(NamedTuple):
    """tuning: tokens trained per second. attained: share of the requests whose SLO was held. tpot, ttft: of the 99th of
    100 requests, in units of the SLO.
    """

    tuning: float
    attained: float
    tpot: float
    ttft: float


def arrivals(rate: float) -> list[Arrival]:
    rng, at_s, found = Random(3), 0.0, []
    while (at_s := at_s + rng.expovariate(rate)) < SECONDS:
        prompt, output = 1 + int(rng.lognormvariate(4.5, 0.8)), 2 + int(rng.lognormvariate(3.7, 0.6))
        found.append(Arrival(at_s=at_s, num_prompt_tokens=prompt, num_output_tokens=output))
    return found


@cache
def outcome(policy: str, rate: float = LIGHT, **settings: Any) -> Outcome:
    """What a policy makes of a job and of requests that come at random."""
    device = ModelledDevice(_backbone(), _profile(), num_pages=16_000)
    config = EngineConfig(policy=policy, policy_settings=settings, ttft_s=5.0)
    engine = EngineCore(device, LatencyModel(_profile()), config)
    data = [Example(tokens=(1,) * 256, trained=(True,) * 256)] * 64
    tuning = TuningConfig(num_epochs=100_000, batch_size=16, max_pack_tokens=4096)
    engine.submit_examples(data, tuning, adapter=LoraConfig(r=16, target_modules="all-linear"))
    requests = arrivals(rate)
    for _ in Simulation(engine, requests).run(SECONDS):
        pass
    engine.check_integrity()
    tpots = sorted(record.tpot_s / record.slo.tpot_s for record in engine.records if record.tpot_s)
    ttfts = sorted(record.ttft_s / record.slo.ttft_s for record in engine.records)
    assert len(engine.records) > 0.5 * len(requests)
    tuned = sum(job.num_rows_run for job in engine.jobs.values()) / 2
    attained = sum(record.attained for record in engine.records)
    return Outcome(
        tuned / device.clock.now(),
        attained / len(engine.records),
        tpots[int(0.99 * len(tpots))],
        ttfts[int(0.99 * len(ttfts))],
    )


# -- temporal sharing (FlexLLM section 8.2, appendix A) ---------------------------------------


@pytest.mark.parametrize("rate", [LIGHT, HEAVY])
def test_the_fewer_iterations_of_inference_the_more_is_trained_and_the_slower_are_answers(rate):
    often, usual, rarely = (outcome("temporal-sharing", rate, n=n) for n in (64, 128, 512))
    assert often.tuning > usual.tuning > rarely.tuning
    assert often.attained < usual.attained < rarely.attained
    assert often.tpot > rarely.tpot and often.ttft > 5 * outcome("inference-only", rate).ttft


def test_a_short_interval_breaks_slos_that_a_long_one_holds():
    """Figure 11: with 64 most is trained and SLOs are lost; co-serving keeps them, and trains more than with any
    interval that comes near to it.
    """
    often, rarely = (outcome("temporal-sharing", HEAVY, n=n) for n in (64, 512))
    fused = outcome("token-fusion", HEAVY)
    assert often.attained < 0.8 < rarely.attained < 0.98 < fused.attained
    assert fused.tuning > 2 * rarely.tuning


def test_a_dynamic_interval_lies_between_the_fixed_ones():
    """Where no queue forms it is some 80: it trains less than with 64, and holds more SLOs."""
    often, dynamic, usual = (
        outcome("temporal-sharing", HEAVY, n=64),
        outcome("dynamic-temporal-sharing", HEAVY),
        outcome("temporal-sharing", HEAVY, n=128),
    )
    assert often.tuning > dynamic.tuning > usual.tuning
    assert often.attained < dynamic.attained < usual.attained


def inference_step(num_waiting: int, num_arrived: int, num_ended: int) -> StepView:
    plan = Plan(rows=(PlannedRows("r", "decode", 1, 1),))
    return StepView(View(now_s=0.0), plan, 0.1, 0, 0, 0, {}, 1, num_waiting, num_arrived, num_ended)


def intervals(number: int, *, queue: int, arrivals: int, ends: int) -> list[int]:
    """Iterations of inference before each of as many iterations of tuning, at a steady load."""
    history, steps, total = Switching(), 0, 0
    found: list[int] = []
    tuning_step = inference_step(0, 0, 0)._replace(plan=Plan(updates=("j",)))
    while len(found) < number:
        steps, total = steps + 1, total + 1
        history.add(inference_step(queue, arrivals * total, ends * total))
        if history.due:
            found.append(steps)
            steps = 0
            history.add(tuning_step)
            assert not history.due
    return found


def test_intervals_are_those_of_algorithm_3():
    """By hand: 64 at first; 1.1 f_p at the next two switches; then (1.35 f + 2 f_p) / 3, at least 80, for the next."""
    assert [interval_at(p) for p in (0.0, 0.8, 1.4, 2.0, 3.0)] == [
        64,
        64,
        pytest.approx(64 + 0.5 * 0.6 * 448),
        512,
        512,
    ]
    # f = 64: f_p = (86.4 + 128) / 3 = 71.47; after it 1.1 f_p = 78.6; the next f_p = (86.4 + 142.9) / 3 = 76.4.
    assert intervals(7, queue=0, arrivals=0, ends=0) == [64, 71, 71, 80, 79, 79, 80]
    # A pressure of 1 + 0.5 + 1: f = 512, f_p = (691.2 + 128) / 3 = 273.1.
    assert intervals(5, queue=40, arrivals=9, ends=1) == [64, 71, 71, 274, 301]


# -- FineInfer's deferred continuous batching ---------------------------------------------------


def test_deferred_batching_keeps_tpots_and_pays_with_ttfts():
    """LLMStation section 6.3: its TPOT is that of inference alone, its TTFT the highest of all."""
    deferred, alone, fused = outcome("fineinfer"), outcome("inference-only"), outcome("slack")
    assert deferred.tpot <= 1.05 * alone.tpot < 0.6 * fused.tpot
    assert deferred.ttft > 2 * max(alone.ttft, fused.ttft)


def test_deferred_batching_trains_next_to_nothing_under_load():
    """Section 6.2: as the rate rises, its throughput drops to zero first."""
    light, heavy = outcome("fineinfer"), outcome("fineinfer", HEAVY)
    assert heavy.tuning < 0.1 * light.tuning
    assert heavy.tuning < 0.2 * outcome("slack", HEAVY).tuning and light.tuning < outcome("slack").tuning


def test_the_longer_the_deferral_the_more_is_trained_and_the_later_are_first_tokens():
    short, long = outcome("fineinfer", deferral=0.0), outcome("fineinfer", deferral=0.8)
    assert long.tuning > short.tuning and long.ttft > short.ttft


# -- chunked training ---------------------------------------------------------------------------


def test_larger_chunks_train_more_and_answer_more_slowly():
    """LLMStation figure 5: small chunks do not use the device."""
    small, middle, large = (outcome("chunked-training", HEAVY, chunk_tokens=n) for n in (32, 128, 512))
    assert small.tuning < middle.tuning < large.tuning
    assert small.tpot < middle.tpot < large.tpot
    assert large.attained < 0.5 < 0.9 < small.attained, "what suits one load does not suit another"

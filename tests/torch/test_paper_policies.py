"""The papers' policies follow their papers' own trends, in simulated time."""

from dataclasses import replace
from functools import cache
from random import Random
from typing import Any, NamedTuple

import pytest
from progress import make_job, make_request

from coserve.adapters import LoraConfig
from coserve.engine.config import EngineConfig
from coserve.engine.token_engine import TokenEngine
from coserve.models import Backbone, load_backbone
from coserve.scheduling import LatencyModel
from coserve.scheduling.history import StepView
from coserve.scheduling.latency import ForwardLoad
from coserve.scheduling.plan import Plan, PlannedRows, View
from coserve.scheduling.policies import make_policy
from coserve.scheduling.policies.dynamic_temporal_sharing import Switching, interval_at
from coserve.scheduling.policies.harli import predictor
from coserve.scheduling.profile import Profile
from coserve.scheduling.records import Key, LatencyRecords, PieceWork, forward_work, tasklet_work
from coserve.simulate.hardware import Hardware
from coserve.simulate.links import Link, SumTimes
from coserve.simulate.modelled_device import ModelledDevice
from coserve.simulate.modelled_ranks import on_ranks
from coserve.simulate.roofline import roofline_profile
from coserve.simulate.simulation import Arrival, Simulation
from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example

pytestmark = pytest.mark.long

DEVICE = Hardware(name="device", flops_per_s=5e12, bytes_per_s=40e9, call_s=1e-5)
SECONDS, LIGHT, HEAVY = 100.0, 0.5, 6.0


@cache
def _backbone() -> Backbone:
    return load_backbone("dummy:qwen2.5-0.5b", device="meta", dtype="bfloat16")


@cache
def _profile(num_units: int = 1) -> Profile:
    return roofline_profile(_backbone(), replace(DEVICE, num_units=num_units))


class Outcome(NamedTuple):
    """The result of a simulated load."""

    tuning: float
    """Tokens trained per second."""
    attained: float
    """Share of the requests whose SLO was held."""
    tpot: float
    """TPOT of the 99th of 100 requests, in units of the SLO."""
    ttft: float
    """TTFT of the 99th of 100 requests, in units of the SLO."""


def arrivals(rate: float) -> list[Arrival]:
    rng, at_s, found = Random(3), 0.0, []
    while (at_s := at_s + rng.expovariate(rate)) < SECONDS:
        prompt, output = (
            1 + int(rng.lognormvariate(4.5, 0.8)),
            2 + int(rng.lognormvariate(3.7, 0.6)),
        )
        found.append(Arrival(at_s=at_s, num_prompt_tokens=prompt, num_output_tokens=output))
    return found


@cache
def outcome(policy: str, rate: float = LIGHT, *, num_units: int = 1, **settings: Any) -> Outcome:
    """Return the result of a policy with a job and random requests, on a device of as many
    units.
    """
    device = ModelledDevice(_backbone(), _profile(num_units), num_pages=16_000)
    config = EngineConfig(policy=policy, policy_settings=settings, ttft_s=5.0)
    engine = TokenEngine(device, LatencyModel(_profile(num_units)), config)
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
    """Figure 11: with 64 most is trained and SLOs are lost; co-serving keeps them, and trains more
    than with any interval that comes near to it.
    """
    often, rarely = (outcome("temporal-sharing", HEAVY, n=n) for n in (64, 512))
    fused = outcome("token-fusion", HEAVY)
    assert often.attained < 0.8 < rarely.attained < 0.98 < fused.attained
    assert fused.tuning > 2 * rarely.tuning


def test_a_dynamic_interval_lies_between_the_fixed_ones():
    """Some 80 where no queue forms: it trains less than with 64, and holds more SLOs."""
    often, dynamic, usual = (
        outcome("temporal-sharing", HEAVY, n=64),
        outcome("dynamic-temporal-sharing", HEAVY),
        outcome("temporal-sharing", HEAVY, n=128),
    )
    assert often.tuning > dynamic.tuning > usual.tuning
    assert often.attained < dynamic.attained < usual.attained


def inference_step(num_waiting: int, num_arrived: int, num_ended: int) -> StepView:
    plan = Plan(rows=(PlannedRows("r", "decode", 1, 1),))
    return StepView(
        view=View(now_s=0.0),
        latency=LatencyModel(_profile()),
        plan=plan,
        forward_s=0.1,
        loss_s=0.0,
        backward_s=0.0,
        update_s=0.0,
        beside_s=0.0,
        num_tasklets={},
        num_beside={},
        num_running=1,
        num_waiting=num_waiting,
        num_arrived=num_arrived,
        num_ended=num_ended,
    )


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
    """Worked out by hand: 64 at first; 1.1 f_p at the next two switches; then (1.35 f + 2 f_p) / 3,
    at least 80, for the next.
    """
    assert [interval_at(p) for p in (0.0, 0.8, 1.4, 2.0, 3.0)] == [
        64,
        64,
        pytest.approx(64 + 0.5 * 0.6 * 448),
        512,
        512,
    ]
    # f = 64: f_p = (86.4 + 128) / 3 = 71.47; after it 1.1 f_p = 78.6; the next f_p = (86.4 + 142.9)
    # / 3 = 76.4.
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
    assert (
        heavy.tuning < 0.2 * outcome("slack", HEAVY).tuning
        and light.tuning < outcome("slack").tuning
    )


def test_the_longer_the_deferral_the_more_is_trained_and_the_later_are_first_tokens():
    short, long = outcome("fineinfer", deferral=0.0), outcome("fineinfer", deferral=0.8)
    assert long.tuning > short.tuning and long.ttft > short.ttft


# -- chunked training ---------------------------------------------------------------------------


def test_larger_chunks_train_more_and_answer_more_slowly():
    """LLMStation figure 5: small chunks do not use the device."""
    small, middle, large = (
        outcome("chunked-training", HEAVY, chunk_tokens=n) for n in (32, 128, 512)
    )
    assert small.tuning < middle.tuning < large.tuning
    assert small.tpot < middle.tpot < large.tpot
    assert large.attained < 0.5 < 0.9 < small.attained, "what suits one load does not suit another"


# -- static spatial sharing (FlexLLM section 8.2, HARLI section 8.1) ------------------------------


def test_the_smaller_the_share_of_requests_the_more_is_trained_and_the_slower_are_answers():
    small, middle, large = (
        outcome("spatial-sharing", HEAVY, num_units=10, inference_share=n) for n in (0.3, 0.6, 0.9)
    )
    assert small.tuning > middle.tuning > large.tuning
    assert small.tpot > middle.tpot > large.tpot


def test_a_fixed_share_that_suits_light_load_breaks_slos_under_heavy_load():
    light, heavy = (
        outcome("spatial-sharing", rate, num_units=10, inference_share=0.4)
        for rate in (LIGHT, HEAVY)
    )
    assert light.attained > 0.99 and heavy.attained < 0.5


# -- HARLI ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [LIGHT, HEAVY])
def test_a_partition_that_follows_the_load_trains_more_than_a_fixed_one_and_holds_slos(rate):
    """Figure 11: 75% more than StaticMode in the mean, with decode latencies nearer to the
    objective."""
    follows, fixed = (
        outcome(policy, rate, num_units=10) for policy in ("harli", "spatial-sharing")
    )
    assert follows.attained > 0.99
    assert follows.tuning > 1.3 * fixed.tuning and follows.tpot > fixed.tpot


def divided(
    policy: str, num_requests: int, *, phase: str = "backward", tpot_s: float = 0.06
) -> Plan:
    """Return the plan of a policy for requests that decode and a job, on a device of ten units."""
    requests = [
        make_request(
            f"r{i}",
            num_rows=1,
            num_past=300,
            num_output=5,
            arrival_s=0.0,
            first_token_s=1.0,
            last_token_s=1.9,
            ttft_s=5.0,
            tpot_s=tpot_s,
        )
        for i in range(num_requests)
    ]
    job = make_job(
        "j",
        phase,
        num_rows=1024,
        num_rows_left=1024,
        num_parts_left=24,
        mean_context_len=128.0,
        counts=_profile(10).job,
    )
    seen = View(now_s=2.0, requests=tuple(requests), jobs=(job,), tpot_s=tpot_s, num_units=10)
    return make_policy(policy).plan(seen, LatencyModel(_profile(10)))


def test_harli_gives_decoding_the_units_that_just_keep_the_slo():
    units = []
    for number in (1, 30, 60):
        made = divided("harli", number)
        assert (
            made.partition is not None
            and made.partition.forward_units + made.partition.backward_units == 10
        )
        latency = LatencyModel(_profile(10))
        took = [
            made.prediction.forward_s
            / latency.sharing.speeds(each, forward_rows=number, tasklet_rows=1024)[0]
            for each in latency.sharing.partitions
        ]
        allowed = [
            each
            for each, seconds in zip(latency.sharing.partitions, took, strict=True)
            if seconds <= 0.06
        ]
        assert abs(made.partition.forward_units - min(each.forward_units for each in allowed)) <= 1
        assert made.predicted_s <= 1.05 * 0.06
        units.append(made.partition.forward_units)
    assert units == sorted(units) and units[0] < units[-1]
    assert not divided("harli", 60, tpot_s=0.03).moved_jobs, (
        "where none keeps it, everything is the requests'"
    )


def test_harli_trains_beside_decode_steps_that_are_over_before_a_jobs_smallest_piece():
    profile = roofline_profile(_backbone(), replace(DEVICE, flops_per_s=2e11, num_units=2))
    made = []
    for waited_s in (0.05, 1.0):
        job = make_job(
            "j",
            "forward",
            num_rows=1024,
            num_rows_left=1024,
            num_parts_left=24,
            mean_context_len=128.0,
            counts=profile.job,
            waited_s=waited_s,
        )
        request = make_request(
            "r",
            num_rows=1,
            num_past=300,
            num_output=5,
            arrival_s=0.0,
            first_token_s=1.0,
            last_token_s=1.9,
            ttft_s=5.0,
            tpot_s=0.3,
        )
        seen = View(now_s=2.0, requests=(request,), jobs=(job,), tpot_s=0.3, num_units=2)
        made.append(make_policy("harli").plan(seen, LatencyModel(profile)))
    assert not made[0].moved_jobs and made[1].moved_jobs == ("j",) and made[1].predicted_s <= 0.3


def test_harlis_predictor_errs_by_five_per_cent_at_most():
    """The paper's own figure (section 8.4), at batches and contexts between those that it was
    fitted to.
    """
    latency, errors = LatencyModel(_profile(10)), []
    for partition in latency.sharing.partitions:
        for batch in (2, 8, 24, 48):
            for context in (300, 700):
                speed, _ = latency.sharing.speeds(partition, forward_rows=batch, tasklet_rows=512)
                truth_s = latency.decode_s(num_requests=batch, context=context) / speed
                errors.append(
                    abs(predictor(latency).seconds(partition, batch, context) / truth_s - 1)
                )
    assert sum(errors) / len(errors) < 0.05


# -- LLMStation -----------------------------------------------------------------------------------


def test_llmstation_trains_where_deferred_batching_cannot_and_holds_slos():
    """Figures 9 and 10: more throughput than FineInfer under load, lower TTFT, and a higher
    TPOT."""
    for num_units in (1, 10):
        planned, deferred = (
            outcome(policy, HEAVY, num_units=num_units) for policy in ("llmstation", "fineinfer")
        )
        assert planned.attained > 0.97
        assert planned.tuning > 2.38 * deferred.tuning, "the least that the paper has"
        assert planned.ttft < deferred.ttft and planned.tpot > deferred.tpot


def test_tuning_is_suspended_while_long_prompts_are_prefilled():
    for rows, tunes in ((400, False), (40, True)):
        prompt = make_request(
            "p",
            num_rows=rows,
            num_past=0,
            num_output=0,
            arrival_s=1.9,
            first_token_s=None,
            last_token_s=1.9,
            ttft_s=5.0,
            tpot_s=0.3,
        )
        decoding = make_request(
            "r",
            num_rows=1,
            num_past=300,
            num_output=5,
            arrival_s=0.0,
            first_token_s=1.0,
            last_token_s=1.9,
            ttft_s=5.0,
            tpot_s=0.3,
        )
        job = make_job(
            "j",
            "forward",
            num_rows=1024,
            num_rows_left=1024,
            num_parts_left=24,
            mean_context_len=128.0,
            counts=_profile().job,
        )
        seen = View(now_s=2.0, requests=(decoding, prompt), jobs=(job,), tpot_s=0.3)
        made = make_policy("llmstation").plan(seen, LatencyModel(_profile()))
        kinds = {planned.kind: planned.rows for planned in made.rows}
        assert kinds["prefill"] == rows, "the whole prompt at once"
        assert ("window" in kinds) == ("decode" in kinds) == tunes


def test_the_linear_model_tells_communication_from_computation_and_memory_access():
    link = Link(name="link", times=(SumTimes(num_devices=2, us=((1, 20.0), (1 << 20, 200.0))),))
    hardware, load = replace(DEVICE, link=link), ForwardLoad(rows=64)
    row_bytes = 64 * _backbone().architecture.hidden_size * 2
    sum_s, gather_s = link.sum_s(row_bytes, 2), link.gather_s(row_bytes, 2)
    for num_ranks in (1, 2):
        backbone = on_ranks(_backbone(), num_ranks)
        latency = LatencyModel(roofline_profile(backbone, hardware))
        job = make_job(
            "j",
            "backward",
            num_rows=512,
            num_rows_left=512,
            num_parts_left=24,
            mean_context_len=0.0,
            counts=latency.profile.job,
        )
        forward, tasklet = forward_work(load, latency), tasklet_work(job, 64, latency)
        num_layers, is_divided = backbone.architecture.num_layers, num_ranks > 1
        # Two sums a block, and that of the embedding, whose table is the head and divided.
        assert forward.communication_s == pytest.approx(
            is_divided * (2 * num_layers + 1) * sum_s, rel=1e-6
        )
        # Of the lowest block, whose input nobody asks about, one; of all others two. And what is
        # saved of the block's input and of the second norm's is gathered.
        backward_s = (2 - 1 / num_layers) * sum_s + 2 * gather_s
        assert tasklet.communication_s == pytest.approx(is_divided * backward_s, rel=1e-6)
        assert forward.fixed_s + forward.computation_s > 0
    assert forward.fixed_s == pytest.approx(
        latency.profile.forward.at(1) - latency.profile.sums.at(1)
    ), "what the sums take is in none of the others"


def test_records_overrule_the_linear_model_which_learns_from_them():
    records, key, other = LatencyRecords(), Key("decode", 8, 0), Key("decode", 9, 0)
    work = [PieceWork(0.01, 0.001 * n, 0.0, 0.010 + 0.001 * n) for n in range(20)]
    assert records.seconds("a", key, lambda: work[8]) == pytest.approx(
        work[8].computation_s + work[8].memory_s
    )
    for batch, each in enumerate(work):
        if batch != 9:
            records.record("a", Key("decode", batch, 0), each, 0.02 + 0.003 * batch)
    assert records.seconds("a", key, lambda: PieceWork(1, 1, 1, 1)) == 0.02 + 0.003 * 8, (
        "a record, whatever the work"
    )
    assert records.recorded("a", other) is None and records.recorded("b", key) is None
    assert records.seconds("a", other, lambda: work[9]) == pytest.approx(0.02 + 0.003 * 9, rel=0.02)
    records.record("a", key, work[8], 5.0)
    held_up_s = records.seconds("a", key, lambda: work[8])
    for _ in range(3000):
        records.record("a", other, work[9], 0.047)
    assert records.recorded("a", key) is None, "one step that was held up is not believed for ever"
    assert records.seconds("a", key, lambda: work[8]) < 0.1 * held_up_s

"""Plans of the default policy that divide the device, where deadlines are held, too."""

from dataclasses import replace
from functools import cache
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from progress import make_job, make_request

from coserve.adapters import LoraConfig
from coserve.engine.config import EngineConfig
from coserve.engine.token_engine import TokenEngine
from coserve.models import load_backbone
from coserve.scheduling import JobProgress, LatencyModel, Plan, RequestProgress, View, make_policy
from coserve.scheduling.policies.slack import Slack
from coserve.scheduling.profile import Profile
from coserve.scheduling.sharing import Share, Sharing
from coserve.scheduling.slo.deadlines import SURE_MARGINS, due_at_s
from coserve.simulate.hardware import Hardware
from coserve.simulate.modelled_device import ModelledDevice
from coserve.simulate.roofline import roofline_profile
from coserve.simulate.simulation import Arrival, Simulation
from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example

CPU = Hardware(name="cpu", flops_per_s=6e11, bytes_per_s=12e9, call_s=1e-5)
SLACK = Slack()
EPSILON = 1e-6


@cache
def make_profile(forward: float = 0.6, backward: float = 0.56) -> Profile:
    """Return the profile of two cores, one of which has these speeds."""
    share = Share(units=1, rows=(1,), forward=(forward,), backward=(backward,))
    bare = roofline_profile(
        load_backbone("dummy:qwen2.5-0.5b", device="meta", dtype="bfloat16"), CPU
    )
    return replace(bare, sharing=Sharing(num_units=2, shares=(share,)))


def make_latency(*speeds: float, margin: float = 0.1) -> LatencyModel:
    latency = LatencyModel(make_profile(*speeds))
    latency.corrections.margin = margin
    return latency


def decoding(id: str = "r", *, tpot_s: float = 0.2, banked_s: float = 0.6) -> RequestProgress:
    first_s = 10.0 - 20 * tpot_s + banked_s
    return make_request(
        id,
        num_rows=1,
        num_past=300,
        num_output=20,
        arrival_s=0.0,
        first_token_s=first_s,
        last_token_s=10.0,
        ttft_s=2.0,
        tpot_s=tpot_s,
    )


def job(
    id: str = "j", phase: str = "backward", *, rows: int = 512, left: int = 512, parts: int = 20
) -> JobProgress:
    return make_job(
        id,
        phase,
        num_rows=rows,
        num_rows_left=left,
        num_parts_left=parts,
        mean_context_len=128.0,
        counts=make_profile().job,
    )


def view(*items: RequestProgress | JobProgress, num_units: int = 2) -> View:
    return View(
        now_s=10.0,
        requests=tuple([item for item in items if isinstance(item, RequestProgress)]),
        jobs=tuple([item for item in items if isinstance(item, JobProgress)]),
        ttft_s=4.0,
        tpot_s=0.2,
        num_units=num_units,
    )


def plan(seen: View, latency: LatencyModel | None = None, **settings: bool) -> Plan:
    return make_policy("slack", settings).plan(seen, latency or make_latency())


def test_tasklets_run_beside_the_forward_pass_where_more_gets_done():
    seen = view(decoding(), job())
    made, turns = plan(seen), plan(seen, divides=False)
    assert made.partition == (1, 1, False) and turns.partition is None
    assert (made.prediction.forward_speed, made.prediction.backward_speed) == (0.6, 0.56)
    assert made.prediction.backward_s >= turns.prediction.backward_s > 0
    assert (
        made.prediction.backward_s / made.predicted_s
        > turns.prediction.backward_s / turns.predicted_s
    )


@pytest.mark.parametrize(
    ("seen", "speeds"),
    [
        (view(decoding(), job()), (0.5, 0.49)),
        (view(decoding(), job(), num_units=1), (0.6, 0.56)),
        (view(job()), (0.6, 0.56)),
        (view(decoding(), job(phase="forward")), (0.6, 0.56)),
        (view(decoding(), job(phase="loss")), (0.6, 0.56)),
        (view(decoding(), job(left=16, parts=1)), (0.6, 0.56)),
        (view(decoding(tpot_s=0.1, banked_s=0.18), job()), (0.6, 0.56)),
    ],
    ids=["slower", "one unit", "no rows", "windows", "losses", "a small rest", "no time"],
)
def test_otherwise_one_follows_the_other(seen, speeds):
    assert plan(seen, make_latency(*speeds)).partition is None


def test_where_the_best_partition_is_too_slow_for_requests_the_best_of_the_others_is_taken():
    """Two and two of four units get most done, but leave the forward pass too little for a request
    without a bank.
    """
    shares = [
        Share(units=n, rows=(1,), forward=(f,), backward=(b,))
        for n, f, b in ((1, 0.3, 0.4), (2, 0.6, 0.8), (3, 0.9, 0.9))
    ]
    latency = LatencyModel(
        replace(make_profile(), sharing=Sharing(num_units=4, shares=tuple(shares)))
    )
    latency.corrections.margin = 0.0
    decode_s = latency.decode_s(num_requests=1, context=301)
    chosen = []
    for stretch in (3.0, 2.0, 1.05):
        request = decoding(tpot_s=stretch * decode_s, banked_s=stretch * decode_s)
        made = plan(
            structs.replace(view(request, job(parts=200), num_units=4), tpot_s=request.info.tpot_s),
            latency,
        )
        chosen.append(None if made.partition is None else made.partition.forward_units)
        if made.partition is not None:
            assert decode_s / made.prediction.forward_speed <= request.info.tpot_s
    assert chosen == [2, 3, None]


def test_what_steps_were_slower_at_is_not_chosen_again():
    latency = make_latency()
    made = plan(view(decoding(), job()), latency)
    assert made.partition is not None
    for _ in range(30):
        latency.sharing.observe(made.partition, "backward", 512, measured=0.3)
    assert plan(view(decoding(), job()), latency).partition is None


def due_beside_jobs_s(request: RequestProgress) -> float:
    """Return until when jobs may keep a request waiting: a reserve is left, or time for a token at
    the pace of its SLO.
    """
    reserved_s = due_at_s(
        request, max_gap_tpots=SLACK.max_gap_tpots, reserve_tpots=SLACK.reserve_tpots
    )
    due_s = due_at_s(request, max_gap_tpots=SLACK.max_gap_tpots)
    return max(reserved_s, min(request.last_token_s + request.info.tpot_s, due_s))


def missed_at_s(request: RequestProgress) -> float:
    """Return when a request would miss its SLO if its next token were its last."""
    assert request.first_token_s is not None
    return request.first_token_s + request.num_output * request.info.tpot_s


@pytest.mark.long
@settings(deadline=None, max_examples=150)
@given(st.randoms(use_true_random=False))
def test_deadlines_are_held_and_units_are_not_given_twice(rng: Random):
    """Speeds, requests and jobs are any."""
    latency = make_latency(
        rng.uniform(0.3, 1.0), rng.uniform(0.3, 1.0), margin=rng.choice([0.02, 0.1, 0.5])
    )
    requests = [
        decoding(f"r{n}", tpot_s=rng.choice([0.1, 0.2, 0.5]), banked_s=rng.uniform(0.0, 2.0))
        for n in range(rng.randint(1, 8))
    ]
    jobs = []
    for n in range(rng.randint(1, 4)):
        rows = rng.choice([64, 300, 1024])
        jobs.append(
            job(
                f"j{n}",
                rng.choice(["backward", "forward", "loss"]),
                rows=rows,
                parts=rng.randint(1, 24),
                left=rows,
            )
        )
    seen = view(*requests, *jobs)
    made = plan(seen, latency)
    if made.partition is None:
        assert made.predicted_s == pytest.approx(
            made.prediction.forward_s
            + made.prediction.loss_s
            + made.prediction.backward_s
            + made.prediction.update_s
        )
        return
    assert made.partition.forward_units + made.partition.backward_units <= seen.num_units
    assert (
        made.prediction.forward_speed + made.prediction.backward_speed > 1
        and made.tasklets
        and not made.losses
    )
    assert all(rows.kind != "window" for rows in made.rows)
    timely = [
        request
        for request in requests
        if due_at_s(request, max_gap_tpots=SLACK.max_gap_tpots) >= 10.0 + made.prediction.forward_s
    ]
    deadline_s = min(map(due_beside_jobs_s, timely), default=1e9) - 10.0
    assert made.predicted_s <= deadline_s + EPSILON
    assert made.backward_limit_s is not None and made.backward_limit_s <= deadline_s + EPSILON
    # As on a whole device: a step that takes longer than predicted, by the margin, comes off what
    # requests have saved up, and none misses its SLO, were its next token the last.
    missed_s = min(map(missed_at_s, timely), default=1e9) - 10.0
    late = 1 + SURE_MARGINS * latency.corrections.margin
    assert made.predicted_s * late <= missed_s + EPSILON


def harvest(*speeds: float, divides: bool) -> tuple[float, int]:
    """Return the tokens that a job is trained on in a simulated minute beside four streams, and the
    number of divided steps.
    """
    backbone = load_backbone("dummy:qwen2.5-0.5b", device="meta", dtype="bfloat16")
    device = ModelledDevice(backbone, make_profile(*speeds), num_pages=4000)
    config = EngineConfig(tpot_s=0.2, policy_settings={"divides": divides})
    engine = TokenEngine(device, LatencyModel(make_profile(0.6, 0.56)), config)
    example = Example(tokens=(1,) * 256, trained=(True,) * 256)
    engine.submit_examples(
        [example] * 64,
        TuningConfig(num_epochs=100_000),
        adapter=LoraConfig(r=16, target_modules="all-linear"),
    )
    arrivals = [Arrival(at_s=0.1, num_prompt_tokens=64, num_output_tokens=270) for _ in range(4)]
    num_divided = 0
    for _ in Simulation(engine, arrivals).run(60.0):
        num_divided += engine.last_plan.partition is not None
    assert len(engine.records) == 4 and all(
        record.tpot_s is not None and record.tpot_s <= 0.2 for record in engine.records
    )
    return sum([job.num_rows_run for job in engine.jobs.values()]) / 2, num_divided


def test_a_simulated_minute_harvests_more_where_the_device_is_divided():
    turns, none = harvest(0.6, 0.56, divides=False)
    sides, many = harvest(0.6, 0.56, divides=True)
    assert none == 0 and many > 10
    assert sides > 1.03 * turns, (
        "windows ride with decode rows as before: the gain is that of backward work"
    )


def test_a_device_that_is_slower_divided_than_it_was_measured_is_found_out():
    turns, _ = harvest(0.45, 0.4, divides=False)
    sides, few = harvest(0.45, 0.4, divides=True)
    assert few < 60 and sides > 0.9 * turns

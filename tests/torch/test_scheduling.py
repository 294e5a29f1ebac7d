"""Policies are pure functions from a view to a plan, and plans keep what they promise by the
latency model's word."""

import copy
import json
from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import inf
from random import Random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs
from progress import changed, make_job, make_request
from support import make_backbone

from coserve.adapters import Adapter, LoraConfig
from coserve.devices.counting import job_counts, model_counts
from coserve.devices.messages.steps import Tasklets
from coserve.devices.torch.tasklet_turns import tasklet_turns
from coserve.models import Backbone, load_backbone
from coserve.models.weights import weight_tensors
from coserve.scheduling import (
    JobProgress,
    LatencyModel,
    Plan,
    RequestProgress,
    View,
    make_policy,
    policy_names,
)
from coserve.scheduling.building import GOOD_ROWS, LOSS_ROWS_STEP, MIN_WINDOW_ROWS, PlanBuilder
from coserve.scheduling.corrections import Corrections, StepOverhead
from coserve.scheduling.counts import JobCounts
from coserve.scheduling.latency import ForwardLoad
from coserve.scheduling.pieces import (
    MAX_ROW_COST,
    MIN_PREFILL_ROWS,
    largest_that_fits,
    least_urgent,
    rows_of_tile,
)
from coserve.scheduling.plan import PlannedLoss, PlannedTasklets, SloUse
from coserve.scheduling.policies.slack import Slack
from coserve.scheduling.profile import Curve, OneCall, Profile
from coserve.scheduling.slo.allowance import Allowance
from coserve.scheduling.slo.deadlines import (
    AIMED,
    RESERVE_TOKENS,
    SURE_MARGINS,
    Deadlines,
    decode_deadlines,
)
from coserve.scheduling.slo.deadlines import due_at_s as deadlines_due_at_s
from coserve.scheduling.slo.step_budget import MAX_SHARE
from coserve.simulate.hardware import Hardware
from coserve.simulate.roofline import roofline_profile
from coserve.tuning import training_programs
from coserve.tuning.cursor import Cursor

CPU = Hardware(name="cpu", flops_per_s=6e11, bytes_per_s=12e9, call_s=1e-5)
GPU = Hardware(name="gpu", flops_per_s=4e14, bytes_per_s=2e12, call_s=5e-6)
SLOW = Hardware(name="slow", flops_per_s=1e10, bytes_per_s=1e9, call_s=1e-4)
EPSILON = 1e-9
SLACK = Slack()
MOST_GAP_TPOTS, RESERVE_TPOTS = SLACK.max_gap_tpots, SLACK.reserve_tpots


def due_at_s(request: RequestProgress, reserve_tpots: float = 0.0) -> float:
    return deadlines_due_at_s(request, max_gap_tpots=MOST_GAP_TPOTS, reserve_tpots=reserve_tpots)


POLICIES = policy_names()


def arrival_wait_s(seen: View) -> float:
    return SLACK.budget(seen, make_latency(), seen.requests).arrival_wait_s


@cache
def _backbone() -> Backbone:
    return load_backbone("dummy:qwen2.5-0.5b", device="meta", dtype="bfloat16")


@cache
def make_profile(hardware: Hardware = CPU) -> Profile:
    return roofline_profile(_backbone(), hardware)


@cache
def _latency(hardware: Hardware) -> LatencyModel:
    return LatencyModel(make_profile(hardware))


def make_latency(
    hardware: Hardware = CPU, *, margin: float = 0.1, overhead_s: float = 0.0, begin_s: float = 0.0
) -> LatencyModel:
    """One that has learned nothing yet but what steps take beside their sections, and with packs
    that begin."""
    latency = copy.copy(_latency(hardware))  # its tables take a while
    latency.corrections, latency.overhead = Corrections(margin=margin), StepOverhead()
    for _ in range(200):
        latency.overhead.observe(overhead_s, begins=False)
        latency.overhead.observe(begin_s or overhead_s, begins=True)
    return latency


def decoding(id: str = "r", **fields: float | None) -> RequestProgress:
    """A request that decodes, at 10 s: ten tokens since 8 s, one every 0.2 s, of which 0.4 s may be
    taken."""
    view = make_request(
        id,
        num_rows=1,
        num_past=100,
        num_output=10,
        arrival_s=5.0,
        first_token_s=8.0,
        last_token_s=9.9,
        ttft_s=2.0,
        tpot_s=0.4,
    )
    return changed(view, **fields)


def prompt(id: str = "p", rows: int = 200, **fields: float) -> RequestProgress:
    """A request that has just come, at 10 s."""
    return changed(
        make_request(
            id,
            num_rows=rows,
            num_past=0,
            num_output=0,
            arrival_s=10.0,
            first_token_s=None,
            last_token_s=10.0,
            ttft_s=2.0,
            tpot_s=0.4,
        ),
        **fields,
    )


def job(
    id: str = "j",
    phase: str = "forward",
    rows: int = 1024,
    left: int | None = None,
    *,
    parts_left: int = 24,
) -> JobProgress:
    left = rows if left is None else left
    return make_job(
        id,
        phase,
        num_rows=rows,
        num_rows_left=left,
        num_parts_left=parts_left,
        mean_context_len=128.0,
        counts=make_profile().job,
    )


def view(*items: RequestProgress | JobProgress, **fields: float) -> View:
    return View(
        now_s=fields.pop("now_s", 10.0),
        requests=tuple(item for item in items if isinstance(item, RequestProgress)),
        jobs=tuple(item for item in items if isinstance(item, JobProgress)),
        **{"ttft_s": 2.0, "tpot_s": 0.4, **fields},  # type: ignore[arg-type]
    )


def near(*items: RequestProgress) -> View:
    """Requests that come near their TPOT by themselves."""
    return structs.replace(view(*items), slo_use=SloUse(tpot=0.8))


def plan(policy: str, seen: View, latency: LatencyModel | None = None) -> Plan:
    return make_policy(policy).plan(seen, latency or make_latency())


def rows_of(made: Plan, kind: str) -> dict[str, int]:
    return {rows.item: rows.rows for rows in made.rows if rows.kind == kind}


def tunes(made: Plan) -> bool:
    return bool(rows_of(made, "window") or made.losses or made.tasklets or made.updates)


@st.composite
def views(draw: st.DrawFn) -> View:
    """An engine with any requests and jobs, some of them late."""
    rng = draw(st.randoms(use_true_random=False))
    now_s, requests = 100.0, []
    tpot_s, ttft_s = rng.choice([0.05, 0.3, 1.0]), rng.choice([0.5, 2.0, 10.0])
    for index in range(rng.choice([0, 0, 1, 3, 20])):
        arrival_s = now_s - rng.uniform(0, 1.5 * ttft_s)
        item = make_request(
            f"r{index}",
            num_rows=rng.randint(1, 600),
            num_past=0,
            num_output=0,
            arrival_s=arrival_s,
            first_token_s=None,
            last_token_s=arrival_s,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
        )
        if rng.random() < 0.7:
            num_output = rng.randint(1, 50)
            first_s = now_s - num_output * tpot_s * rng.uniform(0.3, 1.1)
            last_s = rng.uniform(first_s, now_s)
            item = changed(item, first_token_s=first_s, last_token_s=last_s, num_output=num_output)
            item = changed(
                item,
                num_rows=1 if rng.random() < 0.9 else item.num_rows,
                num_past=rng.randint(1, 2000),
            )
        if rng.random() < 0.3:
            item = changed(item, version=f"v{rng.randint(0, 2)}", num_bypasses=168)
        requests.append(item)
    jobs = []
    near = rng.randint(2, 24)
    for index in range(rng.choice([0, 1, 1, 4, 9])):
        phase, rows = (
            rng.choice(["forward", "loss", "backward", "update"]),
            rng.choice([40, 256, 1024]),
        )
        parts_left = rng.randint(phase != "loss", 24)  # a pack that is evaluated ends with the loss
        if rng.random() < 0.6:
            parts_left = near - rng.randint(0, 1)
        jobs.append(job(f"j{index}", phase, rows, rng.randint(1, rows), parts_left=parts_left))
    return View(
        now_s=now_s,
        requests=tuple(requests),
        jobs=tuple(jobs),
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        max_rows=rng.choice([30, 512, 2048]),
    )


devices = st.sampled_from([CPU, GPU, SLOW])


# -- all policies -------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["slack", "token-fusion", "inference-only", "chunked-training"])
@settings(deadline=None, max_examples=60)
@given(views(), devices)
def test_every_decoding_request_gets_its_row_in_every_plan(policy, seen, hardware):
    made = plan(policy, seen, make_latency(hardware))
    wanted = [request.id for request in seen.requests if request.num_rows == 1]
    assert [rows.item for rows in made.rows if rows.kind == "decode"] == wanted
    assert all(rows.rows == 1 for rows in made.rows if rows.kind == "decode")


@pytest.mark.parametrize("policy", POLICIES)
@settings(deadline=None, max_examples=60)
@given(views(), devices)
def test_plans_are_what_the_engine_can_run(policy, seen, hardware):
    made = plan(policy, seen, make_latency(hardware))
    requests, jobs = {r.id: r for r in seen.requests}, {j.id: j for j in seen.jobs}
    losses = {piece.job: piece.rows for piece in made.losses}
    named = (
        [rows.item for rows in made.rows]
        + [part.job for part in made.tasklets]
        + list(made.updates)
    )
    assert len(set(named)) == len(named) and len(losses) == len(made.losses), (
        "each item has one piece in a step"
    )
    num_decoding = len(rows_of(made, "decode"))
    assert sum(rows.rows for rows in made.rows) <= max(seen.max_rows, num_decoding)
    for rows in made.rows:
        if rows.kind == "window":
            item = jobs[rows.item]
            assert item.phase == "forward" and 1 <= rows.rows <= item.num_rows_left
            assert rows.start == item.num_rows - item.num_rows_left
            assert rows.rows >= min(MIN_WINDOW_ROWS, item.num_rows_left, seen.max_rows)
        else:
            assert (
                1 <= rows.rows <= requests[rows.item].num_rows
                and rows.start == requests[rows.item].num_past
            )
    for name, num_rows in losses.items():
        item = jobs[name]
        assert item.phase == "loss"
        assert min(MIN_WINDOW_ROWS, item.num_rows_left) <= num_rows <= item.num_rows_left
    for part in made.tasklets:
        item = jobs[part.job]
        if item.phase == "loss":
            assert losses[part.job] == item.num_rows_left, "tasklets come after all of the loss"
            item = structs.replace(item, phase="backward", num_rows_left=item.num_rows)
        assert item.phase == "backward" and part.num_tasklets >= 1
        assert part.rows >= min(MIN_WINDOW_ROWS, item.num_rows_left)
        in_current = -(-item.num_rows_left // part.rows)
        in_part = -(-item.num_rows // part.rows)
        assert part.num_tasklets <= in_current + (item.num_parts_left - 1) * in_part
    assert all(jobs[name].phase == "update" for name in made.updates)


@pytest.mark.parametrize("policy", POLICIES)
@settings(deadline=None, max_examples=30)
@given(views(), devices)
def test_the_same_view_gives_the_same_plan_and_stays_as_it_was(policy, seen, hardware):
    latency, before = make_latency(hardware), copy.deepcopy(seen)
    first = plan(policy, seen, latency)
    assert plan(policy, seen, latency) == first == plan(policy, before, make_latency(hardware))
    assert repr(seen) == repr(before)  # progress is compared by identity


def cursor_of(item: JobProgress) -> Cursor:
    """Return the cursor of a job's pack on its backward pass."""
    num_parts = item.info.counts.num_parts
    cursor = Cursor(num_rows=item.num_rows, num_trained=1, num_parts=num_parts)
    cursor.advance_forward(item.num_rows)
    cursor.advance_loss(1)
    cursor.num_parts_done = num_parts - item.num_parts_left
    if item.phase == "backward":
        cursor.num_backward_rows = item.num_rows_left
    return cursor


@pytest.mark.parametrize("policy", POLICIES)
@settings(deadline=None, max_examples=60)
@given(views(), devices)
def test_a_plan_says_what_it_takes(policy, seen, hardware):
    """The sums that grow with a plan are those of the plan as a whole."""
    latency = make_latency(hardware)
    made = plan(policy, seen, latency)
    requests, jobs = {r.id: r for r in seen.requests}, {j.id: j for j in seen.jobs}
    load, backward_s = ForwardLoad(), 0.0
    for rows in made.rows:
        if rows.kind == "window":
            latency.add_window(load, jobs[rows.item], rows.rows)
        else:
            load.add_request(requests[rows.item], rows.rows)
    cursors = {part.job: cursor_of(jobs[part.job]) for part in made.tasklets}
    pieces = [Tasklets(*structs.astuple(part)) for part in made.tasklets]
    for turn in tasklet_turns(pieces, lambda name: cursors[name].num_parts_done):
        windows = []
        for piece in turn:
            start, end = cursors[piece.job].next_backward(piece.num_rows)
            cursors[piece.job].advance_backward(end - start)
            windows.append((jobs[piece.job], end - start))
        backward_s += latency.tasklets_s(windows)
    assert made.prediction.forward_s == pytest.approx(latency.forward_s(load))
    assert made.prediction.backward_s == pytest.approx(backward_s)
    assert made.prediction.loss_s == pytest.approx(
        latency.loss_s(sum(piece.rows for piece in made.losses))
    )
    assert made.predicted_s == pytest.approx(
        made.prediction.forward_s
        + made.prediction.loss_s
        + made.prediction.backward_s
        + made.prediction.update_s
    )
    assert made.prediction.update_s == pytest.approx(
        sum(latency.update_s(jobs[name].info.counts) for name in made.updates)
    )


def test_no_policy_but_those_that_there_are():
    with pytest.raises(ValueError, match=f"policy 'fifo' is not one of {', '.join(POLICIES)}"):
        make_policy("fifo")


# -- slack: when tokens are due -------------------------------------------------------


def test_a_first_token_is_due_when_its_slo_says():
    assert due_at_s(prompt(arrival_s=3.0, ttft_s=2.5)) == 5.5
    assert due_at_s(prompt(arrival_s=3.0, ttft_s=2.5), RESERVE_TPOTS) == 5.5, (
        "nothing is in the bank yet"
    )


def test_tokens_that_came_early_are_banked():
    request = decoding(first_token_s=8.0, num_output=10, last_token_s=11.5, tpot_s=0.4)
    assert due_at_s(request) == pytest.approx(8.0 + 10 * AIMED * 0.4)
    assert due_at_s(request, 2.0) == pytest.approx(8.0 + 8 * AIMED * 0.4), "but for what is kept"


def test_no_gap_between_tokens_is_longer_than_a_reader_would_bear():
    request = decoding(first_token_s=0.0, num_output=1000, last_token_s=10.0, tpot_s=0.4)
    assert (
        due_at_s(request)
        == due_at_s(request, RESERVE_TPOTS)
        == pytest.approx(10.0 + MOST_GAP_TPOTS * 0.4)
    )


def test_the_reserve_is_saved_up_over_the_first_tokens():
    requests = [decoding(num_output=n, last_token_s=20.0) for n in range(1, 13)]
    kept = [due_at_s(request) - due_at_s(request, 2.0) for request in requests]
    share = [min(1.0, n / RESERVE_TOKENS) for n in range(1, 13)]
    assert kept == pytest.approx([2.0 * AIMED * 0.4 * each for each in share])
    assert due_at_s(decoding(num_output=1), 2.0) > 8.0, (
        "the second token may take a while from the start"
    )


# -- slack: budgets -------------------------------------------------------------------


# Others run prompts whole, have no SLO, or leave requests that decode a share of the step, whatever
# that takes.
@pytest.mark.parametrize(
    "policy", ["chunked-training", "harli", "spatial-sharing", "temporal-sharing", "token-fusion"]
)
@pytest.mark.parametrize("overhead_s", [0.02, 0.05])
def test_what_steps_take_beside_their_sections_is_taken_off_their_time(policy, overhead_s):
    """A prompt that fills the SLO, where policies cut them: with the overhead the step takes no
    longer than without."""
    seen = view(decoding(), prompt(rows=2000))
    without, found = (
        plan(policy, seen, make_latency(overhead_s=seconds)) for seconds in (0.0, overhead_s)
    )
    assert found.prediction.overhead_s == pytest.approx(overhead_s, rel=1e-3)
    assert rows_of(found, "prefill")["p"] < rows_of(without, "prefill")["p"]
    assert found.predicted_s <= without.predicted_s + EPSILON


@pytest.mark.parametrize("overhead_s", [0.0, 0.05])
def test_batch_work_has_the_time_that_the_overhead_leaves(overhead_s):
    batch = changed(prompt("b", rows=5000), tpot_s=1000.0, ttft_s=1000.0, batch_due_s=1000.0)
    seen = structs.replace(view(decoding(first_token_s=9.0, last_token_s=10.0)), batch=(batch,))
    without, found = (
        plan("slack", seen, make_latency(overhead_s=seconds)) for seconds in (0.0, overhead_s)
    )
    assert rows_of(without, "prefill")["b"] >= rows_of(found, "prefill")["b"] >= 16
    assert found.predicted_s <= without.predicted_s + 1e-3


@pytest.mark.parametrize("policy", ["slack", "token-fusion", "spatial-sharing", "tuning-only"])
def test_where_a_pack_begins_jobs_have_less_time(policy):
    waiting = structs.replace(job("j", "forward"), phase="pack")
    seen = structs.replace(view(decoding(), waiting), num_free_pages=10_000, num_pages=10_000)
    without, found = (
        plan(policy, seen, make_latency(overhead_s=0.001, begin_s=begin_s))
        for begin_s in (0.001, 0.05)
    )
    assert found.begin == ("j",) and found.prediction.overhead_s == pytest.approx(0.05, rel=1e-2)
    if policy != "tuning-only":  # jobs alone have no SLO
        rows, fewer = (rows_of(made, "window")["j"] for made in (without, found))
        assert fewer < rows or policy == "spatial-sharing"  # a share of what requests take
        assert found.predicted_s <= without.predicted_s + (
            0.05 if policy == "spatial-sharing" else 0.002
        )


@settings(deadline=None, max_examples=300)
@given(views(), devices, st.sampled_from([0.02, 0.1, 0.5]))
@example(
    seen=view(prompt(arrival_s=8.0), job()), hardware=CPU, margin=0.1
)  # due at this very moment
def test_fine_tuning_ends_before_the_tightest_deadline_by_prediction(seen, hardware, margin):
    latency = make_latency(hardware, margin=margin)
    made = plan("slack", seen, latency)
    if not tunes(made):
        return
    least = PlanBuilder(seen, latency)
    least.tune(seen.jobs, 0.0)
    indivisible = not seen.requests and made == least.build()
    soonest_s = seen.now_s + latency.forward_s(
        decode_load([r for r in seen.requests if r.num_rows == 1])
    )
    # Others may be infeasible; one that is due now is, since its step has not begun.
    timely = [
        request
        for request in seen.requests
        if due_at_s(request) >= soonest_s and due_at_s(request) > seen.now_s
    ]
    # A token at the pace of its SLO takes nothing of the bank.
    paces_s = {
        r.id: inf if r.first_token_s is None else r.last_token_s + r.info.tpot_s for r in timely
    }
    due_s = [max(due_at_s(r, RESERVE_TPOTS), min(due_at_s(r), paces_s[r.id])) for r in timely]
    assert made.predicted_s <= min(due_s, default=inf) - seen.now_s + EPSILON
    # If it takes longer, it still ends before any of these has missed its SLO, were its next token
    # the last.
    missed_s = [missed_at_s(request) for request in timely]
    assert (
        made.predicted_s * (1 + SURE_MARGINS * margin)
        <= min(missed_s, default=inf) - seen.now_s + EPSILON
    )
    assert made.predicted_s <= arrival_wait_s(seen) + EPSILON or indivisible
    prompts = [request for request in seen.requests if request.num_rows > 1]
    assert rows_of(made, "prefill") == {request.id: request.num_rows for request in prompts}


@settings(deadline=None, max_examples=300)
@given(views(), devices, st.sampled_from([0.02, 0.1, 0.5]))
def test_prompts_end_before_the_tightest_deadline_by_prediction(seen, hardware, margin):
    latency = make_latency(hardware, margin=margin)
    made = plan("inference-only", seen, latency)
    prefill = [rows for rows in made.rows if rows.kind == "prefill"]
    requests = {request.id: request for request in seen.requests}
    smallest = False
    if len(prefill) == 1:
        load, prompt = (
            decode_load([r for r in seen.requests if r.num_rows == 1]),
            requests[prefill[0].item],
        )
        longest = min(prompt.num_rows, seen.max_rows - load.rows)
        smallest = prefill[0].rows == least_urgent(
            latency.with_request(load, prompt), longest, load.rows
        )
    cramped = len(prefill) == 1 and sum(rows.rows for rows in made.rows) == seen.max_rows
    if not prefill or smallest or cramped:
        return
    deadline_s = (
        min((due_at_s(r) for r in seen.requests if r.num_rows == 1), default=inf) - seen.now_s
    )
    decoding_s = latency.forward_s(decode_load([r for r in seen.requests if r.num_rows == 1]))
    # For prompts that would be late otherwise.
    tpot_s = SLACK.budget(seen, latency, seen.requests).tpot_s
    most_s = max(decoding_s / (1 - MAX_SHARE), MOST_GAP_TPOTS * tpot_s)
    lost_s = seen.tpot_s  # the pace of requests that are late whatever happens
    assert made.predicted_s <= max(deadline_s, most_s, lost_s) + EPSILON


def test_the_smallest_piece_of_an_urgent_prompt_fills_a_tile_where_that_costs_little_more_per_row():
    def in_tiles(rows: int) -> float:
        """Return the seconds of a step with three other rows: 20 ms for what must be read, and 30
        ms a tile.
        """
        return 0.02 + 0.03 * -(-(3 + rows) // 16)

    def flat(rows: int) -> float:
        return 0.02 + 1e-5 * rows

    assert [rows_of_tile(others) for others in (0, 3, 12, 13, 16, 35)] == [16, 13, 4, 19, 16, 13]
    # 64 rows take 2.66 ms each, 29 of them 2.76 and 13 3.85.
    assert least_urgent(in_tiles, 500, 3) == 29
    assert least_urgent(flat, 20, 3) == 20, "no more than there are"
    assert least_urgent(flat, 500, 3) == 61


def deadlines(request: RequestProgress, *, margin: float) -> Deadlines:
    return decode_deadlines(
        [request],
        now_s=10.0,
        decode_s=0.1,
        infeasible_tpot_s=0.4,
        max_gap_tpots=4.0,
        prompt_reserve_tpots=0.0,
        reserve_tpots=0.5,
        margin=margin,
    )


def test_the_margin_counts_against_missing_the_slo_alone():
    """A request that has just begun could miss it with the next token; one that has saved up some
    of a TPOT could not.
    """
    new = decoding(num_output=1, first_token_s=10.0, last_token_s=10.0, num_left=100)
    assert deadlines(new, margin=0.0).prompts_s == pytest.approx(10.0 + AIMED * 0.4)
    for margin in (0.1, 0.5):
        due = deadlines(new, margin=margin)
        assert (
            due.prompts_s == due.jobs_s == pytest.approx(10.0 + 0.4 / (1 + SURE_MARGINS * margin))
        )
    saved = decoding(
        num_output=10, first_token_s=10.0 - 8.9 * AIMED * 0.4, last_token_s=10.0, num_left=100
    )
    assert deadlines(saved, margin=0.05) == deadlines(saved, margin=0.0)
    assert deadlines(saved, margin=0.5).prompts_s < deadlines(saved, margin=0.0).prompts_s


def test_a_preempted_request_that_is_late_has_its_pace_without_a_margin():
    waits = changed(decoding(last_token_s=10.0), first_token_s=None, arrival_s=9.0)
    timely, late = (changed(waits, ttft_s=ttft_s) for ttft_s in (3.0, 0.5))
    assert deadlines(timely, margin=0.1).jobs_s == pytest.approx(10.0 + 2.0 / 1.15)
    assert deadlines(late, margin=0.1).jobs_s == pytest.approx(10.4)


@settings(deadline=None)
@given(
    st.integers(1, 200),
    st.integers(0, 4000),
    st.lists(st.floats(0.001, 1.0), min_size=1, max_size=6),
    st.floats(0.0, 6.0),
    st.booleans(),
)
def test_the_largest_number_that_fits_is_found(least, more, steps, within_s, falls):
    """The search is exact to within a sixty-fourth, where seconds never fall; elsewhere it finds
    one that fits, if any does.
    """
    most, asked = least + more, []

    def seconds(number: int) -> float:
        asked.append(number)
        place = len(steps) * (number - least) / (more + 1)
        whole = int(place)
        rising = sum(steps[:whole]) + steps[whole] * (place - whole)
        return rising - (0.5 if falls and number % 3 == 0 else 0.0)

    found = largest_that_fits(least, most, seconds, within_s)
    assert least <= found <= most and len(asked) <= 40
    if found > least:
        assert seconds(found) <= within_s
    if not falls and found < most:
        assert seconds(min(most, found + max(1, found // 64))) > within_s


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 1000), st.integers(32, 400))
def test_requests_whose_prompts_take_all_that_they_may_are_not_late_by_what_a_step_takes_longer(
    seed, num_tokens
):
    """Steps that should end exactly when the next token is due end sooner or later than that."""
    random, tpot_s = Random(seed), 0.03
    first_s = now_s = 5.1
    for num_output in range(1, num_tokens):
        left = num_tokens - num_output
        request = make_request(
            "r",
            num_rows=1,
            num_past=100,
            num_output=num_output,
            arrival_s=5.0,
            first_token_s=first_s,
            last_token_s=now_s,
            ttft_s=5.0,
            tpot_s=tpot_s,
            num_left=left,
        )
        due = decode_deadlines(
            [request],
            now_s=now_s,
            decode_s=0.015,
            infeasible_tpot_s=tpot_s,
            max_gap_tpots=4.0,
            prompt_reserve_tpots=0.0,
            reserve_tpots=0.5,
        )
        now_s += (due.prompts_s - now_s) * random.lognormvariate(0.0, 0.03)
    assert (now_s - first_s) / (num_tokens - 1) <= tpot_s


def missed_at_s(request: RequestProgress) -> float:
    """Return when a request would miss its SLO if its next token were its last."""
    if request.first_token_s is None:
        return request.info.arrival_s + request.info.ttft_s
    return request.first_token_s + request.num_output * request.info.tpot_s


def decode_load(requests: list[RequestProgress]) -> ForwardLoad:
    load = ForwardLoad()
    load.add_decodes(requests)
    return load


def test_what_was_banked_is_spent_on_fine_tuning():
    poor, rich = decoding(num_output=9), decoding(num_output=11)
    little, much = (
        plan("slack", view(request, job(), ttft_s=20.0, tpot_s=1.0)) for request in (poor, rich)
    )
    assert rows_of(little, "window")["j"] < rows_of(much, "window")["j"]
    assert much.predicted_s == pytest.approx(due_at_s(rich, RESERVE_TPOTS) - 10.0, rel=0.1), (
        "all of it"
    )


def test_a_late_request_stops_fine_tuning_and_is_served_itself():
    late = decoding(num_output=4, last_token_s=9.5)
    assert due_at_s(late) < 10.0
    for phase in ("forward", "backward", "update"):
        assert tunes(plan("slack", view(decoding(), job(phase=phase))))
        made = plan("slack", view(decoding(), changed(late, id="late"), job(phase=phase)))
        assert not tunes(made) and rows_of(made, "decode") == {"r": 1, "late": 1}


def test_a_request_that_has_only_its_reserve_left_gives_jobs_no_more_than_its_pace_does():
    request = decoding(num_output=6, first_token_s=7.75, last_token_s=9.9)
    assert due_at_s(request, RESERVE_TPOTS) <= 10.0 < due_at_s(request) - 0.1
    made = plan("slack", view(request, job(phase="backward")))
    assert tunes(made) and made.predicted_s <= due_at_s(request) - 10.0
    hasty = changed(request, last_token_s=9.7)
    assert (
        plan("slack", view(hasty, job(phase="backward"))).predicted_s
        <= 9.7 + request.info.tpot_s - 10.0
    )


def test_requests_that_were_late_by_themselves_leave_jobs_nothing_at_their_pace():
    request = decoding(num_output=6, first_token_s=7.85, last_token_s=9.9)
    seen = view(request, job(phase="backward"))
    assert tunes(
        plan("slack", structs.replace(seen, slo_use=SloUse(tpot=0.9, time=1.0, known=1.0)))
    )
    for late in (
        SloUse(tpot=1.0, time=1.0, known=1.0),
        SloUse(ttft=0.99, tpot=0.9, time=1.0, known=1.0),
    ):
        assert not tunes(plan("slack", structs.replace(seen, slo_use=late)))


def test_near_their_slos_requests_leave_jobs_the_more_of_their_pace_the_more_of_them_were_seen():
    """The next burst may be larger than all before it; far from their SLOs requests hold them all
    the same."""
    seen = view(
        decoding(num_output=6, first_token_s=7.85, last_token_s=9.9),
        job(phase="backward", rows=4096),
    )

    def seconds(tpot: float, known: float, ttft: float = 0.6) -> float:
        need = SloUse(tpot=tpot, ttft=ttft, time=1.0, known=known)
        return plan("slack", structs.replace(seen, slo_use=need)).predicted_s

    assert seconds(0.9, 0.0) < seconds(0.9, 0.2) < seconds(0.9, 1.0)
    assert seconds(0.5, 0.0) == seconds(0.5, 1.0) >= seconds(0.9, 1.0)
    # Prompts may take all of a step at this pace, too, so that TPOTs are near; who has time for a
    # first token is not.
    assert seconds(0.99, 0.4, ttft=0.1) == seconds(0.9, 1.0) > seconds(0.9, 0.4)
    assert seconds(0.99, 0.1, ttft=0.1) < seconds(0.99, 0.4, ttft=0.1), (
        "little is known of what first tokens need"
    )
    assert seconds(1.0, 1.0, ttft=0.1) < seconds(0.99, 1.0, ttft=0.1), "they are late by themselves"


def test_near_their_slos_requests_leave_jobs_nothing_until_it_is_known_how_much_of_the_time_they_fill():
    """Time that jobs take in the first seconds of a load that just fills it is never made up
    for.
    """
    seen = view(decoding(num_output=20, first_token_s=5.0, last_token_s=9.9), job(phase="backward"))
    for need, can_tune in (
        (SloUse(tpot=0.9), False),
        (SloUse(tpot=0.9, time=0.7), True),
        (SloUse(tpot=0.5), True),
    ):
        assert tunes(plan("slack", structs.replace(seen, slo_use=need))) == can_tune, need


def test_nothing_is_tuned_while_a_prompt_is_not_wholly_in():
    much, little = prompt(rows=2000, ttft_s=20.0), prompt(rows=100, ttft_s=20.0)
    for phase in ("forward", "backward", "update"):
        items = decoding(num_output=50, last_token_s=10.0), job(phase=phase)
        made = plan("slack", view(much, *items, ttft_s=20.0, tpot_s=1.0))
        assert not tunes(made) and 0 < rows_of(made, "prefill")["p"] < 2000
        assert tunes(plan("slack", view(little, *items, ttft_s=20.0, tpot_s=1.0)))


def test_a_tight_first_token_bounds_the_step_that_brings_it():
    tight = prompt(rows=64, arrival_s=8.4, ttft_s=2.0)  # due in 0.4 s
    made = plan("slack", view(tight, job(), ttft_s=2.0, tpot_s=0.4))
    free = plan("slack", view(changed(tight, arrival_s=10.0), job(), ttft_s=2.0, tpot_s=0.4))
    assert made.predicted_s * 1.1 <= 0.4 < free.predicted_s * 1.1


def test_longer_margins_leave_less_to_jobs():
    items = decoding(num_output=9), job()
    sure, unsure = (
        rows_of(plan("slack", view(*items, ttft_s=20.0), make_latency(margin=m)), "window")["j"]
        for m in (0.02, 0.4)
    )
    assert unsure < sure


# -- slack: steps that an arrival might meet --------------------------------------------


@settings(deadline=None, max_examples=200)
@given(views(), devices)
def test_idle_steps_end_soon_or_are_one_indivisible_piece(seen, hardware):
    idle, latency = structs.replace(seen, requests=()), make_latency(hardware)
    made = plan("slack", idle, latency)
    assert made.runs_nothing == (not idle.jobs), "jobs always continue"
    if made.predicted_s <= arrival_wait_s(idle):
        return
    first = idle.jobs[0]
    assert [*made.moved_jobs, *made.updates] == [first.id]
    least = min(first.num_rows_left, MIN_WINDOW_ROWS)
    assert [*made.losses] == ([PlannedLoss(first.id, least)] if first.phase == "loss" else [])
    assert sum(rows.rows for rows in made.rows) == (least if first.phase == "forward" else 0)
    assert [*made.tasklets] == (
        [PlannedTasklets(first.id, least, 1)] if first.phase == "backward" else []
    )
    assert all(made.predicted_s > arrival_wait_s(idle) for _ in idle.jobs)


def test_the_longest_step_follows_from_the_slos():
    assert arrival_wait_s(view(ttft_s=2.0, tpot_s=0.01)) == pytest.approx(0.2), (
        "a share of the TTFT"
    )
    assert arrival_wait_s(view(ttft_s=2.0, tpot_s=0.15)) == pytest.approx(0.3), (
        "two TPOTs where that is more"
    )
    assert arrival_wait_s(view(ttft_s=2.0, tpot_s=5.0)) == pytest.approx(1.0), "up to half of it"


def test_an_idle_device_is_used_up_to_that():
    seen = view(job(phase="forward"))
    made = plan("slack", seen)
    assert 0.9 * arrival_wait_s(seen) < made.predicted_s <= arrival_wait_s(seen)


# -- slack: prompts -------------------------------------------------------------------


def test_prompts_go_in_the_order_of_their_deadlines():
    items = (
        prompt("relaxed", 60, ttft_s=9.0),
        prompt("hasty", 60, ttft_s=1.0),
        prompt("middle", 60, ttft_s=3.0),
    )
    made = plan("slack", view(*items))
    assert [rows.item for rows in made.rows] == ["hasty", "middle", "relaxed"]


def test_an_urgent_prompt_makes_late_who_can_catch_up_and_nobody_else():
    """Though it needs most of the time: where no tokens are left to catch up over, it gets what
    their pace leaves."""
    latency, timely = (
        make_latency(),
        decoding(num_output=6, first_token_s=7.93, last_token_s=9.9, num_left=1),
    )
    ttft_s = 1.1 * (latency.prompt_s(1000) / 0.78 + latency.decode_s(num_requests=1, context=100))
    urgent = prompt(rows=1000, ttft_s=ttft_s)
    made = plan("slack", near(timely, urgent), latency)
    assert rows_of(made, "prefill")["p"] > MIN_PREFILL_ROWS
    assert made.predicted_s <= due_at_s(timely) - 10.0 + EPSILON
    more = plan("slack", near(changed(timely, num_left=100), urgent), latency)
    assert rows_of(more, "prefill")["p"] > rows_of(made, "prefill")["p"]


def test_an_urgent_prompt_gets_what_its_deadline_needs_however_late_others_are():
    """Step by step, until its first token: not the smallest piece each time."""
    latency, now_s, urgent, last_s = make_latency(), 10.0, prompt(rows=1000, ttft_s=3.0), 9.9
    sizes = []
    while True:
        late = decoding(num_output=1, last_token_s=last_s)
        made = plan("slack", view(late, urgent, job(), now_s=now_s, ttft_s=3.0), latency)
        assert due_at_s(late) < now_s and rows_of(made, "decode") == {"r": 1}
        rows = rows_of(made, "prefill").get("p", 0)
        sizes.append(rows)
        now_s += made.predicted_s
        last_s = now_s
        if rows == urgent.num_rows:
            break
        urgent = changed(urgent, num_rows=urgent.num_rows - rows, num_past=urgent.num_past + rows)
    assert latency.prompt_s(1000) < now_s - 10.0 <= 3.0
    assert len(sizes) > 2 and max(sizes) > 1.5 * MIN_PREFILL_ROWS


def test_infeasible_requests_are_served_after_those_that_can_be_in_time():
    latency = make_latency()
    lost, timely = prompt("lost", 1000, arrival_s=8.5), prompt("timely", 300)
    assert due_at_s(lost) - 10.0 < latency.prompt_s(1000)
    made = plan("slack", view(lost, timely), latency)
    assert next(iter(rows_of(made, "prefill"))) == "timely"
    assert (
        rows_of(plan("slack", view(lost, decoding(num_output=50)), latency), "prefill")["lost"]
        >= MIN_PREFILL_ROWS
    )


def test_an_infeasible_request_that_has_waited_for_ten_of_its_slos_is_served_first():
    waited, timely = (
        (prompt("lost", 1000, arrival_s=100 - wait_s) for wait_s in (20.5, 19.5)),
        prompt("timely", 300),
    )
    for lost, first in zip(waited, ("lost", "timely"), strict=True):
        made = plan(
            "slack", view(lost, changed(timely, arrival_s=100.0), now_s=100.0), make_latency()
        )
        assert next(iter(rows_of(made, "prefill"))) == first


def test_an_infeasible_request_that_has_waited_for_very_long_gets_a_piece_beside_marginal_ones():
    """It gets its smallest piece where others can be in time, for whom the time is."""
    latency, lost, timely = (
        make_latency(),
        prompt("lost", 5000, arrival_s=40.0),
        prompt("timely", 300, arrival_s=98.6),
    )
    others = [
        decoding(f"d{i}", tpot_s=0.1, num_output=50, first_token_s=95.0, last_token_s=100.0)
        for i in range(8)
    ]
    beside: tuple[RequestProgress | JobProgress, ...] = (*others, job())
    alone = rows_of(plan("slack", view(lost, *beside, now_s=100.0), latency), "prefill")
    assert alone["lost"] >= MIN_PREFILL_ROWS - len(others)
    both = rows_of(plan("slack", view(lost, timely, *beside, now_s=100.0), latency), "prefill")
    assert both["lost"] == alone["lost"] and both["timely"] >= MIN_PREFILL_ROWS - len(others)
    second = changed(lost, id="second")
    assert list(
        rows_of(plan("slack", view(lost, second, timely, *beside, now_s=100.0), latency), "prefill")
    ) == [
        "lost",
        "timely",
    ]


@pytest.mark.parametrize("tpot_s", [0.001, 0.02])
def test_a_request_that_cannot_be_in_time_does_not_hold_up_jobs(tpot_s):
    """A decode step takes 0.09 s here."""
    lost = decoding("lost", tpot_s=tpot_s, num_output=100, first_token_s=1.0, last_token_s=10.0)
    for phase in ("forward", "backward", "update"):
        assert tunes(plan("slack", view(lost, job(phase=phase))))
        assert tunes(plan("slack", view(lost, decoding(num_output=50), job(phase=phase))))
    # One that can still catch up does.
    late = decoding("late", tpot_s=0.2, num_output=40, first_token_s=1.0, last_token_s=10.0)
    assert due_at_s(late) < 10.0 and not tunes(plan("slack", view(late, job())))
    assert tunes(plan("slack", view(changed(late, num_left=5), job()))), (
        "too few tokens are left for that"
    )


def test_a_prompt_alone_is_run_in_pieces_that_an_arrival_may_wait_for():
    latency, long = make_latency(), prompt(rows=3000, ttft_s=30.0)
    made = plan("slack", view(long, ttft_s=2.0), latency)
    assert 0.8 * 0.8 < made.predicted_s <= arrival_wait_s(view(long, ttft_s=2.0)) == 0.8
    urgent = changed(long, ttft_s=1.2 * latency.prompt_s(3000))
    assert rows_of(plan("slack", view(urgent, max_rows=4000), latency), "prefill") == {"p": 3000}


def test_a_prompt_that_ends_with_a_step_alone_may_take_a_little_longer_than_an_arrival_waits():
    """Its last rows would take a step of their own; not a piece that ends nothing."""
    latency = make_latency()

    def taken(*items: RequestProgress) -> dict[str, int]:
        return rows_of(plan("slack", view(*items, ttft_s=2.0), latency), "prefill")

    piece = taken(prompt(rows=3000, ttft_s=30.0))["p"]
    little = piece + piece // 8
    assert taken(prompt(rows=little, ttft_s=30.0)) == {"p": little}
    assert taken(prompt(rows=2 * piece, ttft_s=30.0)) == {"p": piece}
    both = taken(prompt(rows=little, ttft_s=30.0), prompt("q", rows=little, ttft_s=40.0))
    assert both == {"p": little}, "the next one waits"


def test_long_prompts_take_more_than_their_rows():
    latency = make_latency()
    first_s, second_s = latency.prompt_s(4000), latency.prompt_s(4000, 4000)
    assert latency.prompt_s(8000) == pytest.approx(first_s + second_s, rel=0.05)
    assert second_s > 1.1 * first_s


def test_drawing_masks_and_scoring_take_time():
    latency = make_latency()
    plain = [decoding(f"r{index}") for index in range(32)]
    greedy, drawn = (
        plan("slack", view(*requests), latency)
        for requests in (plain, [changed(request, draws=True) for request in plain])
    )
    load = decode_load(plain)
    load.drawn = 32
    assert (
        drawn.prediction.forward_s == pytest.approx(latency.forward_s(load))
        and drawn.prediction.forward_s > 1.02 * greedy.prediction.forward_s
    )
    masked = plan("slack", view(*[changed(request, is_masked=True) for request in plain]), latency)
    load.drawn, load.masked = 0, 32
    assert (
        masked.prediction.forward_s == pytest.approx(latency.forward_s(load))
        and masked.prediction.forward_s > 1.01 * greedy.prediction.forward_s
    )
    asked = changed(prompt(rows=100), num_scored=99)
    bare, scored = (plan("slack", view(each), latency) for each in (prompt(rows=100), asked))
    assert scored.prediction.forward_s > bare.prediction.forward_s + 0.9 * make_profile().score.at(
        99
    )


def test_backward_work_has_a_limit_so_that_the_rest_is_in_time():
    """The limit is by the clock of the device."""
    latency = make_latency()
    request, deadline_s = (
        decoding(num_output=9),
        due_at_s(decoding(num_output=9), RESERVE_TPOTS) - 10.0,
    )
    made = plan("slack", view(request, job(phase="backward"), ttft_s=20.0, tpot_s=1.0), latency)
    (part,) = made.tasklets
    one_s = latency.tasklet_s(job(phase="backward"), part.rows)
    assert made.backward_limit_s == pytest.approx(deadline_s - made.prediction.forward_s - one_s)
    assert (
        deadline_s - one_s
        < made.prediction.forward_s + made.prediction.backward_s
        <= deadline_s + EPSILON
    )
    assert plan("tuning-only", view(job(phase="backward"))).backward_limit_s is None


def test_jobs_give_way_while_a_request_waits_for_pages():
    items = decoding(num_output=50), structs.replace(job(phase="backward"), num_pages=500)
    blocked = changed(prompt("waits", 320, arrival_s=9.5), num_pages=20)
    free = structs.replace(view(*items, ttft_s=2.0), num_pages=1000, num_free_pages=900)
    assert tunes(plan("slack", free))
    queued = structs.replace(free, num_free_pages=10, waiting=(blocked,))
    made = plan("slack", queued)
    assert made.drop == ("j",) and made.admit == ("waits",), "the pack's pages are enough"
    other = structs.replace(queued, jobs=(job(phase="update"),))
    assert not tunes(plan("slack", other)), "nothing can be dropped: it is to be done soon"
    lost = changed(blocked, arrival_s=0.0)
    assert plan("slack", structs.replace(other, waiting=(lost,), num_free_pages=990)).admit == (
        "waits",
    )
    assert tunes(
        plan("slack", structs.replace(other, requests=(), waiting=(changed(lost, num_pages=2000),)))
    )


@pytest.mark.parametrize("field", ["ttft", "tpot"])
def test_jobs_get_less_the_nearer_requests_are_to_their_slo(field):
    request = decoding(num_output=50, last_token_s=10.0)
    times = []
    for need in (0.0, 0.8, 0.9, 0.95, 0.99, 1.0):
        seen = structs.replace(
            view(request, job(phase="backward")), slo_use=SloUse(**{field: need})
        )
        times.append(plan("slack", seen).prediction.backward_s)
    assert times == sorted(times, reverse=True) and times[0] > 0 and times[-1] == 0


def test_a_job_gets_its_smallest_piece_however_much_requests_press():
    late = decoding(num_output=4, last_token_s=9.5)
    for phase in ("forward", "loss", "backward", "update"):
        item = job(phase=phase)
        for waited_s, wanted in ((0.0, False), (1000.0, True)):
            made = plan("slack", view(late, structs.replace(item, waited_s=waited_s)))
            assert tunes(made) == wanted
        assert all(rows == MIN_WINDOW_ROWS for rows in rows_of(made, "window").values())
        assert all(part.num_tasklets == 1 for part in made.tasklets)
    # Of several, the one that waited longest, though another would be cheaper.
    made = plan(
        "slack",
        view(
            late,
            structs.replace(job("a"), waited_s=50.0),
            structs.replace(job("b", "update"), waited_s=100.0),
        ),
    )
    assert made.updates == ("b",) and not rows_of(made, "window")


def test_prompts_may_take_all_that_leaves_no_gap_that_is_noticed():
    """Together they need 0.85 of the time, more than MAX_SHARE; but requests decode in a twentieth
    of it."""
    latency, rows = make_latency(GPU), 1000
    alone_s = latency.prompt_s(rows)
    decode_s = latency.decode_s(num_requests=1, context=301)
    tpot_s = 5 * decode_s
    late = decoding(
        num_output=20,
        first_token_s=10 - 20 * tpot_s,
        last_token_s=10.0,
        tpot_s=tpot_s,
        num_left=1000,
    )
    left_s = (1 + latency.corrections.margin) * (2 * alone_s / 0.85 + decode_s)
    prompts = [prompt(f"p{index}", rows=rows, ttft_s=left_s) for index in range(2)]
    made = plan("inference-only", view(late, *prompts), latency)
    assert len(rows_of(made, "prefill")) == 2


def test_a_prompt_with_time_leaves_decoding_requests_some_of_their_bank():
    latency = make_latency()
    relaxed, urgent = prompt(rows=200, ttft_s=50.0), prompt(rows=200, ttft_s=1.5)
    late = decoding(num_output=5, last_token_s=9.9)  # due now
    assert due_at_s(late, 1.0) < 10.0
    assert rows_of(plan("slack", near(late, relaxed), latency), "prefill") == {}
    assert rows_of(plan("slack", near(late, urgent), latency), "prefill") == {}, "it has time"
    urgent = changed(urgent, ttft_s=0.6)
    assert rows_of(plan("slack", near(late, urgent), latency), "prefill")["p"] > MIN_PREFILL_ROWS
    # With a bank: the relaxed one stops one TPOT before the deadline, the urgent one goes up to it.
    banked = decoding(num_output=8, last_token_s=9.9)
    deadline_s = due_at_s(banked) - 10.0
    left, taken = (
        plan("slack", near(banked, changed(each, num_rows=2000, ttft_s=ttft_s)), latency)
        for each, ttft_s in ((relaxed, 50.0), (urgent, 6.0))
    )
    assert left.predicted_s <= deadline_s - AIMED * 0.4 + EPSILON
    assert deadline_s - AIMED * 0.4 < taken.predicted_s <= deadline_s + EPSILON


def test_without_jobs_a_prompt_with_time_makes_requests_late_that_are_sure_to_catch_up():
    """So that it decodes with them as soon as possible; no gap is noticed."""
    latency, relaxed = make_latency(), prompt(rows=900, ttft_s=50.0)
    begun = decoding(
        num_output=1, first_token_s=10.0, last_token_s=10.0, tpot_s=0.2, num_left=200, num_sure=200
    )

    def predicted_s(seen: View) -> float:
        made = plan("slack", seen, latency)
        assert rows_of(made, "prefill")
        return made.predicted_s

    pace_s, longest_s = due_at_s(begun) - 10.0, predicted_s(view(begun, relaxed))
    assert 2 * pace_s < longest_s <= MOST_GAP_TPOTS * 0.2 + EPSILON
    unsure, ending = changed(begun, num_sure=-1), changed(begun, num_left=5, num_sure=5)
    unsure_s = predicted_s(view(unsure, relaxed))
    assert pace_s < unsure_s < longest_s, "most answers have some tokens"
    assert predicted_s(view(ending, relaxed)) < unsure_s, "which this one has not"
    grown = changed(unsure, num_output=40, first_token_s=10 - 39 * 0.2)
    assert predicted_s(view(grown, relaxed)) <= pace_s + EPSILON, "it may end with any token"
    assert predicted_s(near(begun, relaxed)) <= pace_s + EPSILON, "they came near their TPOT lately"
    assert predicted_s(view(begun, relaxed, job())) <= pace_s + EPSILON, (
        "jobs want the time that they save"
    )
    batch = changed(begun, id="b", batch_due_s=1000.0, ttft_s=1000.0, tpot_s=1000.0)
    alone = rows_of(plan("slack", view(begun, relaxed), latency), "prefill")["p"]
    beside = rows_of(
        plan("slack", structs.replace(view(begun, relaxed), batch=(batch,)), latency), "prefill"
    )["p"]
    assert beside < alone / 2, "batch work wants it"
    idle = make_policy("inference-only").plan(view(begun, relaxed, job()), latency)
    assert idle.predicted_s == longest_s, "jobs that do not run want nothing"


def test_prompts_ride_along_in_small_pieces_where_rows_are_dear():
    """64 rows would take longer than the longest gap between tokens, however much was banked."""
    latency = make_latency(Hardware(name="dear", flops_per_s=6e11, bytes_per_s=1e12, call_s=5e-6))
    request, relaxed = (
        decoding(num_output=500, last_token_s=10.0, tpot_s=0.01),
        prompt(rows=200, ttft_s=50.0),
    )
    assert latency.prompt_s(MIN_PREFILL_ROWS) > MOST_GAP_TPOTS * 0.01
    made = plan("slack", view(request, relaxed, tpot_s=0.01), latency)
    assert rows_of_tile(1) <= rows_of(made, "prefill")["p"] < MIN_PREFILL_ROWS


def test_no_forward_pass_has_more_rows_than_allowed():
    made = plan("slack", view(decoding(), prompt(rows=500), prompt("q", 500), job(), max_rows=300))
    assert rows_of(made, "prefill") == {"p": 299} and not tunes(made)
    made = plan("slack", view(job(), ttft_s=1000.0, max_rows=100))
    assert rows_of(made, "window") == {"j": 100}


def test_jobs_continue_where_only_small_passes_are_allowed():
    """So it is after the device ran out of memory with requests alone."""
    made = plan("slack", view(job(), max_rows=3))
    assert rows_of(made, "window") == {"j": 3}


# -- windows --------------------------------------------------------------------------


def test_crumbs_of_time_are_saved_up():
    """Right after a token there is little in the bank: a window that would cost much per row waits
    for more."""
    latency = LatencyModel(
        replace(make_profile(), s_per_bypass=1e-3)
    )  # what a window costs at least
    alone_s = latency.decode_s(num_requests=1, context=100)
    load = ForwardLoad()
    load.add_decodes([decoding()])
    windows_of = (MIN_WINDOW_ROWS, GOOD_ROWS, 1024)
    least_s, good_s, longest_s = (latency.with_window(load, job())(n) - alone_s for n in windows_of)
    taken, refused = set(), 0
    for hundredths in range(1, 100):
        budget_s = alone_s + least_s + (longest_s - least_s) * hundredths / 100
        request = decoding(
            num_output=20, tpot_s=10.0, last_token_s=10.0 + budget_s - MOST_GAP_TPOTS * 10.0
        )
        made = plan("slack", view(request, job(), ttft_s=1000.0, tpot_s=10.0), latency)
        windows = rows_of(made, "window")
        if not windows:
            refused += 1
            continue
        taken.add(windows["j"])
        extra_s = made.predicted_s - alone_s
        assert (
            windows["j"] >= GOOD_ROWS
            or extra_s / windows["j"] <= MAX_ROW_COST * good_s / GOOD_ROWS + EPSILON
        )
    assert refused and taken
    # Where waiting would bring no more, since steps are no longer than this anyway, it takes what
    # there is.
    wait_s = alone_s + least_s * 1.01
    made = plan(
        "slack",
        view(decoding(num_output=20, last_token_s=10.0), job(), ttft_s=wait_s * 2, tpot_s=0.01),
    )
    assert rows_of(made, "window")["j"] < min(taken)


def test_nothing_is_saved_up_where_steps_get_no_longer():
    """Requests that needed most of their TTFTs bound every step with a job in it, whatever has been
    banked: its job takes what there is, in this step.
    """
    latency = LatencyModel(replace(make_profile(), s_per_bypass=1e-3))
    load = ForwardLoad()
    load.add_decodes([decoding()])
    window_s = latency.with_window(load, job())(MIN_WINDOW_ROWS) - latency.forward_s(load)
    seen = view(
        decoding(num_output=20, tpot_s=10.0),
        job(),
        ttft_s=2 * window_s / Allowance(SloUse(ttft=0.8)).wait_share,
        tpot_s=10.0,
    )
    (num_rows,) = rows_of(
        plan("slack", structs.replace(seen, slo_use=SloUse(ttft=0.8)), latency), "window"
    ).values()
    assert MIN_WINDOW_ROWS <= num_rows < GOOD_ROWS


def test_crumbs_of_time_are_saved_up_for_the_loss_too():
    """Few rows cost the head as much as a hundred."""
    latency = make_latency()
    alone_s = latency.decode_s(num_requests=1, context=100)
    taken, refused = [], 0
    least_s, good_s, longest_s = (latency.loss_s(n) for n in (MIN_WINDOW_ROWS, GOOD_ROWS, 1024))
    for hundredths in range(1, 100):
        budget_s = alone_s + least_s + (longest_s - least_s) * hundredths / 100
        request = decoding(
            num_output=20, tpot_s=10.0, last_token_s=10.0 + budget_s - MOST_GAP_TPOTS * 10.0
        )
        made = plan("slack", view(request, job("j", "loss"), ttft_s=1000.0, tpot_s=10.0), latency)
        if not made.losses:
            refused += 1
            continue
        (piece,) = made.losses
        taken.append(piece.rows)
        assert (
            piece.rows >= GOOD_ROWS
            or made.prediction.loss_s / piece.rows <= MAX_ROW_COST * good_s / GOOD_ROWS + EPSILON
        )
        assert alone_s + made.prediction.loss_s <= budget_s + EPSILON
    assert refused and taken == sorted(taken) and taken[0] > 2 * MIN_WINDOW_ROWS
    # Numbers of rows repeat, so that libraries have compiled their products.
    assert len(set(taken)) > 2 and all(rows % LOSS_ROWS_STEP == 0 for rows in taken if rows < 1024)
    # The rest of a pack may be small, and so may a piece where waiting would bring no more.
    (piece,) = plan(
        "slack", view(decoding(num_output=9), job("j", "loss", left=3), ttft_s=20.0)
    ).losses
    assert piece.rows == 3
    wait_s = (alone_s + least_s * 1.01) * 1.1
    tight = view(
        decoding(num_output=20, last_token_s=10.0), job("j", "loss"), ttft_s=wait_s * 2, tpot_s=0.01
    )
    (piece,) = plan("slack", tight).losses
    assert piece.rows < taken[0]


def test_what_costs_much_waits_for_a_while_and_no_longer():
    """A job progresses even where there will never be more time."""
    latency = make_latency()
    alone_s = latency.decode_s(num_requests=1, context=100)
    budget_s = alone_s + 1.01 * latency.loss_s(MIN_WINDOW_ROWS)
    request = decoding(
        num_output=20, tpot_s=10.0, last_token_s=10.0 + budget_s - MOST_GAP_TPOTS * 10.0
    )
    for waited_s, runs in (
        (0.0, False),
        (0.99 * MOST_GAP_TPOTS * 10.0, False),
        (1.01 * MOST_GAP_TPOTS * 10.0, True),
    ):
        waiting = structs.replace(job("j", "loss"), waited_s=waited_s)
        seen = view(request, waiting, ttft_s=1000.0, tpot_s=10.0)
        made = make_policy("slack", {"least_share": 0}).plan(seen, latency)
        assert len(made.losses) == runs
        assert all(MIN_WINDOW_ROWS <= piece.rows < 2 * MIN_WINDOW_ROWS for piece in made.losses)


def test_tasklets_follow_the_last_rows_of_the_loss():
    made = plan("slack", view(job("j", "loss", left=100), ttft_s=100.0))
    assert [*made.losses] == [PlannedLoss("j", 100)] and [part.job for part in made.tasklets] == [
        "j"
    ]
    assert made.tasklets[0].rows == 1024, "the whole pack is still to go backward"
    evaluated = plan("slack", view(job("j", "loss", left=100, parts_left=0), ttft_s=100.0))
    assert [*evaluated.losses] == [PlannedLoss("j", 100)] and not evaluated.tasklets
    partly = plan("slack", view(decoding(num_output=20), job("j", "loss"), ttft_s=3.0))
    assert partly.losses and partly.losses[0].rows < 1024 and not partly.tasklets


def test_the_rest_of_a_pack_may_be_a_small_window():
    assert rows_of(plan("slack", view(job(left=3))), "window") == {"j": 3}
    tight = view(decoding(num_output=9), job(left=3), ttft_s=20.0)
    assert rows_of(plan("slack", tight), "window") == {"j": 3}


def test_half_a_window_is_run_where_it_is_clearly_cheaper_per_row(monkeypatch):
    """A window of 512 rows was slow when first seen: whether half of it has the lower price by 3%,
    or by more."""
    seen = view(job(left=512), ttft_s=1000.0)
    for share, rows in (
        (0.97, 512),
        (0.9, 256),
    ):  # of the price of a row in the whole, what it is in the half
        latency = make_latency()
        prices = [
            latency.forward_s(ForwardLoad(rows=n, spans=1, windows=1)) / n for n in (256, 512)
        ]
        factor = prices[0] / prices[1] / share
        monkeypatch.setattr(
            latency.corrections, "of", lambda _, n, __, factor=factor: factor if n > 256 else 1.0
        )
        assert rows_of(make_policy("tuning-only", {}).plan(seen, latency), "window") == {"j": rows}


def test_jobs_are_served_in_turn_and_phases_share_a_step():
    first, second, third = job("a", left=64), job("b", "backward"), job("c", "update")
    made = plan("slack", view(first, second, third, ttft_s=20.0))
    assert rows_of(made, "window") == {"a": 64}
    assert [part.job for part in made.tasklets] == ["b"] and made.updates == ("c",)
    assert made.prediction.forward_s and made.prediction.backward_s and made.prediction.update_s
    # Where there is time for one alone, it goes to the one that was served least.
    for jobs in ((job("a"), job("b")), (job("b"), job("a"))):
        served, *rest = rows_of(plan("slack", view(*jobs)), "window").items()
        assert served[0] == jobs[0].id and served[1] > 10 * sum(rows for _, rows in rest), (
            "but for what is left over"
        )


def test_a_pack_goes_backward_over_several_parts_in_one_step():
    made = plan(
        "slack", view(job(phase="backward", rows=1024, left=100, parts_left=24), ttft_s=1000.0)
    )
    assert made.tasklets == (PlannedTasklets("j", 1024, 24),), (
        "the rest of one part, and all others whole"
    )
    made = plan(
        "slack",
        view(job(phase="backward", rows=1024, left=1024, parts_left=24), ttft_s=0.2, tpot_s=0.01),
    )
    (part,) = made.tasklets
    assert part.rows < 1024 and made.predicted_s <= arrival_wait_s(view(ttft_s=0.2, tpot_s=0.01))


# -- the other policies -----------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 30), st.integers(0, 400), st.floats(0.15, 3.0), st.sampled_from([CPU, GPU]))
def test_token_fusion_fills_every_step_up_to_the_slo(
    num_decoding, num_prompt_rows, slo_s, hardware
):
    latency, window = make_latency(hardware), job(rows=4000)
    requests = [decoding(f"r{i}", tpot_s=slo_s) for i in range(num_decoding)]
    if num_prompt_rows > 1:
        requests.append(prompt(rows=num_prompt_rows, tpot_s=slo_s))
    made = plan("token-fusion", view(*requests, window, max_rows=8000), latency)
    load = ForwardLoad()
    for request in requests:
        load.add_request(
            request, {**rows_of(made, "decode"), **rows_of(made, "prefill")}.get(request.id, 0)
        )
    if (rows := rows_of(made, "window").get("j", 0)) == 0:
        assert latency.with_window(load, window)(MIN_WINDOW_ROWS) > AIMED * slo_s
        return
    assert latency.with_window(load, window)(rows) <= AIMED * slo_s + EPSILON
    more = rows + max(1, rows // 64)
    assert more > window.num_rows_left or latency.with_window(load, window)(more) > AIMED * slo_s


def test_token_fusion_has_no_memory():
    """Tokens that came early or late in the past count for nothing."""
    early, late = (
        decoding(num_output=100, last_token_s=10.0),
        decoding(num_output=1, last_token_s=8.0),
    )
    assert plan("token-fusion", view(early, job())) == plan("token-fusion", view(late, job()))
    assert plan("slack", view(early, job())) != plan("slack", view(late, job()))


def test_tuning_only_knows_no_requests_and_inference_only_no_jobs():
    items = decoding(), prompt(), job("a"), job("b", "backward"), job("c", "update")
    tuning, inference = plan("tuning-only", view(*items)), plan("inference-only", view(*items))
    assert [rows.kind for rows in tuning.rows] == ["window"] and rows_of(tuning, "window") == {
        "a": 1024
    }
    assert tuning.tasklets == (PlannedTasklets("b", 1024, 24),) and tuning.updates == ("c",)
    assert inference == plan("slack", view(*items[:2])) and not tunes(inference)


# -- the latency model --------------------------------------------------------------------


def test_profiles_come_back_from_json():
    profile = make_profile()
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile
    with pytest.raises(KeyError):
        Profile.from_json({})
    with pytest.raises(TypeError):
        Profile.from_json({**profile.to_json(), "colour": "red"})


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 3000), st.floats(1e-6, 10.0)),
        min_size=2,
        max_size=8,
        unique_by=lambda p: p[0],
    )
)
def test_curves_never_fall_however_noisy_they_were_measured(points):
    rows, seconds = zip(*sorted(points), strict=True)
    curve = Curve(rows=rows, seconds=seconds)
    assert [curve.at(n) for n in rows] == pytest.approx(seconds), "a curve goes through its points"
    table = curve.table()
    assert table[0] == 0.0 and all(earlier <= later for earlier, later in pairwise(table))
    latency = LatencyModel(replace(make_profile(), forward=curve))
    times = [latency.prompt_s(n) for n in range(0, 9000, 100)]
    assert times == sorted(times), "and none falls beyond its end"


def test_curves_need_points_in_order():
    for rows in ((1,), (2, 1), (1, 1), ()):
        with pytest.raises(ValueError, match="two rising numbers of rows"):
            Curve(rows=rows, seconds=(1.0,) * len(rows))


loads = st.builds(
    ForwardLoad,
    rows=st.integers(1, 3000),
    sampled=st.integers(0, 100),
    spans=st.integers(2, 100),
    pairs=st.floats(1e3, 1e6),
    window_pairs=st.floats(0, 1e3),
    keys=st.integers(0, 100_000),
    bypasses=st.integers(0, 1000),
    windows=st.integers(0, 2),
    window_rows=st.floats(0, 1000),
    windows_apart=st.integers(0, 1),
)
decode_loads = st.integers(1, 100).map(
    lambda n: ForwardLoad(rows=n, sampled=n, spans=n, keys=50 * n)
)


@settings(deadline=None)
@given(
    loads, st.sampled_from(["rows", "sampled", "spans", "pairs", "keys", "bypasses", "window_rows"])
)
def test_more_of_anything_takes_no_less_time(load, what):
    latency, more = make_latency(), copy.deepcopy(load)
    setattr(more, what, getattr(load, what) + 50)
    assert latency.forward_s(more) >= latency.forward_s(load)
    if what in ("rows", "keys", "pairs", "bypasses") and more.rows > 128:
        assert latency.forward_s(more) > latency.forward_s(load)


@cache
def taught_latency() -> LatencyModel:
    """One whose corrections differ from one number of rows to the next, whose device decodes faster
    alone."""
    one_call = OneCall(
        rows=60, prompt_pairs=2000, saved_s=1e-3, window_saved_s=2e-3, saved_s_per_window_row=1e-5
    )
    latency = LatencyModel(replace(make_latency().profile, one_call=one_call))
    for index, rows in enumerate((1, 3, 6, 20, 40, 90, 200, 400, 900, 1800)):
        for windows in (False, True):
            latency.corrections.observe(
                "forward",
                rows,
                windows,
                predicted_s=1.0,
                measured_s=0.6 + 0.1 * index + 0.05 * windows,
            )
    return latency


def test_steps_that_run_as_one_call_take_less_by_what_that_saves():
    profile, decodes = make_latency().profile, ForwardLoad(rows=4, sampled=4, spans=4, keys=100)
    latency = LatencyModel(profile)
    one_call = OneCall(
        rows=9, prompt_pairs=50, saved_s=1e-4, window_saved_s=2e-4, saved_s_per_window_row=1e-5
    )
    saving = LatencyModel(replace(profile, one_call=one_call))
    assert saving.decode_s(num_requests=4, context=24) == saving.forward_s(decodes)
    for load in (decodes, structs.replace(decodes, rows=9, pairs=50.0)):
        assert saving.forward_s(load) == pytest.approx(latency.forward_s(load) - 1e-4)
    for load in (
        structs.replace(decodes, rows=9, pairs=51.0),
        structs.replace(decodes, rows=10),
        structs.replace(decodes, windows=4),  # no request
        structs.replace(decodes, windows=1, windows_apart=1),
    ):
        assert saving.forward_s(load) == latency.forward_s(load)
    beside = structs.replace(
        decodes, rows=9, windows=1, window_rows=5.0, pairs=900.0, window_pairs=900.0
    )
    assert saving.forward_s(beside) == pytest.approx(latency.forward_s(beside) - 2.5e-4)


@settings(deadline=None)
@given(
    loads | decode_loads,
    st.integers(1, 500),
    st.booleans(),
    st.sampled_from(["", "v"]),
    st.booleans(),
)
def test_what_a_request_would_add_is_what_it_adds(load, rows, last, version, known):
    latency = taught_latency()
    if known:
        load.versions.add("v")
    request = changed(
        prompt(rows=rows if last else rows + 1, num_past=77), version=version, num_bypasses=168
    )
    foreseen_s = latency.with_request(load, request)(rows)
    load.add_request(request, rows)
    assert foreseen_s == pytest.approx(latency.forward_s(load))


@settings(deadline=None)
@given(loads | decode_loads, st.integers(1, 500), st.sampled_from([0.0, 1e6, 5e7]), st.booleans())
def test_what_a_window_would_add_is_what_it_adds(load, rows, flops_per_row, at_once):
    latency = taught_latency()
    counts = replace(make_profile().job, flops_per_row=flops_per_row, runs_at_once=at_once)
    window = changed(job(), counts=counts)
    foreseen_s = latency.with_window(load, window)(rows)
    latency.add_window(load, window, rows)
    assert foreseen_s == pytest.approx(latency.forward_s(load))


@settings(deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=40))
def test_decodes_are_added_together_as_they_are_one_by_one(pasts):
    requests = [
        changed(decoding(f"r{i}", num_past=past), version="v" * (i % 3), num_bypasses=7)
        for i, past in enumerate(pasts)
    ]
    together, single = ForwardLoad(), ForwardLoad()
    together.add_decodes(requests)
    for request in requests:
        single.add_request(request, 1)
    assert together == single


def test_jobs_are_weighed_beside_the_reference_job():
    latency, reference = make_latency(), make_profile().job
    half = replace(
        reference,
        flops_per_row=reference.flops_per_row / 2,
        num_bypasses=reference.num_bypasses // 2,
    )
    light, heavy = changed(job(), counts=half), job()
    assert latency.with_window(ForwardLoad(), light)(256) < latency.with_window(
        ForwardLoad(), heavy
    )(256)
    fewer = replace(
        reference,
        backward_flops_per_row=reference.backward_flops_per_row / 3,
        backward_flops_per_pair=0.0,
    )
    keyless = structs.replace(job(), mean_context_len=0.0)
    assert latency.tasklet_s(changed(keyless, counts=fewer), 256) == pytest.approx(
        latency.tasklet_s(keyless, 256) / 3
    )
    assert latency.tasklet_s(
        structs.replace(job(), mean_context_len=5000.0), 256
    ) > latency.tasklet_s(job(), 256)


# -- what it learns ---------------------------------------------------------------------


def observed(latency: LatencyModel, rows: int, bias: float, *, windows: bool = False) -> float:
    """One step on a device that takes `bias` times what the profile says; returns how far the
    prediction was off."""
    load = ForwardLoad(rows=rows, spans=1, windows=int(windows))
    predicted_s, measured_s = latency.forward_s(load), bias * make_latency().forward_s(load)
    latency.corrections.observe(
        "forward", rows, windows, predicted_s=predicted_s, measured_s=measured_s
    )
    latency.observe_step(predicted_s=predicted_s, measured_s=measured_s)
    return predicted_s / measured_s - 1


@pytest.mark.parametrize("bias", [0.5, 0.8, 1.4, 3.0])
def test_a_biased_device_is_known_after_some_tens_of_steps(bias):
    latency = make_latency()
    errors = [abs(observed(latency, 40 + step % 20, bias)) for step in range(40)]
    assert errors[0] > 0.15
    assert max(errors[25:]) < 0.02


def test_what_one_size_of_step_taught_helps_with_others():
    latency = make_latency()
    for _ in range(30):
        observed(latency, 50, 1.4)
    assert abs(observed(latency, 500, 1.4)) < 0.05
    assert abs(observed(make_latency(), 500, 1.4)) > 0.25


def test_sizes_and_kinds_of_steps_are_corrected_apart():
    latency = make_latency()
    for _ in range(60):
        observed(latency, 50, 1.4)
        observed(latency, 1000, 0.9)
        observed(latency, 50, 2.0, windows=True)
    assert abs(observed(latency, 50, 1.4)) < 0.02
    assert abs(observed(latency, 1000, 0.9)) < 0.02
    assert abs(observed(latency, 50, 2.0, windows=True)) < 0.02


@pytest.mark.parametrize("outlier", [0.001, 100.0])
def test_one_outlier_moves_predictions_a_little_at_most(outlier):
    latency, load = make_latency(), ForwardLoad(rows=50, spans=1)
    for _ in range(40):
        observed(latency, 50, 1.4)
    before_s, margin = latency.forward_s(load), latency.corrections.margin
    observed(latency, 50, outlier)
    assert latency.forward_s(load) == pytest.approx(before_s, rel=0.12)
    assert latency.corrections.margin <= margin
    for _ in range(20):
        observed(latency, 50, 1.4)
    assert latency.forward_s(load) == pytest.approx(before_s, rel=0.01), "and it is forgotten"


def test_the_first_step_of_its_kind_is_not_believed_without_bounds():
    latency, load = make_latency(), ForwardLoad(rows=50, spans=1)
    before_s = latency.forward_s(load)
    observed(latency, 50, 1000.0)
    assert latency.forward_s(load) < 1.5 * before_s


def test_steps_that_took_no_time_teach_nothing():
    latency, load = make_latency(), ForwardLoad(rows=50, spans=1)
    before_s = latency.forward_s(load)
    for times in ({"predicted_s": 0.0, "measured_s": 1.0}, {"predicted_s": 1.0, "measured_s": 0.0}):
        latency.corrections.observe("forward", 50, False, **times)
        latency.observe_step(**times)
    assert latency.forward_s(load) == before_s and not latency.corrections.recent_errors()


def test_the_margin_follows_recent_errors_within_bounds():
    latency = make_latency()

    def steps(*ratios: float) -> float:
        for index in range(320):
            latency.observe_step(predicted_s=1.0, measured_s=ratios[index % len(ratios)])
        return latency.corrections.margin

    assert steps(1.0) == pytest.approx(0.02), "never less than a little"
    assert steps(0.7) == pytest.approx(0.02), "steps that end early are no error to fear"
    assert steps(*[1.0] * 8, 1.2, 1.2) == pytest.approx(0.2)
    assert steps(*[1.0] * 99, 3.0) == pytest.approx(0.02), "one in a hundred is not what it is for"
    assert steps(3.0) == pytest.approx(0.5), "never more than half"
    assert latency.corrections.recent_errors() == pytest.approx([2 / 3] * 256)


# -- counts -------------------------------------------------------------------------------

# The tiny model: hidden 32, intermediate 48, 4 heads of 8 for queries and 2 for keys and values, 3
# blocks.
_BLOCK_WEIGHTS = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48


def test_a_model_costs_two_flops_per_weight_and_row():
    counts = model_counts(make_backbone("llama"))
    elementwise = (
        2 * 4 * 32 + 3 * (32 + 16) + 5 * 48 + 2 * 32
    )  # norms, rotations, the gate, residuals
    assert counts.flops_per_row == 3 * (2 * _BLOCK_WEIGHTS + elementwise)
    assert counts.flops_per_pair == 3 * 2 * 2 * 32, (
        "a row with a key: a product for the score, one with the value"
    )
    assert counts.head_flops_per_row == 2 * 32 * 97 + 4 * 32
    assert counts.kv_bytes_per_key == 3 * 2 * 16 * 4


def lora_counts(targets: list[str], r: int = 4) -> JobCounts:
    adapter = Adapter(make_backbone("llama"), LoraConfig(r=r, target_modules=tuple(targets)))
    return job_counts(adapter, training_programs(adapter))


def test_a_job_costs_what_its_networks_add():
    counts = lora_counts(["q_proj", "down_proj"])
    products = 2 * 4 * (32 + 32) + 2 * 4 * (48 + 32)
    assert counts.flops_per_row == 3 * (products + 2 * 4 + 2 * 32), (
        "and scaling, and adding to the layer's output"
    )
    assert counts.num_bypasses == 6 and counts.num_parts == 3
    assert counts.num_parameters == 3 * 4 * (32 + 32 + 48 + 32)


def test_backward_passes_cost_an_input_gradient_per_weight_above_the_lowest_network():
    counts = lora_counts(["down_proj"])
    # Gradients of B and A, and what lies between; the lowest block needs no more, those above also
    # all of x.
    lowest = 2 * 4 * 32 + 2 * 4 * 32 + 2 * 4 * 48
    above = 2 * _BLOCK_WEIGHTS + lowest + 2 * 4 * 48
    assert 1.0 <= 3 * counts.backward_flops_per_row / (lowest + 2 * above) < 1.1, (
        "and elementwise work"
    )
    # Two of the three blocks reverse their attention: four products with keys or values, and the
    # scores again.
    assert counts.backward_flops_per_pair == pytest.approx(2 / 3 * 2.5 * 4 * 32)
    more = lora_counts(["down_proj"], r=8)
    assert more.backward_flops_per_row > counts.backward_flops_per_row
    assert more.flops_per_row > 1.9 * counts.flops_per_row - 3 * 2 * 32


def test_counting_needs_no_weights():
    meta = load_backbone("dummy:qwen2.5-0.5b", device="meta", dtype="bfloat16")
    counts = model_counts(meta)
    weights = 896 * (896 + 2 * 128) + 896 * 896 + 3 * 896 * 4864
    assert counts.flops_per_row == pytest.approx(24 * 2 * weights, rel=0.01)
    assert counts.head_flops_per_row == pytest.approx(2 * 896 * 151_936, rel=0.01)
    tensors = [tensor for part in meta.weights.values() for tensor in weight_tensors(part)]
    assert all(tensor.device == torch.device("meta") for tensor in tensors)

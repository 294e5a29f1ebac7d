"""LLMStation's planner on a divided device: what runs beside decoding, by predictions and by what
steps really took."""

from math import ceil

import pytest
from profiles import flat, free_but_for
from progress import make_job, make_request

from coserve.scheduling.counts import JobCounts
from coserve.scheduling.history import History, StepView
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import Partition, Plan, View
from coserve.scheduling.policies import make_policy
from coserve.scheduling.policies.llmstation import most_beside
from coserve.scheduling.sharing import Share, Sharing

DECODE_S, TASKLET_S, PARTS = 0.1, 0.02, 24
# Speeds of either side on one, two and three of four units.
SPEEDS = {1: 0.4, 2: 0.7, 3: 0.9}
COUNTS = JobCounts(
    flops_per_row=1.0,
    backward_flops_per_row=1.0,
    backward_flops_per_pair=1.0,
    num_parts=PARTS,
    num_bypasses=1,
    num_parameters=1,
)
POLICY = make_policy("llmstation", {"decode_share": 1.0})


def latency(*units: int, tasklet_s: float = TASKLET_S) -> LatencyModel:
    """Steps that take the same whatever their rows, on a device that was measured in these
    parts."""
    shares = [Share(units=n, rows=(1,), forward=(SPEEDS[n],), backward=(SPEEDS[n],)) for n in units]
    return LatencyModel(
        free_but_for(
            COUNTS,
            forward=flat(DECODE_S),
            backward=flat(tasklet_s),
            sharing=Sharing(num_units=max(units) + min(units), shares=tuple(shares)),
        )
    )


def view(slo_s: float, history: History | None = None) -> View:
    """A request that decodes beside a job that goes backward."""
    tpot_s = slo_s / 0.99  # what policies aim at
    request = make_request(
        "r",
        num_rows=1,
        num_past=300,
        num_output=5,
        arrival_s=0.0,
        first_token_s=1.0,
        last_token_s=1.9,
        ttft_s=5.0,
        tpot_s=tpot_s,
    )
    job = make_job(
        "j",
        "backward",
        num_rows=256,
        num_rows_left=256,
        num_parts_left=PARTS,
        mean_context_len=128.0,
        counts=COUNTS,
    )
    return View(
        now_s=2.0, requests=(request,), jobs=(job,), tpot_s=tpot_s, num_units=4, history=history
    )


def planned(
    slo_s: float, model: LatencyModel, history: History | None = None
) -> tuple[tuple[int, int] | None, int]:
    """Units of decoding and of tuning, if they are apart; tasklets."""
    made = POLICY.plan(view(slo_s, history), model)
    units = (
        None
        if made.partition is None
        else (made.partition.forward_units, made.partition.backward_units)
    )
    return units, sum(part.num_tasklets for part in made.tasklets)


def test_all_of_a_decode_step_runs_beside_tuning_or_nothing_of_it():
    """N_p l_p <= N_d,all l_d <= SLO_d."""
    assert most_beside(0.1, 0.06, 0.003) == 20
    assert most_beside(0.06, 0.06, 0.07) == 0
    assert most_beside(0.05, 0.06, 0.003) == 0


@pytest.mark.parametrize(
    ("slo_s", "units", "tasklets"),
    [
        (0.300, (1, 3), 11),  # 0.1 / 0.4 = 250 ms for decoding, 0.02 / 0.9 = 22 ms a tasklet
        (0.249, (2, 2), 5),  # 143 ms, 29 ms
        (0.142, (3, 1), 2),  # 111 ms, 50 ms
        (0.110, None, 0),  # none keeps the SLO, and after the step there is no time for a tasklet
        (0.099, None, 0),
    ],
)
def test_decoding_is_on_the_part_beside_which_most_tasklets_run_in_time(slo_s, units, tasklets):
    assert planned(slo_s, latency(1, 2, 3)) == (units, tasklets)


def test_where_no_part_keeps_the_slo_tasklets_follow_the_decode_step():
    """In turns (1) is N_p <= (SLO_d - N_d,all l_d0) / l_p."""
    assert planned(0.1105, latency(1, 2, 3, tasklet_s=0.002)) == (None, 5)


def run(
    history: History, model: LatencyModel, made: Plan, *, beside_s: float = 0.0, side_s: float = 0.0
) -> None:
    """A step as it was planned; on a divided device it takes these times."""
    number = sum(part.num_tasklets for part in made.tasklets)
    is_divided = made.partition is not None
    history.add(
        StepView(
            view=view(1.0),
            latency=model,
            plan=made,
            forward_s=beside_s if is_divided else DECODE_S,
            loss_s=0.0,
            backward_s=0.0 if is_divided else number * TASKLET_S,
            update_s=0.0,
            beside_s=number * side_s if is_divided else 0.0,
            num_tasklets={"j": number},
            num_beside={"j": number} if is_divided else {},
            num_running=1,
            num_waiting=0,
            num_arrived=1,
            num_ended=0,
        )
    )


def new_history() -> History:
    history = POLICY.make_history()
    assert history is not None
    return history


def test_what_a_step_took_on_one_part_says_nothing_of_others():
    history, model, slo_s = new_history(), latency(1, 2, 3), 0.3
    run(history, model, POLICY.plan(view(slo_s), model), beside_s=2.0, side_s=0.02)
    assert planned(slo_s, model, history) == ((2, 2), 5), "(1, 3) was too slow"
    run(history, model, POLICY.plan(view(slo_s, history), model), beside_s=0.13, side_s=0.02)
    assert planned(slo_s, model, history) == ((2, 2), 6), (
        "not 143 and 29 ms, as was predicted, but 130 and 20"
    )


def test_a_part_that_was_too_slow_once_is_tried_again():
    history, model, slo_s = new_history(), latency(2), 0.3
    made = POLICY.plan(view(slo_s), model)
    assert made.partition == Partition(2, 2, stops=True)
    run(history, model, made, beside_s=5 * DECODE_S / 0.7, side_s=TASKLET_S / 0.7)
    steps = 0
    while (made := POLICY.plan(view(slo_s, history), model)).partition is None:
        run(history, model, made)
        steps += 1
    assert 20 < steps < 300, "neither at once nor never"
    for _ in range(20):
        run(history, model, made, beside_s=DECODE_S / 0.7, side_s=TASKLET_S / 0.7)
        made = POLICY.plan(view(slo_s, history), model)
        assert made.partition is not None, "the slow step is forgotten"


def test_a_part_that_stays_too_slow_is_tried_seldom():
    history, model, slo_s, number = new_history(), latency(2), 0.3, 0
    for _ in range(1000):
        made = POLICY.plan(view(slo_s, history), model)
        number += made.partition is not None
        run(history, model, made, beside_s=5 * DECODE_S / 0.7, side_s=TASKLET_S / 0.7)
    assert 2 <= number <= ceil(0.04 * 1000)

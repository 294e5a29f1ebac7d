"""HARLI's scheduler where a job has nothing ready, as weights of another model are on their way
(section 6.2)."""

from profiles import flat, free_but_for
from progress import make_job, make_request

from coserve.scheduling.counts import JobCounts
from coserve.scheduling.history import History, StepView
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import Partition, Plan, View
from coserve.scheduling.policies import make_policy
from coserve.scheduling.sharing import Share, Sharing

DECODE_S, TASKLET_S, SLO_S, PARTS = 0.1, 0.008, 0.15, 24
POLICY = make_policy("harli")
COUNTS = JobCounts(
    flops_per_row=1.0,
    backward_flops_per_row=1.0,
    backward_flops_per_pair=1.0,
    num_parts=PARTS,
    num_bypasses=1,
    num_parameters=1,
)


# Steps that take the same whatever their rows, on a device that can be halved.
LATENCY = LatencyModel(
    free_but_for(
        COUNTS,
        forward=flat(DECODE_S),
        backward=flat(TASKLET_S),
        sharing=Sharing(
            num_units=2, shares=(Share(units=1, rows=(1,), forward=(0.7,), backward=(0.7,)),)
        ),
    )
)


def view(history: History, *, tpot_s: float = SLO_S) -> View:
    """A request that decodes beside a job that goes backward."""
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
        now_s=2.0, requests=(request,), jobs=(job,), tpot_s=tpot_s, num_units=2, history=history
    )


def run(history: History, made: Plan, *, num_tasklets: int) -> None:
    """A step of which this many tasklets began."""
    history.add(
        StepView(
            view=view(history),
            latency=LATENCY,
            plan=made,
            forward_s=DECODE_S,
            loss_s=0.0,
            backward_s=0.0,
            update_s=0.0,
            beside_s=0.0,
            num_tasklets={"j": num_tasklets},
            num_beside={},
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


def test_a_job_that_starves_gives_the_whole_device_back_until_it_can_continue():
    history = new_history()
    made = POLICY.plan(view(history), LATENCY)
    assert made.partition == Partition(1, 1, stops=True)
    for _ in range(3):
        run(history, made, num_tasklets=0)
        made = POLICY.plan(view(history), LATENCY)
        assert made.partition is None, "the weights are not there: all of the device decodes"
        assert [part.num_tasklets for part in made.tasklets] == [1], (
            "a unit, which begins if they are there now"
        )
        assert made.predicted_s <= SLO_S
    run(history, made, num_tasklets=1)
    assert POLICY.plan(view(history), LATENCY).partition is not None, "it has continued"


def test_requests_without_time_for_a_unit_are_alone_for_one_step():
    history, tight_s = new_history(), (DECODE_S + TASKLET_S / 2) / 0.99
    run(history, POLICY.plan(view(history), LATENCY), num_tasklets=0)
    made = POLICY.plan(view(history, tpot_s=tight_s), LATENCY)
    assert made.partition is None and not made.moved_jobs
    run(history, made, num_tasklets=0)
    assert POLICY.plan(view(history), LATENCY).partition is not None, "and then it is tried again"

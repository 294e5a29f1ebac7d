"""How fast the sides of a divided device are, and when dividing it brings more; what a divided step
teaches."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from coserve.devices.messages.steps import RequestRows, StepBatch, StepResult, Tasklets
from coserve.devices.recording.replay import as_it_ran
from coserve.engine.step_batch import update_latency_model
from coserve.scheduling.counts import JobCounts, ModelCounts
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import Partition, Plan, PlannedRows, PlannedTasklets, Prediction
from coserve.scheduling.profile import Curve, Profile
from coserve.scheduling.sharing import Share, Sharing, SharingModel
from coserve.scheduling.slo.taken_time import taken_of

HALVES = Partition(1, 1)
ROWS = {"forward_rows": 4, "tasklet_rows": 256}


def two_cores(forward: float = 0.6, backward: float = 0.56, **interference: Any) -> Sharing:
    share = Share(units=1, rows=(1, 512), forward=(forward, 0.5), backward=(backward, backward))
    return Sharing(num_units=2, shares=(share,), **interference)


def test_a_speed_is_that_of_the_units_alone_less_what_the_other_side_takes():
    """Equations 2 and 3 of HARLI."""
    share = Share(units=1, rows=(10, 30), forward=(0.5, 0.3), backward=(0.4, 0.2))
    more = replace(share, units=3, forward=(0.9, 0.8))
    model = SharingModel(Sharing(num_units=4, shares=(share, more), forward_interference=0.8))
    assert model.partitions == (Partition(1, 3), Partition(3, 1))
    for rows, forward, backward in ((1, 0.9, 0.4), (20, 0.85, 0.3), (99, 0.8, 0.2)):
        speeds = model.speeds(Partition(3, 1), forward_rows=rows, tasklet_rows=rows)
        assert speeds == pytest.approx((forward / (1 + 0.8 / 4), backward))
    assert model.speeds(Partition(1, 1), forward_rows=1, tasklet_rows=1) == pytest.approx(
        (0.5 / 1.2, 0.4)
    )


def test_dividing_pays_where_both_speeds_make_more_than_one_device():
    assert SharingModel(None).partitions == () and SharingModel(None).best(**ROWS) is None
    found = SharingModel(two_cores()).best(**ROWS)
    assert found is not None and found[0] == HALVES and sum(found[1:]) > 1
    assert SharingModel(two_cores(0.5, 0.49)).best(**ROWS) is None
    # At 0.6 and 0.56, 0.44 / 0.6 = 0.73 of the forward pass is lost: 1.36 times that would be all
    # of it.
    assert SharingModel(two_cores()).best(**ROWS, margin=0.36) is not None
    assert SharingModel(two_cores()).best(**ROWS, margin=0.37) is None, (
        "steps that err by more than the gain"
    )
    other = SharingModel(replace(two_cores(), pays=False))
    assert other.best(**ROWS) is None and other.partitions == (HALVES,), (
        "it can be divided all the same"
    )
    assert (
        SharingModel(two_cores(forward_interference=0.5, backward_interference=0.4)).best(**ROWS)
        is None
    )


speed = st.floats(0.05, 1.0)


@given(
    st.lists(st.tuples(speed, speed), min_size=1, max_size=9), st.floats(0, 1), st.integers(1, 600)
)
def test_the_best_partition_has_no_more_units_than_there_are_and_none_gets_more_done(
    speeds, interference, rows
):
    num_units = len(speeds) + 1
    shares = [
        Share(units=n + 1, rows=(1,), forward=(f,), backward=(b,))
        for n, (f, b) in enumerate(speeds)
    ]
    model = SharingModel(
        Sharing(num_units=num_units, shares=tuple(shares), forward_interference=interference)
    )
    found = model.best(forward_rows=rows, tasklet_rows=rows)
    both = [model.speeds(each, forward_rows=rows, tasklet_rows=rows) for each in model.partitions]
    assert len(both) == num_units - 1

    def done_by(moment_s: float, forward: float, tasklets: float) -> float:
        """Seconds of tasklets on the whole device, with a forward pass that takes a second
        there."""
        return tasklets * (1 / forward) + moment_s - 1 / forward

    late_s = 1 / min(forward for forward, _ in both)
    most = max([done_by(late_s, *each) for each in both])
    if found is None:
        assert max(map(sum, both)) <= 1 and most <= late_s - 1 + 1e-9
    else:
        assert found[0].forward_units + found[0].backward_units == num_units
        assert done_by(late_s, *found[1:]) == pytest.approx(most) and sum(found[1:]) > 1 - 1e-9


def test_steps_correct_speeds_and_what_was_slow_is_tried_again():
    model = SharingModel(two_cores())
    for _ in range(40):
        model.observe(HALVES, "forward", ROWS["forward_rows"], measured=0.4)
        model.observe(HALVES, "backward", ROWS["tasklet_rows"], measured=0.4)
        model.count_step()
    assert (
        model.speeds(HALVES, **ROWS) == pytest.approx((0.4, 0.4), rel=0.03)
        and model.best(**ROWS) is None
    )
    assert model.speeds(HALVES._replace(stops=True), **ROWS) == model.speeds(HALVES, **ROWS)
    for _ in range(2000):
        model.count_step()
    assert model.best(**ROWS) is not None
    model.observe(HALVES, "forward", 4, measured=0.0)  # no time was taken
    assert model.best(**ROWS) is not None


def test_what_was_seen_long_ago_is_held_for_true_if_that_is_asked():
    model = SharingModel(two_cores())
    forward, backward = model.speeds(HALVES, **ROWS)
    for _ in range(40):
        model.observe(HALVES, "forward", ROWS["forward_rows"], measured=0.4)
    for _ in range(5000):
        model.count_step()
    assert model.speeds(HALVES, **ROWS) == pytest.approx((forward, backward), rel=1e-3)
    model.refresh()
    assert model.speeds(HALVES, **ROWS) == pytest.approx((0.4, backward), rel=0.03)


def test_one_outlier_moves_a_speed_a_little():
    model = SharingModel(two_cores())
    before = model.speeds(HALVES, **ROWS)
    model.observe(HALVES, "forward", 4, measured=before[0] / 1000)
    assert model.speeds(HALVES, **ROWS)[0] > 0.85 * before[0]


def test_what_was_measured_comes_back_from_json():
    sharing = two_cores(forward_interference=0.1, backward_interference=0.2)
    assert Sharing.from_json(json.loads(json.dumps(asdict(sharing)))) == sharing
    with pytest.raises(KeyError):
        Sharing.from_json({})
    with pytest.raises(TypeError):
        Sharing.from_json({**asdict(sharing), "colour": "red"})
    for wrong in ({"rows": (2, 1)}, {"rows": ()}, {"forward": (0.5,)}, {"backward": (0.0, 0.5)}):
        with pytest.raises(ValueError, match="speeds"):
            replace(sharing.shares[0], **wrong)


# -- steps ----------------------------------------------------------------------------


def test_what_runs_beside_the_forward_pass_takes_no_time_of_its_own():
    made = Prediction(forward_s=0.06, loss_s=0.02, backward_s=0.08, update_s=0.01)
    assert made.step_s == pytest.approx(0.17)
    made = structs.replace(made, forward_speed=0.6, backward_speed=0.5)
    assert made.step_s == pytest.approx(0.1 + (0.1 - 0.05) + 0.01)
    assert made.seconds_with(0.0) == pytest.approx(0.1 + 0.01)


def latency() -> LatencyModel:
    curve = Curve(rows=(1, 512), seconds=(0.06, 0.06))
    counts = ModelCounts(
        flops_per_row=1, flops_per_pair=1, head_flops_per_row=1, kv_bytes_per_key=1
    )
    job = JobCounts(
        flops_per_row=1,
        backward_flops_per_row=1,
        backward_flops_per_pair=1,
        num_parts=4,
        num_bypasses=1,
        num_parameters=1,
    )
    zeros: dict[str, Any] = dict.fromkeys(
        ("s_per_pair", "backward_s_per_pair", "s_per_key", "s_per_span", "s_per_bypass"), 0.0
    )
    zeros |= dict.fromkeys(("s_per_window_row", "s_per_parameter", "update_s"), 0.0)
    profile = Profile(
        model=counts,
        job=job,
        forward=curve,
        head=curve,
        loss=curve,
        backward=curve,
        sharing=two_cores(),
        **zeros,
    )
    return LatencyModel(profile)


PREDICTION = Prediction(
    forward_s=0.06, backward_s=0.12, window_s=0.0, forward_speed=0.6, backward_speed=0.5
)
PLANNED = Plan(
    rows=(PlannedRows("r", "decode", 9, 1),),
    tasklets=(PlannedTasklets("j", 256, 4),),
    partition=HALVES,
    prediction=PREDICTION,
)


def test_a_divided_step_teaches_the_speeds_and_nothing_else():
    """Of four tasklets of 30 ms, two were done beside the forward pass, of which the last needed 9
    ms more."""
    model = latency()
    result = StepResult(
        step=0,
        num_tasklets={"j": 3},
        num_beside={"j": 2},
        forward_s=0.12,
        beside_s=0.129,
        backward_s=0.03,
    )
    assert result.seconds == pytest.approx(0.159)
    before = model.sharing.speeds(HALVES, forward_rows=1, tasklet_rows=256)
    update_latency_model(model, PLANNED, result, [], step_s=result.seconds)
    after = model.sharing.speeds(HALVES, forward_rows=1, tasklet_rows=256)
    weight = 0.15 * (1 - 0.002**2)  # a step has passed since, for these rows and for the side
    assert after[0] / before[0] == pytest.approx((0.06 / 0.12 / 0.6) ** weight)
    assert after[1] / before[1] == pytest.approx(((0.06 - 0.009) / 0.12 / before[1]) ** weight)
    assert model.decode_s(num_requests=1, context=9) == latency().decode_s(
        num_requests=1, context=9
    )
    assert model.loss_s(64) == latency().loss_s(64) and model.corrections.recent_errors()


def test_speeds_stay_what_steps_reach_though_plans_ask_for_other_rows_than_steps_have():
    """A plan goes by all rows that a part of the model has left, of which a step may run some."""
    model = latency()
    for asked, run in 200 * ((3000, 700), (700, 3000)):
        _, predicted = model.sharing.speeds(HALVES, forward_rows=1, tasklet_rows=asked)
        plan = structs.replace(
            PLANNED,
            tasklets=(PlannedTasklets("j", run, 1),),
            prediction=structs.replace(PREDICTION, backward_speed=predicted),
        )
        ran = {"j": 1}
        result = StepResult(step=0, num_tasklets=ran, num_beside=ran, forward_s=0.3, beside_s=0.3)
        update_latency_model(model, plan, result, [], step_s=0.3)
        for rows in (asked, run):
            assert 0.39 < model.sharing.speeds(HALVES, forward_rows=1, tasklet_rows=rows)[1] < 0.57


def test_jobs_took_all_but_what_requests_needed_of_the_whole_device():
    prediction = structs.replace(PREDICTION, window_s=0.02)
    made = structs.replace(PLANNED, prediction=prediction)
    assert taken_of(made, step_s=0.2, forward_s=0.1).jobs_s == pytest.approx(
        0.2 - 0.1 * 0.6 * 2 / 3
    )
    whole = structs.replace(prediction, forward_speed=1.0, backward_speed=0.0)
    turns = structs.replace(made, partition=None, prediction=whole)
    assert taken_of(turns, step_s=0.2, forward_s=0.06).jobs_s == pytest.approx(0.14 + 0.02)


def test_a_divided_step_is_replayed_as_it_ran():
    batch = StepBatch(
        step=1,
        requests=(RequestRows("r", 0, (1, 2)),),
        tasklets=(Tasklets("j", 256, 4),),
        backward_limit_s=0.1,
        partition=Partition(2, 1, stops=True),
    )
    result = StepResult(step=1, num_tasklets={"j": 3}, num_beside={"j": 3})
    again = as_it_ran(batch, result, num_units=4)
    assert again.partition == Partition(2, 1) and again.tasklets[0].num_tasklets == 3
    assert as_it_ran(batch, result, num_units=2).partition is None, "one after the other"
    nothing = StepResult(step=1, num_tasklets={"j": 0})
    assert as_it_ran(batch, nothing, num_units=4).partition is None

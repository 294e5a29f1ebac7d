"""A job's place in a cluster: `apply` alone."""

from typing import Any

from cluster_nodes import make_job

from coserve.cluster.jobs.placed_job import (
    CheckpointTold,
    Event,
    Moved,
    Placed,
    PlacedJob,
    RestChanged,
    StartAwaited,
    StartSent,
    StepTold,
    TakenBack,
    apply,
)

NODE: Any = object()


def after(*events: Event, **start: Any) -> PlacedJob:
    state = PlacedJob(start=make_job("one", **start))
    for event in events:
        state = apply(state, event)
    return state


def test_a_node_is_asked_about_a_job_only_when_it_was_told_of_it():
    assert after(Placed(node=NODE)).told is None
    assert after(Placed(node=NODE), StartSent()).told is NODE
    back = after(Placed(node=NODE), StartSent(), TakenBack())
    assert (back.node, back.told) == (None, None)
    assert after(Placed(node=NODE), StartSent(), TakenBack(), Placed(node=NODE)).told is None


def test_a_job_moves_from_its_newest_checkpoint_and_rests_where_it_moves_if_it_did():
    began = after(Moved(), checkpoint="/began")
    assert (began.start.checkpoint, began.start.paused) == ("/began", False)
    moved = after(
        StartAwaited(), CheckpointTold(directory="/7", step=7), RestChanged(rests=True), Moved()
    )
    assert (moved.start.checkpoint, moved.start.paused, moved.is_late) == ("/7", True, False)


def test_a_job_that_was_started_paused_and_is_resumed_before_it_has_a_node_starts_to_run():
    state = after(RestChanged(rests=False), paused=True)
    assert not state.start.paused and not state.rests


def test_steps_are_kept_as_far_as_a_checkpoint_has_them():
    assert after().is_kept
    assert not after(StepTold(step=8)).is_kept
    assert not after(
        CheckpointTold(directory="/7", step=7), StepTold(step=8), StepTold(step=6)
    ).is_kept
    assert after(StepTold(step=8), CheckpointTold(directory="/8", step=8)).is_kept

"""A job's place in a cluster: histories of `apply` and `plan` alone."""

from random import Random
from typing import Any

import pytest
from cluster_nodes import make_job

from coserve.cluster.jobs.placed_job import (
    Action,
    ChangeRequested,
    CheckpointFailed,
    Event,
    NodeAssigned,
    PlacedJob,
    apply,
    plan,
)
from coserve.engine.jobs.events import JobEvent
from coserve.jobs.lifecycle.events import RequestClosed
from coserve.jobs.messages import Checkpointed

NODE: Any = object()
OTHER: Any = object()
ON_NODE: tuple[Event, ...] = ("submit", NodeAssigned(NODE), "start")
RUN, REST = ChangeRequested(desired="run"), ChangeRequested(desired="rest")
END, MOVE = ChangeRequested(desired="end"), ChangeRequested(desired="move")


def step(number: int) -> JobEvent:
    return JobEvent(job="one", kind="step", step=number, now_s=0.0)


def checkpoint(number: int) -> Checkpointed:
    return Checkpointed(job="one", step=number, directory=f"/{number}", listed=False)


def after(*events: Event, **start: Any) -> PlacedJob:
    state = PlacedJob(start=make_job("one", **start), rests=start.get("paused", False))
    for event in events:
        state = apply(state, event)
    return state


def driven(state: PlacedJob, node: Any = OTHER) -> tuple[PlacedJob, list[Action]]:
    """Do what the plan says until there is nothing left to do, and return the state and what was
    done. The queue gives this node.
    """
    actions = list[Action]()
    while (action := plan(state)) not in (None, "forget"):
        assert action is not None and len(actions) < 10, "the plan comes to its end"
        actions.append(action)
        state = apply(state, action)
        if action == "submit" and node is not None:
            state = apply(state, NodeAssigned(node))
    return state, actions + ([] if action is None else [action])


def test_a_job_is_queued_and_started_on_the_node_that_it_gets():
    assert plan(after()) == "submit"
    assert plan(after("submit")) is None
    assert plan(after("submit", NodeAssigned(NODE))) == "start"
    state = after(*ON_NODE)
    assert (plan(state), state.sent_to) == (None, NODE)


def test_a_node_is_asked_about_a_job_only_when_it_was_sent_the_job():
    assert after("submit", NodeAssigned(NODE)).sent_to is None
    assert after(*ON_NODE).sent_to is NODE
    left = after(*ON_NODE, MOVE, "park", "leave")
    assert (left.node, left.sent_to) == (None, None)
    assert apply(left, NodeAssigned(OTHER)).sent_to is None


@pytest.mark.parametrize(
    ("request_", "command", "rests"), [(REST, "pause", True), (RUN, "resume", False)]
)
def test_a_node_is_told_once_what_is_requested(request_: Event, command: Any, rests: bool):
    state = after(*ON_NODE, request_)
    assert plan(state) == command
    done = apply(state, command)
    assert (plan(done), done.rests, done.start.paused) == (None, rests, rests)
    refused = apply(state, RequestClosed())
    assert (plan(refused), refused.rests) == (None, False)


@pytest.mark.parametrize("before", [("submit",), ("submit", NodeAssigned(NODE))])
def test_a_job_that_no_node_was_sent_rests_without_one_until_it_is_resumed(before: Any):
    state, actions = driven(after(*before, REST))
    assert actions == ["withdraw"] and state.rests and state.node is None
    state, actions = driven(apply(state, RUN))
    assert actions == ["submit", "start"] and not state.rests and not state.start.paused


def test_a_job_that_was_started_paused_and_is_resumed_before_it_has_a_node_starts_to_run():
    state = after("submit", RUN, paused=True)
    assert not state.start.paused and not state.rests and plan(state) is None


@pytest.mark.parametrize("before", [(), ("submit",), ("submit", NodeAssigned(NODE))])
def test_a_job_that_no_node_was_sent_ends_without_a_command(before: Any):
    assert plan(after(*before, END)) == "forget"


def test_a_job_ends_on_its_node_first():
    state = after(*ON_NODE, END)
    assert plan(state) == "cancel"
    assert plan(apply(state, "cancel")) == "forget"
    assert plan(apply(state, RequestClosed())) is None, "the node could not"


def test_a_job_moves_from_its_newest_checkpoint_and_rests_where_it_moves_if_it_did():
    state, actions = driven(after(*ON_NODE, MOVE, checkpoint="/began"))
    assert actions == ["park", "leave", "submit", "start"]
    assert (state.sent_to, state.start.checkpoint, state.rests) == (OTHER, "/began", False)
    rests: tuple[Event, ...] = (REST, "pause")
    state, _ = driven(after(*ON_NODE, checkpoint(7), step(7), *rests, MOVE))
    assert (state.start.checkpoint, state.start.paused) == ("/7", True)


def test_a_job_that_its_node_was_not_sent_moves_without_a_checkpoint():
    state, actions = driven(after("submit", NodeAssigned(NODE), MOVE))
    assert (actions, state.sent_to) == (["withdraw", "submit", "start"], OTHER)
    assert plan(after("submit", MOVE)) is None, "it has no node to leave"


@pytest.mark.parametrize("news", [(CheckpointFailed(),), (step(8), "park")])
def test_a_job_whose_last_steps_no_checkpoint_has_is_given_up_where_it_moves(news: Any):
    state, actions = driven(after(*ON_NODE, checkpoint(7), MOVE, *news))
    assert actions == ["leave", "forget"] and state.is_lost


def test_a_move_that_was_broken_off_begins_again_with_a_checkpoint():
    assert plan(after(*ON_NODE, MOVE, "park", RequestClosed(), MOVE)) == "park"


def test_steps_are_kept_as_far_as_a_checkpoint_has_them():
    assert after().is_kept
    assert not after(step(8)).is_kept
    assert not after(checkpoint(7), step(8), step(6)).is_kept
    assert after(step(8), checkpoint(8)).is_kept


@pytest.mark.parametrize("seed", range(50))
def test_after_any_history_a_job_is_where_it_is_wanted(seed: int):
    random, state = Random(seed), after()
    for number in range(40):
        news: list[Event] = [RUN, REST, MOVE, step(number), checkpoint(number)]
        if state.is_waiting:
            news.append(NodeAssigned(NODE))
        state = apply(state, random.choice(news))
        state, actions = driven(state, random.choice([NODE, OTHER, None]))
        if state.is_lost:
            assert actions[-2:] == ["leave", "forget"] and state.step > state.checkpoint_step
            return
        assert state.requested is None
        assert (state.sent_to is None) == (state.is_waiting or not state.needs_node)
        assert state.rests or state.needs_node

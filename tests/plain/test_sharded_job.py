"""A data-parallel job in a cluster: histories of `apply` and `plan` alone."""

from itertools import product
from random import Random
from typing import Any

import pytest
from cluster_nodes import make_job

from coserve.cluster.jobs.placed_job import ChangeRequested
from coserve.cluster.jobs.sharded_job import (
    Action,
    Combine,
    Discard,
    Event,
    JobReport,
    Report,
    ShardContributed,
    ShardedJob,
    ShardReported,
    StartRefused,
    apply,
    plan,
)
from coserve.engine.jobs.events import JobEvent
from coserve.jobs.lifecycle.events import RequestClosed
from coserve.jobs.messages import Checkpointed, Contributed
from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example
from coserve.tuning.order import TrainingOrder
from coserve.tuning.shard import Combination, DataParallel, Shard


def contributed(node: int, step: int, *, meets: bool = True, num_trained: int = 1) -> Contributed:
    return Contributed(
        job="j", step=step, directory=f"{step}-{node}", meets=meets, num_trained=num_trained
    )


class Divided:
    """A job that is divided among this many nodes, as events and its plan change it."""

    def __init__(self, num_shards: int) -> None:
        self.state = ShardedJob.begin(
            make_job("j"), DataParallel(), num_shards=num_shards, attempt="a"
        )
        self.nodes: list[str | None] = [None] * num_shards
        self.spent: list[str] = []

    def planned(self) -> Action | None:
        return plan(self.state, self.nodes)

    def after(self, *events: Event) -> "Divided":
        for event in events:
            self.state = apply(self.state, event)
        return self

    def started(self) -> "Divided":
        """Put all shards on nodes of their own."""
        self.nodes = [f"n{number}" for number in range(self.state.num_shards)]
        others: list[Action] = ["start next"] * (self.state.num_shards - 1)
        return self.after("start first", *others)

    def due(self) -> list[Action]:
        """Do what events call for, and return it."""
        actions = list[Action]()
        while isinstance(action := self.planned(), Report | Combine | Discard):
            actions.append(action)
            self.after(action)
        return actions

    def contribute(self, shard: int, contributed: Contributed) -> dict[int, Combination]:
        """Return what nodes are to take in after a contribution."""
        actions = self.after(ShardContributed(shard=shard, contributed=contributed)).due()
        self.spent += [
            each for action in actions if isinstance(action, Discard) for each in action.directories
        ]
        return {each.shard: each.combination for each in actions if isinstance(each, Combine)}

    def report(self, shard: int, report: JobReport) -> list[JobReport]:
        """Return what is reported of the whole job after a shard's report."""
        actions = self.after(ShardReported(shard=shard, report=report)).due()
        return [action.report for action in actions if isinstance(action, Report)]


def shard(**settings: Any) -> Shard:
    usual = {
        "index": 0,
        "count": 3,
        "synchronization": "synchronous",
        "every_steps": 1,
        "meet_every_steps": 0,
    }
    return Shard(**{"directory": "/none", **usual, **settings})


@pytest.mark.parametrize(("number", "count"), [*product(range(9), (1, 2, 3, 5))])
def test_the_parts_of_a_batch_are_all_of_it_once_and_nearly_the_same_size(number: int, count: int):
    parts = [
        range(*shard(index=index, count=count).part(10, 10 + number)) for index in range(count)
    ]
    assert [index for part in parts for index in part] == list(range(10, 10 + number))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_where_the_examples_of_a_pack_count_together_nodes_have_whole_packs_those_of_one_node():
    examples = [
        Example(tokens=tuple(range(8)), trained=(True,) * 8, parts=(4, 4), labels=(1.0, 0.0))
        for _ in range(11)
    ]
    config = TuningConfig(objective="kto", batch_size=5, max_sequence_length=8, max_pack_tokens=17)
    alone = TrainingOrder(examples, config)
    nodes = [TrainingOrder(examples, config, shard(index=index)) for index in range(3)]
    for step, number in enumerate((3, 3, 1)):
        packs = alone.packs(step)
        assert [pack.is_reference for pack in packs] == [True, False] * number
        assert [pack for node in nodes for pack in node.packs(step)] == packs
        assert max(len(node.packs(step)) for node in nodes) == 2, (
            "each of them has one, with its reference"
        )


def test_asynchronous_nodes_meet_where_a_checkpoint_is_due_and_others_whenever_they_contribute():
    def steps(of: Shard, question: str) -> list[int]:
        return [step for step in range(1, 11) if getattr(of, question)(step, 10)]

    local = shard(synchronization="local-sgd", every_steps=4, meet_every_steps=6)
    assert steps(local, "contributes_after") == [4, 6, 8, 10]
    assert all(local.meets_after(step, 10) for step in (4, 6, 8, 10))
    free = shard(synchronization="asynchronous", every_steps=4, meet_every_steps=6)
    assert steps(free, "contributes_after") == [4, 6, 8, 10]
    assert steps(free, "meets_after") == [6, 10]


def test_nodes_that_meet_take_in_what_all_have_brought_in_one_order():
    job = Divided(3)
    assert job.contribute(2, contributed(2, 1, num_trained=5)) == {}
    assert job.contribute(0, contributed(0, 1, num_trained=2)) == {}
    found = job.contribute(1, contributed(1, 1, num_trained=0))
    whole = Combination(
        directories=("1-0", "1-1", "1-2"), num_trained=7, version=1, num_in_version=3
    )
    assert found == dict.fromkeys(range(3), whole)


def test_a_node_that_waits_for_nobody_takes_in_what_has_come_so_far():
    job = Divided(2)
    first = job.contribute(0, contributed(0, 4, meets=False))
    assert first == {0: Combination(directories=("4-0",), num_trained=1)}
    second = job.contribute(0, contributed(0, 8, meets=False))
    assert second == {
        0: Combination(directories=("8-0",), num_trained=1, version=4, num_in_version=1)
    }
    late = job.contribute(1, contributed(1, 4, meets=False))
    assert late == {
        1: Combination(
            directories=("4-0", "8-0", "4-1"), num_trained=3, version=4, num_in_version=2
        )
    }


@pytest.mark.parametrize("seed", range(20))
def test_a_version_is_made_of_the_same_contributions_on_every_node(seed: int):
    random, num_nodes = Random(seed), 3
    job, rounds = Divided(num_nodes), [4, 6, 8, 10]
    done, waits = [0] * num_nodes, [False] * num_nodes
    taken: list[list[str]] = [[] for _ in range(num_nodes)]
    versions: dict[int, list[str]] = {}
    removed: set[str] = set()
    while any(number < len(rounds) for number in done):
        node = random.choice(
            [each for each in range(num_nodes) if not waits[each] and done[each] < len(rounds)]
        )
        step, done[node], waits[node] = rounds[done[node]], done[node] + 1, True
        for other, found in job.contribute(
            node, contributed(node, step, meets=step in (6, 10))
        ).items():
            assert not removed & set(found.directories)
            waits[other] = False
            if found.version is not None:
                whole = taken[other] + list(found.directories[: found.num_in_version])
                assert versions.setdefault(found.version, whole) == whole
                assert len(whole) == num_nodes * (rounds.index(found.version) + 1)
            taken[other] += found.directories
        removed |= set(job.spent)
    assert taken[0] == taken[1] == taken[2]
    assert sorted(taken[0]) == sorted(
        f"{step}-{node}" for step in rounds for node in range(num_nodes)
    )
    assert {6, 10} <= versions.keys()


def event(kind: Any, step: int, **fields: Any) -> JobEvent:
    return JobEvent(job="j.a.0", kind=kind, step=step, now_s=0.0, **fields)


def test_a_step_is_told_when_all_nodes_have_made_it_with_the_means_of_all_tokens():
    job = Divided(3)
    few = event("step", 1, loss=1.0, token_accuracy=0.0, num_trained=1, num_tokens=2, norm=1.0)
    many = event("step", 1, loss=4.0, token_accuracy=1.0, num_trained=3, num_tokens=5, norm=1.0)
    none = event("step", 1, loss=float("nan"), token_accuracy=float("nan"), num_tokens=0, norm=1.0)
    assert job.report(0, few) == job.report(2, none) == []
    [told] = job.report(1, many)
    assert isinstance(told, JobEvent)
    assert (told.job, told.loss, told.token_accuracy) == ("j", 3.25, 0.75)
    assert (told.num_trained, told.num_tokens, told.norm) == (4, 7, 1.0)


def test_a_checkpoint_is_told_after_its_step_and_an_end_when_all_have_ended():
    job = Divided(2)
    checkpoint = Checkpointed(job="j.a.0", step=1, directory="/c", listed=True)
    assert job.report(0, event("step", 1, loss=1.0, num_trained=1)) == []
    assert job.report(0, checkpoint) == []
    assert job.state.is_holding
    told = job.report(1, event("step", 1, loss=1.0, num_trained=1))
    assert [(type(each).__name__, each.job, each.step) for each in told] == [
        ("JobEvent", "j", 1),
        ("Checkpointed", "j", 1),
    ]
    assert not job.state.is_holding
    assert job.report(1, event("succeeded", 1)) == []
    assert [each.job for each in job.report(0, event("succeeded", 1))] == ["j"]


def test_a_version_is_told_when_all_nodes_have_one_as_new():
    job = Divided(2)
    assert job.report(0, event("version", 4, version="ft:a@b@4")) == []
    assert job.report(0, event("version", 8, version="ft:a@b@8")) == []
    [told] = job.report(1, event("version", 9, version="ft:a@b@4"))
    assert isinstance(told, JobEvent)
    assert (told.version, told.step) == ("ft:a@b@4", 4)


def test_an_end_that_was_requested_is_reported_when_all_shards_have_ended_and_any_other_at_once():
    job = Divided(2).started()
    assert [each.job for each in job.report(1, event("failed", 2))] == ["j"]
    assert job.state.is_over and job.planned() == "leave"
    job = Divided(2).started().after(ChangeRequested(desired="end"))
    assert job.planned() == "cancel"
    assert job.report(0, event("cancelled", 2)) == job.report(1, event("cancelled", 2)) == []
    assert job.state.end is not None and job.state.end.job == "j"
    assert job.after("cancel", RequestClosed()).planned() is None
    assert job.state.shards == ["j.a.0", "j.a.1"]


def test_an_end_that_could_not_be_had_leaves_the_job_as_it_is():
    job = Divided(2).started().after(ChangeRequested(desired="end"), RequestClosed())
    assert not job.state.is_over and job.planned() is None


def test_a_shard_is_started_when_those_before_it_have_nodes_of_their_own():
    job = Divided(3)
    assert job.planned() == "start first"
    assert job.after("start first").planned() is None
    job.nodes[0] = "n0"
    assert job.planned() == "start next"
    assert job.after("start next").planned() is None
    job.nodes[1] = "n1"
    assert job.planned() == "start next"
    job.nodes[2] = "n2"
    assert job.after("start next").planned() is None


def test_a_job_whose_first_shard_is_refused_leaves_its_nodes():
    job = Divided(2).after(StartRefused())
    assert job.planned() == "leave"
    assert job.after("leave").planned() is None


def driven(job: Divided) -> list[Action]:
    """Do what the plan says until there is nothing left to do, and return it."""
    actions = list[Action]()
    while (action := job.planned()) is not None:
        assert len(actions) < 10, "the plan comes to its end"
        actions.append(action)
        job.after(action)
    return actions


REST = ["await starts", "pause first", "await reports", "pause others"]


def test_a_job_rests_with_the_checkpoint_of_its_first_shard_and_runs_again():
    job = Divided(3).started().after(ChangeRequested(desired="rest"))
    assert driven(job) == REST and job.state.rests
    job.after(RequestClosed(), ChangeRequested(desired="run"))
    assert driven(job) == ["resume"] and not job.state.rests


def test_other_shards_rest_when_they_have_come_as_far_as_the_first_ones_checkpoint():
    job = Divided(2).started().after(ChangeRequested(desired="rest"))
    job.after("await starts", "pause first")
    assert job.report(0, event("step", 1)) == []
    assert job.report(0, Checkpointed(job="j.a.0", step=1, directory="/c", listed=False)) == []
    assert job.planned() == "await reports" and job.state.is_holding
    assert len(job.report(1, event("step", 1))) == 2
    assert not job.state.is_holding
    assert job.after("await reports").planned() == "pause others"


def test_shards_that_get_a_node_while_a_job_comes_to_rest_are_started_before_they_are_paused():
    job = Divided(2).after("start first", ChangeRequested(desired="rest"))
    assert job.planned() == "await starts"
    job.nodes[0] = "n0"
    assert job.planned() == "start next"


def test_a_job_that_moves_rests_and_starts_again_on_other_nodes():
    job = Divided(3).started().after(ChangeRequested(desired="move"))
    assert driven(job) == [*REST, "regroup"]
    assert job.after(RequestClosed()).planned() is None


def test_a_job_has_succeeded_when_all_shards_have():
    job = Divided(2).started()
    job.report(1, event("succeeded", 1))
    assert job.planned() is None
    job.report(0, event("succeeded", 1))
    assert job.planned() == "finish"
    assert job.after("finish").planned() is None


def test_a_shard_begins_with_the_newest_checkpoint_that_all_have_come_to():
    job = Divided(2)
    job.report(0, event("step", 1))
    job.report(0, Checkpointed(job="j.a.0", step=1, directory="/c", listed=True))
    assert job.state.checkpoint is None
    job.report(1, event("step", 1))
    assert job.state.checkpoint == "/c"

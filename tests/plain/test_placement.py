"""Placements are pure and found by file name; the cluster's queue places each task once, and
forgets none."""

import re
from collections import Counter
from dataclasses import fields
from pathlib import Path

import msgspec
import pytest
from cluster_views import PROFILE, make_node, make_task
from msgspec.structs import replace

import coserve.cluster.placement as registry
from coserve.cluster.placement import make_placement, placement_class, placement_names
from coserve.cluster.scheduler import ClusterScheduler
from coserve.cluster.view import ClusterView, LengthStats, NodeView, Waits

FOLDER = Path(registry.__file__).parent
# Of an engine, where training and batch work give way to requests.
ENGINE = replace(PROFILE, training_yields=True)


def scheduler(name, num_nodes=3, **settings) -> ClusterScheduler:
    found = ClusterScheduler(make_placement(name, settings))
    for index in range(num_nodes):
        found.report(make_node(f"n{index}"))
    return found


def test_every_file_of_the_folder_is_a_placement():
    files = {path.stem.replace("_", "-") for path in FOLDER.glob("[!_]*.py")} - {"base"}
    assert set(placement_names()) == files
    for name in placement_names():
        placement = make_placement(name)
        assert type(placement) is placement_class(name) and placement.summary
        assert [one.name for one in placement.settings()] == [one.name for one in fields(placement)]
        assert all(one.help.endswith(".") for one in placement.settings())


def test_what_there_is_not_is_named():
    with pytest.raises(
        ValueError, match=re.escape(f"placement 'x' is not one of {', '.join(placement_names())}")
    ):
        make_placement("x")
    with pytest.raises(
        ValueError, match="placement 'round-robin' has no setting 'speed'; it has none"
    ):
        make_placement("round-robin", {"speed": 1})


def test_round_robin_takes_turns_over_both_kinds():
    cluster = scheduler("round-robin")
    for index in range(6):
        cluster.submit(make_task(f"t{index}", "training" if index % 2 else "request"))
    assert [placed.node for _, placed in cluster.place(0.0)] == ["n0", "n1", "n2"] * 2


def test_lowest_utilisation_takes_the_idlest():
    cluster = scheduler("lowest-utilisation")
    for name, busy in (("n0", 0.5), ("n1", 0.2), ("n2", 0.9)):
        cluster.report(make_node(name, utilisation=busy))
    cluster.submit(make_task("a"))
    assert [placed.node for _, placed in cluster.place(0.0)] == ["n1"]


@pytest.mark.parametrize("name", placement_names())
def test_nodes_that_drain_or_are_excluded_get_nothing(name):
    cluster = scheduler(name)
    cluster.report(make_node("n0", is_draining=True))
    cluster.submit(make_task("a", excluded=frozenset({"n1"})))
    assert [placed.node for _, placed in cluster.place(0.0)] in (["n2"], [])
    cluster.report(make_node("n2", is_draining=True))
    cluster.submit(make_task("b", excluded=frozenset({"n1"})))
    assert not list(cluster.place(0.0))
    decision = cluster.placement.place(
        cluster.view(0.0), make_task("c", excluded=frozenset({"n1"}))
    )
    assert isinstance(decision, Waits) and decision.seconds > 0 and "drain" in decision.reason


@pytest.mark.parametrize("name", placement_names())
def test_the_same_view_gives_the_same_decision(name):
    cluster = scheduler(name)
    for index in range(5):
        cluster.submit(
            make_task(f"t{index}", "training" if index % 2 else "request", arrival_s=0.1 * index)
        )
    list(cluster.place(0.5))
    task, view = make_task("next", arrival_s=0.6), cluster.view(0.6)
    before = msgspec.json.encode(view)
    first = cluster.placement.place(view, task)
    assert cluster.placement.place(view, task) == first
    assert make_placement(name).place(view, task) == first, "nothing is kept between calls"
    assert msgspec.json.encode(view) == before


def test_a_task_is_placed_once_and_its_node_is_remembered():
    cluster = scheduler("round-robin")
    cluster.submit(make_task("a"))
    assert cluster.num_waiting == 1 and cluster.node_of("a") is None
    assert len(list(cluster.place(0.0))) == 1 and not list(cluster.place(0.0))
    assert cluster.node_of("a") == "n0"
    assert [node.num_tasks for node in cluster.view(0.0).nodes] == [1, 0, 0]
    cluster.finish("a")
    cluster.finish("never there")
    assert cluster.node_of("a") is None and not any(
        node.num_tasks for node in cluster.view(0.0).nodes
    )


def test_until_the_next_report_a_placed_task_has_its_pages():
    cluster = ClusterScheduler(make_placement("round-robin"))
    cluster.report(make_node("n0", num_pages=100, num_free_pages=100))
    cluster.submit(make_task("a", num_tokens=160, num_output_tokens=16))
    list(cluster.place(0.0))
    (node,) = cluster.view(0.0).nodes
    assert (node.num_free_pages, node.num_waiting) == (89, 1)
    cluster.report(make_node("n0", num_pages=100, num_free_pages=95))
    assert cluster.view(0.0).nodes[0].num_free_pages == 95


def test_a_request_that_has_a_token_waits_no_more_and_took_as_long_as_it_did():
    cluster = ClusterScheduler(make_placement("lemix"))
    cluster.report(make_node("n0", num_running=1))
    cluster.submit(make_task("a"))
    ((_, placed),) = cluster.place(0.0)
    assert placed.path.forward_end_s == (0.02,)
    cluster.begin("a", 0.5)
    cluster.begin("never there", 0.5)
    (node,) = cluster.view(0.5).nodes
    assert (node.num_waiting, node.num_running) == (0, 2)
    assert node.last.forward_end_s == node.queue[0].forward_end_s == (0.5,)


def test_a_task_that_ends_before_it_has_begun_waits_no_more():
    cluster = ClusterScheduler(make_placement("round-robin"))

    def num_waiting() -> int:
        return cluster.view(0.0).nodes[0].num_waiting

    cluster.report(make_node("n0"))
    for name in ("ends", "begins", "reported"):
        cluster.submit(make_task(name))
    list(cluster.place(0.0))
    assert num_waiting() == 3
    cluster.finish("ends")
    assert num_waiting() == 2
    cluster.begin("begins", 0.0)
    cluster.finish("begins")
    assert num_waiting() == 1, "it is counted once"
    cluster.report(make_node("n0", num_waiting=1))
    cluster.finish("reported")
    assert num_waiting() == 1, "the node knows best which of those that it has wait"


def test_batch_work_on_an_engine_keeps_no_request_from_it():
    cluster = ClusterScheduler(make_placement("slack-affinity", {"most_prompts": 1}))
    cluster.report(make_node("n0", profile=ENGINE, num_pages=1000, num_free_pages=1000))
    for number in range(40):
        cluster.submit(make_task(f"b{number}", batch_due_s=float(number), num_tokens=160))
    placed = [task.id for task, _ in cluster.place(0.0)]
    assert placed == [f"b{number}" for number in range(16)], (
        "as many as its next steps may have room for"
    )
    cluster.submit(make_task("chat", ttft_s=2.0))
    assert [task.id for task, _ in cluster.place(0.1)] == ["chat"]
    (node,) = cluster.view(0.1).nodes
    assert (node.num_waiting, node.num_batch_waiting) == (1, 16)
    assert node.num_free_pages == 1000 - 7, "pages of batch work are there for others"
    assert node.last is not None and node.last.task == "chat"
    cluster.begin("b0", 0.2)
    assert not list(cluster.place(0.2)), (
        "a request waits there: batch work is for what requests leave"
    )
    cluster.begin("chat", 0.3)
    assert [task.id for task, _ in cluster.place(0.3)] == ["b16"]
    cluster.finish("b0")
    cluster.finish("b16")
    (node,) = cluster.view(0.3).nodes
    assert (node.num_waiting, node.num_batch_waiting, node.num_batch_running) == (0, 15, 1)


def test_a_request_goes_before_batch_work_that_has_waited_for_long():
    cluster = ClusterScheduler(make_placement("slack-affinity", {"most_prompts": 1}))
    cluster.report(make_node("n0", profile=ENGINE, num_waiting=1))
    for number in range(256):
        cluster.submit(make_task(f"b{number}", batch_due_s=3600.0, ttft_s=2.0))
    cluster.submit(make_task("bulk", arrival_s=99.0, ttft_s=1.0, priority=5))
    cluster.submit(make_task("chat", arrival_s=100.0, ttft_s=2.0))
    assert not list(cluster.place(100.0))
    order = []
    for _ in range(3):
        cluster.report(make_node("n0", profile=ENGINE))
        order += [task.id for task, _ in cluster.place(100.0)][:1]
    assert order == ["chat", "bulk", "b0"]


def test_batch_work_is_shared_out_among_engines():
    cluster = ClusterScheduler(make_placement("slack-affinity"))
    for name, slack in (("idle", 1.0), ("also", 1.0), ("busy", 0.1)):
        cluster.report(make_node(name, profile=ENGINE, slack=slack))
    for number in range(12):
        cluster.submit(make_task(f"b{number}", batch_due_s=1.0))
    placed = Counter(decision.node for _, decision in cluster.place(0.0))
    assert placed == {"idle": 6, "also": 6}


def test_an_engine_whose_steps_take_several_prompts_gets_several_and_another_node_one():
    for profile, names in ((ENGINE, ["r0", "r1", "r2", "r3"]), (PROFILE, ["r0"])):
        cluster = ClusterScheduler(make_placement("slack-affinity"))
        cluster.report(make_node("n0", profile=profile))
        for number in range(9):
            cluster.submit(make_task(f"r{number}", ttft_s=2.0))
        assert [task.id for task, _ in cluster.place(0.0)] == names
        cluster.begin("r0", 0.1)
        assert len(list(cluster.place(0.1))) == 1


def test_where_batch_work_does_not_give_way_it_waits_as_late_requests_do():
    cluster = scheduler("slack-affinity", num_nodes=1)
    for number in range(4):
        cluster.submit(make_task(f"b{number}", batch_due_s=1.0))
    assert [task.id for task, _ in cluster.place(0.0)] == ["b0"]
    (node,) = cluster.view(0.0).nodes
    assert (node.num_waiting, node.num_batch_waiting) == (1, 0)


def test_a_node_that_comes_back_has_its_place_again():
    cluster = scheduler("separate")
    cluster.remove("n0")
    cluster.report(make_node("n3"))
    cluster.report(make_node("n0"))
    assert [node.id for node in cluster.view(0.0).nodes] == ["n0", "n1", "n2", "n3"], (
        "and trains no more than before"
    )


def test_a_node_that_is_gone_returns_its_tasks():
    cluster = scheduler("round-robin")
    for name in "abcd":
        cluster.submit(make_task(name))
    list(cluster.place(0.0))
    assert cluster.remove("n0") == ("a", "d") and cluster.remove("n0") == ()
    assert cluster.node_of("a") is None and cluster.node_of("b") == "n1"


def test_a_withdrawn_task_is_not_placed():
    cluster = scheduler("round-robin")
    cluster.submit(make_task("a"))
    assert cluster.withdraw("a") and not cluster.withdraw("a")
    assert not list(cluster.place(0.0))


def test_a_task_that_excludes_nodes_holds_up_none():
    cluster = scheduler("round-robin", num_nodes=1)
    cluster.submit(make_task("failed", excluded=frozenset({"n0"})))
    cluster.submit(make_task("fresh"))
    assert [task.id for task, _ in cluster.place(0.0)] == ["fresh"]
    assert cluster.num_waiting == 1


def test_views_are_plain_data():
    cluster = scheduler("round-robin")
    cluster.report(make_node("n0", adapters=frozenset({"a@3"}), prefixes=frozenset({b"\0\xff"})))
    cluster.submit(make_task("t", prefix=(b"\0\xff",)))
    view = cluster.view(1.0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(view), type=ClusterView) == view


def test_lengths_have_a_mean_and_a_deviation():
    lengths = LengthStats()
    assert lengths.deviation == 0.0
    for value in (2, 4, 4, 4, 5, 5, 7, 9):
        lengths = lengths.add(value)
    assert (lengths.count, lengths.mean) == (8, 5) and lengths.deviation == pytest.approx(2.0)


def test_a_cached_prefix_ends_at_the_first_block_that_is_missing():
    node: NodeView = make_node("n0", prefixes=frozenset({b"1", b"3"}))
    assert node.num_cached_tokens(make_task("t", num_tokens=64, prefix=(b"1", b"2", b"3"))) == 16
    assert node.num_cached_tokens(make_task("t", num_tokens=16, prefix=(b"1",))) == 15, (
        "one is left to compute"
    )

"""The order in which waiting tasks are placed: as it is defined, however it came about; and who is
asked again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest
from cluster_views import make_node, make_task
from hypothesis import given, settings
from hypothesis import strategies as st

from coserve.cluster.placement import make_placement, placement_names
from coserve.cluster.placement.base import PlacementPolicy
from coserve.cluster.queues import DeadlineQueue
from coserve.cluster.scheduler import ClusterScheduler
from coserve.cluster.view import ClusterTask, ClusterView, NodeView, Placed, TaskKind, Waits
from coserve.scheduling.fairness import TokenWeights

SLO_TIMES, MAX_DEFER_S = 5.0, 60.0
_TASKS = st.tuples(
    st.sampled_from(["request", "training", "batch"]),
    st.integers(1, 4000),
    st.sampled_from([None, 0.02, 0.5, 3.0, 40.0]),
    st.sampled_from([0, 0, 0, -1, 7]),
)
# A task comes; the nth of those that wait goes; or time passes, and then the order is asked for.
_EVENTS = st.lists(st.one_of(_TASKS, st.integers(0, 50), st.floats(0.0, 25.0)), max_size=60)


def deadline_queue(*, most_waiting: int = 1) -> DeadlineQueue:
    return DeadlineQueue(
        slo_times=SLO_TIMES,
        max_defer_s=MAX_DEFER_S,
        has_room=lambda node: node.num_waiting < most_waiting,
    )


def by_definition(view: ClusterView) -> list[str]:
    """Requests by their priorities, of each aged ones, those that can be in time by their
    deadlines, and late ones; training after all that can be in time, but aged training after aged
    requests; then batch work by when it is due.
    """
    aged_s = view.now_s - MAX_DEFER_S
    aged_training = [task for task in view.training[:1] if task.arrival_s <= aged_s]
    keys = {}
    for task in view.requests:
        alone_s = min(n.num_stages * n.profile.forward.seconds(task.num_tokens) for n in view.nodes)
        due_s = task.arrival_s + (task.ttft_s or SLO_TIMES * alone_s)
        if task.arrival_s <= aged_s:
            keys[task.id] = (task.priority, 0, 0.0)
        elif view.now_s <= due_s - alone_s:
            keys[task.id] = (task.priority, 1, due_s)
        else:
            keys[task.id] = (task.priority, 2, 0.0)
    awaited = sorted(
        (task for task in view.requests if not task.is_batch), key=lambda task: keys[task.id]
    )
    parts = [keys[task.id][1] for task in awaited]
    num_in_time = max((index + 1 for index, part in enumerate(parts) if part < 2), default=0)
    num_aged = next((index for index, part in enumerate(parts) if part), len(parts))
    training = [task for task in view.training if task not in aged_training]
    batch = sorted(
        (task for task in view.requests if task.is_batch), key=lambda task: task.batch_due_s or 0.0
    )
    before, between, after = (
        awaited[:num_aged],
        awaited[num_aged:num_in_time],
        awaited[num_in_time:],
    )
    return [task.id for task in (*before, *aged_training, *between, *training, *after, *batch)]


@settings(max_examples=200, deadline=None)
@given(_EVENTS, st.integers(1, 3))
def test_the_order_is_the_one_that_is_defined_whatever_came_before(events, num_nodes):
    queue = deadline_queue()
    waiting: list[ClusterTask] = []
    now_s = 0.0
    for number, event in enumerate(events):
        if isinstance(event, tuple):
            kind, length, ttft_s, priority = event
            more = (
                {"kind": "request", "batch_due_s": now_s + length / 50}
                if kind == "batch"
                else {"kind": kind}
            )
            if kind != "training":
                more |= {"priority": priority, "ttft_s": ttft_s}
            waiting.append(make_task(f"t{number}", arrival_s=now_s, num_tokens=length, **more))
            queue.add(waiting[-1])
        elif isinstance(event, int):
            if waiting:
                queue.remove(waiting.pop(event % len(waiting)))
        else:
            now_s += event
            # Nodes of other kinds come: what a request takes alone is another then.
            nodes = tuple(
                make_node(f"n{n}", num_stages=1 + n) for n in range(1 + number % num_nodes)
            )
            requests = tuple(task for task in waiting if not task.trains)
            training = tuple(task for task in waiting if task.trains)
            view = ClusterView(
                now_s=now_s, nodes=nodes[::-1][:1], requests=requests, training=training
            )
            assert [task.id for task in queue.order(view)] == by_definition(view)


def test_a_batch_never_goes_before_requests_that_somebody_waits_for_however_long_it_has_waited():
    queue = deadline_queue()
    for number in range(256):
        queue.add(
            make_task(
                f"batch{number}", arrival_s=number / 1000, ttft_s=2.0, batch_due_s=3600.0 - number
            )
        )
    for name, arrival_s in (("aged", 30.0), ("chat", 100.0), ("late", 97.0)):
        queue.add(make_task(name, arrival_s=arrival_s, ttft_s=2.0))
    for now_s in (100.0, 7200.0):
        order = [task.id for task in queue.order(ClusterView(now_s=now_s, nodes=(make_node("n"),)))]
        assert order[:3] == ["aged", "chat", "late"]
        assert order[3:6] == ["batch255", "batch254", "batch253"], "what should be done first"
    assert len(order) == 259, "and none is forgotten"


def test_priorities_go_before_deadlines_and_before_how_long_one_has_waited():
    queue = deadline_queue()
    queue.add(make_task("bulk", arrival_s=0.0, ttft_s=2.0, priority=10))
    queue.add(make_task("chat", arrival_s=99.0, ttft_s=3.0))
    queue.add(make_task("old", arrival_s=20.0, ttft_s=2.0))
    queue.add(make_task("operator", arrival_s=99.0, ttft_s=9.0, priority=-1))
    view = ClusterView(now_s=100.0, nodes=(make_node("n"),))
    assert [task.id for task in queue.order(view)] == ["operator", "old", "chat", "bulk"]


@pytest.mark.parametrize("name", placement_names())
def test_every_placement_asks_for_requests_by_priority_and_for_batch_work_last(name):
    tasks = (
        make_task("second", batch_due_s=9.0, priority=-5),
        make_task("first", batch_due_s=8.0),
        make_task("later", priority=1),
        make_task("usual"),
        make_task("sooner", priority=-1),
    )
    view = ClusterView(now_s=0.0, nodes=(make_node("n"),), requests=tasks)
    order = [task.id for task in make_placement(name).order(view)]
    assert order == ["sooner", "usual", "later", "first", "second"]


def one_by_one(cluster: ClusterScheduler, num_tasks: int) -> list[str]:
    """The order in which a node gets them that takes one at a time."""
    found = list[str]()
    for _ in range(num_tasks):
        cluster.report(make_node("n"))
        for task, _ in cluster.place(1.0):
            cluster.begin(task.id, 1.0)
            found.append(task.id)
            break
    return found


@pytest.mark.parametrize("is_fair", [True, False])
def test_tenants_share_what_nodes_do_where_the_policy_of_a_device_has_them_share(is_fair):
    cluster = ClusterScheduler(
        make_placement("slack-affinity"), TokenWeights() if is_fair else None
    )
    cluster.report(make_node("n", num_waiting=1))
    for number in range(4):
        cluster.submit(make_task(f"ann{number}", tenant="ann", ttft_s=5.0))
    cluster.submit(make_task("late", tenant="ann", arrival_s=-9.0, ttft_s=1.0))
    cluster.submit(make_task("bob0", tenant="bob", arrival_s=1.0, ttft_s=90.0, num_tokens=150))
    cluster.submit(make_task("bob1", tenant="bob", arrival_s=1.0, ttft_s=90.0))
    cluster.submit(make_task("urgent", tenant="ann", arrival_s=1.0, ttft_s=90.0, priority=-1))
    first = one_by_one(cluster, 3)
    assert first == (["urgent", "bob0", "ann0"] if is_fair else ["urgent", "ann0", "ann1"])
    cluster.answered("ann", 1000)
    rest = one_by_one(cluster, 5)
    assert rest == (
        ["bob1", "ann1", "ann2", "ann3", "late"]
        if is_fair
        else ["ann2", "ann3", "bob0", "bob1", "late"]
    )


def test_a_queue_leaves_out_kinds_that_are_stopped_on_the_way():
    queue = deadline_queue()
    for number in range(3):
        queue.add(make_task(f"r{number}", ttft_s=9.0))
        queue.add(make_task(f"t{number}", "training"))
    stopped, found = set[TaskKind](), list[str]()
    for task in queue.order(ClusterView(now_s=0.0, nodes=(make_node("n"),)), stopped):
        found.append(task.id)
        stopped.add(task.kind)
    assert found == ["r0", "t0"]


def test_where_tasks_wait_on_every_node_nobody_is_looked_for():
    queue = deadline_queue(most_waiting=2)
    queue.add(make_task("r"))
    assert not list(queue.order(ClusterView(now_s=0.0, nodes=(make_node("n", num_waiting=2),))))
    assert list(queue.order(ClusterView(now_s=0.0, nodes=(make_node("n", num_waiting=1),))))


@dataclass(frozen=True, kw_only=True)
class _Slow(PlacementPolicy):
    """Asks nobody to come back before two seconds are over; places on nodes with pages."""

    summary: ClassVar[str] = "for this test"
    asked: ClassVar[list[str]] = []

    def choose(
        self, view: ClusterView, task: ClusterTask, nodes: Sequence[NodeView]
    ) -> Placed | Waits:
        self.asked.append(task.id)
        return Placed(nodes[0].id) if nodes[0].num_free_pages else Waits("no pages", 2.0)


def test_a_task_that_waits_is_asked_about_again_when_its_time_is_over_or_a_node_has_changed():
    cluster = ClusterScheduler(_Slow())
    cluster.report(make_node("n"))
    cluster.submit(make_task("a"))
    asked = _Slow.asked
    for now_s, number in ((0.0, 1), (1.0, 1), (1.9, 1), (2.0, 2), (2.5, 2)):
        assert not list(cluster.place(now_s))
        assert len(asked) == number, now_s
    cluster.submit(make_task("b"))
    assert not list(cluster.place(2.6)) and asked == ["a", "a"], (
        "one that comes after it changes nothing"
    )
    cluster.withdraw("a")
    assert not list(cluster.place(2.7)) and asked == ["a", "a", "b"], "another is first"
    cluster.report(make_node("n", num_pages=9, num_free_pages=9))
    assert [task.id for task, _ in cluster.place(2.8)] == ["b"]

"""The order in which waiting tasks are placed: as it is defined, however it came about; and who is asked again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from cluster_views import make_node, make_task
from hypothesis import given, settings
from hypothesis import strategies as st

from coserve.cluster.placement.base import Placement
from coserve.cluster.queues import DeadlineQueue
from coserve.cluster.scheduler import ClusterScheduler
from coserve.cluster.view import ClusterView, NodeView, Placed, Task, TaskKind, Waits

SLO_TIMES, MAX_DEFER_S = 5.0, 60.0
_TASKS = st.tuples(
    st.sampled_from(["request", "training"]), st.integers(1, 4000), st.sampled_from([None, 0.02, 0.5, 3.0, 40.0])
)
# A task comes; the nth of those that wait goes; or time passes, and then the order is asked for.
_EVENTS = st.lists(st.one_of(_TASKS, st.integers(0, 50), st.floats(0.0, 25.0)), max_size=60)


def by_definition(view: ClusterView) -> list[str]:
    """Aged tasks, requests that can be in time by their deadlines, training, late requests."""
    aged_s = view.now_s - MAX_DEFER_S
    aged = [task for task in (*view.requests, *view.training[:1]) if task.arrival_s <= aged_s]
    timely, late = [], []
    for task in view.requests:
        alone_s = min(n.num_stages * n.profile.forward.seconds(task.num_tokens) for n in view.nodes)
        due_s = task.arrival_s + (task.ttft_s or SLO_TIMES * alone_s)
        if task not in aged and view.now_s <= due_s - alone_s:
            timely.append((due_s, task))
        elif task not in aged:
            late.append(task)
    timely.sort(key=lambda pair: pair[0])
    training = [task for task in view.training if task not in aged]
    return [task.id for task in (*aged, *(task for _, task in timely), *training, *late)]


@settings(max_examples=200, deadline=None)
@given(_EVENTS, st.integers(1, 3))
def test_the_order_is_the_one_that_is_defined_whatever_came_before(events, num_nodes):
    queue = DeadlineQueue(slo_times=SLO_TIMES, max_defer_s=MAX_DEFER_S, most_waiting=1)
    waiting: list[Task] = []
    now_s = 0.0
    for number, event in enumerate(events):
        if isinstance(event, tuple):
            kind, length, ttft_s = event
            waiting.append(make_task(f"t{number}", kind, arrival_s=now_s, num_tokens=length, ttft_s=ttft_s))
            queue.add(waiting[-1])
        elif isinstance(event, int):
            if waiting:
                queue.remove(waiting.pop(event % len(waiting)))
        else:
            now_s += event
            # Nodes of other kinds come: what a request takes alone is another then.
            nodes = tuple(make_node(f"n{n}", num_stages=1 + n) for n in range(1 + number % num_nodes))
            requests = tuple(task for task in waiting if not task.trains)
            training = tuple(task for task in waiting if task.trains)
            view = ClusterView(now_s=now_s, nodes=nodes[::-1][:1], requests=requests, training=training)
            assert [task.id for task in queue.order(view)] == by_definition(view)


def test_a_queue_leaves_out_kinds_that_are_stopped_on_the_way():
    queue = DeadlineQueue(slo_times=SLO_TIMES, max_defer_s=MAX_DEFER_S, most_waiting=1)
    for number in range(3):
        queue.add(make_task(f"r{number}", ttft_s=9.0))
        queue.add(make_task(f"t{number}", "training"))
    stopped, found = set[TaskKind](), list[str]()
    for task in queue.order(ClusterView(now_s=0.0, nodes=(make_node("n"),)), stopped):
        found.append(task.id)
        stopped.add(task.kind)
    assert found == ["r0", "t0"]


def test_where_tasks_wait_on_every_node_nobody_is_looked_for():
    queue = DeadlineQueue(slo_times=SLO_TIMES, max_defer_s=MAX_DEFER_S, most_waiting=2)
    queue.add(make_task("r"))
    assert not list(queue.order(ClusterView(now_s=0.0, nodes=(make_node("n", num_waiting=2),))))
    assert list(queue.order(ClusterView(now_s=0.0, nodes=(make_node("n", num_waiting=1),))))


@dataclass(frozen=True, kw_only=True)
class _Slow(Placement):
    """Asks nobody to come back before two seconds are over; places on nodes with pages."""

    summary: ClassVar[str] = "for this test"
    asked: ClassVar[list[str]] = []

    def choose(self, view: ClusterView, task: Task, nodes: Sequence[NodeView]) -> Placed | Waits:
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
    assert not list(cluster.place(2.6)) and asked == ["a", "a"], "one that comes after it changes nothing"
    cluster.withdraw("a")
    assert not list(cluster.place(2.7)) and asked == ["a", "a", "b"], "another is first"
    cluster.report(make_node("n", num_pages=9, num_free_pages=9))
    assert [task.id for task, _ in cluster.place(2.8)] == ["b"]

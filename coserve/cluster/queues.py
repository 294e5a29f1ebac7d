"""Tasks that have no node yet, in the order in which a placement wants them placed.

A placement says by its queue which task is next. The order is a function of the tasks, of the moment and of the nodes;
what a queue keeps is there only so that a thousand tasks that wait make the next one no dearer to find.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush, merge
from itertools import chain, count
from typing import NamedTuple, Protocol

from coserve.cluster.view import ClusterView, Latency, NodeView, Task, TaskKind


class TaskQueue(Protocol):
    """Each task is added once, and removed when it has a node or is not wanted any more."""

    def add(self, task: Task) -> None:
        """It waits from now on."""
        ...

    def remove(self, task: Task) -> None:
        """It waits no more."""
        ...

    def order(self, view: ClusterView, stopped: Collection[TaskKind] = ()) -> Iterable[Task]:
        """As they are to be placed now. Tasks may be removed meanwhile. stopped: kinds of task of which no more are
        wanted, so that they may be left out; may grow meanwhile.
        """
        ...


class ArrivalQueue:
    """Requests and training as they came."""

    def add(self, task: Task) -> None:
        pass  # the view has them in this order

    def remove(self, task: Task) -> None:
        pass

    def order(self, view: ClusterView, stopped: Collection[TaskKind] = ()) -> Iterable[Task]:
        return merge(view.requests, view.training, key=lambda task: task.arrival_s)


class RequestsFirst(ArrivalQueue):
    """Requests before training, each as they came."""

    def order(self, view: ClusterView, stopped: Collection[TaskKind] = ()) -> Iterable[Task]:
        return chain(_until(stopped, view.requests), _until(stopped, view.training))


def _until(stopped: Collection[TaskKind], tasks: Iterable[Task]) -> Iterator[Task]:
    """Tasks of one kind, until that kind is stopped."""
    for task in tasks:
        if task.kind in stopped:
            return
        yield task


class Deadline(NamedTuple):
    """Of a request. due_s: when its first token is. latest_begin_s: when it must begin for that, alone on the node that
    is the fastest for it.
    """

    due_s: float
    latest_begin_s: float


_Kinds = frozenset[tuple[int, Latency]]


def kinds_of(nodes: Iterable[NodeView]) -> _Kinds:
    """Of nodes by what a request takes there alone: numbers of stages, and what a forward pass takes in each."""
    return frozenset([(node.num_stages, node.profile.forward) for node in nodes])


def deadline(task: Task, kinds: _Kinds, *, slo_times: float) -> Deadline:
    """slo_times: the SLO of a request that brings none, in forward passes of its own."""
    alone_s = min([stages * forward.seconds(task.num_tokens, task.batch_size) for stages, forward in kinds])
    due_s = task.arrival_s + (task.ttft_s or slo_times * alone_s)
    return Deadline(due_s, due_s - alone_s)


# Sorted by the first two: a key, and the number in which the task came.
_Entry = tuple[float, int, Task]


@dataclass(eq=False, slots=True)
class _Waiting:
    """entries: where it is; None: it has come since the order was last asked for. key: there."""

    number: int
    task: Task
    entries: list[_Entry] | None = None
    key: float = 0.0


class DeadlineQueue:
    """What has waited for long; requests that can be in time, by their deadlines; training; late requests.

    A request is late when it could not be in time if it began now, alone, on any node: which it stays. So each task
    changes its place twice at most, and all that is done for one takes O(log n) of those that wait, but for copies of
    arrays of pointers.
    """

    def __init__(self, *, slo_times: float, max_defer_s: float, most_waiting: int) -> None:
        """See `coserve.cluster.placement.slack_affinity`."""
        self._slo_times, self._max_defer_s, self._most_waiting = slo_times, max_defer_s, most_waiting
        self._numbers = count()
        self._requests: dict[str, _Waiting] = {}
        self._training: dict[str, Task] = {}
        self._new: list[_Waiting] = []
        self._timely: list[_Entry] = []  # by deadline
        self._late: list[_Entry] = []  # as they came, as the following
        self._aged: list[_Entry] = []
        self._latest: list[tuple[float, int, str]] = []  # a heap of when they become late
        self._ageing: list[tuple[float, int, str]] = []  # and aged
        self._kinds: _Kinds = frozenset()

    def add(self, task: Task) -> None:
        if task.trains:
            self._training[task.id] = task
            return
        found = self._requests[task.id] = _Waiting(next(self._numbers), task)
        self._new.append(found)

    def remove(self, task: Task) -> None:
        if self._training.pop(task.id, None) is None and (found := self._requests.pop(task.id, None)) is not None:
            self._take_out(found)

    def order(self, view: ClusterView, stopped: Collection[TaskKind] = ()) -> Iterable[Task]:
        if all(node.num_waiting >= self._most_waiting for node in view.nodes):
            return ()
        kinds = kinds_of(view.nodes)
        if kinds != self._kinds:  # what requests take alone is another
            self._kinds = kinds
            self._begin_again()
        for waiting in self._new:
            if self._requests.get(waiting.task.id) is waiting:
                self._put_in(waiting)
        self._new.clear()
        self._pass_time(view.now_s)
        return self._ordered(view.now_s - self._max_defer_s, stopped)

    def _ordered(self, aged_s: float, stopped: Collection[TaskKind]) -> Iterator[Task]:
        """Each part is copied when it is come to."""
        first = next(iter(self._training.values()), None)
        aged = [first] if first is not None and first.arrival_s <= aged_s else []
        yield from _until(stopped, _tasks(self._aged))
        yield from _until(stopped, aged)
        yield from _until(stopped, _tasks(self._timely))
        if "training" not in stopped:
            yield from _until(stopped, list(self._training.values())[len(aged) :])
        yield from _until(stopped, _tasks(self._late))

    def _begin_again(self) -> None:
        for entries in (self._timely, self._late, self._aged, self._latest, self._ageing):
            entries.clear()
        self._new = list(self._requests.values())

    def _put_in(self, waiting: _Waiting) -> None:
        """Among those that are in time, until time passes."""
        task = waiting.task
        due_s, latest_begin_s = deadline(task, self._kinds, slo_times=self._slo_times)
        self._put(waiting, self._timely, due_s)
        heappush(self._latest, (latest_begin_s, waiting.number, task.id))
        heappush(self._ageing, (task.arrival_s + self._max_defer_s, waiting.number, task.id))

    def _pass_time(self, now_s: float) -> None:
        while self._latest and self._latest[0][0] < now_s:
            self._move(heappop(self._latest), self._late)
        while self._ageing and self._ageing[0][0] <= now_s:
            self._move(heappop(self._ageing), self._aged)

    def _move(self, due: tuple[float, int, str], entries: list[_Entry]) -> None:
        _, number, id = due
        waiting = self._requests.get(id)
        if waiting is None or waiting.number != number or waiting.entries is self._aged:
            return
        self._take_out(waiting)
        self._put(waiting, entries, 0.0)

    def _put(self, waiting: _Waiting, entries: list[_Entry], key: float) -> None:
        waiting.entries, waiting.key = entries, key
        insort(entries, (key, waiting.number, waiting.task))

    def _take_out(self, waiting: _Waiting) -> None:
        if waiting.entries is not None:
            at = bisect_left(waiting.entries, (waiting.key, waiting.number))
            del waiting.entries[at]


def _tasks(entries: list[_Entry]) -> Iterator[Task]:
    """As they are when the first is asked for."""
    for _, _, task in tuple(entries):
        yield task

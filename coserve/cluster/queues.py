"""Queues of the tasks that have no node yet, in the order in which a placement wants them placed.

The order is a function of the tasks, of the time and of the nodes. Queues keep state only so that
the next of a thousand waiting tasks is found quickly.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, merge
from itertools import chain, count, groupby
from typing import NamedTuple, Protocol

from coserve.cluster.view import ClusterTask, ClusterView, Latency, NodeView, TaskKind
from coserve.scheduling.order import by_due, by_priority, by_share


class TaskQueue(Protocol):
    """Queue of tasks. Each is added once, and removed when it has a node or is not wanted."""

    def add(self, task: ClusterTask) -> None:
        """Add a task."""
        ...

    def remove(self, task: ClusterTask) -> None:
        """Remove a task."""
        ...

    def order(self, view: ClusterView, stopped: Collection[TaskKind] = ()) -> Iterable[ClusterTask]:
        """Return the tasks as they are to be placed now. Tasks may be removed during the iteration.

        Args:
            view: The cluster.
            stopped: Kinds of task of which no more are wanted; may grow during the iteration.
        """
        ...


class ArrivalQueue:
    """A queue in the order of arrival; but requests by their priorities, and batch work after the
    others, by when it is due.
    """

    def __init__(self) -> None:
        self._num_apart = 0  # requests that wait and whose order is not that in which they came

    def add(self, task: ClusterTask) -> None:
        self._num_apart += _is_apart(task)

    def remove(self, task: ClusterTask) -> None:
        self._num_apart -= _is_apart(task)

    def order(self, view: ClusterView, stopped: Collection[TaskKind] = ()) -> Iterable[ClusterTask]:
        # A merge reorders neither input, so that requests keep the order of their priorities.
        return merge(self.requests(view), view.training, key=lambda task: task.arrival_s)

    def requests(self, view: ClusterView) -> Sequence[ClusterTask]:
        """Return the waiting requests in their order."""
        requests: Sequence[ClusterTask] = view.requests
        if len(view.tenants) > 1:
            requests = list(_shared_out(view, requests))
        if not self._num_apart:
            return requests
        awaited = [task for task in requests if not task.is_batch]
        batch = [task for task in requests if task.is_batch]
        return [
            *by_priority(awaited, lambda task: task.priority),
            *by_due(batch, lambda task: task.batch_due_s),
        ]


def _is_apart(task: ClusterTask) -> bool:
    return bool(task.priority) or task.is_batch


def _shared_out(view: ClusterView, requests: Sequence[ClusterTask]) -> Iterator[ClusterTask]:
    """Order requests so that tenants get their shares, by what they have been served."""
    served = {tenant.name: tenant.served for tenant in view.tenants}

    def cost(task: ClusterTask) -> float:
        return view.prompt_weight * task.batch_size * task.num_tokens

    return by_share(requests, served, cost, lambda task: task.tenant)


class RequestsFirst(ArrivalQueue):
    """A queue of requests before training, each in the order of an `ArrivalQueue`."""

    def order(self, view: ClusterView, stopped: Collection[TaskKind] = ()) -> Iterable[ClusterTask]:
        return chain(_until(stopped, self.requests(view)), _until(stopped, view.training))


def _until(stopped: Collection[TaskKind], tasks: Iterable[ClusterTask]) -> Iterator[ClusterTask]:
    """Yield tasks of one kind until that kind is stopped."""
    for task in tasks:
        if task.kind in stopped:
            return
        yield task


class Deadline(NamedTuple):
    """Deadline of a request."""

    due_s: float
    """Time at which its first token is due."""
    latest_begin_s: float
    """Time at which it must begin for that, alone on the node that is the fastest for it."""


_Kinds = frozenset[tuple[int, Latency]]


def kinds_of(nodes: Iterable[NodeView]) -> _Kinds:
    """Return the kinds of nodes, by what a request takes there alone: the number of stages, and the
    latency of a forward pass in each.
    """
    return frozenset([(node.num_stages, node.profile.forward) for node in nodes])


def deadline(task: ClusterTask, kinds: _Kinds, *, slo_times: float) -> Deadline:
    """Return the deadline of a request.

    Args:
        task: The request.
        kinds: Kinds of the cluster's nodes.
        slo_times: TTFT SLO of a request without one, in forward passes of its own.
    """
    alone_s = min(
        [stages * forward.seconds(task.num_tokens, task.batch_size) for stages, forward in kinds]
    )
    due_s = task.arrival_s + (task.ttft_s or slo_times * alone_s)
    return Deadline(due_s, due_s - alone_s)


# Parts of the requests of one priority: those that have waited for long, those that can be in time,
# and late ones.
_AGED, _TIMELY, _LATE = range(3)
# Priority, part, deadline (0: by arrival) and number of arrival, by which entries are sorted.
_Entry = tuple[int, int, float, int, ClusterTask]


@dataclass(eq=False, slots=True)
class _Waiting:
    """A request that waits, and its place in the order."""

    number: int
    """Number in the order of arrival."""
    task: ClusterTask
    """The request."""
    part: int | None = None
    """Its part among requests of its priority; None: it has come since the order was last computed.
    """
    due_s: float = 0.0
    """The deadline of its entry."""


class DeadlineQueue:
    """A queue by priorities and deadlines.

    Requests come by their priorities; of one priority, first those that have waited for long, then
    those that can be in time, by their deadlines, then late ones. Training is placed after all that
    can be in time; training that has waited for long comes after requests that have, too. Batch
    work is last, by when it is due: nobody waits for it, and it has no deadline here, however long
    it has waited. Where requests are shared out among tenants (`ClusterView.tenants`), that
    replaces deadlines and waiting times.

    A request is late when it could not be in time if it began now, alone, on any node; it remains
    late. So each task changes its place twice at most, and the work for one task is O(log n) in the
    number of waiting tasks, but for copies of arrays of pointers.
    """

    def __init__(
        self, *, slo_times: float, max_defer_s: float, has_room: Callable[[NodeView], bool]
    ) -> None:
        """Begin without tasks.

        Args:
            slo_times: TTFT SLO of a request without one, in forward passes of its own.
            max_defer_s: Time after which a task has waited for long.
            has_room: Returns whether a node may get a task; where none may, no task is looked for.
        """
        self._slo_times = slo_times
        self._max_defer_s = max_defer_s
        self._has_room = has_room
        self._numbers = count()
        self._requests: dict[str, _Waiting] = {}  # but for batch work
        self._training: dict[str, ClusterTask] = {}
        self._new: list[_Waiting] = []
        self._entries: list[_Entry] = []
        self._num_late = 0  # of the entries
        self._latest: list[tuple[float, int, str]] = []  # a heap of when they become late
        self._ageing: list[tuple[float, int, str]] = []  # and aged
        self._batch: list[
            tuple[float, int, ClusterTask]
        ] = []  # by when each should be done, and the number in which it came
        self._numbers_of_batch: dict[str, int] = {}
        self._kinds: _Kinds = frozenset()

    def add(self, task: ClusterTask) -> None:
        if task.trains:
            self._training[task.id] = task
        elif task.batch_due_s is not None:
            number = self._numbers_of_batch[task.id] = next(self._numbers)
            insort(self._batch, (task.batch_due_s, number, task))
        else:
            waiting = self._requests[task.id] = _Waiting(next(self._numbers), task)
            self._new.append(waiting)

    def remove(self, task: ClusterTask) -> None:
        if self._training.pop(task.id, None) is not None:
            return
        if (waiting := self._requests.pop(task.id, None)) is not None:
            self._take_out(waiting)
        elif (number := self._numbers_of_batch.pop(task.id, None)) is not None:
            assert task.batch_due_s is not None
            # The shorter tuple sorts directly before its entry.
            del self._batch[bisect_left(self._batch, (task.batch_due_s, number))]

    def order(self, view: ClusterView, stopped: Collection[TaskKind] = ()) -> Iterable[ClusterTask]:
        if not any(map(self._has_room, view.nodes)):
            return ()
        kinds = kinds_of(view.nodes)
        if kinds != self._kinds:  # deadlines have changed
            self._kinds = kinds
            self._begin_again()
        for waiting in self._new:
            # It may have been removed since it was added.
            if self._requests.get(waiting.task.id) is waiting:
                self._put_in(waiting)
        self._new.clear()
        self._pass_time(view.now_s)
        return self._ordered(view, stopped)

    def _ordered(self, view: ClusterView, stopped: Collection[TaskKind]) -> Iterator[ClusterTask]:
        """Yield the tasks that wait now; training and batch work are looked up late."""
        aged_s = view.now_s - self._max_defer_s
        first = next(iter(self._training.values()), None)
        aged = [first] if first is not None and first.arrival_s <= aged_s else []
        num_before = (
            len(self._entries) - self._num_late
        )  # of those that come, the ones that go before training
        is_aged_due, is_training_due = bool(aged), True
        # A copy, since tasks are removed during the iteration.
        requests = ((part, task) for _, part, _, _, task in tuple(self._entries))
        for part, task in requests if len(view.tenants) < 2 else self._shared_out(view):
            if "request" in stopped:
                break
            if is_aged_due and part != _AGED:
                is_aged_due = False
                yield from _until(stopped, aged)
            # All that can be in time has been yielded, and late requests follow.
            if is_training_due and not num_before:
                is_training_due = False
                yield from _until(stopped, self._training_beside(aged))
            num_before -= part != _LATE
            yield task
        if is_aged_due:
            yield from _until(stopped, aged)
        if is_training_due:
            yield from _until(stopped, self._training_beside(aged))
        yield from _until(stopped, (task for _, _, task in tuple(self._batch)))

    def _shared_out(self, view: ClusterView) -> Iterator[tuple[int, ClusterTask]]:
        """Yield requests shared out among tenants: of each priority those that can be in time or
        have waited for long, then late ones.
        """
        for (_, is_late), group in groupby(
            tuple(self._entries), lambda entry: (entry[0], entry[1] == _LATE)
        ):
            for task in _shared_out(view, [entry[-1] for entry in group]):
                yield _LATE if is_late else _TIMELY, task

    def _training_beside(self, aged: Sequence[ClusterTask]) -> Iterator[ClusterTask]:
        return (task for task in tuple(self._training.values()) if task not in aged)

    def _begin_again(self) -> None:
        for entries in (self._entries, self._latest, self._ageing):
            entries.clear()
        self._num_late = 0
        self._new = list(self._requests.values())

    def _put_in(self, waiting: _Waiting) -> None:
        """Add a request to those that can be in time, until time passes."""
        task = waiting.task
        due_s, latest_begin_s = deadline(task, self._kinds, slo_times=self._slo_times)
        self._put(waiting, _TIMELY, due_s)
        heappush(self._latest, (latest_begin_s, waiting.number, task.id))
        heappush(self._ageing, (task.arrival_s + self._max_defer_s, waiting.number, task.id))

    def _pass_time(self, now_s: float) -> None:
        # Late ones first: a request that is late and aged counts as aged.
        while self._latest and self._latest[0][0] < now_s:
            self._move(heappop(self._latest), _LATE)
        while self._ageing and self._ageing[0][0] <= now_s:
            self._move(heappop(self._ageing), _AGED)

    def _move(self, due: tuple[float, int, str], part: int) -> None:
        _, number, id = due
        waiting = self._requests.get(id)
        # Heaps keep entries of requests that have left, or that came again under the same id.
        if waiting is None or waiting.number != number or waiting.part == _AGED:
            return
        self._take_out(waiting)
        self._put(waiting, part, 0.0)

    def _put(self, waiting: _Waiting, part: int, due_s: float) -> None:
        waiting.part, waiting.due_s = part, due_s
        self._num_late += part == _LATE
        insort(self._entries, (waiting.task.priority, part, due_s, waiting.number, waiting.task))

    def _take_out(self, waiting: _Waiting) -> None:
        if waiting.part is not None:
            self._num_late -= waiting.part == _LATE
            del self._entries[
                bisect_left(
                    self._entries,
                    (waiting.task.priority, waiting.part, waiting.due_s, waiting.number),
                )
            ]

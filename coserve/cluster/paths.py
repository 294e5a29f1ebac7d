"""Execution planning: when a task would run on a node, and how much idleness that adds (LeMix
section IV-B, algorithm 1).

A stage runs one pass at a time. Forward passes keep the order of placement; a forward pass that
would not end before the backward pass of an earlier training task begins waits until that has ended
(a far dependency).

Where a node bounds how many training tasks are in flight (`NodeView.training_in_flight`), the
others wait before the first stage, and requests pass them: a request runs before the passes of a
training task that is still to begin, where it ends before them.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from coserve.cluster.view import ClusterTask, NodeView, PlannedTask


class ExecutionPath(NamedTuple):
    """Path of a task on a node, and what it costs."""

    task: PlannedTask
    """Times of the task's passes."""
    idleness_s: float
    """II: idle time that the task adds to the node's stages, summed over them."""
    response_s: float
    """R: time from the task's arrival to the end of its forward pass."""


def plan_path(
    node: NodeView,
    task: ClusterTask,
    now_s: float,
    *,
    num_cached: int = 0,
    after: Sequence[PlannedTask] = (),
) -> ExecutionPath:
    """Return a task's path on a node if it is placed there now. O(stages × training tasks under
    way).

    Args:
        node: The node.
        task: The task.
        now_s: The time.
        num_cached: Tokens of its prompt that need not be computed.
        after: Planned tasks that would be placed there before it.
    """
    profile = node.profile
    if profile.gives_way(task):
        return _beside(node, task, now_s, num_cached)
    paths = (*node.queue, *after)
    training = [] if profile.training_yields else [path for path in paths if path.backward_end_s]
    forward_s = profile.forward.seconds(task.num_tokens - num_cached, task.batch_size)
    # Tasks after whose forward passes this one's may begin, and training tasks that it may pass.
    before = [after[-1] if after else node.last]
    held: list[PlannedTask] = []
    end_s = max(now_s, task.arrival_s)
    if node.training_in_flight is not None and training:
        if not task.trains:
            # Training that has not begun may be passed by requests.
            held = [path for path in training if path.forward_start_s[0] > now_s]
        elif len(training) >= node.training_in_flight:
            # Training waits until one of the tasks in flight has ended.
            end_s = max(end_s, training[-node.training_in_flight].end_s)
        last_request = next((path for path in reversed(paths) if not path.backward_end_s), None)
        before = [last_request, *training[: len(training) - len(held)][-1:]]
    starts_s, ends_s = [], []
    idleness_s = 0.0
    for stage in range(node.num_stages):
        # A node that has run nothing makes no earlier time unusable.
        previous_s = max(
            [path.forward_end_s[stage] for path in before if path is not None], default=end_s
        )
        start_s = max(end_s, previous_s)
        end_s = start_s + forward_s
        # Time within the gap after the previous forward pass in which other passes run: not idle.
        offset_s = 0.0
        for pass_start_s, pass_end_s in _passes(stage, training, held):
            if end_s <= pass_start_s:
                break  # it fits before this pass
            if pass_end_s <= previous_s:
                continue  # this pass is over before it could begin
            start_s = max(start_s, pass_end_s)
            end_s = start_s + forward_s
            if previous_s <= pass_start_s:
                offset_s += pass_end_s - pass_start_s
        idleness_s += max(0.0, start_s - previous_s - offset_s)
        starts_s.append(start_s)
        ends_s.append(end_s)
    backward = _backward(node, task, ends_s[-1], training) if task.trains else ((), ())
    planned = PlannedTask(
        task=task.id,
        kind=task.kind,
        arrival_s=task.arrival_s,
        forward_start_s=tuple(starts_s),
        forward_end_s=tuple(ends_s),
        backward_start_s=backward[0],
        backward_end_s=backward[1],
    )
    return ExecutionPath(planned, idleness_s, end_s - task.arrival_s)


def _passes(
    stage: int, training: Sequence[PlannedTask], held: Sequence[PlannedTask]
) -> Iterable[tuple[float, float]]:
    """Return starts and ends of the passes that a forward pass must not delay in a stage, in order:
    backward passes, which keep the order of placement, and forward passes of training tasks that a
    request may pass.
    """
    passes = ((path.backward_start_s[stage], path.backward_end_s[stage]) for path in training)
    if not held:
        return passes
    return sorted(
        [*passes, *((path.forward_start_s[stage], path.forward_end_s[stage]) for path in held)]
    )


def _beside(node: NodeView, task: ClusterTask, now_s: float, num_cached: int) -> ExecutionPath:
    """Return the path of a task that gives way to requests: it begins at once, and takes longer the
    less slack there is, and the more such tasks there are.
    """
    profile, at = node.profile, (now_s,) * node.num_stages
    passes = (profile.forward, profile.backward) if task.trains else (profile.forward,)
    alone_s = node.num_stages * sum(
        one.seconds(task.num_tokens - num_cached, task.batch_size) for one in passes
    )
    others = len(node.jobs) if task.trains else node.num_batch_running + node.num_batch_waiting
    end_s = now_s + alone_s * (1 + others) / max(node.slack, 0.01)
    ends_s = (end_s,) * node.num_stages
    planned = PlannedTask(
        task=task.id,
        kind=task.kind,
        arrival_s=task.arrival_s,
        forward_start_s=at,
        forward_end_s=at if task.trains else ends_s,
        backward_start_s=at if task.trains else (),
        backward_end_s=ends_s if task.trains else (),
    )
    return ExecutionPath(planned, 0.0, end_s - task.arrival_s)


def _backward(
    node: NodeView, task: ClusterTask, forward_end_s: float, training: Sequence[PlannedTask]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return starts and ends of a backward pass by stage. It runs through the stages in reverse,
    after earlier backward passes.
    """
    backward_s = node.profile.backward.seconds(task.num_tokens, task.batch_size)
    starts_s, ends_s, at_s = [], [], forward_end_s
    for stage in reversed(range(node.num_stages)):
        start_s = max([at_s, *[path.backward_end_s[stage] for path in training]])
        at_s = start_s + backward_s
        starts_s.append(start_s)
        ends_s.append(at_s)
    return tuple(reversed(starts_s)), tuple(reversed(ends_s))

"""Policies for tests: whatever a function says, and any plan that the engine could be given."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from coserve.scheduling import LatencyModel, Plan, PlannedLoss, PlannedRows, PlannedTasklets, View
from coserve.scheduling.memory import MemoryPlan
from coserve.scheduling.plan import RowKind
from coserve.scheduling.policies import Policy


@dataclass(frozen=True, kw_only=True)
class PlannedBy(Policy):
    """Whatever a function says."""

    summary = "for tests"
    function: Callable[[View, LatencyModel], Plan] = field(
        metadata={"help": "", "least": 0.0, "most": 0.0}
    )

    def plan(self, view: View, latency: LatencyModel) -> Plan:
        return self.function(view, latency)

    def __post_init__(self) -> None:
        """A function is no setting."""


def random_policy(seed: int) -> Policy:
    """Any plan that the engine could be given: some of the requests, in chunks, and any pieces of
    jobs."""
    rng, groups = Random(seed), Random(seed)

    def plan(view: View, latency: LatencyModel) -> Plan:
        memory = MemoryPlan(view)
        memory.grow()
        memory.admit_waiting()
        memory.begin_packs()
        rows, losses, tasklets, updates, room = [], [], [], [], view.max_rows
        for request in memory.requests:
            num_rows = min(room, request.num_rows, rng.choice((1, 2, 3, 5, 8, 1000)))
            if num_rows and rng.random() < 0.9:
                kind: RowKind = "decode" if request.num_rows == 1 else "prefill"
                rows.append(PlannedRows(request.id, kind, request.num_past, num_rows))
                room -= num_rows
        for job in memory.jobs:
            if rng.random() < 0.2:
                continue
            if job.phase == "update":
                updates.append(job.id)
            elif job.phase == "loss":
                losses.append(PlannedLoss(job.id, rng.choice((2, 7, 20, 1000))))
            elif job.phase == "backward":
                number = _some_tasklets(rng, job.num_rows_left, job.num_parts_left)
                tasklets.append(PlannedTasklets(job.id, *number, groups.choice((None, 0, 0, 1))))
            elif num_rows := min(room, job.num_rows_left, rng.choice((1, 3, 7, 20, 1000))):
                rows.append(
                    PlannedRows(job.id, "window", job.num_rows - job.num_rows_left, num_rows)
                )
                room -= num_rows
        return Plan(
            preempt=tuple(memory.preempt),
            drop=tuple(memory.drop),
            admit=tuple(memory.admit),
            begin=tuple(memory.begin),
            rows=tuple(rows),
            losses=tuple(losses),
            tasklets=tuple(tasklets),
            updates=tuple(updates),
        )

    return PlannedBy(function=plan)


def _some_tasklets(rng: Random, num_rows_left: int, num_parts_left: int) -> tuple[int, int]:
    """Rows and number of tasklets, of which there are at least this many."""
    num_rows = rng.choice((2, 5, 11, 1000))
    return num_rows, rng.randint(1, -(-num_rows_left // num_rows) + num_parts_left - 1)

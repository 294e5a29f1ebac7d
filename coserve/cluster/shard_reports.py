"""What the nodes of a data-parallel job report, told as if one had the whole job."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from coserve.engine.jobs.events import JobEvent
from coserve.jobs.messages import Checkpointed

Told = JobEvent | Checkpointed


class ShardReports:
    """Of one job, while the same nodes have it. Nodes are numbered as their shards.

    A step is told when all nodes have made it; what the first one says of a step (its checkpoint, the validation set's
    loss) after that, so that nothing is known of a step that may be made again.
    """

    def __init__(self, job: str, num_nodes: int) -> None:
        self._job, self._num_nodes = job, num_nodes
        self._steps: dict[int, list[JobEvent]] = {}  # that some have made, and not all
        self._held: list[Told] = []  # of such steps
        self._versions: dict[int, int] = {}  # the newest that each serves
        self._last_version: int | None = None
        self._num_succeeded = 0

    @property
    def is_holding(self) -> bool:
        """Whether something waits until all nodes have come as far."""
        return bool(self._held)

    def take(self, node: int, report: Told) -> list[Told]:
        """What is to be told now, in this order."""
        report = replace(report, job=self._job)
        if isinstance(report, Checkpointed) or report.kind == "evaluation":
            self._held.append(report)
            return self._released()
        if report.kind == "step":
            found = self._steps.setdefault(report.step, [])
            found.append(report)
            if len(found) < self._num_nodes:
                return []
            del self._steps[report.step]
            return [joint_step(found), *self._released()]
        if report.kind == "version":
            return self._version(node, report)
        if report.kind == "succeeded":
            self._num_succeeded += 1
            return [report] if self._num_succeeded == self._num_nodes else []
        return [report] if report.kind == "failed" or (report.kind == "cancelled" and not node) else []

    def _released(self) -> list[Told]:
        first = min(self._steps, default=inf)
        ready = [each for each in self._held if each.step < first]
        self._held = [each for each in self._held if each.step >= first]
        return ready

    def _version(self, node: int, report: JobEvent) -> list[Told]:
        """The newest one that all nodes have, or have had."""
        name, _, step = (report.version or "").rpartition("@")
        self._versions[node] = int(step)
        newest = min(self._versions.values())
        if len(self._versions) < self._num_nodes or newest == self._last_version:
            return []
        self._last_version = newest
        return [replace(report, version=f"{name}@{newest}", step=newest)]


def joint_step(events: Sequence[JobEvent]) -> JobEvent:
    """One optimizer step of all nodes: means over the trained tokens of all, and what the slowest of them took."""
    trained = [event for event in events if event.num_trained]
    num_trained = sum(event.num_trained for event in trained)

    def mean(values: Sequence[float | None]) -> float | None:
        pairs = [(value, event.num_trained) for value, event in zip(values, trained, strict=True) if value is not None]
        return sum(value * number for value, number in pairs) / num_trained if pairs else None

    names = trained[0].metrics if trained else ()
    slowest = max(events, key=lambda event: event.seconds.forward_s + event.seconds.backward_s)
    norms = [event.norm for event in events]
    return replace(
        events[-1],
        loss=mean([event.loss for event in trained]),
        token_accuracy=mean([event.token_accuracy for event in trained]),
        metrics={name: mean([event.metrics[name] for event in trained]) or 0.0 for name in names},
        num_trained=num_trained,
        num_tokens=sum(event.num_tokens for event in events),
        norm=None if None in norms else sum(norm for norm in norms if norm is not None) / len(norms),
        seconds=slowest.seconds,
    )

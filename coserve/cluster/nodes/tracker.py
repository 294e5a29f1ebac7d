"""Statistics that a front keeps of its nodes: the view that placements see, and the sums that a
server shows.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from msgspec import structs

from coserve.cluster.nodes.prefixes import SentPrefixes
from coserve.cluster.view import NodeProfile, NodeView
from coserve.engine.records import EngineStats
from coserve.protocol.messages import Ready, StepReport

# Window over which utilisation is measured; after as long without a step, the slack is 1.
_RECENT_S = 10.0
# Counts since an engine began; all other numbers are as of now.
_COUNTS = (
    *(
        "num_steps",
        "num_tokens_trained",
        "num_preemptions",
        "num_packs_dropped",
        "num_slos_clamped",
    ),
    *("num_swapped_out", "num_swapped_in", "num_pages_moved"),
    *("num_weight_bytes_copied", "weights_wait_s", "num_tasklets_declined"),
)
# Stats that are not summed over nodes: the maximum, or the minimum, of all is shown.
_WORST, _LEAST = ("margin", "give_back_s"), ("slack",)


class NodeTracker:
    """Statistics of one engine on one node, as long as it lives."""

    def __init__(self, name: str, ready: Ready, profile: NodeProfile) -> None:
        """Begin without steps. profile: `coserve.cluster.nodes.profiler.profile_of`."""
        self.name = name
        self.ready = ready
        self.profile = profile
        self.prefixes = SentPrefixes(ready.num_pages)
        self.stats: EngineStats | None = None
        self.adapters: set[str] = set()
        """Labels of those that were asked for here: the least used ones may have made room
        since."""
        self._steps: deque[tuple[float, float]] = deque()  # end, and how long
        self._began_s: float | None = None

    def take(self, report: StepReport, now_s: float) -> None:
        """Take in a report of steps."""
        if self._began_s is None:
            self._began_s = now_s
        self._steps.extend((step.end_s, step.step_s) for step in report.steps)
        if report.stats is not None:
            self.stats = report.stats

    def view(self, now_s: float, *, jobs: tuple[str, ...], is_draining: bool) -> NodeView:
        """Return the node as placements see it. jobs: ids of those that were placed here."""
        while self._steps and self._steps[0][0] < now_s - _RECENT_S:
            self._steps.popleft()
        # A young engine has a shorter window; at least a second, so that one step does not fill it.
        recent_s = min(
            _RECENT_S, max(1.0, now_s - (self._began_s if self._began_s is not None else now_s))
        )
        busy_s = sum(step_s for _, step_s in self._steps)
        stats = self.stats
        return NodeView(
            id=self.name,
            hardware=self.ready.hardware,
            profile=self.profile,
            is_draining=is_draining,
            num_running=0 if stats is None else stats.num_running,
            num_waiting=0 if stats is None else stats.num_waiting,
            num_batch_running=0 if stats is None else stats.num_batch_running,
            num_batch_waiting=0 if stats is None else stats.num_batch_waiting,
            jobs=jobs,
            slack=1.0 if stats is None or not self._steps else stats.slack,
            utilisation=min(1.0, busy_s / recent_s),
            num_pages=self.ready.num_pages,
            num_free_pages=self.ready.num_pages if stats is None else stats.num_pages_for_requests,
            adapters=frozenset(self.adapters),
            prefixes=self.prefixes.keys,
        )


class Totals:
    """Stats of all engines together, counted since one of them was last lost, as listeners of a
    single engine expect.
    """

    def __init__(self) -> None:
        self._before: dict[str, EngineStats] = {}  # by node

    def restart(self, stats: dict[str, EngineStats]) -> None:
        """Count from now on. stats: of the engines that are left when one was lost, by node."""
        self._before = dict(stats)

    def of(self, stats: dict[str, EngineStats]) -> EngineStats | None:
        """Return the sums of these stats, by node; None if no node has reported any."""
        if not stats:
            return None
        whole = list(stats.values())
        sums: dict[str, Any] = {
            each.name: sum(getattr(one, each.name) for one in whole)
            for each in fields(EngineStats)
            if isinstance(getattr(whole[0], each.name), int | float)
        }
        # Listeners expect counts to start at zero when an engine is lost.
        for name in _COUNTS:
            sums[name] -= sum(
                getattr(self._before[node], name) for node in stats if node in self._before
            )
        sums |= {name: max(getattr(one, name) for one in whole) for name in _WORST}
        sums |= {name: min(getattr(one, name) for one in whole) for name in _LEAST}
        owners, grammars = Counter[str](), Counter[str]()
        for one in whole:
            owners.update(one.num_pages_by_owner)
            grammars.update(one.grammar_bytes_by_tenant)
        slowest = max((one.slo for one in whole), key=lambda slo: slo.tpot_s)
        joined = tuple(group for one in whole for group in one.joined_jobs)
        sums |= {"num_pages_by_owner": dict(owners), "grammar_bytes_by_tenant": dict(grammars)}
        return replace(whole[0], slo=slowest, joined_jobs=joined, **sums)


def joined_ready(readies: list[Ready]) -> Ready:
    """Return what engines report of themselves, joined so that any of them takes what one takes."""
    return structs.replace(
        readies[0],
        slo=max((each.slo for each in readies), key=lambda slo: slo.tpot_s),
        max_positions=min(each.max_positions for each in readies),
        num_pages=min(each.num_pages for each in readies),
    )


def difference_from(ready: Ready, others: Iterable[Ready]) -> str | None:
    """Return in one line how an engine differs from others in what answers depend on; None if it
    does not.
    """
    for other in others:
        for name in ("model", "dtype", "vocab_size", "block_tokens"):
            if (its := getattr(ready, name)) != (ours := getattr(other, name)):
                return f"its {name} is {its}, and that of others {ours}: start it as those were"
        if _kind_of_device(ready) == _kind_of_device(other) and _has_other_weights(ready, other):
            return (
                f"its model {ready.model} has other weights than that of others: "
                "have the same files on all machines"
            )
    return None


def _kind_of_device(ready: Ready) -> str:
    """Return the kind of device; on another kind, weights may be quantised with other rounding."""
    return ready.device.partition(":")[0]


def _has_other_weights(one: Ready, other: Ready) -> bool:
    return "" not in (one.fingerprint, other.fingerprint) and one.fingerprint != other.fingerprint

"""The engines of many nodes as a server sees one: each request and job is placed on a node, and
what comes of it is reported as if there were no others.

A node that dies takes its requests with it (`ClusterRequests`). Its jobs are reported as lost, and
the jobs' manager starts each again from its newest checkpoint, on whichever node is chosen then.
Reports of a node about a job that is another node's by now are dropped.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from coserve.cluster.front.requests import ClusterRequests
from coserve.cluster.jobs.placed_jobs import PlacedJobs
from coserve.cluster.jobs.sharded_job import JobReport
from coserve.cluster.jobs.sharded_jobs import ShardedJobs
from coserve.cluster.nodes.adapters import ClusterAdapters
from coserve.cluster.nodes.checks import NodeChecks
from coserve.cluster.nodes.joins import NodeJoins
from coserve.cluster.nodes.profiler import profile_of
from coserve.cluster.nodes.registry import ClusterNode, FindNodes, NodeRegistry
from coserve.cluster.nodes.tracker import NodeTracker, Totals, difference_from, joined_ready
from coserve.cluster.scheduler import RETRY_S, ClusterScheduler
from coserve.cluster.view import ClusterView
from coserve.engine.commands import AdapterRef, AddRequest, JobStart
from coserve.engine.jobs.events import JobEvent
from coserve.engine_client.link import EngineListener
from coserve.engine_client.streams import RequestStream
from coserve.errors import ClusterError, EngineGoneError
from coserve.jobs.files.shared_files import SharedFiles
from coserve.protocol.messages import Ready, StepReport

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Interval at which the front looks for nodes that have joined, and asks others for their status.
_LOOK_S = 1.0
_ENDS = ("succeeded", "failed", "cancelled")
# Time for checkpoints at the end, as for a single engine.
_SHUTDOWN_S = 20.0


class ClusterLink:
    """The server's link to all engines. Belongs to one event loop; implements
    `coserve.engine_client.access.EngineAccess`.
    """

    def __init__(
        self,
        find: FindNodes,
        scheduler: ClusterScheduler,
        home: Path | None = None,
        shared: SharedFiles | None = None,
        checks: NodeChecks | None = None,
    ) -> None:
        """Begin without nodes.

        Args:
            find: Finds the nodes of the cluster.
            scheduler: The cluster's queue.
            home: Where κ and T_max of kinds of nodes are kept; None: nowhere.
            shared: Where contributions of jobs lie: `ShardedJobs`.
            checks: Checks of nodes before they are used (default: that all are alike).
        """
        self._home = home
        self._checks = checks or NodeChecks()
        self._scheduler = scheduler
        self._nodes = NodeRegistry(find, self, self._checks)
        self._jobs = PlacedJobs(self._scheduler, self._place, self._tell_job)
        self._sharded = ShardedJobs(
            self._jobs, self._nodes_for_jobs, self._tell_job, self._lose_jobs, shared
        )
        self._adapters = ClusterAdapters(self._nodes.used, self._checks.most_adapters)
        self._node_joins = NodeJoins(self._sharded.changed_by, self._adapters, self._checks)
        self._unlike: dict[ClusterNode, Ready] = {}  # engines that differ from those that are used
        self._listeners: list[EngineListener] = []
        self._requests = ClusterRequests(self._scheduler, self._jobs, self._nodes)
        self._totals = Totals()
        self._ready: Ready | None = None
        self._closing = False
        self._ended = asyncio.Event()
        self._retry: asyncio.TimerHandle | None = None
        self.jobs_at_death: tuple[str, ...] | None = ()
        """See `EngineAccess`."""
        self.jobs_lost: frozenset[str] | None = frozenset()
        """See `EngineAccess`."""

    # -- questions ------------------------------------------------------------------

    @property
    def start_progress(self) -> None:
        """No progress of a start: nodes start one by one; `coserve cluster status` shows each."""
        return

    @property
    def ready(self) -> Ready | None:
        return self._ready

    @property
    def num_open(self) -> int:
        return len(self._requests)

    @property
    def is_silent(self) -> bool:
        return all(node.link.is_silent for node in self._nodes.used())

    def require_ready(self) -> Ready:
        if self._closing:
            raise EngineGoneError("the server is shutting down; ask another, or later")
        if self._ready is None:
            problems = [
                f"{node.name}: {node.problem}" for node in self._nodes.all() if node.problem
            ]
            raise EngineGoneError(
                "; ".join(["no node is ready; try again in a few seconds", *problems])
            )
        return self._ready

    def require_alive(self) -> None:
        self.require_ready()
        if self.is_silent:
            raise EngineGoneError("no node has answered for some seconds")

    def listen(self, listener: EngineListener) -> None:
        self._listeners.append(listener)
        if self._ready is not None:
            listener.engine_ready(self._ready)

    @property
    def view(self) -> ClusterView:
        """The cluster as placements see it now."""
        return self._scheduler.view(time.monotonic())

    def describe(self) -> list[dict[str, Any]]:
        """Return the state of every node, with its number of requests and its jobs."""
        return [
            node.describe(
                num_requests=self._requests.num_on(node),
                jobs=[self._sharded.job_of(id) for id in self._jobs.on(node)],
            )
            for node in self._nodes.all()
        ]

    async def drain(self, *names: str) -> None:
        """Drain nodes that are to leave: they get nothing more, their jobs continue on others, and
        their requests come to their ends. Returns when the jobs have gone.

        Raises:
            ClusterError: A node does not exist; then none drains.
        """
        nodes = {each.name: each for each in self._nodes.all()}
        if unknown := [name for name in names if name not in nodes]:
            raise ClusterError(
                f"there is no node {unknown[0]!r}; there are {', '.join(nodes) or 'none'}"
            )
        leaving = [nodes[name] for name in names]
        for node in leaving:  # all first, so that no job moves from one to the next
            node.drain()
            if node.tracker is not None:
                self._view(node)
        await asyncio.gather(*map(self._sharded.leave, leaving))

    @property
    def waiting(self) -> list[str]:
        """Ids of requests and jobs that have no node yet."""
        return self._requests.waiting + [self._sharded.job_of(id) for id in self._jobs.on(None)]

    @property
    def num_nodes(self) -> int:
        return len(self._nodes_for_jobs())

    def _nodes_for_jobs(self) -> list[ClusterNode]:
        return [node for node in self._nodes.used() if not node.is_draining]

    # -- life -----------------------------------------------------------------------

    async def run(self) -> None:
        while not self._closing:
            await self._nodes.look()
            self._look_at_idle()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), _LOOK_S)

    async def stop(self) -> None:
        self.close_to_requests()
        with suppress(TimeoutError):
            # Before the nodes are left, which write the checkpoints.
            await asyncio.wait_for(self._sharded.checkpoint_all(), _SHUTDOWN_S)
        self.fail_open_requests("the server is shutting down")
        if self._retry is not None:
            self._retry.cancel()
        self._node_joins.close()
        self._sharded.close()
        await self._nodes.close()

    def close_to_requests(self) -> None:
        self._closing = True
        self._ended.set()

    def fail_open_requests(self, reason: str) -> None:
        self._requests.fail_all(reason)

    # -- nodes (see `NodesOwner`) -------------------------------------------------------

    def node_ready(self, node: ClusterNode, ready: Ready) -> None:
        """Check a node whose engine takes commands, and prepare it to be used."""
        self._unlike.pop(node, None)
        if not self._refuses(node, ready):
            self._node_joins.admit(node, lambda: self._use(node, ready))

    def _refuses(self, node: ClusterNode, ready: Ready) -> bool:
        """Return whether a node's engine cannot be used. One that differs from the others is looked
        at again when those are gone.
        """
        if (mismatch := self._checks.engine_mismatch(ready)) is not None:
            self._nodes.refuse(node, mismatch)
        elif (unlike := difference_from(ready, self._readies())) is not None:
            self._unlike[node] = ready
            self._nodes.refuse(node, unlike)
        else:
            return False
        return True

    def _use(self, node: ClusterNode, ready: Ready) -> None:
        if self._refuses(node, ready):  # another node has joined first
            return
        node.tracker = NodeTracker(node.name, ready, profile_of(ready, self._home))
        self._nodes.engine_used(node)
        self._view(node)
        self._join()
        assert self._ready is not None
        for listener in self._listeners:
            listener.engine_ready(self._ready)
        self._place()
        self._sharded.grow()

    def node_gone(self, node: ClusterNode) -> None:
        """Handle the death of a node's engine, or of the node."""
        lost, node.lost = node.lost, []
        self._node_joins.gone(node)
        self._unlike.pop(node, None)
        # The engine was not in use, so that nobody depends on it.
        if node.tracker is None:
            return
        node.tracker = None
        self._scheduler.remove(node.name)
        at_death = node.link.jobs_at_death
        if at_death is not None:
            at_death = tuple({self._sharded.job_of(id) for id in at_death})
        jobs = self._sharded.lose(node)
        self._join()
        # Counts start anew from those of the engines that are left.
        self._totals.restart(self._stats())
        self._lose_jobs(jobs, at_death)
        # After the node was removed, so that they are placed on others.
        for id in lost:
            self._requests.lost(id, node, self._ready, is_closing=self._closing)
        self._place()
        # Engines that differed only from those that are gone can be used now.
        for other, ready in list(self._unlike.items()):
            if other in self._nodes.all() and not self._closing:
                self.node_ready(other, ready)

    def _lose_jobs(self, jobs: frozenset[str], at_death: tuple[str, ...] | None = ()) -> None:
        """Have jobs that no node has any more started again. at_death:
        `EngineAccess.jobs_at_death`.
        """
        self.jobs_lost = jobs
        self.jobs_at_death = at_death
        for listener in self._listeners:
            # As if the only engine had died: where nodes are left, it is ready again at once.
            listener.engine_gone()
        if self._ready is not None:
            for listener in self._listeners:
                listener.engine_ready(self._ready)

    def _join(self) -> None:
        readies = self._readies()
        self._ready = joined_ready(readies) if readies else None

    def _readies(self) -> list[Ready]:
        return [node.link.ready for node in self._nodes.used() if node.link.ready is not None]

    def _stats(self) -> dict[str, Any]:
        return {
            n.name: n.tracker.stats
            for n in self._nodes.used()
            if n.tracker is not None and n.tracker.stats is not None
        }

    def _look_at_idle(self) -> None:
        """Update the views of nodes without work: their engines report nothing, while their recent
        utilisation falls.
        """
        for node in self._nodes.used():
            if not self._scheduler.num_tasks(node.name):
                self._view(node)

    def _view(self, node: ClusterNode) -> None:
        assert node.tracker is not None
        jobs = tuple(self._jobs.on(node))
        self._scheduler.report(
            node.tracker.view(time.monotonic(), jobs=jobs, is_draining=node.is_draining)
        )

    # -- what nodes report ------------------------------------------------------------

    def node_reported(self, node: ClusterNode, report: StepReport) -> None:
        """Apply a node's report, and pass it on with shards joined to whole jobs."""
        if node.tracker is None:
            return
        node.tracker.take(report, time.monotonic())
        for contributed in report.contributions:
            if self._jobs.is_on(contributed.job, node):
                self._sharded.contributed(contributed)
        # By the ids that nodes know: `_of_jobs` replaces shards by whole jobs.
        ended = [
            each
            for each in report.job_events
            if each.kind in _ENDS and self._jobs.is_on(each.job, node)
        ]
        report = self._of_jobs(report, node)
        news: list[JobReport] = [*report.job_events, *report.checkpoints]
        for job_report in news:
            self._jobs.reported(job_report)
        for end in ended:
            self._jobs.ended(end)
        if report.stats is not None:
            self._view(node)
            self._join()
            report = replace(report, stats=self._totals.of(self._stats()))
        for listener in self._listeners:
            listener.engine_reported(report)
        makes_room = self._requests.take(report.chunks)
        if (makes_room or report.stats is not None) and self._scheduler.num_waiting:
            self._place()

    def _of_jobs(self, report: StepReport, node: ClusterNode) -> StepReport:
        """Return a report with shards joined to whole jobs, and without jobs of other nodes."""
        steps = [each for each in report.job_events if each.kind not in _ENDS]
        ends = [each for each in report.job_events if each.kind in _ENDS]
        # A job's last checkpoint is reported before its end.
        reports: list[JobReport] = [*steps, *report.checkpoints, *ends]
        whole_reports: list[JobReport] = []
        for job_report in reports:
            if self._jobs.is_on(job_report.job, node):
                whole_reports += self._sharded.take(job_report)
        return replace(
            report,
            job_events=[each for each in whole_reports if isinstance(each, JobEvent)],
            checkpoints=[each for each in whole_reports if not isinstance(each, JobEvent)],
            contributions=[],
        )

    # -- requests -------------------------------------------------------------------

    def open(
        self,
        requests: list[AddRequest],
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        shown_tokens: tuple[str, ...] = (),
    ) -> RequestStream:
        self.require_ready()
        stream = RequestStream(requests, tokenizer, shown_tokens)
        self._requests.open(stream, self._ready)
        self._place()
        return stream

    def close(self, stream: RequestStream) -> None:
        for request in stream.requests:
            self._requests.drop(request.id)

    def use_vocabulary(self, pieces: Sequence[bytes], special: Sequence[int]) -> None:
        self._requests.use_vocabulary(pieces, special)

    def _place(self) -> None:
        """Send what can be placed now; try again soon with the rest."""
        self._requests.follow_jobs(self._ready)
        for task, placed in self._scheduler.place(time.monotonic()):
            node = self._nodes.find(placed.node)
            if task.id in self._requests:
                self._requests.placed(task, node)
            else:
                self._sharded.assigned(task.id, node)
        if self._retry is not None:
            self._retry.cancel()
        waits = self._scheduler.num_waiting and not self._closing
        self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._place) if waits else None

    # -- adapters -------------------------------------------------------------------

    async def load_adapter(self, adapter: AdapterRef) -> None:
        """Load an adapter on every node, or, if one cannot read it, on none.

        Raises:
            AdapterError: A node cannot read the adapter; the message names the node.
        """
        self.require_ready()
        await self._adapters.load(adapter)

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter from every node."""
        self.require_ready()
        await self._adapters.unload(name)

    # -- jobs (see `JobEngine`) -------------------------------------------------------

    async def start_job(self, job: JobStart) -> None:
        """Start a job; one that has to wait for a node counts as started, too."""
        self.require_ready()
        await self._sharded.start_job(job)

    async def pause_job(self, job: str) -> None:
        await self._sharded.pause_job(job)

    async def resume_job(self, job: str) -> None:
        await self._sharded.resume_job(job)

    async def cancel_job(self, job: str) -> None:
        await self._sharded.cancel_job(job)

    def _tell_job(self, report: JobReport) -> None:
        """Pass on a report about a job that does not come from its node."""
        events = [each for each in self._sharded.take(report) if isinstance(each, JobEvent)]
        for listener in self._listeners:
            listener.engine_reported(StepReport(job_events=events))

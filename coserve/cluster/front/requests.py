"""Requests of a cluster: each waits for a node, and is sent to the one that it is placed on; those
of a node that is lost are placed again.

A request without a token can be placed again unnoticed; one that has tokens ends with an error that
says so. The adapter of a running job is served on the nodes of that job: requests for it follow the
job when it moves.
"""

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from coserve.cluster.jobs.placed_jobs import PlacedJobs
from coserve.cluster.nodes.prefixes import prefix_keys
from coserve.cluster.nodes.registry import ClusterNode, NodeRegistry
from coserve.cluster.scheduler import ClusterScheduler
from coserve.cluster.tasks import task_of_request
from coserve.cluster.view import ClusterTask
from coserve.engine.commands import AddRequest
from coserve.engine.request import Chunk
from coserve.engine_client.streams import RequestStream
from coserve.errors import EngineGoneError
from coserve.protocol.messages import Ready

# A request is given up when this many nodes have died: they may have died of it.
_MAX_TRIES = 3


@dataclass(kw_only=True, eq=False)
class _Request:
    """A request that is not over."""

    request: AddRequest
    """Request as it is sent to a node."""
    stream: RequestStream
    """Where its chunks go."""
    num_open: int
    """Number of its sequences that are not over."""
    num_tokens: int = 0
    """Number of tokens that it has got."""
    num_tries: int = 0
    """Number of nodes that were lost with it."""
    node: ClusterNode | None = None
    """Its node; None while it waits for one."""


class ClusterRequests:
    """Requests that are not over, by id. In methods, `ready` is what the engines report of
    themselves; None while there is none.
    """

    def __init__(self, scheduler: ClusterScheduler, jobs: PlacedJobs, nodes: NodeRegistry) -> None:
        self._scheduler = scheduler
        self._jobs = jobs
        self._nodes = nodes
        self._requests: dict[str, _Request] = {}
        self._vocabulary: tuple[Sequence[bytes], Sequence[int]] | None = None
        # Requests that wait for the adapter of a running job, and the nodes where it is not.
        self._following: dict[str, frozenset[str]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, id: str) -> bool:
        return id in self._requests

    def num_on(self, node: ClusterNode) -> int:
        """Return the number of requests on a node."""
        return sum(entry.node is node for entry in self._requests.values())

    @property
    def waiting(self) -> list[str]:
        """Ids of requests that have no node yet."""
        return [id for id, entry in self._requests.items() if entry.node is None]

    def open(self, stream: RequestStream, ready: Ready | None) -> None:
        """Have a stream's requests placed."""
        for request in stream.for_engine():
            entry = _Request(request=request, stream=stream, num_open=request.params.n)
            self._requests[request.id] = entry
            self._submit(entry, ready)

    def drop(self, id: str) -> None:
        """Drop a request that is over, or not wanted any more."""
        entry = self._requests.pop(id, None)
        if entry is None:
            return
        self._following.pop(id, None)
        # False: the request has been placed.
        if not self._scheduler.withdraw(id):
            self._scheduler.finish(id)
        if entry.node is not None and entry.num_open:
            entry.node.link.cancel(id)

    def fail_all(self, reason: str) -> None:
        """End all requests with an error."""
        for id, entry in list(self._requests.items()):
            self.drop(id)
            entry.stream.fail(EngineGoneError(reason))

    def use_vocabulary(self, pieces: Sequence[bytes], special: Sequence[int]) -> None:
        """Keep what tokens stand for, for nodes that get requests with grammars."""
        self._vocabulary = pieces, special

    def placed(self, task: ClusterTask, node: ClusterNode) -> None:
        """Send a request to its node."""
        entry = self._requests[task.id]
        entry.node = node
        self._following.pop(task.id, None)
        if entry.request.params.grammar is not None and self._vocabulary is not None:
            node.link.use_vocabulary(*self._vocabulary)
        if node.tracker is not None:
            node.tracker.prefixes.use(task.prefix)
            if entry.request.adapter is not None:
                node.tracker.adapters.add(entry.request.adapter.name)
        node.link.send(entry.request, entry.stream)

    def follow_jobs(self, ready: Ready | None) -> None:
        """Queue requests for the adapters of running jobs for the nodes where these jobs are now;
        must be called before tasks are placed.
        """
        for id, excluded in list(self._following.items()):
            entry = self._requests[id]
            assert entry.request.adapter is not None
            trainers = self._jobs.nodes_training(entry.request.adapter.name)
            # The job has ended or moved: queue the request again for where it can go now.
            if trainers is None or self._others(trainers) != excluded:
                self._scheduler.withdraw(id)
                del self._following[id]
                self._submit(entry, ready)

    def take(self, chunks: Iterable[Chunk]) -> bool:
        """Take in chunks of a node's steps, and return whether a request waits there no more: it
        has its first token, or has ended without one.
        """
        makes_room = False
        for chunk in chunks:
            if (entry := self._requests.get(chunk.request)) is None:
                continue
            if chunk.tokens and not entry.num_tokens:
                self._scheduler.begin(chunk.request, time.monotonic())
                makes_room = True
            entry.num_tokens += len(chunk.tokens)
            self._scheduler.answered(entry.request.tenant, len(chunk.tokens))
            entry.num_open -= chunk.finish_reason is not None
            if not entry.num_open:
                self.drop(chunk.request)
                makes_room |= not entry.num_tokens
        return makes_room

    def lost(self, id: str, node: ClusterNode, ready: Ready | None, *, is_closing: bool) -> None:
        """Place a request again whose node was lost, or end it with an error."""
        entry = self._requests.get(id)
        if entry is None:
            return
        entry.num_tries += 1
        # Its client may have got them, and another node could answer differently.
        if entry.num_tokens:
            reason = (
                f"the node {node.name} was lost after {entry.num_tokens} tokens of this answer; "
                "ask again"
            )
        elif entry.request.batch_due_s is not None:  # its batch counts the deaths
            reason = f"the node {node.name} was lost before this request had a token"
        elif entry.num_tries >= _MAX_TRIES:
            reason = (
                f"{entry.num_tries} nodes were lost, one after the other, "
                "before this request had a token"
            )
        elif is_closing:
            reason = "the server is shutting down"
        else:
            entry.node = None
            self._submit(entry, ready)
            return
        self._fail(id, reason)

    def _fail(self, id: str, reason: str) -> None:
        """End a request that is on no node with an error."""
        entry = self._requests[id]
        entry.node = None
        self.drop(id)
        entry.stream.fail(EngineGoneError(reason))

    def _submit(self, entry: _Request, ready: Ready | None) -> None:
        """Queue a request for a node."""
        excluded, adapter = frozenset[str](), entry.request.adapter
        # An adapter without a directory exists only on the nodes of the job that trains it.
        if adapter is not None and adapter.directory is None:
            if (trainers := self._jobs.nodes_training(adapter.name)) is not None:
                excluded = self._following[entry.request.id] = self._others(trainers)
            elif (trained := self._jobs.trained(adapter.name)) is not None:
                entry.request = replace(entry.request, adapter=trained)
            else:
                reason = f"the job that trains {adapter.name} is restarting, or is over; ask again"
                self._fail(entry.request.id, reason)
                return
        request = entry.request
        prefix: tuple[bytes, ...] = ()
        if ready is not None and self._scheduler.placement.uses_prefixes:
            prefix = prefix_keys(request, ready.block_tokens)
        self._scheduler.submit(task_of_request(request, prefix=prefix, excluded=excluded))

    def _others(self, trainers: Collection[ClusterNode]) -> frozenset[str]:
        """Return the names of the nodes that do not run a job."""
        return frozenset(node.name for node in self._nodes.all() if node not in trainers)

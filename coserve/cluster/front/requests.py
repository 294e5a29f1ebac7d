"""Requests of a cluster: each waits for a node, and is sent to the one that it is placed on; those
of a node that is lost are placed again.

One that has no token yet can be placed again, since nobody can tell; one that has ends with an
error that says so. What only a job has, on its node, is asked there: requests that wait follow the
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

# NodeRegistry that may die of a request before it is given up: it may be what they die of.
_MOST_TRIES = 3


@dataclass(kw_only=True, eq=False)
class _Request:
    """One that is not over. num_open: sequences. node: None while it waits for one."""

    request: AddRequest
    stream: RequestStream
    num_open: int
    num_tokens: int = 0
    num_tries: int = 0
    node: ClusterNode | None = None


class ClusterRequests:
    """Those that are not over, by id. `ready`: what the engines say of themselves, None while none
    does.
    """

    def __init__(self, scheduler: ClusterScheduler, jobs: PlacedJobs, nodes: NodeRegistry) -> None:
        self._scheduler, self._jobs, self._nodes = scheduler, jobs, nodes
        self._requests: dict[str, _Request] = {}
        self._vocabulary: tuple[Sequence[bytes], Sequence[int]] | None = None
        # Those that wait for what only a job has, and where they cannot go for it.
        self._following: dict[str, frozenset[str]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, id: str) -> bool:
        return id in self._requests

    def num_on(self, node: ClusterNode) -> int:
        """How many are on a node."""
        return sum(each.node is node for each in self._requests.values())

    @property
    def waiting(self) -> list[str]:
        """Those that have no node yet."""
        return [id for id, each in self._requests.items() if each.node is None]

    def open(self, stream: RequestStream, ready: Ready | None) -> None:
        """Have a stream's requests placed."""
        for request in stream.for_engine():
            found = _Request(request=request, stream=stream, num_open=request.params.n)
            self._requests[request.id] = found
            self._submit(found, ready)

    def drop(self, id: str) -> None:
        """It is over, or not wanted any more."""
        found = self._requests.pop(id, None)
        if found is None:
            return
        self._following.pop(id, None)
        if not self._scheduler.withdraw(id):
            self._scheduler.finish(id)
        if found.node is not None and found.num_open:
            found.node.link.cancel(id)

    def fail_all(self, reason: str) -> None:
        """End each with an error."""
        for id, found in list(self._requests.items()):
            self.drop(id)
            found.stream.fail(EngineGoneError(reason))

    def use_vocabulary(self, pieces: Sequence[bytes], special: Sequence[int]) -> None:
        """See `EngineAccess`."""
        self._vocabulary = pieces, special

    def placed(self, task: ClusterTask, node: ClusterNode) -> None:
        """Send it there."""
        found = self._requests[task.id]
        found.node = node
        self._following.pop(task.id, None)
        if found.request.params.grammar is not None and self._vocabulary is not None:
            node.link.use_vocabulary(*self._vocabulary)
        if node.tracker is not None:
            node.tracker.prefixes.use(task.prefix)
            if found.request.adapter is not None:
                node.tracker.adapters.add(found.request.adapter.name)
        node.link.send(found.request, found.stream)

    def follow_jobs(self, ready: Ready | None) -> None:
        """Those that wait for what only a job has wait for the node where the job is now; to be
        called before tasks are placed.
        """
        for id, excluded in list(self._following.items()):
            found = self._requests[id]
            assert found.request.adapter is not None
            makers = self._jobs.nodes_training(found.request.adapter.name)
            if makers is None or self._others(makers) != excluded:
                self._scheduler.withdraw(id)
                del self._following[id]
                self._submit(found, ready)

    def take(self, chunks: Iterable[Chunk]) -> bool:
        """What a node's steps made of requests; whether one waits there no more: it has its first
        token, or has ended without one.
        """
        makes_room = False
        for chunk in chunks:
            if (found := self._requests.get(chunk.request)) is None:
                continue
            if chunk.tokens and not found.num_tokens:
                self._scheduler.begin(chunk.request, time.monotonic())
                makes_room = True
            found.num_tokens += len(chunk.tokens)
            self._scheduler.answered(found.request.tenant, len(chunk.tokens))
            found.num_open -= chunk.finish_reason is not None
            if not found.num_open:
                self.drop(chunk.request)
                makes_room |= not found.num_tokens
        return makes_room

    def lost(self, id: str, node: ClusterNode, ready: Ready | None, *, is_closing: bool) -> None:
        """A request was lost with its node."""
        found = self._requests.get(id)
        if found is None:
            return
        found.num_tries += 1
        if found.num_tokens:
            reason = f"the node {node.name} was lost after {found.num_tokens} tokens of this answer; ask again"
        elif found.request.batch_due_s is not None:  # its batch counts the deaths
            reason = f"the node {node.name} was lost before this request had a token"
        elif found.num_tries >= _MOST_TRIES:
            reason = f"{found.num_tries} nodes were lost, one after the other, before this request had a token"
        elif is_closing:
            reason = "the server is shutting down"
        else:
            found.node = None
            self._submit(found, ready)
            return
        self._fail(id, reason)

    def _fail(self, id: str, reason: str) -> None:
        """One that is on no node."""
        found = self._requests[id]
        found.node = None
        self.drop(id)
        found.stream.fail(EngineGoneError(reason))

    def _submit(self, found: _Request, ready: Ready | None) -> None:
        """Have it placed."""
        excluded, adapter = frozenset[str](), found.request.adapter
        if adapter is not None and adapter.directory is None:
            if (makers := self._jobs.nodes_training(adapter.name)) is not None:
                excluded = self._following[found.request.id] = self._others(makers)
            elif (trained := self._jobs.trained(adapter.name)) is not None:
                found.request = replace(found.request, adapter=trained)
            else:
                reason = f"the job that makes {adapter.name} begins anew, or is over; ask again"
                self._fail(found.request.id, reason)
                return
        request = found.request
        prefix: tuple[bytes, ...] = ()
        if ready is not None and self._scheduler.placement.uses_prefixes:
            prefix = prefix_keys(request, ready.block_tokens)
        self._scheduler.submit(task_of_request(request, prefix=prefix, excluded=excluded))

    def _others(self, makers: Collection[ClusterNode]) -> frozenset[str]:
        """NodeRegistry that do not have what only the job that makes it has, on its node."""
        return frozenset(node.name for node in self._nodes.all() if node not in makers)

"""Queues of waiting and running requests, by id and by the name that they were added under.

A prompt can be computed by another instance (`coserve.handover`): its request is held, and no
policy may start it until the blocks in the page file are known. When it is admitted, blocks that
are cached here are shared, those in the file are copied, and the rest is computed; at least one
token is, as after any prefix, so that its first token is sampled here.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Annotated

import msgspec
from msgspec import Meta, structs

from coserve.devices.messages.commands import CloseRequest, Command, ImportPages, OpenRequest
from coserve.engine.host_swap import HostSwap
from coserve.engine.request import Request
from coserve.memory.pages.kv_cache import KvCache, PagedSequence
from coserve.scheduling.fairness import TokenCounters
from coserve.scheduling.plan import PlannedRows, RequestProgress


class ImportedBlocks(msgspec.Struct, frozen=True):
    """Blocks of a prompt that another instance has computed, in a page file."""

    path: str
    """Path of the page file."""
    first_block: Annotated[int, Meta(ge=0)]
    """Index in the prompt of the first block in the file."""
    num_blocks: Annotated[int, Meta(ge=0)]
    """Number of blocks, from the file's start on."""


class BlockImports:
    """Requests that wait for blocks from another instance, and the blocks that were delivered."""

    def __init__(self, cache: KvCache, send: Callable[[Command], None]) -> None:
        """Begin with none. send: appends a command to the device's log."""
        self._block_tokens = cache.block_tokens
        self._held: set[str] = set()
        self._blocks: dict[str, ImportedBlocks] = {}
        self._send = send

    def hold(self, request: str) -> None:
        """Hold a request back until `arrive`."""
        self._held.add(request)

    def is_held(self, request: str) -> bool:
        return request in self._held

    def arrive(self, request: str, blocks: ImportedBlocks | None) -> None:
        """Deliver the blocks of a held request, which may start now; None: there are none."""
        self._held.discard(request)
        if blocks is not None and blocks.num_blocks:
            self._blocks[request] = blocks

    def release(self, request: str) -> None:
        """Forget a request that waits no more."""
        self._held.discard(request)
        self._blocks.pop(request, None)

    def num_tokens(self, request: str, num_known: int, num_tokens: int) -> int:
        """Return how many of a request's num_tokens tokens its file holds after the first num_known
        ones.
        """
        return len(self._places(request, num_known, num_tokens)) * self._block_tokens

    def bring_in(self, request: str, sequence: PagedSequence, num_tokens: int) -> None:
        """Copy blocks that follow the sequence's tokens from the request's file to its pages."""
        if places := self._places(request, sequence.length, num_tokens):
            first = sequence.length // self._block_tokens
            pages = tuple(sequence.pages[first : first + len(places)])
            self._send(ImportPages(self._blocks[request].path, pages, tuple(places)))
            # Filled at once in the books: the import precedes any step that reads these pages.
            sequence.fill(len(places))

    def _places(self, request: str, num_known: int, num_tokens: int) -> range:
        """Return which blocks of a request's file can be used; at least one token is left to
        compute.
        """
        blocks = self._blocks.get(request)
        if blocks is None:
            return range(0)
        # Indices in the file: from the first unknown block to the last one before the last token.
        start = num_known // self._block_tokens - blocks.first_block
        end = min(blocks.num_blocks, (num_tokens - 1) // self._block_tokens - blocks.first_block)
        # A negative start means a gap: the file begins after the blocks that are known here.
        return range(start, end) if start >= 0 else range(0)

    def check_integrity(self, waiting: set[str]) -> None:
        """Assert that only waiting requests are held, or have a file."""
        assert self._held | self._blocks.keys() <= waiting


# Waiting requests that are looked up among the cached prefixes for each view; the others are
# admitted later anyway.
_NUM_LOOKED_UP = 16


class RequestQueue:
    """The queue of all requests that are not over, each either waiting or running."""

    def __init__(
        self,
        cache: KvCache,
        swap: HostSwap,
        counters: TokenCounters,
        send: Callable[[Command], None],
    ) -> None:
        """Begin empty. send: appends a command to the device's log."""
        self.waiting: dict[str, Request] = {}  # preempted ones first, then as they came
        self.running: dict[str, Request] = {}  # in the order of admission
        self.num_preemptions = self.num_arrived = self.num_ended = 0
        self._cache, self._swap, self._counters = cache, swap, counters
        self._imports = BlockImports(cache, send)
        self._members: dict[str, list[Request]] = {}
        self._num_batch = 0  # sequences of batch work
        self.num_by_tenant: Counter[str] = Counter()  # sequences of every tenant that has any
        self._keys: dict[str, list[bytes]] = {}  # keys of waiting requests' blocks
        self._progress: dict[str, RequestProgress] = {}  # progress of waiting requests

    # -- questions ----------------------------------------------------------------

    def __bool__(self) -> bool:
        return bool(self._members)

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def __iter__(self) -> Iterator[Request]:
        yield from self.running.values()
        yield from self.waiting.values()

    @property
    def has_batch(self) -> bool:
        """Return whether any request is batch work."""
        return self._num_batch > 0

    def excludes_jobs(self, admitted: Collection[str] = ()) -> bool:
        """Return whether a request beside which no job may have a step runs, or is one of those to
        be admitted.
        """
        # Only requests of batch work can exclude jobs.
        if not self._num_batch:
            return False
        begin = [self.waiting[id] for id in admitted if id in self.waiting]
        return any(each.without_jobs for each in (*begin, *self.running.values()))

    def members(self, name: str) -> list[Request]:
        """Return the sequences of a request that are not over."""
        return list(self._members.get(name, ()))

    def running_progress(self, *, is_batch: bool = False) -> tuple[RequestProgress, ...]:
        """Return the progress of running sequences: of batch work, or of all others."""
        if not self.running:
            return ()
        return tuple(
            [each.progress() for each in self.running.values() if each.is_batch == is_batch]
        )

    def waiting_progress(self, *, is_batch: bool = False) -> tuple[RequestProgress, ...]:
        """Return the progress of waiting sequences: of batch work, or of all others. Beyond the
        first few, the number of cached tokens may be out of date.
        """
        if not self.waiting:
            return ()
        waiting = [request for request in self.waiting.values() if request.is_batch == is_batch]
        for request in waiting[:_NUM_LOOKED_UP]:
            self._progress[request.id] = self._look_up(request)
        return tuple([self._progress[request.id] for request in waiting])

    def num_batch(self) -> tuple[int, int]:
        """Return the numbers of running and of waiting sequences of batch work."""
        running = sum([request.is_batch for request in self.running.values()])
        return running, sum([request.is_batch for request in self.waiting.values()])

    def num_batch_pages(self) -> int:
        """Return the number of pages that batch work has, alone or shared; a shared page counts
        once.
        """
        if not self._num_batch:
            return 0
        sequences = [
            each.sequence
            for each in self.running.values()
            if each.is_batch and each.sequence is not None
        ]
        return len({page for sequence in sequences for page in sequence.pages})

    def may_start(self, request: Request) -> bool:
        """Return whether a waiting sequence may be admitted."""
        return request.may_start and not self._imports.is_held(request.id)

    def first(self, name: str) -> Request | None:
        """Return the first sequence of a request while it waits, on which the others wait; None if
        it runs, or has ended.
        """
        members = self._members.get(name)
        return (
            # Only the sample with index 0 runs the prompt; the others share its blocks.
            members[0]
            if members and members[0].id in self.waiting and not members[0].index
            else None
        )

    def unknown_blocks(self, name: str) -> range:
        """Return the full blocks of a waiting request's prompt that are not cached here, for
        another instance to compute.

        The last prompt token is always run here. There are none where another instance's blocks
        could not be used: the prompt's tokens are scored, which needs all rows; it has a salt, or
        virtual tokens; or the weights have been changed here.
        """
        first = self.first(name)
        if first is None or first.scores_prompt or first.params.cache_salt or first.num_virtual:
            return range(0)
        if not self._cache.prefixes.shares:
            return range(0)
        if first.num_model_changes:  # the weights of the other engine are not these
            return range(0)
        block = self._cache.block_tokens
        return range(self._look_up(first).num_past // block, (len(first.prompt) - 1) // block)

    # -- verbs ----------------------------------------------------------------------

    def add(self, name: str, members: list[Request]) -> None:
        """Append the sequences of a request to the queue."""
        self._members[name] = list(members)
        self.num_arrived += len(members)
        for request in members:
            self._num_batch += request.is_batch
            self.num_by_tenant[request.info.tenant] += 1
            self._wait(request)

    def hold(self, name: str) -> None:
        """Hold a waiting request back until `arrive`; another instance computes its prompt."""
        if (first := self.first(name)) is not None:
            self._imports.hold(first.id)

    def arrive(self, name: str, blocks: ImportedBlocks | None) -> None:
        """Deliver the blocks of a held request; no effect if it does not wait any more."""
        if (first := self.first(name)) is not None:
            self._imports.arrive(first.id, blocks)

    def note_model_changes(self, number: int) -> None:
        """Note that the weights have changed: waiting requests no longer find prefixes that the old
        weights have computed.
        """
        for request in self.waiting.values():
            request.note_model_changes(number)
            # A request that scores its prompt has no keys, since all of its rows must run.
            if not request.scores_prompt:
                self._keys[request.id] = self._cache.prefixes.keys(
                    request.prefix_owner, request.tokens
                )
            self._progress[request.id] = self._look_up(request)

    def admit(self, request: Request) -> OpenRequest | None:
        """Give a request the pages of all its tokens, with what lies on the host or was handed
        over.

        Returns:
            The command that opens the request on the device; None, and nothing has changed, if
            there are too few pages.
        """
        keys = self._keys[request.id]
        # `open` marks the known blocks as used, so that reserving pages cannot evict them.
        sequence = self._cache.open(keys, len(request.tokens))
        num_rows = len(request.tokens) - sequence.length
        if sequence.num_pages_missing(num_rows) > self._cache.num_available:
            sequence.close()
            return None
        opened = request.open(sequence)
        sequence.reserve(num_rows)
        # Only after `reserve`, which may evict the request's own blocks to the host.
        self._swap.bring_back(sequence, keys, len(request.tokens))
        self._imports.bring_in(request.id, sequence, len(request.tokens))
        self._stop_waiting(request)
        # A request that comes back after a preemption has been charged for its prompt already.
        if not request.num_preemptions:
            self._counters.charge(request.info.tenant, prompt=len(request.prompt))
        self.running[request.id] = request
        return opened

    def reserve(self, planned: PlannedRows) -> PlannedRows | None:
        """Reserve pages for planned rows of a request.

        Returns:
            The rows as they can run now; None if there are no pages, or the request does not run.
        """
        request = self.running.get(planned.item)
        if request is None or request.sequence is None:
            return None
        sequence = request.sequence
        # The view's numbers may be out of date, as after an eviction for an earlier admission.
        start, num_rows = sequence.length, planned.rows
        if num_rows > len(request.tokens) - start:
            num_rows = len(request.tokens) - start
        if missing := sequence.num_pages_missing(num_rows):
            if missing > self._cache.num_available:
                return None
            sequence.reserve(num_rows)
        if start == planned.start and num_rows == planned.rows:
            return planned
        return structs.replace(planned, start=start, rows=num_rows)

    def preempt(self, request: Request) -> CloseRequest:
        """Take a request's pages, and put it at the head of the queue; what is not kept of it is
        recomputed.
        """
        assert request.sequence is not None
        num_tokens = request.sequence.length
        closed = request.close()
        request.wait()
        request.num_preemptions += 1
        self.num_preemptions += 1
        del self.running[request.id]
        # At the head: dicts keep the order of insertion.
        others, self.waiting = self.waiting, {}
        self._wait(request)
        self.waiting |= others
        # After `_wait`, which computes the keys of the blocks.
        self._swap.keep(request.id, self._keys[request.id], num_tokens)
        return closed

    def remove(self, request: Request) -> CloseRequest | None:
        """Remove a request that is over, and give its pages back, if it has any."""
        closed = None
        if request.sequence is not None:
            closed = request.close()
            del self.running[request.id]
        else:
            self._stop_waiting(request)
        members = self._members[request.request]
        members.remove(request)
        self.num_ended += 1
        self._num_batch -= request.is_batch
        self.num_by_tenant[request.info.tenant] -= 1
        if not self.num_by_tenant[request.info.tenant]:
            del self.num_by_tenant[request.info.tenant]
        if not members:
            del self._members[request.request]
        return closed

    def check_integrity(self) -> None:
        """Assert that each sequence is either waiting or running, and that exactly the running ones
        have pages.
        """
        assert {request.id for group in self._members.values() for request in group} == {
            *self.running,
            *self.waiting,
        }
        assert self.running.keys().isdisjoint(self.waiting)
        assert all(request.sequence is not None for request in self.running.values())
        assert all(request.sequence is None for request in self.waiting.values())
        self._imports.check_integrity(set(self.waiting))

    def _wait(self, request: Request) -> None:
        shares = not request.scores_prompt
        prefixes = self._cache.prefixes
        self._keys[request.id] = (
            prefixes.keys(request.prefix_owner, request.tokens) if shares else []
        )
        self.waiting[request.id] = request
        self._progress[request.id] = self._look_up(request)
        self._counters.arrive(request.info.tenant, request.id)

    def _stop_waiting(self, request: Request) -> None:
        del self.waiting[request.id], self._keys[request.id], self._progress[request.id]
        self._swap.release(request.id)
        self._imports.release(request.id)
        self._counters.leave(request.info.tenant, request.id)

    def _look_up(self, request: Request) -> RequestProgress:
        keys, num_tokens = self._keys[request.id], len(request.tokens)
        num_pages, num_known = self._cache.num_pages_to_open(keys, num_tokens)
        num_known += self._swap.num_tokens_kept(keys, num_known, num_tokens)
        num_known += self._imports.num_tokens(request.id, num_known, num_tokens)
        return request.progress_waiting(
            num_known, num_pages, is_held=self._imports.is_held(request.id)
        )

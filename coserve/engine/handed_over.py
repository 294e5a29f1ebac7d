"""Keys and values of prompts that another instance computed: which requests wait for them, and how they come in.

A request can be held: it waits, and no policy may start it. Then `arrive` says which blocks of its prompt lie in a page
file, if any, and it waits as any other. When it is admitted, what it finds here is shared, what lies in the file is
copied, and the rest is computed; at least one token is, as after any prefix, so that its first token is chosen here.
Who computes, and what goes between the two, is in `coserve.handover`.
"""

from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from coserve.devices.messages import Command, ImportPages
from coserve.memory.kv_cache import KvCache, PagedSequence


class HandedBlocks(msgspec.Struct, frozen=True):
    """Blocks of a prompt in a page file: the first of them, and how many there are from the file's start on."""

    path: str
    first_block: Annotated[int, Meta(ge=0)]
    num_blocks: Annotated[int, Meta(ge=0)]


class HandedOver:
    """num_pages: that were copied so far."""

    def __init__(self, cache: KvCache, send: Callable[[Command], None]) -> None:
        """send: has the device copy the pages, in the order in which they are asked for."""
        self._block_tokens = cache.block_tokens
        self._held: set[str] = set()
        self._blocks: dict[str, HandedBlocks] = {}
        self._send = send
        self.num_pages = 0

    def hold(self, request: str) -> None:
        """It is not to start before `arrive`."""
        self._held.add(request)

    def is_held(self, request: str) -> bool:
        return request in self._held

    def arrive(self, request: str, blocks: HandedBlocks | None) -> None:
        """All that comes for a request that was held; None: nothing does."""
        self._held.discard(request)
        if blocks is not None and blocks.num_blocks:
            self._blocks[request] = blocks

    def release(self, request: str) -> None:
        """A request waits no more. No error if nothing has come for it."""
        self._held.discard(request)
        self._blocks.pop(request, None)

    def num_tokens(self, request: str, num_known: int, num_tokens: int) -> int:
        """Of a request of num_tokens tokens, those in its file that follow the first num_known ones."""
        return len(self._places(request, num_known, num_tokens)) * self._block_tokens

    def bring_in(self, request: str, sequence: PagedSequence, num_tokens: int) -> None:
        """Copy what follows the sequence's tokens and lies in the request's file into its pages, which it has taken."""
        if places := self._places(request, sequence.length, num_tokens):
            first = sequence.length // self._block_tokens
            pages = tuple(sequence.pages[first : first + len(places)])
            self._send(ImportPages(self._blocks[request].path, pages, tuple(places)))
            sequence.fill(len(places))
            self.num_pages += len(places)

    def _places(self, request: str, num_known: int, num_tokens: int) -> range:
        """At least one token is left to compute."""
        found = self._blocks.get(request)
        if found is None:
            return range(0)
        start = num_known // self._block_tokens - found.first_block
        end = min(found.num_blocks, (num_tokens - 1) // self._block_tokens - found.first_block)
        return range(start, end) if start >= 0 else range(0)

    def check_integrity(self, waiting: set[str]) -> None:
        """Assert that only requests that wait are held, or have a file."""
        assert self._held | self._blocks.keys() <= waiting

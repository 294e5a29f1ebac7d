"""Keys and values of preempted requests on the host: which blocks go there, and come back.

A request that is preempted leaves its full blocks on the device, as prefixes that nobody uses: often it is back before
they are needed. So a block is copied to the host only when its page goes to somebody else, and only where that is worth
it (`scheduling.swapping`). When the request is admitted, what it still finds on the device is shared, what lies on the
host is copied back, and the rest is computed again; so are the tokens after its last full block.

Copies have a queue of their own. They come before everything else that a step, or a pack that begins, does with pages.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from coserve.devices.base import Device
from coserve.devices.messages import Command, DeviceInfo, SwapIn, SwapOut
from coserve.memory.host_blocks import HostBlocks
from coserve.memory.kv_cache import KvCache, PagedSequence
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.swapping import swap_pays


class HostSwap:
    """num_swapped_out, num_swapped_in: pages that were copied so far."""

    def __init__(self, cache: KvCache, info: DeviceInfo, latency: LatencyModel) -> None:
        self._blocks, self._block_tokens = HostBlocks(info.num_host_pages), cache.block_tokens
        self._page_bytes, self._latency = info.page_bytes, latency
        self._commands: deque[SwapOut | SwapIn] = deque()
        self.num_swapped_out = self.num_swapped_in = 0
        if info.num_host_pages:
            cache.prefixes.on_evict = self._store

    @property
    def num_pages_used(self) -> int:
        """Of the host: those of requests that wait."""
        return self._blocks.num_used

    # -- requests -------------------------------------------------------------------

    def keep(self, request: str, keys: Sequence[bytes], num_tokens: int) -> None:
        """A request with this many tokens in the cache was preempted: its blocks go to the host when their pages go, if
        that pays and there is room for them. keys: of its blocks.
        """
        keys = keys[: num_tokens // self._block_tokens]
        if keys and self._blocks.num_slots:
            num_bytes = len(keys) * self._page_bytes
            if swap_pays(self._latency, num_tokens=len(keys) * self._block_tokens, num_bytes=num_bytes):
                self._blocks.want(request, keys)

    def num_tokens_kept(self, keys: Sequence[bytes], num_known: int, num_tokens: int) -> int:
        """Of a sequence of num_tokens tokens, those on the host that follow the first num_known ones."""
        return len(self._slots(keys, num_known, num_tokens)) * self._block_tokens

    def bring_back(self, sequence: PagedSequence, keys: Sequence[bytes], num_tokens: int) -> None:
        """Copy what follows the sequence's tokens and lies on the host into its pages, which it has taken."""
        slots = self._slots(keys, sequence.length, num_tokens)
        if slots:
            first = sequence.length // self._block_tokens
            self._commands.append(SwapIn(tuple(sequence.pages[first : first + len(slots)]), tuple(slots)))
            sequence.fill(len(slots))
            self.num_swapped_in += len(slots)

    def release(self, request: str) -> None:
        """A request waits no more: its places on the host are free. No error if it has none."""
        self._blocks.release(request)

    def _slots(self, keys: Sequence[bytes], num_known: int, num_tokens: int) -> list[int]:
        """At least one token is left to compute."""
        if not self._blocks.num_used:
            return []
        return self._blocks.slots_of(keys[num_known // self._block_tokens : (num_tokens - 1) // self._block_tokens])

    def _store(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """Blocks are being forgotten, and their pages are somebody else's from now on."""
        if found := self._blocks.store(keys):
            self._commands.append(SwapOut(tuple([pages[place] for place, _ in found]), tuple([to for _, to in found])))
            self.num_swapped_out += len(found)

    # -- the device -----------------------------------------------------------------

    def take_commands(self) -> list[Command]:
        """What the device must do before the step that begins."""
        commands: list[Command] = list(self._commands)
        self._commands.clear()
        return commands

    def flush(self, device: Device) -> None:
        """Have it done now. If the caller is interrupted, it is done again: no step has come between."""
        while self._commands:
            device.execute(self._commands[0])
            self._commands.popleft()

    def lose(self, commands: Iterable[Command]) -> None:
        """Whether these were done is not known, and pages may have been written to since: what they were to bring to
        the host counts as not there. (What they were to bring back belongs to requests that run; those are closed.)
        """
        self._blocks.lose([slot for command in commands if isinstance(command, SwapOut) for slot in command.slots])

    def check_integrity(self, waiting: Iterable[str]) -> None:
        """Assert that each page of the host is free, or wanted by requests that wait."""
        self._blocks.check_integrity(waiting)

"""What gave way and lies on the host: keys and values of preempted requests, and packs of jobs.

A request that is preempted leaves its full blocks on the device, as prefixes that nobody uses: often it is back before
they are needed. So a block is copied to the host only when its page goes to somebody else, and only where that is worth
it (`scheduling.swapping`). When the request is admitted, what it still finds on the device is shared, what lies on the
host is copied back, and the rest is computed again; so are the tokens after its last full block.

A pack that gives way goes to the host at once, or not at all; it comes back to any pages.

Copies have a queue of their own. They come before everything else that a step, or a pack that begins, does with pages.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from coserve.devices.base import Device
from coserve.devices.messages import Command, DeviceInfo, SwapIn, SwapOut
from coserve.memory.host_blocks import HostBlocks
from coserve.memory.kv_cache import KvCache, PagedSequence
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import JobView
from coserve.scheduling.swapping import pack_swap_pays, swap_pays
from coserve.tuning.cursor import Cursor


@dataclass(frozen=True, kw_only=True)
class SwappedPack:
    """A pack that lies on the host: how far it has come, and the pages that it needs, by group of tensors (None: one
    that it has let go).
    """

    cursor: Cursor
    group_pages: Sequence[int | None]

    @property
    def num_pages(self) -> int:
        return sum([number for number in self.group_pages if number is not None])


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
    def num_pages(self) -> int:
        """That the host has room for."""
        return self._blocks.num_slots

    @property
    def num_pages_used(self) -> int:
        """Of the host: those of requests that wait, and of packs."""
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

    # -- packs ----------------------------------------------------------------------

    def keep_pack(self, job: JobView, pages: Sequence[int]) -> bool:
        """A job's pack gives these pages back: copy them, if that pays and there is room. Returns whether."""
        if not self._blocks.num_slots or not pack_swap_pays(
            self._latency, job, num_bytes=len(pages) * self._page_bytes
        ):
            return False
        keys = _pack_keys(job.id, len(pages))
        if not self._blocks.want(_pack_owner(job.id), keys):
            return False
        self._store(keys, pages)
        return True

    def has_pack(self, job: str, num_pages: int) -> bool:
        """Whether all of it is there; copies can be lost (`lose`)."""
        return len(self._blocks.slots_of(_pack_keys(job, num_pages))) == num_pages

    def bring_back_pack(self, job: str, pages: Sequence[int]) -> None:
        """Copy it to these pages. It has its places on the host until `release_pack`."""
        self._commands.append(SwapIn(tuple(pages), tuple(self._blocks.slots_of(_pack_keys(job, len(pages))))))
        self.num_swapped_in += len(pages)

    def release_pack(self, job: str) -> None:
        """Its places on the host are free. No error if it has none."""
        self._blocks.release(_pack_owner(job))

    def _slots(self, keys: Sequence[bytes], num_known: int, num_tokens: int) -> list[int]:
        """At least one token is left to compute."""
        if not self._blocks.num_used:
            return []
        return self._blocks.slots_of(keys[num_known // self._block_tokens : (num_tokens - 1) // self._block_tokens])

    def _store(self, keys: Sequence[Hashable], pages: Sequence[int]) -> None:
        """The pages that hold this are somebody else's from now on."""
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

    def check_integrity(self, waiting: Iterable[str], packs: Iterable[str]) -> None:
        """Assert that each page of the host is free, or wanted by requests that wait or packs of these jobs."""
        self._blocks.check_integrity([*waiting, *map(_pack_owner, packs)])


def _pack_owner(job: str) -> Hashable:
    return "pack", job


def _pack_keys(job: str, num_pages: int) -> list[Hashable]:
    return [(job, number) for number in range(num_pages)]

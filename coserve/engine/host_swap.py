"""Swapping to the host: keys and values of preempted requests, packs of jobs, and tensors that
nothing runs with, which are adapters that no request reads and moments of the optimizers of paused
jobs.

A preempted request leaves its full blocks on the device, as prefixes that nobody uses: often it is
back before they are evicted. So a block is copied to the host only when its page is given to
somebody else, and only where that pays (`scheduling.swapping`). When the request is admitted,
blocks that are still on the device are shared, those on the host are copied back, and the rest is
computed again; so are the tokens after its last full block.

A pack that gives way goes to the host at once, or not at all; it comes back to any pages. So do
tensors, whether they lie in pages or beside them: their owners send the commands for them
(`jobs/memory.py`, `served_adapters.py`).
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from coserve.devices.messages.commands import Command, DeviceInfo
from coserve.devices.messages.pages import SwapIn, SwapOut
from coserve.memory.pages.host_blocks import HostBlocks
from coserve.memory.pages.kv_cache import KvCache, PagedSequence
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import JobProgress
from coserve.scheduling.swapping import pack_swap_pays, swap_pays
from coserve.tuning.cursor import Cursor

# A job's pack, the moments of its optimizer, or an adapter version.
HostOwner = tuple[Literal["pack", "optimizer", "version"], str]


@dataclass(frozen=True, kw_only=True)
class SwappedPack:
    """A pack that lies on the host."""

    cursor: Cursor
    """Progress of the pack."""
    group_pages: Sequence[int | None]
    """Number of pages of each group of tensors that it needs; None: the group has been released."""

    @property
    def num_pages(self) -> int:
        return sum([number for number in self.group_pages if number is not None])


# Steps with such waits that `HostSwap.give_back_s` remembers.
_NUM_WAITS = 64


class HostSwap:
    """The host's memory for pages that gave way.

    `num_swapped_out` and `num_swapped_in` count the pages copied so far. `give_back_s` is how long
    it takes to give pages back: the longest that a recent step has waited for copies to the host,
    for optimizers to leave their pages, and for weights of other models to leave their window; 0 if
    there were none of these, since a pack that is dropped, or a prefix that is evicted, is free at
    once.
    """

    def __init__(
        self,
        cache: KvCache,
        info: DeviceInfo,
        latency: LatencyModel,
        send: Callable[[Command], None],
    ) -> None:
        """Begin with nothing on the host. send: has the device make the copies, in this order."""
        self._blocks, self._block_tokens = HostBlocks(info.num_host_pages), cache.block_tokens
        self._page_bytes, self._latency = info.page_bytes, latency
        self._send = send
        self.num_swapped_out = self.num_swapped_in = 0
        self._has_copied_out = False  # since the last step
        self._waits_s: deque[float] = deque(maxlen=_NUM_WAITS)
        self.give_back_s = 0.0  # the longest of these
        if info.num_host_pages:
            cache.prefixes.on_evict = self._store

    @property
    def num_pages(self) -> int:
        """Return the number of pages that fit on the host."""
        return self._blocks.num_slots

    @property
    def num_pages_used(self) -> int:
        """Return the number of the host's pages that are taken: by waiting requests, packs, and
        tensors.
        """
        return self._blocks.num_used

    # -- requests -------------------------------------------------------------------

    def keep(self, request: str, keys: Sequence[bytes], num_tokens: int) -> None:
        """Keep the blocks of a preempted request: they are copied to the host when their pages are
        reused, if that pays and there is room.

        Args:
            keys: Keys of its blocks.
            num_tokens: Number of its tokens in the cache.
        """
        # Only full blocks have keys under which they can be found again.
        keys = keys[: num_tokens // self._block_tokens]
        if keys and self._blocks.num_slots:
            num_bytes = len(keys) * self._page_bytes
            if swap_pays(
                self._latency, num_tokens=len(keys) * self._block_tokens, num_bytes=num_bytes
            ):
                self._blocks.want(request, keys)

    def num_tokens_kept(self, keys: Sequence[bytes], num_known: int, num_tokens: int) -> int:
        """Return how many of a sequence's num_tokens tokens lie on the host after the first
        num_known ones.
        """
        return len(self._slots(keys, num_known, num_tokens)) * self._block_tokens

    def bring_back(self, sequence: PagedSequence, keys: Sequence[bytes], num_tokens: int) -> None:
        """Copy the blocks that follow the sequence's tokens from the host into its pages."""
        slots = self._slots(keys, sequence.length, num_tokens)
        if slots:
            first = sequence.length // self._block_tokens
            # The slots are freed when the request stops waiting; their next use follows in the log.
            self._send(SwapIn(tuple(sequence.pages[first : first + len(slots)]), tuple(slots)))
            sequence.fill(len(slots))
            self.num_swapped_in += len(slots)

    def release(self, request: str) -> None:
        """Free the host's places of a request that waits no more; no error if it has none."""
        self._blocks.release(request)

    # -- packs ----------------------------------------------------------------------

    def keep_pack(self, job: JobProgress, pages: Sequence[int]) -> bool:
        """Copy the pages that a job's pack gives back, if that pays and there is room. Returns
        whether it was done.
        """
        owner, num_bytes = ("pack", job.id), len(pages) * self._page_bytes
        if not self.num_pages or not pack_swap_pays(self._latency, job, num_bytes=num_bytes):
            return False
        if not self._blocks.want(owner, _keys(owner, len(pages))):
            return False
        self._store(_keys(owner, len(pages)), pages)
        return True

    def command_to_bring_back_pack(self, job: str, pages: Sequence[int]) -> SwapIn:
        """Return the command that copies a pack to these pages. It keeps its places on the host
        until `release_pack`.
        """
        # Counted here, since the caller executes the command at once.
        self.num_swapped_in += len(pages)
        return SwapIn(tuple(pages), tuple(self._blocks.slots_of(_keys(("pack", job), len(pages)))))

    def release_pack(self, job: str) -> None:
        """Free the host's places of a pack; no error if it has none."""
        self._blocks.release(("pack", job))

    # -- tensors --------------------------------------------------------------------

    def keep_tensors(self, owner: HostOwner, num_bytes: int) -> tuple[int, ...] | None:
        """Reserve slots for tensors of this size, and count them as copied; None if there is no
        room.
        """
        keys = _keys(owner, -(-num_bytes // self._page_bytes))
        if not self._blocks.want(owner, keys):
            return None
        self._blocks.store(keys)
        self.num_swapped_out += len(keys)
        return self.tensor_slots(owner)

    def tensor_slots(self, owner: HostOwner) -> tuple[int, ...]:
        """Return the slots that an owner's tensors have."""
        return tuple(self._blocks.slots_of_owner(owner))

    def note_tensors_back(self, owner: HostOwner) -> None:
        """Note that tensors are on the device again, and free their slots."""
        self.num_swapped_in += len(self.tensor_slots(owner))
        self.release_tensors(owner)

    def release_tensors(self, owner: HostOwner) -> None:
        """Free the slots of tensors; no error if they have none."""
        self._blocks.release(owner)

    def _slots(self, keys: Sequence[bytes], num_known: int, num_tokens: int) -> list[int]:
        """Return the host's slots of the blocks after the known tokens; at least one token is left
        to compute.
        """
        if not self._blocks.num_used:
            return []
        return self._blocks.slots_of(
            keys[num_known // self._block_tokens : (num_tokens - 1) // self._block_tokens]
        )

    def _store(self, keys: Sequence[Hashable], pages: Sequence[int]) -> None:
        """Copy these pages out where their contents are wanted: they are reused from now on."""
        if copies := self._blocks.store(keys):
            self._send(
                SwapOut(
                    tuple([pages[place] for place, _ in copies]), tuple([to for _, to in copies])
                )
            )
            self.num_swapped_out += len(copies)
            self._has_copied_out = True

    # -- the device -----------------------------------------------------------------

    def note_step(self, copy_s: float, weights_s: float, *, have_left: bool = False) -> None:
        """Note how long a step has waited for copies, and for weights that made room. have_left:
        whether moments of optimizers left pages.
        """
        # Without copies to the host, `copy_s` is the time of copies back, which free no page.
        has_copied = self._has_copied_out or have_left
        if has_copied or weights_s:
            self._waits_s.append((copy_s if has_copied else 0.0) + weights_s)
            self.give_back_s = max(self._waits_s)
            self._has_copied_out = False

    def check_integrity(self, owners: Iterable[Hashable]) -> None:
        """Assert that each page of the host is free, or has one of these owners: ids of waiting
        requests, `HostOwner`s.
        """
        self._blocks.check_integrity(owners)


def _keys(owner: Hashable, number: int) -> list[Hashable]:
    """Return keys for the places of an owner whose contents have none of their own."""
    return [(owner, place) for place in range(number)]

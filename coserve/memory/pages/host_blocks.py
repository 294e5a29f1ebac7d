"""Slots of host memory, and the blocks that they hold or will hold. Bookkeeping alone.

A slot has the size of a page. Of a preempted request it holds the keys and values of one full
block, by the block's key (`PrefixIndex.keys`). The request gets slots for all its blocks at once,
or for none: blocks leave the device one by one, the last first, and the last are of no use without
the first. Requests with a block in common share its slot. A pack, or tensors of another kind, get
slots for all of it or for nothing, too.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence


class HostBlocks:
    """Slots by number, each of which is free, or is that of one block that somebody wants.

    Questions: `num_used`, `slots_of`; verbs: `want`, `store`; the inverse of `want`: `release`.
    `check_integrity` checks the invariant.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        # Reversed, so that `pop` gives out the lowest slot first.
        self._free = list(range(num_slots))[::-1]
        self._slot: dict[Hashable, int] = {}
        # Blocks whose contents are in their slots; those of other slots are still on the device.
        self._stored: set[Hashable] = set()
        self._num_owners: dict[Hashable, int] = {}
        self._wanted: dict[Hashable, list[Hashable]] = {}

    @property
    def num_used(self) -> int:
        """Return the number of slots in use; the blocks of some are still on the device."""
        return self.num_slots - len(self._free)

    def want(self, owner: Hashable, keys: Sequence[Hashable]) -> bool:
        """Give every block of an owner a slot; return False, and give none, if too few are free."""
        assert owner not in self._wanted
        new = [key for key in keys if key not in self._slot]
        if not keys or len(new) > len(self._free):
            return False
        for key in new:
            self._slot[key] = self._free.pop()
        for key in keys:
            self._num_owners[key] = self._num_owners.get(key, 0) + 1
        self._wanted[owner] = list(keys)
        return True

    def release(self, owner: Hashable) -> None:
        """Free the slots of an owner that nobody else wants; no error if it has none."""
        for key in self._wanted.pop(owner, ()):
            self._num_owners[key] -= 1
            if not self._num_owners[key]:
                del self._num_owners[key]
                self._stored.discard(key)
                self._free.append(self._slot.pop(key))

    def store(self, keys: Sequence[Hashable]) -> list[tuple[int, int]]:
        """Note that blocks leave the device, and return those that are to be copied, which count as
        copied now.

        Returns:
            Place in `keys` and slot of each.
        """
        copies = []
        for place, key in enumerate(keys):
            if (slot := self._slot.get(key)) is not None and key not in self._stored:
                copies.append((place, slot))
                self._stored.add(key)
        return copies

    def slots_of(self, keys: Sequence[Hashable]) -> list[int]:
        """Return the slots of the first of these blocks, as far as they lie on the host."""
        slots = []
        for key in keys:
            if key not in self._stored:
                break
            slots.append(self._slot[key])
        return slots

    def slots_of_owner(self, owner: Hashable) -> list[int]:
        """Return the slots of all blocks that an owner wants."""
        return [self._slot[key] for key in self._wanted.get(owner, ())]

    def check_integrity(self, owners: Iterable[Hashable]) -> None:
        """Assert the invariant, and that only these owners have slots."""
        assert self._wanted.keys() <= set(owners)
        assert sorted([*self._free, *self._slot.values()]) == list(range(self.num_slots))
        assert self._stored <= self._slot.keys() == self._num_owners.keys()
        wanted = [key for keys in self._wanted.values() for key in keys]
        assert Counter(wanted) == self._num_owners

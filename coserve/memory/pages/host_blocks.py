"""Which slots of host memory hold, or will hold, which blocks of whom. Bookkeeping alone.

A slot has the size of a page. Of a preempted request it holds keys and values of one full block, by
the block's key (`PrefixIndex.keys`). The request gets a slot for each of its blocks at once, or for
none of them: blocks leave the device one by one, the last first, and the last are of no use without
the first. Requests with a block in common share its slot. A pack, or tensors of another kind, get
slots for all of it or for nothing, too.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence


class HostBlocks:
    """Slots by number. Questions: `num_used`, `slots_of`; verbs: `want`, `store`; inverse of
    `want`: `release`.

    Invariant, held by `check_integrity`: a slot is free, or the slot of one block that somebody
    wants.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots))[::-1]
        self._slot: dict[Hashable, int] = {}
        self._stored: set[Hashable] = set()
        self._num_owners: dict[Hashable, int] = {}
        self._wanted: dict[Hashable, list[Hashable]] = {}

    @property
    def num_used(self) -> int:
        """Slots that are not free; of some, what they are for is still on the device."""
        return self.num_slots - len(self._free)

    def want(self, owner: Hashable, keys: Sequence[Hashable]) -> bool:
        """Give every block of a request a slot; False, and none has one, if too few are free."""
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
        """The request needs its blocks no more; no error if it has none."""
        for key in self._wanted.pop(owner, ()):
            self._num_owners[key] -= 1
            if not self._num_owners[key]:
                del self._num_owners[key]
                self._stored.discard(key)
                self._free.append(self._slot.pop(key))

    def store(self, keys: Sequence[Hashable]) -> list[tuple[int, int]]:
        """Blocks leave the device: those that are to be copied, as (place in keys, slot). They
        count as copied now.
        """
        found = []
        for place, key in enumerate(keys):
            if (slot := self._slot.get(key)) is not None and key not in self._stored:
                found.append((place, slot))
                self._stored.add(key)
        return found

    def slots_of(self, keys: Sequence[Hashable]) -> list[int]:
        """The slots of the first of these blocks, as far as they lie on the host."""
        found = []
        for key in keys:
            if key not in self._stored:
                break
            found.append(self._slot[key])
        return found

    def slots_of_owner(self, owner: Hashable) -> list[int]:
        """The slots of all that somebody wants; none, if nothing."""
        return [self._slot[key] for key in self._wanted.get(owner, ())]

    def check_integrity(self, owners: Iterable[Hashable]) -> None:
        """Assert the invariant, and that nobody but these requests has slots."""
        assert self._wanted.keys() <= set(owners)
        assert sorted([*self._free, *self._slot.values()]) == list(range(self.num_slots))
        assert self._stored <= self._slot.keys() == self._num_owners.keys()
        wanted = [key for keys in self._wanted.values() for key in keys]
        assert Counter(wanted) == self._num_owners

"""Which jobs may train now, and in which order the others come: a place each, and tenants take turns.

A place is a job's from when it is given one until it ends or is paused; the engine's death does not take it away.
"""

from collections import Counter
from collections.abc import Callable

# A tenant -> how many of its jobs may train at once; None: no limit of its own.
TenantLimit = Callable[[str], int | None]


class Places:
    """Belongs to one event loop; `position` may be called from any thread."""

    def __init__(self, most: int | None, most_of: TenantLimit) -> None:
        """most: jobs at once; None: no limit."""
        self._most, self._most_of = most, most_of
        self._holders: dict[str, str] = {}  # tenants, by job
        self._waiting: dict[str, str] = {}  # likewise, in the order in which they came
        self._num_given: Counter[str] = Counter()  # by tenant, ever

    def ask(self, job: str, tenant: str) -> bool:
        """Whether a job may train now; if not, it waits for its turn."""
        if job in self._holders:
            return True
        self._waiting.setdefault(job, tenant)
        if self.next() != job:
            return False
        self._take(job)
        return True

    def next(self) -> str | None:
        """Who is to have the place that is free; None if there is none, or nobody waits who may have it."""
        if self._most is not None and len(self._holders) >= self._most:
            return None
        held = Counter(self._holders.values())
        may_have = {job: tenant for job, tenant in self._waiting.items() if self._is_below(tenant, held)}
        return _first(may_have, held, self._num_given)

    def leave(self, job: str) -> None:
        """It needs none: it has ended, or is paused."""
        self._holders.pop(job, None)
        self._waiting.pop(job, None)

    def position(self, job: str) -> int | None:
        """How many places must come free until it has one: 1 is the next. None if it does not wait."""
        waiting, held = dict(self._waiting), Counter(tuple(self._holders.values()))
        if job not in waiting:
            return None
        given = Counter(self._num_given)
        number = 0
        while (first := _first(waiting, held, given)) is not None:
            number += 1
            if first == job:
                break
            tenant = waiting.pop(first)
            held[tenant] += 1
            given[tenant] += 1
        return number

    def _is_below(self, tenant: str, held: Counter[str]) -> bool:
        most = self._most_of(tenant)
        return most is None or held[tenant] < most

    def _take(self, job: str) -> None:
        tenant = self._holders[job] = self._waiting.pop(job)
        self._num_given[tenant] += 1


def _first(waiting: dict[str, str], held: Counter[str], given: Counter[str]) -> str | None:
    """The oldest of the tenant that has fewest places, and of these of the one that has been given fewest."""
    return min(waiting, key=lambda job: (held[waiting[job]], given[waiting[job]]), default=None)

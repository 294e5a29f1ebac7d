"""Training slots: the rule that says which jobs may train now, and in which order the others
follow.

Tenants take turns. The jobs' states hold who has a slot and who waits for one.
"""

from collections import Counter
from collections.abc import Callable, Collection

from coserve.jobs.lifecycle.state import JobState

# Maps a tenant to the number of its jobs that may train at once; None: no limit of its own.
TenantLimit = Callable[[str], int | None]


class TrainingSlots:
    """Allocator of training slots. Belongs to one event loop; `position` may be called from any
    thread.
    """

    def __init__(self, max_running: int | None, max_running_of: TenantLimit) -> None:
        """Set how many jobs may train at once, in total and per tenant; None: no limit."""
        self._max_running, self._max_running_of = max_running, max_running_of
        self._num_granted: Counter[str] = Counter()  # by tenant, since the start

    def next(self, states: Collection[JobState]) -> JobState | None:
        """Return the job that gets the next slot; None if no slot is free, or no waiting job may
        have one.
        """
        waiting = [state for state in states if state.slot == "waiting"]
        if not waiting:
            return None
        held = _held(states)
        if self._max_running is not None and held.total() >= self._max_running:
            return None
        allowed = [state for state in waiting if self._is_below_limit(state.job.tenant, held)]
        return _first(allowed, held, self._num_granted)

    def note_granted(self, tenant: str) -> None:
        """Count a slot that was granted to a job of a tenant."""
        self._num_granted[tenant] += 1

    def position(self, states: Collection[JobState], job: str) -> int | None:
        """Return how many slots must come free until a job has one: 1 is the next. None if the job
        does not wait.
        """
        waiting = [state for state in states if state.slot == "waiting"]
        if job not in {state.id for state in waiting}:
            return None
        # Grant slots one by one in the order of `next`, leaving out the limits of tenants.
        held, granted = _held(states), Counter(self._num_granted)
        number = 0
        while (first := _first(waiting, held, granted)) is not None:
            number += 1
            if first.id == job:
                break
            waiting.remove(first)
            held[first.job.tenant] += 1
            granted[first.job.tenant] += 1
        return number

    def _is_below_limit(self, tenant: str, held: Counter[str]) -> bool:
        limit = self._max_running_of(tenant)
        return limit is None or held[tenant] < limit


def _held(states: Collection[JobState]) -> Counter[str]:
    """Count slots by the tenants that hold them."""
    return Counter(state.job.tenant for state in states if state.slot == "held")


def _first(
    waiting: Collection[JobState], held: Counter[str], granted: Counter[str]
) -> JobState | None:
    """Return the oldest job of the tenant that holds fewest slots, and among such tenants of the
    one that was granted fewest.
    """

    def key(state: JobState) -> tuple[int, int, int]:
        tenant = state.job.tenant
        return held[tenant], granted[tenant], state.ticket

    return min(waiting, key=key, default=None)

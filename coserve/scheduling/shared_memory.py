"""Division of pages and slots among tenants: each has a share, and may use what others do not need.

A tenant is richer than another if it holds more pages, or slots, in proportion to its share. Who needs a page takes
it from a richer tenant, as long as that stays the richer one: first packs of its jobs, then its youngest request. Who
needs a slot takes it from a tenant that holds more than `SLOTS_RATIO` times as much; free slots bring the rest. So a
tenant that has filled the memory makes room for one that comes, and keeps the rest. Within a tenant, requests come
before jobs, as in `MemoryPlan`.

Time comes before memory: a waiting request takes nothing from a tenant that has been served less than its own by more
than `MAX_LEAD_S`. Equal numbers of slots would otherwise give more time to the tenant whose requests cost more, however
far the time counters diverge.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from coserve.scheduling.memory import SPARE_PAGES, CanWait, MemoryPlan
from coserve.scheduling.plan import JobView, RequestView, View

# Seconds, of a tenant of weight 1, that a tenant may have been served more than one from which it takes room. Above 0,
# because pieces of jobs are lumps: a request should not wait because a job of its tenant has just run.
MAX_LEAD_S = 0.1

# How many times as many slots, in proportion to its share, a tenant must hold before a request of it is preempted for
# its slot. At 1 requests would be preempted again and again, since admission by time counters does not aim at equal
# numbers of slots.
SLOTS_RATIO = 2.0


class SharedMemoryPlan(MemoryPlan):
    """Pages changing hands among tenants."""

    def __init__(self, view: View, shares: Mapping[str, float]) -> None:
        """Begin with what the view says; shares: of every tenant that has work."""
        super().__init__(view)
        self._shares = shares
        self._used_s = {tenant.name: tenant.used_s for tenant in view.tenants}
        self._short: set[str] = set()  # tenants whose requests made room for the rows of others

    def admit_waiting(self, waiting: Iterable[RequestView] | None = None, can_wait: CanWait | None = None) -> None:
        """Give waiting requests their pages and slots, in this order, until no tenant can have more."""
        blocked = set(self._short)
        tenants = {each.tenant for each in self._view.waiting}
        slots = Counter([each.tenant for each in self.requests])
        for request in self._view.waiting if waiting is None else waiting:
            tenant = request.tenant
            if tenant in blocked or not request.may_start:
                continue
            self.claimant = tenant
            # Those of its tenant that run will want a page each, soon.
            if not self._make_room(request, request.num_pages + slots[tenant]):
                blocked.add(tenant)
                if blocked >= tenants or self._stops_others(request):
                    return
                continue
            self.free -= request.num_pages
            slots[tenant] += 1
            self.requests.append(request)
            self.admit.append(request.id)

    def _stops_others(self, request: RequestView) -> bool:
        """Return whether nobody is admitted before a request that lacks pages: it has waited for longer than its TTFT,
        and no tenant with requests waiting has been served less. Small requests would otherwise overtake it forever.
        """
        if len(self.requests) >= self._view.max_requests or self._view.now_s - request.arrival_s <= request.ttft_s:
            return False
        own_s = self._used_s.get(request.tenant, 0.0)
        return all(own_s <= self._used_s.get(each.tenant, 0.0) for each in self._view.waiting)

    def _make_room(self, request: RequestView, num_pages: int) -> bool:
        """Return whether there is a slot and as many free pages, after richer tenants have made room."""
        if len(self.requests) < self._view.max_requests and num_pages <= self.free:
            return True
        self._preempt_batch(num_pages, slots=1)
        while len(self.requests) >= self._view.max_requests:
            if (victim := self._from_richest_by_slots(request)) is None:
                return False
            self._preempt(victim)
        return num_pages <= self.free or self._take_pages(num_pages)

    def _take_pages(self, num_pages: int) -> bool:
        """Return whether as many pages are free, after packs and requests of richer tenants have made room."""
        while self.free < num_pages:
            held = self._held()
            tenant = max(held, key=lambda name: self._wealth(held[name], name), default=self.claimant)
            left = self._wealth(held[tenant], tenant) if tenant in held else 0.0
            own = self._wealth(held.get(self.claimant, 0) + num_pages, self.claimant)
            if tenant == self.claimant or left <= own or self._leads(self.claimant, tenant):
                return False
            packs = [job for job in self._packs() if job.tenant == tenant]
            running = [each for each in self.requests if each.tenant == tenant]
            if packs:
                self.free += packs[0].num_pages
                self.drop.append(packs[0].id)
                self.jobs.remove(packs[0])
            elif running:
                self._preempt(_youngest_of(running))
            else:
                return False
        return True

    def _from_richest_by_slots(self, request: RequestView) -> RequestView | None:
        """Return the youngest request of the tenant with most slots, if the requested slot may be taken from it."""
        slots = Counter([each.tenant for each in self.requests])
        tenant = max(slots, key=lambda name: self._wealth(slots[name], name))
        own = self._wealth(slots[request.tenant] + 1, request.tenant)
        if self._wealth(slots[tenant], tenant) <= SLOTS_RATIO * own or self._leads(request.tenant, tenant):
            return None
        return _youngest_of([each for each in self.requests if each.tenant == tenant])

    def _held(self) -> dict[str, int]:
        """Return the pages of requests and packs, by tenant."""
        found: dict[str, int] = {}
        admitted = set(self.admit)
        for request in self.requests:
            num_pages = request.num_pages if request.id in admitted else request.num_held
            found[request.tenant] = found.get(request.tenant, 0) + num_pages
        for job in self.jobs:
            if job.phase != "update":
                found[job.tenant] = found.get(job.tenant, 0) + job.num_pages
        return found

    def _leads(self, tenant: str, other: str) -> bool:
        """Return whether a tenant has been served too much more than another to take room from it."""
        return self._used_s.get(tenant, 0.0) > self._used_s.get(other, 0.0) + MAX_LEAD_S

    def _wealth(self, number: int, tenant: str) -> float:
        return number / self._shares[tenant]

    # -- what `MemoryPlan` asks ---------------------------------------------------------

    def _packs(self) -> list[JobView]:
        """Return packs that may be dropped for the claimant: its own, and those of richer tenants."""
        packs = super()._packs()
        if all(job.tenant == self.claimant for job in packs):
            return packs
        held = self._held()
        own = self._wealth(held.get(self.claimant, 0), self.claimant)
        return [job for job in packs if job.tenant == self.claimant or self._wealth(held[job.tenant], job.tenant) > own]

    def _youngest(self) -> RequestView:
        """Return the youngest request of the tenant that holds most."""
        held = self._held()
        running = {each.tenant for each in self.requests}
        richest = max(running, key=lambda name: self._wealth(held[name], name))
        return _youngest_of([each for each in self.requests if each.tenant == richest])

    def _preempt(self, request: RequestView) -> None:
        super()._preempt(request)
        self._short.add(request.tenant)

    def _requests_wait(self) -> bool:
        """Return False: each job is asked about (`_keeps_others_waiting`)."""
        return False

    def _keeps_others_waiting(self, job: JobView) -> bool:
        """Return whether requests of its own tenant wait for pages, or those of a tenant that would be poorer."""
        if not self._view.waiting or len(self.requests) >= self._view.max_requests:
            return False
        held = self._held()
        own = self._wealth(held.get(job.tenant, 0) + job.num_pages, job.tenant)
        waiting = {each.tenant for each in self._not_admitted()}
        return job.tenant in waiting or any(self._wealth(held.get(name, 0), name) < own for name in waiting)

    def _group_of(self, job: JobView) -> str:
        """Return its tenant: packs of others do not keep a job waiting."""
        return job.tenant

    def _growth(self, seconds: float) -> int:
        """Return the pages that requests of the claimant may take within this time; of others, the spare ones."""
        everyone = self.requests
        self.requests = [each for each in everyone if each.tenant == self.claimant]
        num_pages = super()._growth(seconds)
        num_others, self.requests = len(everyone) - len(self.requests), everyone
        held = self._held()
        is_poor = self._wealth(held.get(self.claimant, 0), self.claimant) < sum(held.values())
        return num_pages + (0 if is_poor else SPARE_PAGES * num_others)

    def _return_to_share(self, num_pages: int) -> None:
        """Have batch work beyond its share make room, then richer tenants."""
        super()._return_to_share(num_pages)
        if num_pages > self.free:
            self._take_pages(num_pages)


def _youngest_of(requests: Sequence[RequestView]) -> RequestView:
    """Return the request with the least priority that came last."""
    return max(reversed(requests), key=lambda running: (running.priority, running.arrival_s))

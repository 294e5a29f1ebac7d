"""Division of pages and slots among tenants: each has a share, and may use what others do not need.

A tenant is richer than another if it holds more pages, or slots, in proportion to its share. Who
needs a page takes it from a richer tenant, as long as that stays the richer one: first its batch
work, then packs of its jobs, then its youngest request. Who stays within its share also takes from
a tenant beyond its own what leaves that the poorer one: a pack may be larger than a share. Who
needs a slot takes it from a tenant that holds more than `SLOTS_RATIO` times as much, and from batch
work as long as its tenant stays the richer one; free slots bring the rest. So a tenant that has
filled the memory makes room for one that comes, and keeps the rest. Within a tenant, requests come
before batch work and jobs, as in `MemoryPlan`.

Batch work is admitted in the order of the time counters, too (where a tenant has no requests
waiting, in turn with the requests of others), and takes room from batch work of a tenant that holds
more than `SLOTS_RATIO` times as many of its sequences. Requests of another tenant that wait do not
stop it, unless that tenant would be the poorer one.

Time comes before memory: a waiting request takes nothing from a tenant that has been served less
than its own by more than `MAX_LEAD_S`. Equal numbers of slots would otherwise give more time to the
tenant whose requests cost more, however far the time counters diverge.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf

from coserve.scheduling.memory import SPARE_PAGES, CanWait, MemoryPlan
from coserve.scheduling.plan import JobProgress, RequestProgress, View

# Seconds, of a tenant of weight 1, that a tenant may have been served more than one from which it
# takes room. Above 0, because pieces of jobs are lumps: a request should not wait because a job of
# its tenant has just run.
MAX_LEAD_S = 0.1

# How many times as many slots, in proportion to its share, a tenant must hold before a request of
# it is preempted for its slot. At 1 requests would be preempted again and again, since admission by
# time counters does not aim at equal numbers of slots.
SLOTS_RATIO = 2.0


class SharedMemoryPlan(MemoryPlan):
    """Pages changing hands among tenants."""

    def __init__(
        self, view: View, shares: Mapping[str, float], max_batch_pages: float = inf
    ) -> None:
        """Begin with the view's pages.

        Args:
            shares: Share of every tenant that has work.
            max_batch_pages: Pages of all batch work together.
        """
        super().__init__(view)
        self._batch_pages = max_batch_pages
        self._shares = shares
        self._used_s = {tenant.name: tenant.used_s for tenant in view.tenants}
        self._short: set[str] = set()  # tenants whose requests made room for the rows of others
        self._short_of_batch: set[str] = set()  # tenants whose batch work made room

    def admit_waiting(
        self, waiting: Iterable[RequestProgress] | None = None, can_wait: CanWait | None = None
    ) -> None:
        """Give waiting requests their pages and slots, in this order, until no tenant can have
        more. Lines of a batch among them get what is free in their turn.
        """
        # Tenants that get nothing more in this plan.
        blocked = set(self._short)
        tenants = {each.info.tenant for each in self._view.waiting}
        slots = Counter([each.info.tenant for each in self.requests])
        for request in self._view.waiting if waiting is None else waiting:
            tenant = request.info.tenant
            if tenant in blocked or not request.may_start:
                continue
            self.claimant = tenant
            # Lines of a batch take only free room; they never have others make some.
            if request.info.batch_due_s is not None:
                if tenant not in self._short_of_batch and self._has_room_for_batch(request):
                    self._add_batch(request)
                continue
            victims = self._slot_victims(request)
            # Running requests of its tenant will need a page each, soon.
            num_pages = request.num_pages + slots[tenant]
            if victims is None or not self._take_pages(num_pages, victims, takes_own_batch=True):
                blocked.add(tenant)
                if blocked >= tenants or (victims is not None and self._stops_others(request)):
                    return
                continue
            self.free -= request.num_pages
            slots[tenant] += 1
            self.requests.append(request)
            self.admit.append(request.id)

    def _stops_others(self, request: RequestProgress) -> bool:
        """Return whether nobody is admitted before a request that lacks pages: it has waited for
        longer than its TTFT, and no tenant with requests waiting has been served less. Small
        requests would otherwise overtake it forever.
        """
        if self._view.now_s - request.info.arrival_s <= request.info.ttft_s:
            return False
        return self._is_served_least(
            request.info.tenant, {each.info.tenant for each in self._view.waiting}
        )

    def _is_served_least(self, tenant: str, others: Iterable[str]) -> bool:
        """Return whether none of the others has been served less than a tenant."""
        own_s = self._used_s.get(tenant, 0.0)
        return all(own_s <= self._used_s.get(other, 0.0) for other in others)

    def _slot_victims(self, request: RequestProgress) -> list[RequestProgress] | None:
        """Return what gives a slot to a request: nothing where one is free; None if it may not have
        any.
        """
        requests, batch, victims = list(self.requests), list(self.batch), list[RequestProgress]()
        while len(requests) + len(batch) >= self._view.max_requests:
            if (victim := self._slot_victim(request, requests, batch)) is None:
                return None
            (requests if victim.info.batch_due_s is None else batch).remove(victim)
            victims.append(victim)
        return victims

    def _take_pages(
        self,
        num_pages: int,
        slot_victims: Sequence[RequestProgress] = (),
        *,
        takes_own_batch: bool = False,
    ) -> bool:
        """Return whether as many pages are free, after richer tenants have made room for the
        claimant; nothing makes room in vain.

        Args:
            slot_victims: What makes room in any case, if there are enough pages.
            takes_own_batch: Whether batch work of the claimant makes room before other tenants do.
        """
        victims: list[RequestProgress | JobProgress] = list(slot_victims)
        if not victims and num_pages <= self.free:
            return True
        # Counted in copies first: nothing makes room unless that is enough.
        held, free = self._held(), self.free
        for each in slot_victims:
            free += self._num_given(each)
            held[each.info.tenant] -= self._num_given(each)
        holdings = self._holdings({each.id for each in slot_victims})
        own = holdings.pop(self.claimant, [])
        own_batch = [each for each in own if each in self.batch] if takes_own_batch else []
        while free < num_pages:
            if own_batch:
                victim: RequestProgress | JobProgress = own_batch.pop()
            else:
                tenant = max(
                    holdings, key=lambda name: self._wealth(held[name], name), default=None
                )
                if tenant is None or self._leads(self.claimant, tenant):
                    return False
                victim = holdings[tenant].pop()
                wanted = held.get(self.claimant, 0) + num_pages
                if not self._may_take(self._num_given(victim), tenant, held[tenant], wanted):
                    return False
                if not holdings[tenant]:
                    del holdings[tenant]
            free += self._num_given(victim)
            held[victim.info.tenant] -= self._num_given(victim)
            victims.append(victim)
        for victim in victims:
            self._give_way(victim)
        return True

    def _may_take(self, number: int, tenant: str, held: int, wanted: int) -> bool:
        """Return whether as many pages of a tenant may go to the claimant.

        Args:
            held: Pages that the tenant holds.
            wanted: Pages that the claimant will hold.
        """
        own, whole = self._wealth(wanted, self.claimant), self._view.num_pages
        return (
            self._wealth(held - number, tenant) >= own or self._wealth(held, tenant) > whole >= own
        )

    def _slot_victim(
        self,
        request: RequestProgress,
        requests: Sequence[RequestProgress],
        batch: Sequence[RequestProgress],
    ) -> RequestProgress | None:
        """Return whose slot a request takes, if it may have one: the youngest batch work of its
        tenant, or of the tenant with most slots, or the youngest request of that. requests, batch:
        what holds slots.
        """
        if own_batch := [each for each in batch if each.info.tenant == request.info.tenant]:
            return own_batch[-1]
        slots = Counter([each.info.tenant for each in (*requests, *batch)])
        tenant = max(slots, key=lambda name: self._wealth(slots[name], name))
        own = self._wealth(slots[request.info.tenant] + 1, request.info.tenant)
        if self._leads(request.info.tenant, tenant):
            return None
        if its_batch := [each for each in batch if each.info.tenant == tenant]:
            return its_batch[-1] if self._wealth(slots[tenant] - 1, tenant) >= own else None
        if self._wealth(slots[tenant], tenant) <= SLOTS_RATIO * own:
            return None
        return _youngest_of([each for each in requests if each.info.tenant == tenant])

    def _give_way(self, victim: RequestProgress | JobProgress) -> None:
        """Take the pages of a pack, of batch work or of a request."""
        if isinstance(victim, JobProgress):
            self.free += victim.num_pages
            self.jobs.remove(victim)
            if victim.id in self.begin:  # in this plan: there is nothing to drop yet
                self.begin.remove(victim.id)
            else:
                self.drop.append(victim.id)
        elif victim.info.batch_due_s is not None:
            self.batch.remove(victim)
            self._close(victim)
        else:
            self._preempt(victim)

    def _holdings(
        self, left_out: Collection[str] = ()
    ) -> dict[str, list[RequestProgress | JobProgress]]:
        """Return what holds pages, by tenant; what makes room first comes last. left_out: ids."""
        holdings: dict[str, list[RequestProgress | JobProgress]] = {}
        requests = sorted(
            self.requests, key=lambda running: (running.info.priority, running.info.arrival_s)
        )
        items: list[RequestProgress | JobProgress] = [
            *requests,
            *reversed(super()._packs()),
            *self.batch,
        ]
        for each in items:
            if each.id not in left_out:
                holdings.setdefault(each.info.tenant, []).append(each)
        return holdings

    def _held(self) -> dict[str, int]:
        """Return the pages of requests, batch work and packs, by tenant."""
        held: dict[str, int] = {}
        admitted = set(self.admit)
        for request in (*self.requests, *self.batch):
            num_pages = self._num_given(request, admitted)
            held[request.info.tenant] = held.get(request.info.tenant, 0) + num_pages
        for job in self.jobs:
            if job.phase != "update":
                held[job.info.tenant] = held.get(job.info.tenant, 0) + job.num_pages
        return held

    def _num_given(
        self, item: RequestProgress | JobProgress, admitted: Collection[str] | None = None
    ) -> int:
        """Return the pages that come back when something makes room; admitted: `self.admit`, for
        many questions.
        """
        if isinstance(item, JobProgress) or item.id in (
            self.admit if admitted is None else admitted
        ):
            return item.num_pages
        return item.num_held + self._grown.get(item.id, 0)

    # -- batch work ---------------------------------------------------------------------

    def _admit_batch(self, waiting: Iterable[RequestProgress]) -> None:
        """Give waiting batch work its pages and slots, in this order, until no tenant can have
        more. A tenant whose batch work makes room in this plan gets none: it would make room for
        the same again soon.
        """
        tenants = {each.info.tenant for each in self._view.batch_waiting}
        blocked = self._short | {each.info.tenant for each in self._not_admitted()}
        for request in waiting:
            blocked |= self._short_of_batch
            if blocked >= tenants:
                return
            if request.info.tenant in blocked or not request.may_start or request.id in self.admit:
                continue
            self.claimant = request.info.tenant
            if self._keeps_poorer_waiting(request):
                blocked.add(request.info.tenant)
            elif self._make_room_for_batch(request):
                self._add_batch(request)
            elif self._is_served_least(request.info.tenant, tenants - blocked):
                return  # smaller lines of others would overtake it forever
            else:
                blocked.add(request.info.tenant)

    def _has_room_for_batch(self, request: RequestProgress) -> bool:
        """Return whether there is room for batch work within its tenant's share of pages, or such
        that nobody waits who would be poorer.
        """
        fits = self._fits_batch(
            request, num_held=self._num_batch_pages(), num_free=self.free, num_batch=len(self.batch)
        )
        num_pages = self._held().get(request.info.tenant, 0) + request.num_pages
        is_within_share = self._wealth(num_pages, request.info.tenant) <= self._view.num_pages
        return fits and (is_within_share or not self._keeps_poorer_waiting(request))

    def _make_room_for_batch(self, request: RequestProgress) -> bool:
        """Return whether there is room for batch work, after that of tenants with many more
        sequences has made some; none does so in vain.
        """
        number = Counter([each.info.tenant for each in self.batch])
        left, victims = list(self.batch), list[RequestProgress]()
        num_held, num_free = self._num_batch_pages(), self.free
        own = SLOTS_RATIO * self._wealth(number[request.info.tenant] + 1, request.info.tenant)
        while not self._fits_batch(
            request, num_held=num_held, num_free=num_free, num_batch=len(left)
        ):
            tenant = max(
                number,
                key=lambda name: self._wealth(number[name], name),
                default=request.info.tenant,
            )
            if self._wealth(number[tenant], tenant) <= own or self._leads(
                request.info.tenant, tenant
            ):
                return False
            victim = next(each for each in reversed(left) if each.info.tenant == tenant)
            left.remove(victim)
            victims.append(victim)
            number[tenant] -= 1
            num_held -= victim.num_held + victim.num_pages
            num_free += self._num_given(victim)
        for victim in victims:
            self._give_way(victim)
        return True

    def _keeps_poorer_waiting(self, item: RequestProgress | JobProgress) -> bool:
        """Return whether requests of a tenant wait that would be poorer than this one's with its
        pages.
        """
        if not (waiting := {each.info.tenant for each in self._not_admitted()}):
            return False
        held = self._held()
        own = self._wealth(held.get(item.info.tenant, 0) + item.num_pages, item.info.tenant)
        return any(
            self._wealth(held.get(name, 0), name) < own for name in waiting - {item.info.tenant}
        )

    def _last_of_batch(self) -> RequestProgress:
        """Return the youngest batch work of the tenant whose batch work holds most."""
        held = Counter[str]()
        for each in self.batch:
            held[each.info.tenant] += self._num_given(each)
        richest = max(held, key=lambda name: self._wealth(held[name], name))
        return next(each for each in reversed(self.batch) if each.info.tenant == richest)

    # -- order --------------------------------------------------------------------------

    def _leads(self, tenant: str, other: str) -> bool:
        """Return whether a tenant has been served too much more than another to take room from
        it.
        """
        return self._used_s.get(tenant, 0.0) > self._used_s.get(other, 0.0) + MAX_LEAD_S

    def _wealth(self, number: int, tenant: str) -> float:
        return number / self._shares[tenant]

    # -- hooks of `MemoryPlan` ----------------------------------------------------------

    def _packs(self) -> list[JobProgress]:
        """Return packs that may be dropped for the claimant: its own, and those of richer
        tenants.
        """
        packs = super()._packs()
        if all(job.info.tenant == self.claimant for job in packs):
            return packs
        held = self._held()
        own = self._wealth(held.get(self.claimant, 0), self.claimant)
        return [
            job
            for job in packs
            if job.info.tenant == self.claimant
            or self._wealth(held[job.info.tenant], job.info.tenant) > own
        ]

    def _youngest(self) -> RequestProgress:
        """Return the youngest request of the tenant that holds most."""
        held = self._held()
        # In the order of admission, which decides among equals: that of a set would be any.
        running = dict.fromkeys([each.info.tenant for each in self.requests])
        richest = max(running, key=lambda name: self._wealth(held[name], name))
        return _youngest_of([each for each in self.requests if each.info.tenant == richest])

    def _preempt(self, request: RequestProgress) -> None:
        super()._preempt(request)
        self._short.add(request.info.tenant)

    def _close(self, request: RequestProgress) -> None:
        super()._close(request)
        if request.info.batch_due_s is not None:
            self._short_of_batch.add(request.info.tenant)

    def _requests_wait(self) -> bool:
        """Return False: each job is asked about (`_keeps_others_waiting`)."""
        return False

    def _keeps_others_waiting(self, job: JobProgress) -> bool:
        """Return whether requests of its own tenant wait for pages, or those of a tenant that would
        be poorer.
        """
        if not self._view.waiting or len(self.requests) >= self._view.max_requests:
            return False
        waits = any(each.info.tenant == job.info.tenant for each in self._not_admitted())
        return waits or self._keeps_poorer_waiting(job)

    def _group_of(self, job: JobProgress) -> str:
        """Return its tenant: packs of others do not keep a job waiting."""
        return job.info.tenant

    def _growth(self, seconds: float) -> int:
        """Return the pages that requests of the claimant may take within this time; of others, the
        spare ones.
        """
        everyone = self.requests
        # The base class then counts the claimant's requests alone.
        self.requests = [each for each in everyone if each.info.tenant == self.claimant]
        num_pages = super()._growth(seconds)
        num_others, self.requests = len(everyone) - len(self.requests), everyone
        held = self._held()
        # A tenant below its share leaves others' growth to them.
        is_poor = self._wealth(held.get(self.claimant, 0), self.claimant) < sum(held.values())
        return num_pages + (0 if is_poor else SPARE_PAGES * num_others)

    def _return_to_share(self, num_pages: int) -> None:
        """Have batch work beyond its share make room, then richer tenants."""
        super()._return_to_share(num_pages)
        if num_pages > self.free:
            self._take_pages(num_pages)


def _youngest_of(requests: Sequence[RequestProgress]) -> RequestProgress:
    """Return the request with the least priority that came last."""
    return max(
        reversed(requests), key=lambda running: (running.info.priority, running.info.arrival_s)
    )

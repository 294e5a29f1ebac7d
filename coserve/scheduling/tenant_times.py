"""Virtual time counters: the device's seconds that each tenant was served, divided by the tenant's
weight.

A virtual token counter (`scheduling.fairness`) whose tokens cost what they take on the device (the
cost function h of Sheng et al., section 3.2): requests, jobs and batch work of a tenant have one
counter. Policies that share the time of steps among tenants (`Policy.shares_time`) give the tenant
with the smallest counter more of the next step. The time between two steps, in which the host sends
answers, counts as well: a tenant with many streams has the device wait.

A tenant that had no work is lifted to the smallest counter of those that have, so that idling saves
up no credit. No counter falls below the largest one by more than `max_credit_s`: a tenant that uses
less than its share for long would otherwise take the whole device for as long as it saved up.
"""

from collections.abc import Callable, Mapping, Set

from coserve.scheduling.plan import TenantView

# The most seconds, of a tenant of weight 1 or more, by which a counter may be below the largest
# one.
MAX_CREDIT_S = 0.25
# A tenant counts as one that may come back at any moment for as long after its last work. Meanwhile
# steps with prompts are short, so that its next request waits for no long one, which costs the jobs
# of the others some of their speed.
RECENT_S = 5.0


def max_credit_s(weight: float, step_s: float = 0.0) -> float:
    """Return the most by which the counter of a tenant of this weight may be below the largest one,
    in seconds of that counter. step_s: what the step took by which the largest one may have grown:
    its own tenant's turn comes later.
    """
    return max(MAX_CREDIT_S, step_s) / min(1.0, weight)


class TenantTimes:
    """Counters of tenants that have work, or had some lately. The engine reports the time of each
    step.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """Begin without tenants; weights: of tenants that do not have a weight of 1."""
        self._weights = dict(weights or {})
        self._used_s: dict[str, float] = {}
        self._seen_s: dict[str, float] = {}
        self._present: frozenset[str] = frozenset()

    @property
    def are_shared(self) -> bool:
        """Return whether there is more than one tenant."""
        return len(self._used_s) > 1

    def used_s(self, tenant: str) -> float:
        """Return the counter of a tenant; 0 if it is not known."""
        return self._used_s.get(tenant, 0.0)

    def note_present(self, tenants: Set[str], now_s: float) -> None:
        """Record which tenants have work now; those that had none are lifted, those long without
        work forgotten.
        """
        if self._present != tenants:
            others = [self._used_s[each] for each in self._present if each in tenants]
            smallest = min(others, default=max(self._used_s.values(), default=0.0))
            for tenant in tenants:
                if tenant not in self._present:
                    self._used_s[tenant] = max(self._used_s.get(tenant, 0.0), smallest)
            self._present = frozenset(tenants)
        for tenant in tenants:
            self._seen_s[tenant] = now_s
        if len(self._seen_s) > len(tenants):
            for tenant in [
                each for each, seen_s in self._seen_s.items() if seen_s < now_s - RECENT_S
            ]:
                del self._seen_s[tenant], self._used_s[tenant]

    def charge(self, seconds: Mapping[str, float]) -> None:
        """Count what a step took for each tenant."""
        for tenant, used_s in seconds.items():
            if tenant in self._used_s:
                self._used_s[tenant] += used_s / self.weight(tenant)
        largest_s, step_s = max(self._used_s.values(), default=0.0), sum(seconds.values())
        for tenant, used_s in self._used_s.items():
            smallest_s = largest_s - max_credit_s(self.weight(tenant), step_s)
            if used_s < smallest_s:
                self._used_s[tenant] = smallest_s

    def weight(self, tenant: str) -> float:
        """Return the weight of a tenant."""
        return self._weights.get(tenant, 1.0)

    def views(self, served: Callable[[str], float]) -> tuple[TenantView, ...]:
        """Return the counters for a policy; served: the weighted tokens of a tenant."""
        return tuple(
            [
                TenantView(
                    name=tenant,
                    served=served(tenant),
                    used_s=used_s,
                    weight=self.weight(tenant),
                    is_present=tenant in self._present,
                )
                for tenant, used_s in self._used_s.items()
            ]
        )

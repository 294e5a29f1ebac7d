"""Virtual token counters: what each tenant has been served, requests and fine-tuning together.

FlexLLM appendix C, Algorithm 4 (after Sheng et al., "Fairness in Serving Large Language Models",
OSDI 2024). Each tenant has a counter of weighted tokens. A tenant whose queue was empty is lifted
to the least counter of those that queue, so that idling saves up no credit. The policy `vtc` serves
the tenant with the least counter first.

Theorem 1 there: while two tenants both have work queued, what they are served differs by no more
than 2 max(w_p L, max(w_q, w_r) M), with L the longest prompt and M the most tokens under way at
once.
"""

from collections.abc import Hashable
from typing import NamedTuple

from coserve.scheduling.plan import TenantView


class TokenWeights(NamedTuple):
    """Costs of a token to its tenant.

    The defaults of the first two are Sheng et al.'s. A row of a job passes forward once and
    backward once, and backward through frozen weights takes about what forward takes: each pass
    costs what a prompt's token costs.
    """

    prompt: float = 1.0
    """Cost of a prompt's token (w_p)."""
    output: float = 2.0
    """Cost of a generated token (w_q)."""
    tuning: float = 1.0
    """Cost of a job's row in one pass (w_r)."""


class TokenCounters:
    """Counters of all tenants that were ever seen: plain bookkeeping of what the engine reports.

    A tenant's queue is its requests that wait to be admitted (again, if they were preempted), and
    its running jobs.
    """

    def __init__(self, weights: TokenWeights | None = None) -> None:
        """Begin without tenants; the weights are the policy's (`Policy.token_weights`)."""
        self.weights = weights or TokenWeights()
        self._served: dict[str, float] = {}
        self._queued: dict[str, set[Hashable]] = {}
        self._last_left: str | None = None

    def arrive(self, tenant: str, item: Hashable) -> None:
        """Add a request or a job to its tenant's queue; no effect if it is there.

        If the queue was empty, the tenant's counter is lifted.
        """
        served = self._served.setdefault(tenant, 0.0)
        if not self._queued.get(tenant):
            # Lifted to the least counter of those that queue, or else to that of the last to leave.
            queued = [self._served[each] for each, items in self._queued.items() if items]
            if queued:
                served = max(served, min(queued))
            elif self._last_left is not None:
                served = max(served, self._served[self._last_left])
            self._served[tenant] = served
        self._queued.setdefault(tenant, set()).add(item)

    def leave(self, tenant: str, item: Hashable) -> None:
        """Remove an admitted or ended request, or an ended or paused job, from its tenant's queue;
        no effect if it is not there, so that a caller that was interrupted can call again.
        """
        items = self._queued.get(tenant)
        if items is None:
            return
        items.discard(item)
        if not items:
            self._last_left = tenant
            del self._queued[tenant]

    def charge(self, tenant: str, *, prompt: int = 0, output: int = 0, tuning: float = 0.0) -> None:
        """Charge a tenant for tokens of an admitted prompt, of outputs, and rows of jobs in one
        pass each.
        """
        weights = self.weights
        served = prompt * weights.prompt + output * weights.output + tuning * weights.tuning
        self._served[tenant] = self._served.get(tenant, 0.0) + served

    def served(self, tenant: str) -> float:
        """Return the counter of a tenant; 0 if it was never seen."""
        return self._served.get(tenant, 0.0)

    def views(self) -> tuple[TenantView, ...]:
        """Return the counters of tenants with a queue, for a policy."""
        return tuple(
            [TenantView(name=tenant, served=self._served[tenant]) for tenant in self._queued]
        )

"""FlexLLM appendix C, Algorithm 4: fair shares among tenants, by virtual token counters, within the budget of slack.

Whose request is admitted next, and whose job gets tokens next, is decided by the least counter (`scheduling.fairness`):
first requests, then jobs, as in the algorithm. How much time a step has for either is `slack`'s rule.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from coserve.scheduling.fairness import TokenWeights
from coserve.scheduling.plan import JobView, RequestView, View
from coserve.scheduling.policies.base import setting
from coserve.scheduling.policies.slack import Slack


@dataclass(frozen=True, kw_only=True)
class Vtc(Slack):
    """See the module."""

    summary: ClassVar[str] = "slack with fair shares among tenants (virtual token counter, FlexLLM appendix C)"

    w_p: float = setting(1.0, "What a token of a prompt costs its tenant.")
    w_q: float = setting(2.0, "What a token of an output costs its tenant.")
    w_r: float = setting(1.0, "What a row of a job costs its tenant, forward and backward each.")

    @property
    def token_weights(self) -> TokenWeights:
        return TokenWeights(self.w_p, self.w_q, self.w_r)

    def queue(self, view: View) -> Sequence[RequestView]:
        """Again and again the earliest request of the tenant with the least counter, which pays for its prompt."""
        served = {tenant.name: tenant.served for tenant in view.tenants}
        by_tenant: dict[str, list[RequestView]] = {}
        for request in reversed(view.waiting):
            if request.may_start:
                by_tenant.setdefault(request.tenant, []).append(request)
        order = []
        while by_tenant:
            tenant = min(by_tenant, key=lambda name: (served.get(name, 0.0), -len(by_tenant[name])))
            request = by_tenant[tenant].pop()
            served[tenant] = served.get(tenant, 0.0) + self.w_p * request.num_rows
            order.append(request)
            if not by_tenant[tenant]:
                del by_tenant[tenant]
        return order

    def turns(self, view: View) -> Sequence[JobView]:
        """The job of the tenant with the least counter first; among one tenant's, the one served least."""
        served = {tenant.name: tenant.served for tenant in view.tenants}
        return sorted(view.jobs, key=lambda job: served.get(job.tenant, 0.0))

    def shares(self, jobs: Sequence[JobView], view: View) -> Sequence[JobView]:
        """Not those of a tenant that is a whole step ahead of another: a job gets one piece a step, so a tenant with
        many jobs would get many. The step is the shorter for it; no time is lost.
        """
        served = {tenant.name: tenant.served for tenant in view.tenants}
        least = min([served.get(job.tenant, 0.0) for job in jobs], default=0.0)
        return [job for job in jobs if served.get(job.tenant, 0.0) <= least + self.w_r * view.max_rows]

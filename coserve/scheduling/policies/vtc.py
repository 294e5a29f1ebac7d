"""Fair shares among tenants by virtual token counters (FlexLLM appendix C, Algorithm 4), within the
budget of `slack`.

The least counter (`scheduling.fairness`) decides whose request is admitted next, and whose job gets
tokens next: first requests, then jobs, as in the algorithm. How much time a step has for either is
`slack`'s rule.

An SLO can claim a device without using it: between tokens that are due in little more than a decode
step, nothing else runs. Among several tenants a TPOT is therefore planned for as far as the share
of its tenant goes: with N of them, none tighter than what N requests alone, one after the other,
could be given; and none is ever widened beyond the default.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from msgspec import structs

from coserve.scheduling.fairness import TokenWeights
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.order import by_share
from coserve.scheduling.plan import JobProgress, Plan, RequestProgress, View
from coserve.scheduling.policies.base import setting
from coserve.scheduling.policies.slack import Slack
from coserve.scheduling.slo import MIN_TIMES_ALONE, SOLO_CONTEXT


@dataclass(frozen=True, kw_only=True)
class Vtc(Slack):
    """The default policy with fair shares of tokens among tenants."""

    summary: ClassVar[str] = (
        "slack with fair shares among tenants (virtual token counter, FlexLLM appendix C)"
    )
    shares_time: ClassVar[bool] = False

    w_p: float = setting(1.0, "Cost of a prompt's token to its tenant.")
    w_q: float = setting(2.0, "Cost of a generated token to its tenant.")
    w_r: float = setting(1.0, "Cost of a job's row to its tenant, forward and backward each.")

    @property
    def token_weights(self) -> TokenWeights:
        return TokenWeights(self.w_p, self.w_q, self.w_r)

    def plan(self, view: View, latency: LatencyModel) -> Plan:
        served = {tenant.name: tenant.served for tenant in view.tenants}
        # The job of the tenant with the least counter first; among one tenant's, the one served
        # least.
        jobs = tuple(sorted(view.jobs, key=lambda job: served.get(job.info.tenant, 0.0)))
        return super().plan(_within_shares(structs.replace(view, jobs=jobs), latency), latency)

    def queue(self, view: View) -> Sequence[RequestProgress]:
        """Return again and again the earliest request of the tenant with the least counter, which
        pays for its prompt.
        """
        served = {tenant.name: tenant.served for tenant in view.tenants}
        waiting = [request for request in view.waiting if request.may_start]
        return list(by_share(waiting, served, lambda request: self.w_p * request.num_rows))

    def turns(self, view: View) -> Sequence[JobProgress]:
        return view.jobs

    def shares(self, jobs: Sequence[JobProgress], view: View) -> Sequence[JobProgress]:
        """Return jobs but for those of a tenant that is a whole step ahead of another: a job gets
        one piece a step, so a tenant with many jobs would get many. The step is the shorter for it;
        no time is lost.
        """
        served = {tenant.name: tenant.served for tenant in view.tenants}
        least = min([served.get(job.info.tenant, 0.0) for job in jobs], default=0.0)
        return [
            job
            for job in jobs
            if served.get(job.info.tenant, 0.0) <= least + self.w_r * view.max_rows
        ]


def _within_shares(view: View, latency: LatencyModel) -> View:
    """Return the view with TPOTs that are no tighter than the shares of their tenants.

    The recorded use of TPOT SLOs does not apply to the TPOTs that are planned for, so it is
    dropped.
    """
    tenants = {
        each.info.tenant for group in (view.requests, view.waiting, view.jobs) for each in group
    }
    if len(tenants) < 2:
        return view
    alone_s = MIN_TIMES_ALONE * latency.decode_s(num_requests=1, context=SOLO_CONTEXT)
    least_s = min(view.tpot_s, len(tenants) * alone_s)
    if all(request.info.tpot_s >= least_s for request in (*view.requests, *view.waiting)):
        return view
    return structs.replace(
        view,
        requests=_no_tighter(view.requests, least_s),
        waiting=_no_tighter(view.waiting, least_s),
        slo_use=structs.replace(view.slo_use, tpot=0.0),
    )


def _no_tighter(requests: Sequence[RequestProgress], least_s: float) -> tuple[RequestProgress, ...]:
    return tuple(
        [each if each.info.tpot_s >= least_s else _with_tpot(each, least_s) for each in requests]
    )


def _with_tpot(request: RequestProgress, tpot_s: float) -> RequestProgress:
    return replace(request, info=structs.replace(request.info, tpot_s=tpot_s))

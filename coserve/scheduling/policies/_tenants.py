"""The steps of `slack` where several tenants have work, or had some lately: each has a share of
every step.

A step with requests lasts no longer than a quantum (`_quantum_s`), which bounds what a request of
another tenant that arrives meanwhile waits for. The quantum is shared out by weights. A tenant that
needs less than its part gets what it needs, and the others share the rest. Among those, virtual
time counters (`scheduling.tenant_times`) correct what earlier steps gave too much or too little:
pieces of work are lumps, and predictions err. In steps of jobs alone tenants take turns by the same
counters (`_plan_jobs`).

Within its part, a tenant's requests come before its batch work and its jobs: first rows that
decode, those first that have waited longest, then prompts by their deadlines, infeasible ones last.
What a tenant leaves goes to jobs of the others.

An SLO is planned for as far as its tenant's part goes: it costs neither requests nor jobs of
others. A TPOT that is tighter than the quantum makes steps shorter, unless its requests have saved
up the time of a longer one. Short steps have no room for pieces of jobs of a good size. So jobs
save their tenant's part up, in its counter, until they may have a piece as large as in a usual
step, which lasts as long.

Requests are admitted by the same counters (Algorithm 4 of FlexLLM's appendix C): again and again
the first request of the tenant with the smallest one, which pays for its prompt. Pages and slots:
`scheduling.shared_memory`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from coserve.scheduling.building import MIN_WINDOW_ROWS, PlanBuilder
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.order import by_due, by_priority, by_share
from coserve.scheduling.pieces import largest_that_fits
from coserve.scheduling.plan import JobProgress, Plan, RequestProgress, TenantView, View
from coserve.scheduling.shared_memory import SharedMemoryPlan
from coserve.scheduling.slo import SOLO_CONTEXT
from coserve.scheduling.slo.deadlines import AIMED, due_at_s
from coserve.scheduling.slo.infeasible import infeasible_last
from coserve.scheduling.slo.step_budget import StepBudget
from coserve.scheduling.tenant_times import MAX_CREDIT_S, max_credit_s

# A step lasts half a TPOT of the default SLO, or as many decode steps of one request if that is
# more. The third number is the most TPOTs that it lasts: smallest pieces, and errors of prediction,
# come on top of that.
QUANTUM_TPOTS, QUANTUM_DECODES, MAX_QUANTUM_TPOTS = 0.5, 4.0, 0.75
# Rows that decode take no more of their tenant's part than this while it has prompts, and never
# less than as many decode steps of one request: fewer rows would not take less time.
DECODE_SHARE, MIN_DECODES = 0.7, 1.5
# A counter that is below the largest by this share of the most that it can be is as small as it
# gets.
NEARLY_ALL = 0.95
# Whatever a tenant was served before, it gets this share of its part.
MIN_PART = 0.1
# Rows from whose time the time of prompts that wait is estimated.
_TYPICAL_ROWS = 256
# Beside others a pack takes about this many times the time that it takes alone, times the number of
# tenants.
_PACK_STRETCH = 2.0


class _SharedPolicy(Protocol):
    """The part of a policy that the shares of tenants build on."""

    @property
    def batch_share(self) -> float: ...

    @property
    def least_share(self) -> float: ...

    def queue(self, view: View) -> Sequence[RequestProgress]: ...

    def budget(self, view: View, latency: LatencyModel) -> StepBudget: ...


@dataclass(kw_only=True)
class _Part:
    """The part of one tenant in a step."""

    tenant: TenantView
    """The tenant."""
    share: float
    """Share of the device, among tenants that have work."""
    decoding: list[RequestProgress] = field(default_factory=list)
    """Requests that decode."""
    prompts: list[RequestProgress] = field(default_factory=list)
    """Requests that prefill."""
    batch: list[RequestProgress] = field(default_factory=list)
    """Batch work."""
    jobs: list[JobProgress] = field(default_factory=list)
    """Jobs."""
    limit_s: float = inf
    """Seconds of the step that it may take."""
    own_s: float = 0.0
    """Seconds that it may take if its counter is like those of the others."""
    owed_s: float = 0.0
    """Seconds that earlier steps gave it too little; below 0, too much."""
    taken_s: float = 0.0
    """Seconds of the step that it has taken."""
    can_save: bool = False
    """Whether a later step may owe it more, if it leaves some of this one to others."""

    @property
    def left_s(self) -> float:
        """Return what is left of its limit."""
        return self.limit_s - self.taken_s

    @property
    def saved_s(self) -> float:
        """Return what is left of its own seconds and of those that it is owed."""
        return self.own_s + self.owed_s - self.taken_s

    def needed_s(self, row_s: float) -> float:
        """Return about what its work would take; inf with jobs, which take all that there is."""
        if self.jobs or self.batch:
            return inf
        return row_s * (len(self.decoding) + sum([request.num_rows for request in self.prompts]))


def needs_shares(view: View) -> bool:
    """Return whether a step is to be shared out: if several tenants have work, or if others had
    some lately and the one that has work now has prompts, which would make the step long for a
    request of another that arrives meanwhile.
    """
    if len(view.tenants) < 2:
        return False
    if sum([tenant.is_present for tenant in view.tenants]) > 1:
        return True
    return bool(view.waiting) or any(request.num_rows > 1 for request in view.requests)


def plan_shared(policy: _SharedPolicy, view: View, latency: LatencyModel, *, tunes: bool) -> Plan:
    """Return a plan in which every tenant has its share of memory and time."""
    present = [tenant for tenant in view.tenants if tenant.is_present]
    whole = sum([tenant.weight for tenant in present])
    parts = {tenant.name: _Part(tenant=tenant, share=tenant.weight / whole) for tenant in present}
    row_s = latency.prompt_s(_TYPICAL_ROWS) / _TYPICAL_ROWS
    jobs = sorted(view.jobs, key=lambda job: parts[job.info.tenant].tenant.used_s) if tunes else []
    memory = _share_memory(policy, view, latency, parts, jobs, row_s=row_s)
    for request in memory.requests:
        part = parts[request.info.tenant]
        (part.decoding if request.num_rows == 1 else part.prompts).append(request)
    for request in memory.batch:
        parts[request.info.tenant].batch.append(request)
    for job in memory.jobs if tunes else ():
        parts[job.info.tenant].jobs.append(job)
    ordered = sorted(parts.values(), key=lambda part: part.tenant.used_s)
    # Neither requests nor batch work: jobs alone take turns.
    if not (memory.requests or memory.batch or view.waiting or view.batch_waiting):
        return _plan_jobs(policy, view, latency, memory, ordered)
    usual_s = _usual_quantum_s(view, latency)
    quantum_s = _quantum_s(view, latency, ordered, usual_s)
    _set_limits(ordered, quantum_s, row_s, max([tenant.used_s for tenant in view.tenants]))
    return _SharedStep(policy, view, latency, memory, quantum_s=quantum_s, usual_s=usual_s).build(
        ordered
    )


def _share_memory(
    policy: _SharedPolicy,
    view: View,
    latency: LatencyModel,
    parts: Mapping[str, _Part],
    jobs: Sequence[JobProgress],
    *,
    row_s: float,
) -> SharedMemoryPlan:
    """Return the pages that change hands; row_s: seconds of a row of a prompt."""
    max_pages = policy.batch_share * view.num_pages if jobs and view.num_pages else inf
    memory = SharedMemoryPlan(view, {name: part.share for name, part in parts.items()}, max_pages)
    memory.grow()
    used_s = {name: part.tenant.used_s for name, part in parts.items()}

    def cost_s(request: RequestProgress) -> float:
        # In seconds of the tenant's counter, which are divided by its weight.
        return row_s * request.num_rows / parts[request.info.tenant].tenant.weight

    if view.waiting:
        waiting = [*infeasible_last(policy.queue(view), view, latency), *_first_lines(view)]
        queue = by_share(waiting, used_s, cost_s)
        has_priorities = any(request.info.priority for request in view.waiting)
        memory.admit_waiting(by_priority(list(queue)) if has_priorities else queue)
    if view.batch or view.batch_waiting:
        memory.serve_batch(max_pages, by_share(by_due(view.batch_waiting), used_s, cost_s))
    if jobs:
        memory.begin_packs(jobs, lambda job: _PACK_STRETCH * len(parts) * latency.pack_s(job))
        memory.take_turns(jobs)
    return memory


def _first_lines(view: View) -> list[RequestProgress]:
    """Return the first line of a batch of each tenant that has no requests waiting. These lines are
    admitted in turn with the requests of others: a tenant that always has more of these waiting
    would otherwise keep every slot.
    """
    lines: dict[str, RequestProgress] = {}
    tenants = {request.info.tenant for request in view.waiting}
    for line in by_due(
        [each for each in view.batch_waiting if each.may_start and each.info.tenant not in tenants]
    ):
        lines.setdefault(line.info.tenant, line)
    return list(lines.values())


def _plan_jobs(
    policy: _SharedPolicy,
    view: View,
    latency: LatencyModel,
    memory: SharedMemoryPlan,
    parts: Sequence[_Part],
) -> Plan:
    """Return a step of jobs alone, in the order of their tenants' counters. It lasts as long as a
    step of jobs of one tenant, since a request that arrives waits for no more either way, and has
    tasklets of several tenants run as one batch of rows. So tenants take turns instead of parts of
    the step: one that has been served more than another, by as much as half a step, waits.
    """
    build, budget = PlanBuilder(view, latency, memory), policy.budget(view, latency)
    until_s = build.step_s + budget.max_jobs_s(build.step_s)
    parts = [part for part in parts if part.jobs]
    max_used_s = (
        min([part.tenant.used_s for part in parts], default=0.0) + min(until_s, MAX_CREDIT_S) / 2
    )
    jobs = [job for part in parts if part.tenant.used_s <= max_used_s for job in part.jobs]
    build.tune(jobs, until_s, least_share=budget.least_share)
    return build.build()


def _usual_quantum_s(view: View, latency: LatencyModel) -> float:
    """Return the longest that a step may last beside requests that bring no SLO."""
    alone_s = latency.decode_s(num_requests=1, context=SOLO_CONTEXT)
    return max(
        QUANTUM_TPOTS * view.tpot_s, min(QUANTUM_DECODES * alone_s, MAX_QUANTUM_TPOTS * view.tpot_s)
    )


def _quantum_s(view: View, latency: LatencyModel, parts: Sequence[_Part], usual_s: float) -> float:
    """Return the longest that this step may last: less than usual where requests with a tighter
    TPOT have not saved up as much time. That counts as far as their tenant's share goes: steps at
    their pace must leave the others theirs. A gap between two tokens may be as long as beside
    requests without an SLO, whatever number of their TPOTs that is.
    """
    quantum_s, end_s = usual_s, view.now_s + usual_s * (1 + latency.corrections.margin)
    for part in parts:
        tight = [request for request in part.decoding if AIMED * request.info.tpot_s < quantum_s]
        if not tight or min([due_at_s(request, max_gap_tpots=inf) for request in tight]) >= end_s:
            continue
        needed_s = latency.decode_s(num_requests=len(part.decoding), context=SOLO_CONTEXT)
        tpot_s = min([request.info.tpot_s for request in tight])
        quantum_s = min(quantum_s, max(AIMED * tpot_s, needed_s / part.share))
    return quantum_s


def _set_limits(parts: Sequence[_Part], quantum_s: float, row_s: float, max_used_s: float) -> None:
    """Share a quantum out: a tenant that needs less than its part gets that part; the others share
    what is left, corrected by their counters.

    A tenant that needs less but has been served more than these counts as one of them: the real
    times of rows and of steps are not all known beforehand.

    Args:
        max_used_s: Largest counter.
    """
    left_s, share = quantum_s, 1.0
    backlogged: list[_Part] = []
    modest: list[_Part] = []
    needs = [(part.needed_s(row_s) / part.share, part) for part in parts]
    # From the least need on: what a modest tenant leaves is shared by those after it.
    for need, part in sorted(needs, key=lambda each: each[0]):
        # Once one needs more than its part, so do all after it.
        if not backlogged and need <= left_s / share:
            modest.append(part)
            part.limit_s = part.share * left_s / share
            left_s, share = left_s - need * part.share, share - part.share
        else:
            backlogged.append(part)
    if not backlogged:
        return
    mean_s = _mean_used_s(backlogged)
    for part in modest:
        if part.tenant.used_s > mean_s:
            backlogged.append(part)
            left_s += part.needed_s(row_s)
    weight, mean_s = sum([part.tenant.weight for part in backlogged]), _mean_used_s(backlogged)
    for part in backlogged:
        part.own_s = left_s * part.tenant.weight / weight
        part.owed_s = part.tenant.weight * (mean_s - part.tenant.used_s)
        part.limit_s = min(left_s, max(MIN_PART * part.own_s, part.own_s + part.owed_s))
        # Alone it is owed nothing by anybody, and a counter that is as small as it can be stays as
        # it is.
        min_used_s = max_used_s - NEARLY_ALL * max_credit_s(part.tenant.weight)
        part.can_save = len(backlogged) > 1 and part.tenant.used_s > min_used_s


def _mean_used_s(parts: Sequence[_Part]) -> float:
    """Return the mean of the counters of tenants, by their weights."""
    weight = sum([part.tenant.weight for part in parts])
    return sum([part.tenant.weight * part.tenant.used_s for part in parts]) / weight


class _SharedStep:
    """A step that is being planned, tenant by tenant."""

    def __init__(
        self,
        policy: _SharedPolicy,
        view: View,
        latency: LatencyModel,
        memory: SharedMemoryPlan,
        *,
        quantum_s: float,
        usual_s: float,
    ) -> None:
        self._policy, self._view, self._latency = policy, view, latency
        self._budget = policy.budget(view, latency)
        self._quantum_s, self._usual_s = quantum_s, usual_s
        self._build = PlanBuilder(view, latency, memory)
        self._build_s = self._build.step_s

    def build(self, parts: Sequence[_Part]) -> Plan:
        """Return the plan: of each kind of work, that of the tenant with the smallest counter
        first.
        """
        for part in parts:
            if part.decoding:
                self._decode(part)
                self._charge(part)
        for part in parts:
            if part.prompts:
                self._prefill(part)
                self._charge(part)
        for part in parts:
            if part.batch:
                until_s = self._build.step_s + (
                    self._policy.batch_share if part.jobs else 1.0
                ) * max(0.0, part.left_s)
                self._build.batch(part.batch, until_s, must=self._build.runs_nothing)
                self._charge(part)
        self._tune(parts)
        return self._build.build()

    def _charge(self, part: _Part) -> None:
        """Count what the plan has grown by as taken by a tenant."""
        before_s, self._build_s = self._build_s, self._build.step_s
        part.taken_s += self._build_s - before_s

    def _decode(self, part: _Part) -> None:
        """Add the rows of a tenant that decode, as many as its part has time for."""
        decoding, number = part.decoding, len(part.decoding)
        limit_s = (DECODE_SHARE if part.prompts else 1.0) * part.limit_s
        limit_s = max(
            limit_s, MIN_DECODES * self._latency.decode_s(num_requests=1, context=SOLO_CONTEXT)
        )
        seconds, before_s = self._build.decode_seconds(decoding), self._build.forward_s
        if seconds(number) - before_s > limit_s:
            decoding = sorted(decoding, key=lambda request: request.last_token_s)
            seconds = self._build.decode_seconds(decoding)
            number = largest_that_fits(1, number, seconds, before_s + limit_s)
        self._build.decode(decoding[:number])

    def _prefill(self, part: _Part) -> None:
        """Add prompts of a tenant: those first that are due first, and infeasible ones last."""
        prompts = by_priority(sorted(part.prompts, key=self._budget.due_at_s))
        prompts = infeasible_last(prompts, self._view, self._latency)
        self._build.prefill(
            prompts, self._build.seconds + max(0.0, part.left_s), urgent=part.left_s > 0
        )

    def _tune(self, parts: Sequence[_Part]) -> None:
        """Add work of jobs: of each tenant as much as its part has time for, then of all what the
        step has left.
        """
        jobs = [job for part in parts for job in part.jobs]
        if not jobs:
            return
        is_short = self._quantum_s < self._usual_s
        for part in parts:
            if part.jobs and is_short:
                self._tune_whole(part)
                self._charge(part)
            elif part.jobs and part.left_s > 0:
                self._build.tune(part.jobs, self._build.step_s + part.left_s)
                self._tune_lump(part, part.limit_s + part.owed_s)
                self._charge(part)
        served = self._build.served_jobs
        if waiting := [job for job in jobs if job.id not in served]:
            # In a short step only `least_share` gives these jobs anything.
            until_s = 0.0 if is_short else self._quantum_s
            self._build.tune(waiting, until_s, least_share=self._policy.least_share)

    def _tune_whole(self, part: _Part) -> None:
        """Add work of a tenant's jobs to a step that the SLO of another makes short. Short steps
        have no room for pieces of a good size, and small ones take longer per row. So the tenant's
        part is saved up, in its counter, until it is worth what a usual step would give, or all
        that is left of the job's phase, or as much as it can be.
        """
        # What the tenant's part of a step of usual length would be.
        usual_s = part.own_s * self._usual_s / self._quantum_s - part.taken_s
        whole_s = self._build.piece_s(part.jobs[0], part.jobs[0].num_rows_left)
        if part.can_save and part.saved_s < min(usual_s, whole_s):
            return
        self._build.tune(part.jobs, min(self._build.step_s + part.saved_s, self._usual_s))
        self._tune_lump(part, part.saved_s)

    def _tune_lump(self, part: _Part, max_s: float) -> None:
        """Add the smallest piece of a tenant's first job if none of its jobs has any: where that
        takes more than the tenant's part, but not more than what it is owed (max_s).
        """
        if not self._build.served_jobs.isdisjoint([job.id for job in part.jobs]):
            return
        least_s = self._build.piece_s(part.jobs[0], MIN_WINDOW_ROWS)
        if least_s <= max_s:
            self._build.tune(part.jobs[:1], self._build.step_s + least_s)

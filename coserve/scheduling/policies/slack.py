"""The default: requests first, then as much fine-tuning as fits before the tightest deadline.

`scheduling.slo.step_budget` has what a step may take: when tokens are due, what prompts need to be
in time, and what is left for jobs. Here is the order in which it is given away: rows that decode,
prompts by their deadlines (infeasible ones last), batch work, jobs.

Batch work (`View.batch`) runs in what requests leave, too: beside jobs it gets `batch_share` of it,
in time and in pages, and all of it where some of it should have been done by now. It has no SLO;
nothing that it takes makes a request late that a job's work would not.

Where several tenants have work, each has a share of every step, and all of the above holds within
it (`_tenants.py`).

In any case jobs get `least_share` of the time, in smallest pieces, so that none stands still; where
requests are marginal, a fiftieth of it.

The aim: SLOs that requests alone hold at p99, they hold at p99 beside jobs.
tests/torch/test_simulation.py holds random loads against it, experiments/slo_edge.py loads at which
requests alone are marginal, of which a few fall below (benchmarks/slo-edge.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import ClassVar

from coserve.scheduling.building import PlanBuilder
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.memory import MemoryPlan, rows_to_go
from coserve.scheduling.order import by_priority
from coserve.scheduling.pieces import WHOLE_STRETCH
from coserve.scheduling.plan import JobProgress, Plan, RequestProgress, View
from coserve.scheduling.policies._tenants import needs_shares, plan_shared
from coserve.scheduling.policies.base import Policy, setting
from coserve.scheduling.slo.deadlines import Deadlines
from coserve.scheduling.slo.infeasible import infeasible_last
from coserve.scheduling.slo.step_budget import BudgetSettings, StepBudget

# A job in memory that has stood still for as many of the longest steps has its turn: one that was
# served less, or whose pieces are always cheaper, would keep it waiting. 1.5 and 6: within 0.1%
# with six jobs (benchmarks/slack-constants.md).
AGED_WAITS = 3.0
# Beside requests a pack takes about this many times the time that it takes alone. 1 and 4: the same
# on all simulated loads.
PACK_STRETCH = 2.0
# A request waits for a pack to be done only if it has this many times the time. 2 and 8: the
# same on all simulated loads.
CAN_WAIT_TIMES = 4.0


@dataclass(frozen=True, kw_only=True)
class Slack(Policy):
    """The default policy: requests first, jobs in whatever time their SLOs leave over."""

    summary: ClassVar[str] = "requests first, jobs in whatever time their SLOs leave over"
    serves_batch: ClassVar[bool] = True
    is_fair: ClassVar[bool] = True
    shares_time: ClassVar[bool] = True
    """Whether steps are divided among tenants by time; otherwise only the order of requests and
    jobs is."""

    max_gap_tpots: float = setting(
        4.0, "The longest gap between two tokens of a request, in units of its TPOT SLO.", least=1
    )
    reserve_tpots: float = setting(
        0.5,
        "Reserve that every request keeps of the time saved by early tokens, in TPOTs; near its "
        "SLO 1.5 at least.",
    )
    arrival_share: float = setting(
        0.1,
        "Share of the TTFT SLO that an arrival may wait for a step with fine-tuning in it to end.",
        most=1,
    )
    least_share: float = setting(
        0.005,
        "Share of the time that jobs get however much requests press; a fiftieth of it where SLOs "
        "are marginal.",
        most=0.5,
    )

    batch_share: float = setting(
        0.5,
        "Share of the time left by requests that batch work gets beside jobs; late batch work gets "
        "all of it.",
        most=1,
    )
    divides: bool = setting(
        True,
        "Whether jobs may run beside the forward pass, each on its part of the device, where that "
        "brings more.",
    )

    def plan(self, view: View, latency: LatencyModel) -> Plan:
        return self.plan_steps(view, latency, tunes=True)

    def plan_steps(self, view: View, latency: LatencyModel, *, tunes: bool) -> Plan:
        """Return the plan, with jobs in it or without."""
        if self.shares_time and needs_shares(view):
            return plan_shared(self, view, latency, tunes=tunes)
        tunes = tunes and bool(view.jobs)
        batch_share = self._batch_share(view, tunes=tunes)
        memory = self._share_memory(view, latency, batch_share, tunes=tunes)
        budget = self.budget(view, latency, memory.requests)
        build = PlanBuilder(view, latency, memory)
        # Requests come first: rows that decode, then prompts.
        deadlines, all_in = self._serve(
            build, memory, budget, others_want_time=tunes or bool(memory.batch)
        )
        # Time for batch work and jobs; none while a prompt still has rows that found no time.
        until_s, max_s = 0.0, inf
        if all_in and (tunes or memory.batch):
            until_s, max_s = budget.jobs_until_s(build.step_s, deadlines, memory)
        if memory.batch:
            left_s = max(0.0, until_s - build.step_s)
            # On a slow device a piece may be longer than its share of any step.
            must = build.runs_nothing and batch_share == 1
            build.batch(memory.batch, build.step_s + batch_share * left_s, must=must)
        if tunes:
            # A job's piece may be deferred for a step with more time, as long as a token may be,
            # if there can be one: near an SLO requests keep the time that they save.
            may_grow = until_s < max_s and not budget.allowance.is_near
            jobs = self.shares(memory.jobs, view)
            if self.divides and view.num_units > 1:
                # Before `tune`, which plans tasklets for the divided device then.
                build.divide(jobs, until_s)
            max_defer_s = self.max_gap_tpots * budget.tpot_s if may_grow else 0.0
            build.tune(jobs, until_s, max_defer_s=max_defer_s, least_share=budget.least_share)
        return build.build()

    def budget(
        self, view: View, latency: LatencyModel, requests: Sequence[RequestProgress] = ()
    ) -> StepBudget:
        """Return what a step may take that serves these requests."""
        return StepBudget(view, latency, self._budget_settings, requests)

    def arrival_wait_s(self, ttft_s: float, tpot_s: float) -> float:
        """Return the longest that a request waits for a step with jobs in it that runs when it
        arrives.

        Args:
            ttft_s: its SLO.
            tpot_s: the tightest SLO of those that run.
        """
        return self._budget_settings.arrival_wait_s(ttft_s, tpot_s)

    # -- what a subclass may change -----------------------------------------------------

    def queue(self, view: View) -> Sequence[RequestProgress]:
        """Return waiting requests in the order in which they are to be admitted, as far as they can
        be in time.
        """
        return view.waiting

    def turns(self, view: View) -> Sequence[JobProgress]:
        """Return jobs in the order in which they are to be served: the one served least first, but
        who has waited for many steps before all.
        """
        longest_s = max([job.waited_s for job in view.jobs]) if len(view.jobs) > 1 else 0.0
        # A lower bound of the wait computed below: most plans end here.
        if longest_s <= AGED_WAITS * self.arrival_share * view.ttft_s:
            return view.jobs
        tpot_s = min([request.info.tpot_s for request in view.requests], default=view.tpot_s)
        waited_s = AGED_WAITS * self.arrival_wait_s(view.ttft_s, tpot_s)
        # False sorts first: these are the jobs that have waited too long.
        return sorted(view.jobs, key=lambda job: job.waited_s <= waited_s)

    def shares(self, jobs: Sequence[JobProgress], view: View) -> Sequence[JobProgress]:
        """Return those of the jobs that can run now which may take part in this step."""
        return jobs

    # -- the parts of a plan ------------------------------------------------------------

    @cached_property
    def _budget_settings(self) -> BudgetSettings:
        return BudgetSettings(
            max_gap_tpots=self.max_gap_tpots,
            reserve_tpots=self.reserve_tpots,
            arrival_share=self.arrival_share,
            least_share=self.least_share,
        )

    def _batch_share(self, view: View, *, tunes: bool) -> float:
        """Return the share that batch work may have of what requests leave."""
        if not tunes:
            return 1.0
        if not (view.batch or view.batch_waiting):
            return self.batch_share
        dues_s = [each.info.batch_due_s for each in (*view.batch, *view.batch_waiting)]
        is_late = any(due_s is not None and due_s < view.now_s for due_s in dues_s)
        return 1.0 if is_late else self.batch_share

    def _share_memory(
        self, view: View, latency: LatencyModel, batch_share: float, *, tunes: bool
    ) -> MemoryPlan:
        """Return the pages that change hands."""
        memory = MemoryPlan(view)

        def can_wait(request: RequestProgress, job: JobProgress) -> bool:
            budget = self.budget(view, latency)
            # Near an SLO no request has time to wait for a pack.
            if budget.allowance.is_near:
                return False
            left_s = budget.due_at_s(request, self.reserve_tpots) - view.now_s
            return CAN_WAIT_TIMES * _wait_for_pack_s(request, job, latency) < left_s

        memory.grow(can_wait)
        if view.waiting:
            # Priorities decide first, feasibility within one priority.
            memory.admit_waiting(
                by_priority(infeasible_last(self.queue(view), view, latency)), can_wait
            )
        if view.batch or view.batch_waiting:
            memory.serve_batch(batch_share * view.num_pages if view.num_pages else inf)
        if tunes:
            memory.begin_packs(view.jobs, lambda job: PACK_STRETCH * latency.pack_s(job))
            memory.take_turns(self.turns(view))
        return memory

    def _serve(
        self, build: PlanBuilder, memory: MemoryPlan, budget: StepBudget, *, others_want_time: bool
    ) -> tuple[Deadlines, bool]:
        """Add rows of requests. Returns when decoding ones are due, and whether all prompts are
        in.
        """
        if not (requests := memory.requests):
            return Deadlines(), True
        # One row: the next token. More: a prompt, or what a preempted request computes again.
        decoding = [request for request in requests if request.num_rows == 1]
        prompts = (
            []
            if len(decoding) == len(requests)
            else [each for each in requests if each.num_rows > 1]
        )
        build.decode(decoding)
        decode_s = build.seconds
        need = budget.prompts_need(prompts, decode_s)
        deadlines = budget.deadlines(decoding, decode_s, need)
        if not prompts:
            return deadlines, True
        # Nobody decodes, so only arriving requests limit the prompts.
        if not decoding:
            alone = budget.prefill_alone(need)
            ordered = [*need.aged, *need.ordered]
            all_in = build.prefill(
                ordered, alone.seconds, urgent=alone.urgent, stretch=WHOLE_STRETCH
            )
        else:
            # A budget of 0, but urgent: an aged prompt gets its smallest piece before the others.
            build.prefill(need.aged, 0.0, urgent=True)
            beside = budget.prefill_beside(
                deadlines, need, build.seconds, others_want_time=others_want_time
            )
            # An aged prompt got one piece only, so not all prompts are in.
            all_in = (
                build.prefill(need.ordered, beside.seconds, urgent=beside.urgent) and not need.aged
            )
        return (budget.before_prompts(deadlines, need) if all_in else deadlines), all_in


def _wait_for_pack_s(request: RequestProgress, job: JobProgress, latency: LatencyModel) -> float:
    """Return the time until a request has its next token if it gets its pages when a pack is
    done.
    """
    # Share of the pack that is still to run, of one pass forward and one backward.
    left = rows_to_go(job) / (2 * job.num_rows)
    return PACK_STRETCH * left * latency.pack_s(job) + latency.prompt_s(
        request.num_past + request.num_rows
    )

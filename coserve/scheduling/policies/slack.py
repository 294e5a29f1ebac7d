"""The default: requests first, then as much fine-tuning as fits before the tightest deadline.

`scheduling.slo.deadlines` says when tokens are due. The time to the tightest deadline is the step's budget. Prompts
take from it what they need to be in time, and more where decoding requests have it to spare; lost causes come last.
Jobs get what is left, and stop before any of these would be late:

- A step at the pace of the SLOs takes nothing of what was banked, so jobs may have it, also where they may have nothing
  else, unless requests just hold their TTFT, or too few have been seen to rule it out. This is all that token fusion
  fills. Prompts may make requests late, by less than these could catch up over their remaining tokens.
- Beyond that a little of every bank is never spent: a step that takes longer than predicted finds it there.
- No step with fine-tuning in it is planned to last longer than `arrival_wait_s`, which bounds what a request that
  arrives just after planning waits for: with nothing else running, its first row enters the next step.
- Where recent requests by themselves needed nearly all of their SLO, jobs may take of each only what they left, and the
  less the more of the time requests filled lately: a queue that hardly ever empties makes all that come later late by
  what jobs take now. As long as it is not known how much of the time they fill, jobs get nothing there.
- Jobs that stretch requests keep pages and slots occupied: as these get scarce, jobs give way, and wholly while a
  request that can still be in time waits for them.

Batch work (`View.batch`) runs in what requests leave, too: beside jobs it gets `batch_share` of it, in time and in
pages, and all of it where some of it should have been done by now. It has no SLO; nothing that it takes makes a request
late that a job's work would not.

Where several tenants have work, each has a share of every step, and all of the above holds within it (`_tenants.py`).

In any case jobs get `least_share` of the time, in smallest pieces, so that none stands still; where requests just hold
their SLOs, a fiftieth of it.

The aim: SLOs that requests alone hold at p99, they hold at p99 beside jobs. tests/torch/test_simulation.py holds random
loads against it, benchmarks/slo_edge.py loads that requests alone just hold, of which a few fall below
(benchmarks/slo-edge.md).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from coserve.scheduling.building import PlanBuilder
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.memory import MemoryPlan, rows_to_go
from coserve.scheduling.order import by_priority
from coserve.scheduling.pieces import WHOLE_STRETCH
from coserve.scheduling.plan import JobProgress, NeedView, Plan, RequestProgress, View
from coserve.scheduling.policies._tenants import needs_shares, plan_shared
from coserve.scheduling.policies.base import Policy, setting
from coserve.scheduling.slo.deadlines import AIMED, Deadlines, decode_deadlines, due_at_s, sure_by_s
from coserve.scheduling.slo.infeasible import has_waited, is_lost, lost_last

# Where others want the time that requests save, prompts leave one TPOT in every bank as long as they need less than
# this share of the time to be in time; then they take the share that they need, though requests be late meanwhile that
# can catch up. Prompts that would need more than the second share, and than what leaves no gap that is noticed, can't
# be in time beside requests that decode.
URGENT_SHARE, MOST_SHARE = 1 / 3, 0.8
# A step of two TPOTs is always allowed, up to this share of the TTFT SLO: on a slow device nothing would fit otherwise.
MOST_ARRIVAL_SHARE = 0.5
# Requests that by themselves need more of their SLO than this are near its edge: each may lose to jobs no more than
# was left. A step of jobs may take no more than the second share of what TTFTs left, in units of what they needed.
EDGE, WAIT_SHARE_OF_REST = 0.75, 0.3
# There every bank keeps at least this much: a burst of prompts finds it.
EDGE_RESERVE_TPOTS = 1.5
# Requests that need more of their TTFT than this just hold it.
JUST_HELD = 0.97
# Those that need less of their TTFT than this, of what is known of it, have time for the prompts of a burst.
FAR = 0.5
# Of their time per token these may lose to jobs this much, times u / (1 - u), where u is how far the time is unfilled.
FAR_SHARE = 0.25
# Near the edge jobs get less the more of the time requests needed lately: from the first of these shares on; nothing
# above the second. A queue that forms then never ends, so that what jobs take is taken from all that come later.
FILLED = 0.8, 0.9
# There jobs get this much of `least_share`; unless more than this share of requests would be late without any jobs.
EDGE_LEAST_SHARE, MOST_LATE_SHARE = 0.02, 0.05
# Below this share of free pages, or of free slots, jobs get less the fewer there are.
SCARCE = 0.25
# A request waits for pages or a slot once it has waited this share of its TTFT SLO.
QUEUED_SHARE = 0.05
# A job in memory that has stood still for as many of the longest steps has its turn: one that was served less, or whose
# pieces are always cheaper, would keep it waiting.
AGED_WAITS = 3.0
# Beside requests a pack takes about this many times the time that it takes alone.
PACK_STRETCH = 2.0
# A request waits for a pack to be done only if it has this many times the time.
CAN_WAIT_TIMES = 4.0


@dataclass(frozen=True, kw_only=True)
class Slack(Policy):
    """See the module."""

    summary: ClassVar[str] = "requests first, jobs in whatever time their SLOs leave over"
    serves_batch: ClassVar[bool] = True
    is_fair: ClassVar[bool] = True
    # Whether steps are divided among tenants by time; otherwise only the order of requests and jobs is.
    shares_time: ClassVar[bool] = True

    max_gap_tpots: float = setting(
        4.0, "The longest gap between two tokens of a request, in units of its TPOT SLO.", least=1
    )
    reserve_tpots: float = setting(
        0.5, "What every request keeps of the time that early tokens saved, in TPOTs; near its SLO 1.5 at least."
    )
    arrival_share: float = setting(
        0.1, "Share of the TTFT SLO that an arrival may wait for a step with fine-tuning in it to end.", most=1
    )
    least_share: float = setting(
        0.005,
        "Share of the time that jobs get however much requests press; a fiftieth of it where SLOs are just held.",
        most=0.5,
    )

    batch_share: float = setting(
        0.5, "Of what requests leave, the share of batch work where jobs want it, too; what is late gets all.", most=1
    )
    divides: bool = setting(
        True, "Whether jobs may run beside the forward pass, each on its part of the device, where that brings more."
    )

    def plan(self, view: View, latency: LatencyModel) -> Plan:
        return self.plan_steps(view, latency, tunes=True)

    def plan_steps(self, view: View, latency: LatencyModel, *, tunes: bool) -> Plan:
        """Return the plan, with jobs in it or without."""
        if self.shares_time and needs_shares(view):
            return plan_shared(self, view, latency, tunes=tunes)
        memory, tunes = MemoryPlan(view), tunes and bool(view.jobs)

        def can_wait(request: RequestProgress, job: JobProgress) -> bool:
            left_s = self.due_at_s(request, self.reserve_tpots) - view.now_s
            return nearness(view) < EDGE and CAN_WAIT_TIMES * _wait_for_pack_s(request, job, latency) < left_s

        memory.grow(can_wait)
        if view.waiting:
            memory.admit_waiting(by_priority(lost_last(self.queue(view), view, latency)), can_wait)
        batch_share = self._batch_share(view, tunes=tunes)
        if view.batch or view.batch_waiting:
            memory.serve_batch(batch_share * view.num_pages if view.num_pages else inf)
        if tunes:
            memory.begin_packs(view.jobs, lambda job: PACK_STRETCH * latency.pack_s(job))
            memory.take_turns(self.turns(view))
        build = PlanBuilder(view, latency, memory)
        tpot_s = tightest_tpot_s(view, memory.requests)
        deadlines, all_in = self._serve(build, memory, view, latency, tpot_s, tunes=tunes)
        until_s, most_s = 0.0, inf
        if all_in and (tunes or memory.batch):
            until_s, most_s = self._until_s(build, deadlines, memory, view, latency, tpot_s)
        if memory.batch:
            left_s = max(0.0, until_s - build.step_s)
            # On a slow device a piece may be longer than its share of any step.
            must = build.runs_nothing and batch_share == 1
            build.batch(memory.batch, build.step_s + batch_share * left_s, must=must)
        if tunes:
            # As long as a request's token may, a job's piece may wait for more time than there is; where there can be:
            # near an SLO, requests that came lately keep what they save.
            may_grow = until_s < most_s and nearness(view) <= EDGE
            max_defer_s = self.max_gap_tpots * tpot_s if may_grow else 0.0
            least_share = self.least_share_now(view)
            jobs = self.shares(memory.jobs, view)
            if self.divides and view.num_units > 1:
                build.divide(jobs, until_s)
            build.tune(jobs, until_s, max_defer_s=max_defer_s, least_share=least_share)
        return build.build()

    def _batch_share(self, view: View, *, tunes: bool) -> float:
        """Of what requests leave, what batch work may have."""
        if not tunes:
            return 1.0
        if not (view.batch or view.batch_waiting):
            return self.batch_share
        batch = (*view.batch, *view.batch_waiting)
        is_late = any(each.info.batch_due_s is not None and each.info.batch_due_s < view.now_s for each in batch)
        return 1.0 if is_late else self.batch_share

    def queue(self, view: View) -> Sequence[RequestProgress]:
        """Waiting requests in the order in which they are to be admitted, as far as they can be in time."""
        return view.waiting

    def turns(self, view: View) -> Sequence[JobProgress]:
        """Jobs in the order in which they are to be served: the one served least first, but who has waited for many
        steps before all.
        """
        longest_s = max([job.waited_s for job in view.jobs]) if len(view.jobs) > 1 else 0.0
        if longest_s <= AGED_WAITS * self.arrival_share * view.ttft_s:
            return view.jobs
        waited_s = AGED_WAITS * self.arrival_wait_s(view, tightest_tpot_s(view, view.requests))
        return sorted(view.jobs, key=lambda job: job.waited_s <= waited_s)

    def shares(self, jobs: Sequence[JobProgress], view: View) -> Sequence[JobProgress]:
        """Of the jobs that can run now, those that may take part in this step."""
        return jobs

    def arrival_wait_s(self, view: View, tpot_s: float) -> float:
        """The longest that a request waits for a step with jobs in it that runs when it arrives; tpot_s: the tightest
        SLO of those that run.
        """
        return max(self.arrival_share * view.ttft_s, min(2 * tpot_s, MOST_ARRIVAL_SHARE * view.ttft_s))

    def max_jobs_s(self, view: View, tpot_s: float, requests_s: float) -> float:
        """Return the longest that jobs may take of a step whose other work takes requests_s, for those that arrive."""
        return min(self.arrival_wait_s(view, tpot_s) - requests_s, wait_share(view.need.ttft) * view.ttft_s)

    def due_at_s(self, request: RequestProgress, reserve_tpots: float = 0.0) -> float:
        """When a request's next token is due."""
        return due_at_s(request, max_gap_tpots=self.max_gap_tpots, reserve_tpots=reserve_tpots)

    # -- requests -------------------------------------------------------------------

    def _serve(
        self, build: PlanBuilder, memory: MemoryPlan, view: View, latency: LatencyModel, tpot_s: float, *, tunes: bool
    ) -> tuple[Deadlines, bool]:
        """Rows of requests, beside jobs or not. Returns when decoding ones are due, and whether all prompts are in."""
        if not (requests := memory.requests):
            return Deadlines(), True
        decoding = [request for request in requests if request.num_rows == 1]
        build.decode(decoding)
        prompts = [] if len(decoding) == len(requests) else [each for each in requests if each.num_rows > 1]
        due_s = {each.id: self.due_at_s(each) for each in prompts}
        most_share = max(MOST_SHARE, 1 - build.seconds / (self.max_gap_tpots * tpot_s))
        share, piece, ordered = self._share_of_prompts(prompts, due_s, build.seconds, most_share, view, latency)
        deadlines = decode_deadlines(
            decoding,
            now_s=view.now_s,
            decode_s=build.seconds,
            lost_tpot_s=view.tpot_s,
            max_gap_tpots=self.max_gap_tpots,
            prompt_reserve_tpots=0.0 if share > URGENT_SHARE else 1.0,
            reserve_tpots=max(self.reserve_tpots, EDGE_RESERVE_TPOTS if nearness(view) > EDGE else 0.0),
            jobs_share=jobs_share(view.need),
            margin=latency.corrections.margin,
        )
        if not prompts:
            return deadlines, True
        if not decoding:
            # A request that arrives now waits for this step to end.
            budget_s = inf if share > MOST_ARRIVAL_SHARE else self.arrival_wait_s(view, tpot_s)
            all_in = build.prefill([*piece, *ordered], budget_s, urgent=True, stretch=WHOLE_STRETCH)
        else:
            build.prefill(piece, 0.0, urgent=True)
            budget_s = deadlines.prompts_s - view.now_s
            if share > URGENT_SHARE:
                # At the very pace nobody would catch up.
                urgent_s = (deadlines.urgent_s - view.now_s) / (1 + latency.corrections.margin)
                budget_s = max(budget_s, min(build.seconds / (1 - min(share, most_share)), urgent_s))
            if not (tunes or memory.batch) and _are_far(view.need):
                budget_s = max(budget_s, (deadlines.free_s - view.now_s) / (1 + latency.corrections.margin))
            urgent = share > MOST_ARRIVAL_SHARE or not share
            all_in = build.prefill(ordered, budget_s, urgent=urgent) and not piece
        if all_in:
            # What is late already does not keep jobs from the step that ends it.
            first_s = min([each_s for each_s in due_s.values() if each_s > view.now_s], default=inf)
            first_s = sure_by_s(first_s, view.now_s, latency.corrections.margin)
            deadlines = deadlines.with_jobs_until(first_s)
        return deadlines, all_in

    def _share_of_prompts(
        self,
        prompts: Sequence[RequestProgress],
        due_s: Mapping[str, float],
        decode_s: float,
        most_share: float,
        view: View,
        latency: LatencyModel,
    ) -> tuple[float, list[RequestProgress], list[RequestProgress]]:
        """The share of the time that prompts need to be in time, all that can be; one that cannot, has waited for very
        long, and gets a piece before them; and their order: by their deadlines (due_s), then lost causes as they came.
        """
        aged, timely, lost = (list[RequestProgress]() for _ in range(3))
        share = needed_s = 0.0
        for prompt in by_priority(sorted(prompts, key=lambda each: due_s[each.id])):
            alone_s = latency.prompt_s(prompt.num_rows, prompt.num_past)
            left_s = (due_s[prompt.id] - view.now_s) / (1 + latency.corrections.margin) - decode_s
            if alone_s > left_s:
                (aged if has_waited(prompt, view) else lost).append(prompt)
                continue
            timely.append(prompt)
            if needed_s + alone_s <= most_share * left_s or not needed_s:
                needed_s += alone_s
                share = max(share, needed_s / left_s)
        return (share, aged[:1], [*timely, *lost]) if share else (share, [], [*aged, *lost])

    # -- jobs -------------------------------------------------------------------------

    def least_share_now(self, view: View) -> float:
        """Return the share of the time that jobs get in any case. Where requests just hold their SLOs by themselves,
        each is late by all that jobs took since the device was last idle: there it is next to nothing.
        """
        at_edge = nearness(view) > EDGE and view.need.late_share < MOST_LATE_SHARE
        return self.least_share * (EDGE_LEAST_SHARE if at_edge else 1.0)

    def _until_s(
        self,
        build: PlanBuilder,
        deadlines: Deadlines,
        memory: MemoryPlan,
        view: View,
        latency: LatencyModel,
        tpot_s: float,
    ) -> tuple[float, float]:
        """Seconds until which a step with jobs in it must have ended; and the most that these can become as requests
        save time up. tpot_s: the tightest SLO of those that run.
        """
        if _queues(memory, view, latency):
            return 0.0, inf
        requests_s = build.step_s
        most_s = self.max_jobs_s(view, tpot_s, requests_s)
        # A step at the pace of the SLOs takes nothing of what was banked.
        own_s = max(deadlines.extra_s, pace_share(view.need) * (AIMED * tpot_s - requests_s))
        extra_s = min(deadlines.jobs_s - view.now_s - requests_s, own_s, most_s)
        room = _room(memory, view) if memory.requests else 1.0
        return requests_s + room * extra_s, requests_s + room * most_s


def nearness(view: View) -> float:
    """How near recent requests came to one of their SLOs by themselves; 1: just held."""
    return max(view.need.ttft, view.need.tpot)


def _are_far(need: NeedView) -> bool:
    """Whether requests are known to need little of their TPOT, or none has been seen."""
    return need.tpot <= EDGE if need.tpot else not need.known


def tightest_tpot_s(view: View, requests: Sequence[RequestProgress]) -> float:
    """The least TPOT SLO of these requests; without any, of the next."""
    return min([request.info.tpot_s for request in requests]) if requests else view.tpot_s


def jobs_share(need: NeedView) -> float:
    """What jobs may take of a request's time per token, in all: as much as they like where requests need no more than
    EDGE of it themselves; nothing where they need all of it, or where the time was filled lately, or may have been.
    Where first tokens have time, what they need of their TPOT says little (`pace_share`): how far the time was filled.
    """
    if need.tpot <= EDGE:
        return inf
    if not need.time:
        return 0.0
    unfilled = _unfilled(need)
    share = unfilled * max(0.0, 1 - need.tpot) ** 2 / (need.tpot - EDGE)
    if need.ttft >= FAR * need.known or need.tpot >= 1:
        return share
    return inf if unfilled == 1 else max(share, FAR_SHARE * unfilled / (1 - unfilled))


def pace_share(need: NeedView) -> float:
    """What jobs may take of a step at the pace of the SLOs. Requests that are held to this pace are more when a burst
    of prompts comes, and have saved up less for it: harmless, unless requests just hold their TTFT, or it may be so.
    The first burst that shows it is late by what jobs took before; less so where time is left in which its queue ends.
    Their TPOT tells nothing of that as long as they hold it: prompts, too, may take all of a step at this pace, whether
    they have to or not.
    """
    if need.tpot <= EDGE:
        return 1.0
    if not need.time or need.tpot >= 1 or need.ttft >= JUST_HELD:
        return 0.0
    return 1.0 if need.ttft < FAR * need.known else max(need.known**2, _unfilled(need))


def _unfilled(need: NeedView) -> float:
    """How far requests left the time unfilled lately: 1 up to the first of FILLED, 0 from the second on."""
    return max(0.0, min(1.0, (FILLED[1] - need.time) / (FILLED[1] - FILLED[0])))


def wait_share(need: float) -> float:
    """What a step of jobs may take of a TTFT, where requests need this share of it themselves: nothing at 1."""
    return WAIT_SHARE_OF_REST * max(0.0, 1 - need) / max(need, WAIT_SHARE_OF_REST)


def _wait_for_pack_s(request: RequestProgress, job: JobProgress, latency: LatencyModel) -> float:
    """Until a request has its next token if it gets its pages when a pack is done."""
    left = rows_to_go(job) / (2 * job.num_rows)
    return PACK_STRETCH * left * latency.pack_s(job) + latency.prompt_s(request.num_past + request.num_rows)


def _queues(memory: MemoryPlan, view: View, latency: LatencyModel) -> bool:
    """Whether a request that can still be in time waits for pages or a slot."""
    if memory.waits_for_pack or not view.waiting:
        return False
    admitted = set(memory.admit)
    return any(
        request.may_start
        and request.id not in admitted
        and view.now_s - request.info.arrival_s > QUEUED_SHARE * request.info.ttft_s
        and not is_lost(request, view, latency)
        for request in view.waiting
    )


def _room(memory: MemoryPlan, view: View) -> float:
    """How much of the time that requests leave over jobs may take, as pages and slots get scarce: from 1 to 0."""
    slots = 1 - len(memory.requests) / view.max_requests
    given = sum([job.num_pages for job in memory.jobs]) + sum([each.num_held for each in memory.batch])
    pages = (memory.free + given) / view.num_pages if view.num_pages else 1.0
    return max(0.0, min(1.0, slots / SCARCE, pages / SCARCE))

"""The default: requests first, then as much fine-tuning as fits before the tightest deadline.

A running request's next token is due when its mean time per output token would reach its SLO (what earlier tokens came
early is banked), and no later than a gap that a reader would notice. A waiting request's first token is due at
arrival + TTFT. The time to the tightest of these is the step's budget.

Two things keep p99 what it says. A little of the bank is never spent, so that a step that takes longer than predicted
finds it there. And no step with fine-tuning in it is planned to last longer than `arrival_wait_s`, which bounds what a
request that arrives just after planning waits for: with nothing else running, its first row enters the next step.

What that promises: where requests alone leave `arrival_wait_s` of the TTFT SLO and 15% of the TPOT SLO
at p99, both are held at p99 beside jobs, on devices where a few more decoding requests make no longer step. Nearer to
the edge the wait for a running step may be what breaks TTFT; and where decoding is bound by arithmetic, requests that
queued up meanwhile, and so run side by side, may break TPOT. tests/torch/test_simulation.py holds random loads against
this.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from coserve.scheduling.building import PlanBuilder
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.memory import MemoryPlan
from coserve.scheduling.plan import JobView, Plan, RequestView, View
from coserve.scheduling.policies.base import Policy, setting

# The reserve is saved up over the first tokens of a request, as many as these.
RESERVE_TOKENS = 8
# Prompts leave so much in the bank, too, until the first of them has less time than so many times what all of them
# take; then they may have all of it. With less than so many times, the first has to go on whoever is late for it: what
# a decode step leaves of a TPOT is about half of the time.
PROMPT_RESERVE_TPOTS, URGENT_TIMES, URGENT_TIMES_ALONE = 1.0, 3.0, 2.0
# A step of two TPOTs is always allowed, up to this share of the TTFT SLO: on a slow device nothing would fit otherwise.
MOST_ARRIVAL_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class Slack(Policy):
    """See the module."""

    summary: ClassVar[str] = "requests first, jobs in whatever time their SLOs leave over"

    max_gap_tpots: float = setting(
        4.0, "The longest gap between two tokens of a request, in units of its TPOT SLO.", least=1
    )
    reserve_tpots: float = setting(1.5, "What every request keeps of the time that early tokens saved, in TPOTs.")
    arrival_share: float = setting(
        0.1, "Share of the TTFT SLO that an arrival may wait for a step with fine-tuning in it to end.", most=1
    )

    def plan(self, view: View, latency: LatencyModel) -> Plan:
        return self.plan_steps(view, latency, tunes=True)

    def plan_steps(self, view: View, latency: LatencyModel, *, tunes: bool) -> Plan:
        """The plan, with jobs in it or without."""
        memory = MemoryPlan(view)
        memory.grow()
        memory.admit_waiting(self.queue(view))
        if tunes:
            memory.begin_packs(self.turns(view))
        build = PlanBuilder(view, latency)
        if self._serve(build, memory.requests, view, latency) and tunes:
            self._tune(build, memory, view, latency)
        return build.build(memory)

    def queue(self, view: View) -> tuple[RequestView, ...]:
        """Waiting requests in the order in which they are to be admitted."""
        return view.waiting

    def turns(self, view: View) -> tuple[JobView, ...]:
        """Jobs in the order in which they are to be served."""
        return view.jobs

    def arrival_wait_s(self, view: View, requests: Sequence[RequestView]) -> float:
        """The longest that a request waits for the step that runs when it arrives; requests: those that run."""
        tpots_s = 2 * tightest_tpot_s(view, requests)
        return max(self.arrival_share * view.ttft_s, min(tpots_s, MOST_ARRIVAL_SHARE * view.ttft_s))

    def due_at_s(self, request: RequestView, reserve_tpots: float = 0.0) -> float:
        """When a request's next token is due, with so much of the bank kept once the request is under way."""
        return self.earliest_due_s([request], reserve_tpots)

    def earliest_due_s(self, requests: Sequence[RequestView], reserve_tpots: float) -> float:
        """The first of these moments; never, without requests."""
        earliest_s, max_gap_tpots = inf, self.max_gap_tpots
        for _, _, _, num_output, arrival_s, first_s, last_s, ttft_s, tpot_s, *_ in requests:
            if first_s is None:
                due_s = arrival_s + ttft_s
            else:
                # Asked some hundred times a step, so without calls.
                reserve = reserve_tpots if num_output >= RESERVE_TOKENS else reserve_tpots * num_output / RESERVE_TOKENS
                banked_s = first_s + (num_output - reserve) * tpot_s
                noticed_s = last_s + max_gap_tpots * tpot_s
                due_s = banked_s if banked_s < noticed_s else noticed_s
            if due_s < earliest_s:
                earliest_s = due_s
        return earliest_s

    def _serve(self, build: PlanBuilder, requests: Sequence[RequestView], view: View, latency: LatencyModel) -> bool:
        """Rows of requests; whether all of them are in."""
        decoding = [request for request in requests if request.num_rows == 1]
        build.decode(decoding)
        if len(decoding) == len(requests):
            return True
        prompts = sorted((request for request in requests if request.num_rows > 1), key=self.due_at_s)
        alone_s = latency.prompt_s(sum([request.num_rows for request in prompts]))
        left_s = self.due_at_s(prompts[0]) - view.now_s
        kept = 0.0 if URGENT_TIMES * alone_s > left_s else PROMPT_RESERVE_TPOTS
        budget_s = (self.earliest_due_s(decoding, kept) - view.now_s) / (1 + latency.margin)
        return build.prefill(prompts, budget_s, urgent=URGENT_TIMES_ALONE * alone_s > left_s)

    def _tune(self, build: PlanBuilder, memory: MemoryPlan, view: View, latency: LatencyModel) -> None:
        """Jobs' rows, in what is left of the time."""
        due_s = self.earliest_due_s(memory.requests, self.reserve_tpots)
        budget_s, wait_s = (due_s - view.now_s) / (1 + latency.margin), self.arrival_wait_s(view, memory.requests)
        # As long as a request's token may, a job's piece may wait for more time than there is; where there can be any.
        max_defer_s = self.max_gap_tpots * tightest_tpot_s(view, memory.requests) if budget_s < wait_s else 0.0
        build.tune(memory.jobs, min(budget_s, wait_s), max_defer_s=max_defer_s)


def tightest_tpot_s(view: View, requests: Sequence[RequestView]) -> float:
    """The least TPOT SLO of these requests; without any, of the next."""
    return min([request.tpot_s for request in requests], default=view.tpot_s)

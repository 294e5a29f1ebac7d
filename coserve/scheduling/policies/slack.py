"""The default: requests first, then as much fine-tuning as fits before the tightest deadline.

A running request's next token is due when its mean time per output token would reach the objective (what earlier
tokens came early is banked), and no later than a gap that a reader would notice. A waiting request's first token is
due at arrival + TTFT. The time to the tightest of these is the step's budget.

Two things keep p99 what it says. A little of the bank is never spent, so that a step that takes longer than predicted
finds it there. And no step with fine-tuning in it is planned to last longer than `arrival_wait_s`, which bounds what a
request that arrives just after planning waits for: with nothing else running, its first row enters the next step.

What that promises: where requests alone leave `arrival_wait_s` of the TTFT objective and 15% of the TPOT objective
at p99, both are held at p99 beside jobs, on devices where a few more decoding requests make no longer step. Nearer to
the edge the wait for a running step may be what breaks TTFT; and where decoding is bound by arithmetic, requests that
queued up meanwhile, and so run side by side, may break TPOT. tests/torch/test_simulation.py holds random loads against
this.
"""

from collections.abc import Sequence
from math import inf

from coserve.scheduling.building import PlanBuilder
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import Plan, RequestView, View

# The longest gap between two tokens of a request, in units of its TPOT objective.
MOST_GAP_TPOTS = 4.0
# What is kept in the bank: so many TPOTs, saved up over the first so many tokens.
RESERVE_TPOTS, RESERVE_TOKENS = 1.5, 8
# Prompts leave so much in the bank, too, until the first of them has less time than so many times what all of them
# take; then they may have all of it. With less than so many times, the first has to go on whoever is late for it: what
# a decode step leaves of a TPOT is about half of the time.
PROMPT_RESERVE_TPOTS, URGENT_TIMES, URGENT_TIMES_ALONE = 1.0, 3.0, 2.0
# Share of the TTFT objective that an arrival may wait for a step to end; a step of two TPOTs is always allowed, up to
# the second share: on a slow device nothing would fit otherwise.
ARRIVAL_SHARE, MOST_ARRIVAL_SHARE = 0.1, 0.5


def plan(view: View, latency: LatencyModel) -> Plan:
    """See the module."""
    build = PlanBuilder(view, latency)
    patience = 1 + latency.margin
    decoding = [request for request in view.requests if request.num_rows == 1]
    build.decode(decoding)
    if len(decoding) < len(view.requests):
        prompts = sorted((request for request in view.requests if request.num_rows > 1), key=due_at_s)
        alone_s = latency.prompt_s(sum([request.num_rows for request in prompts]))
        left_s = due_at_s(prompts[0]) - view.now_s
        kept = 0.0 if URGENT_TIMES * alone_s > left_s else PROMPT_RESERVE_TPOTS
        due_s = earliest_due_s(decoding, kept)
        if not build.prefill(prompts, (due_s - view.now_s) / patience, urgent=URGENT_TIMES_ALONE * alone_s > left_s):
            return build.build()
    due_s = earliest_due_s(view.requests, RESERVE_TPOTS)
    budget_s, wait_s = (due_s - view.now_s) / patience, arrival_wait_s(view)
    # As long as a request's token may, a job's piece may wait for more time than there is; where there can be any.
    max_defer_s = MOST_GAP_TPOTS * tightest_tpot_s(view) if budget_s < wait_s else 0.0
    build.tune(view.jobs, min(budget_s, wait_s), max_defer_s=max_defer_s)
    return build.build()


def arrival_wait_s(view: View) -> float:
    """The longest that a request waits for the step that runs when it arrives."""
    return max(ARRIVAL_SHARE * view.ttft_s, min(2 * tightest_tpot_s(view), MOST_ARRIVAL_SHARE * view.ttft_s))


def tightest_tpot_s(view: View) -> float:
    """The least TPOT objective of all requests; without any, of the next."""
    return min([request.tpot_s for request in view.requests], default=view.tpot_s)


def due_at_s(request: RequestView, reserve_tpots: float = 0.0) -> float:
    """When a request's next token is due, with so much of the bank kept once the request is under way."""
    return earliest_due_s([request], reserve_tpots)


def earliest_due_s(requests: Sequence[RequestView], reserve_tpots: float) -> float:
    """The first of these moments; never, without requests."""
    earliest_s = inf
    for _, _, _, num_output, arrival_s, first_s, last_s, ttft_s, tpot_s, _, _ in requests:
        if first_s is None:
            due_s = arrival_s + ttft_s
        else:
            # Asked some hundred times a step, so without calls.
            reserve = reserve_tpots if num_output >= RESERVE_TOKENS else reserve_tpots * num_output / RESERVE_TOKENS
            banked_s = first_s + (num_output - reserve) * tpot_s
            noticed_s = last_s + MOST_GAP_TPOTS * tpot_s
            due_s = banked_s if banked_s < noticed_s else noticed_s
        if due_s < earliest_s:
            earliest_s = due_s
    return earliest_s

"""Deadlines of the next tokens of requests, and the test whether a request can still keep its SLO.

A first token is due at arrival + TTFT. With k tokens out, the next is due at first token + k ×
TPOT: the SLO is about the mean time per token, so time that earlier tokens came early is banked. A
token is never due later than a gap that a reader would notice.

A request is infeasible if it could not keep its SLO even if all its remaining tokens came as fast
as now possible. Nobody gains from hurrying it, so it is served last, at the pace of the default SLO
(earliest-deadline-first does badly under overload for want of such a rule: late tasks make all
others late).
"""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import msgspec

from coserve.scheduling.plan import RequestProgress

# Where each value comes from, and what happens at half and at twice of it:
# benchmarks/slack-constants.md.

# The reserve is saved up over the first tokens of a request, as many as these. 4 and 16: × 9.4 and
# × 9.7 at the edge, where jobs get all or nothing, and within 2% on all other loads.
RESERVE_TOKENS = 8
# Tokens are due at this share of their TPOT SLO: where they came exactly at it, every second
# request would be late by what its last step takes longer than predicted. 0.98: × 0.08 and 1.2
# points fewer in bursts; 0.995: × 0.8 there.
AIMED = 0.99
# Beside infeasible requests alone, a step may last a decode step this many times. 0.6 and 2.5: the
# same on all simulated loads.
INFEASIBLE_STRETCH = 1.25
# The margin is what 95 of 100 steps stay within, and SLOs are promised to 99 of 100 requests:
# errors that are spread normally are within 1.4 times as much then. 3: × 0.09 and 0.6 points fewer
# in bursts; 0.75: × 0.86 to × 13, by load.
SURE_MARGINS = 1.5
# For urgent prompts a request may be late by this share of what it could catch up over all tokens
# that may still come. 0.05: × 0.08 in bursts; 0.2: × 3.
URGENT_CATCH_UP_SHARE = 0.1
# Where no other work needs the time that requests save it may be late for any prompt, by this share
# of what it catches up over the tokens that are sure to come: up to the second number of all, since
# most answers are no shorter. Half of either: 0.6 points more without jobs in bursts; twice: the
# same.
FREE_CATCH_UP_SHARE, MIN_ANSWER_TOKENS = 0.3, 16
# More than what rounding can take off a time with the margin.
_ROUNDING = 1e-9


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """Times until which a step may last for requests that decode; inf without any."""

    prompts_s: float = inf
    """Time until which prompts may take the step."""
    jobs_s: float = inf
    """Time until which jobs may take it."""
    urgent_s: float = inf
    """Time until which urgent prompts may: each request has its next token at the pace of its SLO,
    or can catch up.
    """
    free_s: float = inf
    """Time until which any prompts may where no other work needs the time that requests save: each
    surely catches up."""
    extra_s: float = inf
    """Maximum number of seconds that jobs may still take from any of the requests."""

    def with_jobs_until(self, seconds: float) -> "Deadlines":
        """Return the same with jobs limited to this time."""
        return msgspec.structs.replace(self, jobs_s=min(self.jobs_s, seconds))


def due_at_s(
    request: RequestProgress, *, max_gap_tpots: float, reserve_tpots: float = 0.0
) -> float:
    """Return the time at which a request's next token is due.

    Args:
        max_gap_tpots: Longest gap between tokens, in TPOTs.
        reserve_tpots: Part of the bank that is kept once the request is under way, in TPOTs.
    """
    if request.first_token_s is None:
        return request.info.arrival_s + request.info.ttft_s
    reserve = reserve_tpots * min(1.0, request.num_output / RESERVE_TOKENS)
    banked_s = request.first_token_s + (request.num_output - reserve) * AIMED * request.info.tpot_s
    return min(banked_s, request.last_token_s + max_gap_tpots * request.info.tpot_s)


def sure_by_s(due_s: float, now_s: float, margin: float) -> float:
    """Return the predicted end of a step that must not end later than due_s, with the margin's
    share to spare.
    """
    return now_s + (due_s - now_s) / (1 + SURE_MARGINS * margin)


def decode_deadlines(
    requests: Sequence[RequestProgress],
    *,
    now_s: float,
    decode_s: float,
    infeasible_tpot_s: float,
    max_gap_tpots: float,
    prompt_reserve_tpots: float,
    reserve_tpots: float,
    jobs_share: float = inf,
    margin: float = 0.0,
) -> Deadlines:
    """Return when the first of the requests that decode is due.

    A token at the pace of its SLO (`AIMED`) takes nothing of the bank, so that a request that is in
    time may always be kept waiting for as long; only beyond that is something left in the bank.

    Args:
        decode_s: Time of a step of all of them.
        infeasible_tpot_s: Pace of infeasible requests.
        max_gap_tpots: Longest gap between tokens, in TPOTs.
        prompt_reserve_tpots: TPOTs that prompts leave in every bank.
        reserve_tpots: TPOTs that jobs leave in every bank.
        jobs_share: Share of a request's time per token that jobs may take in all.
        margin: Share by which a step may take longer than predicted. The next steps make up for
            what one was late by, so it counts against the whole bank alone: that a step takes
            longer must not miss the SLO even if its token is the last. At the pace tokens come in
            the mean.
    """
    if not requests:
        return Deadlines()
    gap_s = far_s = extra_s = banks_missed_s = inf
    end_s, limited, aimed = now_s + decode_s, jobs_share < inf, AIMED
    sure = SURE_MARGINS * margin + _ROUNDING
    kept_tpots = max(prompt_reserve_tpots, reserve_tpots)
    unstarted: list[RequestProgress] = []
    infeasible: list[RequestProgress] = []
    close: list[tuple[RequestProgress, float, float]] = []
    # Some hundred requests come by in each plan, so the loop calls nothing.
    for request in requests:
        first_s = request.first_token_s
        if first_s is None:
            unstarted.append(request)
            continue
        tpot_s, num_output = request.info.tpot_s, request.num_output
        aimed_s = aimed * tpot_s
        banked_s = first_s + num_output * aimed_s
        # Late by more than all later tokens, each as fast as possible, could make up for.
        if end_s > banked_s and end_s - banked_s > (aimed_s - decode_s) * (request.num_left - 1):
            infeasible.append(request)
            continue
        noticed_s = request.last_token_s + max_gap_tpots * tpot_s
        if noticed_s < gap_s:
            gap_s = noticed_s
            far_s = gap_s + sure * (gap_s - now_s) if gap_s > now_s else gap_s
        # What jobs may take in all, less what they have taken.
        if limited and jobs_share * aimed_s * num_output - request.jobs_s < extra_s:
            extra_s = jobs_share * aimed_s * num_output - request.jobs_s
        # Most requests have saved up so much that a gap binds first, even with the margin; only
        # the others are looked at closely.
        if banked_s - kept_tpots * aimed_s < far_s or aimed_s < decode_s:
            close.append((request, aimed_s, banked_s))
            # Measured against the SLO itself, without `AIMED`: the margin must never miss that.
            if first_s + num_output * tpot_s < banks_missed_s:
                banks_missed_s = first_s + num_output * tpot_s
    due_s, missed_s = _first_tokens_due_s(unstarted, end_s, infeasible_tpot_s, decode_s)
    late_s, late_free_s = _infeasible_due_s(infeasible, infeasible_tpot_s, decode_s, max_gap_tpots)
    bank = _banks_due_s(close, decode_s, prompt_reserve_tpots, reserve_tpots)
    sure_s = sure_by_s(min(missed_s, banks_missed_s), now_s, margin)
    return Deadlines(
        prompts_s=min(due_s, late_s, bank.prompts_s, gap_s, sure_s),
        jobs_s=min(due_s, late_s, bank.jobs_s, gap_s, sure_s),
        urgent_s=min(bank.urgent_s, gap_s),
        free_s=min(due_s, late_free_s, bank.free_s, gap_s),
        extra_s=max(0.0, extra_s),
    )


def _first_tokens_due_s(
    requests: Sequence[RequestProgress], end_s: float, infeasible_tpot_s: float, decode_s: float
) -> tuple[float, float]:
    """Return when the first of these is due, and when the first of them misses its TTFT. Preempted
    requests, and those with a prompt of one token, are due like any first token.

    Args:
        end_s: End of a decode step that begins now.
    """
    due_s = missed_s = inf
    for request in requests:
        first_due_s = request.info.arrival_s + request.info.ttft_s
        # One that is late already goes on at the pace of infeasible requests.
        if end_s > first_due_s:
            due_s = min(due_s, request.last_token_s + _late_pace_s(infeasible_tpot_s, decode_s))
        else:
            due_s, missed_s = min(due_s, first_due_s), min(missed_s, first_due_s)
    return due_s, missed_s


def _infeasible_due_s(
    requests: Sequence[RequestProgress],
    infeasible_tpot_s: float,
    decode_s: float,
    max_gap_tpots: float,
) -> tuple[float, float]:
    """Return when the first of these infeasible requests is due, and when it is where no other work
    needs the time that requests save.
    """
    due_s = free_s = inf
    pace_s = _late_pace_s(infeasible_tpot_s, decode_s)
    for request in requests:
        aimed_s, last_s = AIMED * request.info.tpot_s, request.last_token_s
        # At its own pace, if that is slower still.
        late_s = last_s + max(aimed_s, pace_s)
        due_s = min(due_s, late_s)
        free_s = min(free_s, max(late_s, last_s + max_gap_tpots * aimed_s))
    return due_s, free_s


def _late_pace_s(infeasible_tpot_s: float, decode_s: float) -> float:
    return max(infeasible_tpot_s, INFEASIBLE_STRETCH * decode_s)


class _BanksDue(NamedTuple):
    """Times at which the banks of requests are spent."""

    prompts_s: float = inf
    """Time at which prompts have left their reserve."""
    jobs_s: float = inf
    """Time at which jobs have."""
    urgent_s: float = inf
    """Time until which each can catch up over all tokens that may come."""
    free_s: float = inf
    """Time until which each surely catches up."""


def _banks_due_s(
    requests: Sequence[tuple[RequestProgress, float, float]],
    decode_s: float,
    prompt_reserve_tpots: float,
    reserve_tpots: float,
) -> _BanksDue:
    """Return when the banks of these requests are spent; none before the next token at the pace of
    the SLO.

    Args:
        requests: Requests, each with its pace and with when its next token is due.
    """
    if not requests:
        return _BanksDue()
    prompts_s = jobs_s = urgent_s = free_s = inf
    for request, aimed_s, banked_s in requests:
        num_output = request.num_output
        next_s, num_later = request.last_token_s + aimed_s, request.num_left - 1
        spent_s = banked_s + URGENT_CATCH_UP_SHARE * (aimed_s - decode_s) * num_later
        # A token at the pace of the SLO spends nothing, so nothing is due before it.
        due_s = spent_s if spent_s > next_s else next_s
        if due_s < urgent_s:
            urgent_s = due_s
        # Tokens sure to come: MIN_ANSWER_TOKENS in all at least, and no more than are left.
        num_sure = request.num_sure
        if num_sure < MIN_ANSWER_TOKENS - num_output:
            num_sure = MIN_ANSWER_TOKENS - num_output
        if num_sure > num_later:
            num_sure = num_later
        spent_s = banked_s
        if num_sure > 0:
            spent_s += FREE_CATCH_UP_SHARE * (aimed_s - decode_s) * num_sure
        due_s = spent_s if spent_s > next_s else next_s
        if due_s < free_s:
            free_s = due_s
        # For prompts and jobs a request behind its pace must not fall back further.
        if next_s > banked_s:
            next_s = banked_s
        # The reserve builds up over the first tokens.
        kept_s = aimed_s if num_output >= RESERVE_TOKENS else aimed_s * num_output / RESERVE_TOKENS
        spent_s = banked_s - prompt_reserve_tpots * kept_s
        due_s = spent_s if spent_s > next_s else next_s
        if due_s < prompts_s:
            prompts_s = due_s
        spent_s = banked_s - reserve_tpots * kept_s
        due_s = spent_s if spent_s > next_s else next_s
        if due_s < jobs_s:
            jobs_s = due_s
    return _BanksDue(prompts_s, jobs_s, urgent_s, free_s)

"""The time budget of one step: it weighs the SLOs of requests against each other and against work
of jobs.

The time to the tightest deadline is the step's budget (`slo.deadlines`). Prompts take from it what
they need to be in time, and more where decoding requests have it to spare. Jobs get what is left,
and stop before anything would be late:

- A step at the pace of the SLOs takes nothing of what was banked. This is all that token fusion
  fills. Prompts may make requests late, by less than these could catch up over their remaining
  tokens.
- Beyond that a little of every bank is never spent: a step that takes longer than predicted finds
  it there.
- No step with jobs in it is planned to last longer than `arrival_wait_s`, which bounds the wait of
  a request that arrives just after planning: with nothing else running, its first row enters the
  next step.
- How near recent requests came to their SLOs decides how much of all this jobs may have
  (`slo.allowance`).
- Jobs that stretch requests keep pages and slots occupied: as these get scarce, jobs give way, and
  wholly while a request that can still be in time waits for them.

Where each value comes from, and what happens at half and at twice of it, or of what it leaves of 1:
benchmarks/slack-constants.md. "× 9.7" is a factor on the work of jobs, points are percentage points
of requests in time; a load that is not named is the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.memory import MemoryPlan
from coserve.scheduling.order import by_priority
from coserve.scheduling.plan import RequestProgress, View
from coserve.scheduling.slo.allowance import Allowance
from coserve.scheduling.slo.deadlines import AIMED, Deadlines, decode_deadlines, due_at_s, sure_by_s
from coserve.scheduling.slo.infeasible import has_waited, is_infeasible

# Prompts that need more than this share of the time to be in time leave nothing in the banks of
# decoding requests. 1/6: × 9.7 at the edge, × 0.94 in bursts; 2/3: × 0.08 and 0.6 points fewer in
# bursts.
URGENT_SHARE = 1 / 3
# Prompts that would need more than this share, and more than leaves no gap that is noticed, are
# infeasible. The gap is nearly always the larger bound (benchmarks/slo-edge.md, 2026-11-25): 0.6
# and 0.9 are the same on all simulated loads.
MAX_SHARE = 0.8
# A step of two TPOTs is always allowed, up to this share of the TTFT: on a slow device nothing
# would fit otherwise. 0.25: × 0.85 where the TTFT is short; 1 is the same.
MAX_ARRIVAL_SHARE = 0.5
# Below this share of free pages, or of free slots, jobs get less the fewer there are. 0.125 is the
# same, 0.5: × 0.88 with few slots.
SCARCE = 0.25
# A request waits for pages or a slot once it has waited this share of its TTFT. 0.025 and 0.1: the
# same on all simulated loads.
QUEUED_SHARE = 0.05


@dataclass(frozen=True, kw_only=True)
class BudgetSettings:
    """The settings of a policy's budget; `Slack` describes each."""

    max_gap_tpots: float
    """Longest gap between two tokens, in TPOTs."""
    reserve_tpots: float
    """Reserve that jobs leave in every bank, in TPOTs."""
    arrival_share: float
    """Share of the TTFT that an arrival may wait for a step with jobs in it."""
    least_share: float
    """Share of the time that jobs get in any case."""

    def arrival_wait_s(self, ttft_s: float, tpot_s: float) -> float:
        """Return the longest that an arriving request waits for a step with jobs in it.

        Args:
            ttft_s: Its SLO.
            tpot_s: Tightest SLO of running requests.
        """
        return max(self.arrival_share * ttft_s, min(2 * tpot_s, MAX_ARRIVAL_SHARE * ttft_s))


class PromptsNeed(NamedTuple):
    """The time that prompts need to be in time."""

    share: float
    """Share of the time that is enough for all that can be in time."""
    max_share: float
    """Largest share that prompts may have beside requests that decode."""
    aged: list[RequestProgress]
    """At most one prompt that cannot be in time and has waited for very long; it gets a piece
    before the others.
    """
    ordered: list[RequestProgress]
    """The others by their deadlines, then infeasible ones as they came."""
    first_due_s: float
    """Time at which the first of them is due that is not late yet."""


_NO_PROMPTS = PromptsNeed(0.0, MAX_SHARE, [], [], inf)


class PrefillBudget(NamedTuple):
    """The time that prompts may take of a step."""

    seconds: float
    """From the step's start to the end of the forward pass."""
    urgent: bool
    """Whether the first prompt gets its smallest piece in any case."""


class StepBudget:
    """The budget of a step that serves given requests."""

    def __init__(
        self,
        view: View,
        latency: LatencyModel,
        settings: BudgetSettings,
        requests: Sequence[RequestProgress] = (),
    ) -> None:
        self._view, self._latency, self._settings = view, latency, settings
        self.allowance = Allowance(view.slo_use)
        self.tpot_s = (
            min([request.info.tpot_s for request in requests]) if requests else view.tpot_s
        )
        """Tightest TPOT SLO of the requests; without any, of the next."""

    @property
    def arrival_wait_s(self) -> float:
        """Return the longest that an arriving request waits for a step with jobs in it."""
        return self._settings.arrival_wait_s(self._view.ttft_s, self.tpot_s)

    @property
    def least_share(self) -> float:
        """Return the share of the time that jobs get in any case."""
        return self._settings.least_share * self.allowance.least_share

    def max_jobs_s(self, requests_s: float) -> float:
        """Return the longest that jobs may take of a step whose other work takes requests_s, for
        the sake of arriving requests.
        """
        return min(self.arrival_wait_s - requests_s, self.allowance.wait_share * self._view.ttft_s)

    def due_at_s(self, request: RequestProgress, reserve_tpots: float = 0.0) -> float:
        """Return the time at which a request's next token is due."""
        return due_at_s(
            request, max_gap_tpots=self._settings.max_gap_tpots, reserve_tpots=reserve_tpots
        )

    # -- requests -----------------------------------------------------------------------

    def prompts_need(self, prompts: Sequence[RequestProgress], decode_s: float) -> PromptsNeed:
        """Return the need of prompts beside a decode step of this length."""
        if not prompts:
            return _NO_PROMPTS
        now_s, late = self._view.now_s, 1 + self._latency.corrections.margin
        # Prompts may have all of the longest gap but the decode step in it.
        max_share = max(MAX_SHARE, 1 - decode_s / (self._settings.max_gap_tpots * self.tpot_s))
        due_s = {each.id: self.due_at_s(each) for each in prompts}
        aged, timely, infeasible = (list[RequestProgress]() for _ in range(3))
        share = needed_s = 0.0
        for prompt in by_priority(sorted(prompts, key=lambda each: due_s[each.id])):
            alone_s = self._latency.prompt_s(prompt.num_rows, prompt.num_past)
            # Time until the prompt is due, shortened by the margin and the decode step.
            left_s = (due_s[prompt.id] - now_s) / late - decode_s
            if alone_s > left_s:
                (aged if has_waited(prompt, self._view) else infeasible).append(prompt)
                continue
            timely.append(prompt)
            # A prompt that no longer fits behind the others cannot be in time, and counts for
            # nothing; the first one always counts.
            if needed_s + alone_s <= max_share * left_s or not needed_s:
                needed_s += alone_s
                # The tightest of the deadlines decides on the share.
                share = max(share, needed_s / left_s)
        first_due_s = min([each_s for each_s in due_s.values() if each_s > now_s], default=inf)
        # One aged prompt at a time, so that prompts in time keep theirs.
        if share:
            return PromptsNeed(share, max_share, aged[:1], [*timely, *infeasible], first_due_s)
        # None can be in time: aged prompts are simply the first.
        return PromptsNeed(share, max_share, [], [*aged, *infeasible], first_due_s)

    def deadlines(
        self, decoding: Sequence[RequestProgress], decode_s: float, need: PromptsNeed
    ) -> Deadlines:
        """Return the deadlines of requests that decode, beside prompts with this need. Prompts
        leave one TPOT in every bank as long as they are not urgent.
        """
        return decode_deadlines(
            decoding,
            now_s=self._view.now_s,
            decode_s=decode_s,
            infeasible_tpot_s=self._view.tpot_s,
            max_gap_tpots=self._settings.max_gap_tpots,
            prompt_reserve_tpots=0.0 if need.share > URGENT_SHARE else 1.0,
            reserve_tpots=self.allowance.reserve_tpots(self._settings.reserve_tpots),
            jobs_share=self.allowance.jobs_share,
            margin=self._latency.corrections.margin,
        )

    def prefill_alone(self, need: PromptsNeed) -> PrefillBudget:
        """Return the time that prompts may take of a step in which no request decodes: an arriving
        request waits for its end.
        """
        return PrefillBudget(inf if need.share > MAX_ARRIVAL_SHARE else self.arrival_wait_s, True)

    def prefill_beside(
        self, deadlines: Deadlines, need: PromptsNeed, begun_s: float, *, others_want_time: bool
    ) -> PrefillBudget:
        """Return the time that prompts may take beside requests that decode: urgent ones the share
        that they need, though requests that can catch up are late meanwhile.

        Args:
            begun_s: Time of the step so far, with rows that decode and the piece of an aged prompt.
            others_want_time: Whether jobs or batch work compete for the time that requests save.
        """
        now_s, late = self._view.now_s, 1 + self._latency.corrections.margin
        seconds = deadlines.prompts_s - now_s
        if need.share > URGENT_SHARE:
            # With the margin taken off: exactly at that pace no request would catch up.
            urgent_s = (deadlines.urgent_s - now_s) / late
            # A step of begun_s / (1 - share) leaves prompts that share of it.
            seconds = max(seconds, min(begun_s / (1 - min(need.share, need.max_share)), urgent_s))
        if not others_want_time and self.allowance.frees_pace:
            seconds = max(seconds, (deadlines.free_s - now_s) / late)
        # Without a prompt that can be in time, infeasible ones still advance.
        return PrefillBudget(seconds, need.share > MAX_ARRIVAL_SHARE or not need.share)

    def before_prompts(self, deadlines: Deadlines, need: PromptsNeed) -> Deadlines:
        """Return deadlines that end before the next prompt is due. What is late already does not
        keep jobs from the step that ends it.
        """
        margin = self._latency.corrections.margin
        return deadlines.with_jobs_until(sure_by_s(need.first_due_s, self._view.now_s, margin))

    # -- jobs -----------------------------------------------------------------------------

    def jobs_until_s(
        self, requests_s: float, deadlines: Deadlines, memory: MemoryPlan
    ) -> tuple[float, float]:
        """Return the time until which a step with jobs in it must have ended, from its start, and
        the most that it can become as requests save time up.

        Args:
            requests_s: Time of the requests' part.
        """
        # Jobs give way wholly while a request could be in time with their pages or time.
        if self._queues(memory):
            return 0.0, inf
        max_s = self.max_jobs_s(requests_s)
        # A step at the pace of the SLOs takes nothing of what was banked.
        own_s = max(
            deadlines.extra_s, self.allowance.pace_share * (AIMED * self.tpot_s - requests_s)
        )
        extra_s = min(deadlines.jobs_s - self._view.now_s - requests_s, own_s, max_s)
        room = self._room(memory) if memory.requests else 1.0
        return requests_s + room * extra_s, requests_s + room * max_s

    def _queues(self, memory: MemoryPlan) -> bool:
        """Return whether a request that can still be in time waits for pages or a slot."""
        view = self._view
        # The request is spared on purpose: the pack that it waits for must run.
        if memory.waits_for_pack or not view.waiting:
            return False
        admitted = set(memory.admit)
        return any(
            request.may_start
            and request.id not in admitted
            and view.now_s - request.info.arrival_s > QUEUED_SHARE * request.info.ttft_s
            and not is_infeasible(request, view, self._latency)
            for request in view.waiting
        )

    def _room(self, memory: MemoryPlan) -> float:
        """Return the share of the time left by requests that jobs may take, as pages and slots get
        scarce: from 1 to 0.
        """
        view = self._view
        slots = 1 - len(memory.requests) / view.max_requests
        # Packs and batch work make room for requests, so their pages count as free.
        given = sum([job.num_pages for job in memory.jobs]) + sum(
            [each.num_held for each in memory.batch]
        )
        pages = (memory.free + given) / view.num_pages if view.num_pages else 1.0
        return max(0.0, min(1.0, slots / SCARCE, pages / SCARCE))

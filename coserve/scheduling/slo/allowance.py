"""The time of requests that jobs may take, by how much of their SLOs recent requests used by
themselves (`SloUse`).

Far from their SLOs requests lose nothing that they would miss. Near them, what jobs take now makes
all later requests late, the more so the fuller the time is: a queue that hardly ever empties passes
every delay on.

Where each value comes from, and what happens at half and at twice of it, or of what it leaves of 1:
benchmarks/slack-constants.md. "× 2.9" is a factor on the work of jobs, points are percentage points
of requests in time; a load that is not named is the same.
"""

from math import inf

from coserve.scheduling.plan import SloUse

# Requests that use more of an SLO than this are near it: each may lose to jobs no more than was
# left. 0.875: × 1.3 and × 2.9 on two loads, of which one loses 0.6 points; 0.5: × 0.91 and × 0.96.
NEAR = 0.75
# Requests that use more of their TTFT than this are marginal: they hold it only just. 0.985: × 1.1
# at the edge and in bursts; 0.94: × 0.09 in bursts. Found on loads that requests alone hold
# (benchmarks/slo-edge.md).
MARGINAL = 0.97
# Requests that use less of their TTFT than this, of what is known of it, have time for the prompts
# of a burst. Found on a trace, where it brings jobs 6% (benchmarks/compare.md); none of the
# simulated loads is between 0.25 and 1.
FAR = 0.5
# Requests near their TPOT may lose this share of their time per token, times u / (1 - u) with u the
# unfilled time. 0.125 and 0.5: the same on all simulated loads.
FAR_SHARE = 0.25
# Near an SLO jobs get less from the first of these shares of filled time on, and nothing above the
# second. 0.9 and 0.95: × 2.9 and 0.6 points fewer on one load; 0.6 and 0.8: × 0.17 and × 0.84 on
# two.
FILLED = 0.8, 0.9
# A step of jobs may take no more than this share of what TTFTs have left, in units of what they
# use. 0.15: × 0.08 in bursts; 0.6: × 1.6.
WAIT_SHARE_OF_REST = 0.3
# Every bank keeps at least this many TPOTs near an SLO, so that a burst of prompts finds them. 0.75
# and 3: the same on all simulated loads.
NEAR_RESERVE_TPOTS = 1.5
# Near an SLO jobs get this much of `least_share`, unless more requests than the second share are
# late without jobs. 0.01 is the same, 0.04: × 8.8 at the edge. Of the second 0.025: × 0.9 with long
# prompts; 0.1: 0.8 points more under overload.
NEAR_LEAST_SHARE, MAX_LATE_SHARE = 0.02, 0.05


class Allowance:
    """The time that jobs may take at one use of SLOs. Computed on demand: a plan needs part of
    it.
    """

    def __init__(self, use: SloUse) -> None:
        self._use = use
        self.is_near = use.ttft > NEAR or use.tpot > NEAR
        """Whether requests come near one of their SLOs by themselves."""

    @property
    def frees_pace(self) -> bool:
        """Return whether prompts without jobs beside them may exceed the pace of the SLOs: requests
        use little of their TPOT, or none has been seen.
        """
        return self._use.tpot <= NEAR if self._use.tpot else not self._use.known

    @property
    def least_share(self) -> float:
        """Return the factor on the policy's `least_share`. Where requests are marginal, each is
        late by all that jobs took since the device was last idle: there it is next to nothing.
        """
        return NEAR_LEAST_SHARE if self.is_near and self._use.late_share < MAX_LATE_SHARE else 1.0

    def reserve_tpots(self, usual: float) -> float:
        """Return the TPOTs that jobs leave in every bank, given those far from the SLOs."""
        return max(usual, NEAR_RESERVE_TPOTS if self.is_near else 0.0)

    @property
    def jobs_share(self) -> float:
        """Return the share of a request's time per token that jobs may take in all.

        It is unlimited where requests are far from their TPOT, and 0 where they use all of it, or
        where the time was filled lately, or may have been. Where first tokens have time, the use of
        the TPOT says little (`pace_share`), and how far the time was filled decides.
        """
        use = self._use
        if use.tpot <= NEAR:
            return inf
        if not use.time:
            return 0.0
        unfilled = self._unfilled
        share = unfilled * max(0.0, 1 - use.tpot) ** 2 / (use.tpot - NEAR)
        if use.ttft >= FAR * use.known or use.tpot >= 1:
            return share
        return inf if unfilled == 1 else max(share, FAR_SHARE * unfilled / (1 - unfilled))

    @property
    def pace_share(self) -> float:
        """Return the share of a step at the pace of the SLOs that jobs may take.

        Requests that are held to this pace are more when a burst of prompts comes, and have saved
        up less for it: harmless, unless requests are marginal at their TTFT, or may be. The first
        burst that shows it is late by what jobs took before; less so where time is left in which
        its queue ends. The TPOT says nothing about that as long as it is held: prompts, too, may
        take all of a step at this pace, whether they have to or not.
        """
        use = self._use
        if use.tpot <= NEAR:
            return 1.0
        if not use.time or use.tpot >= 1 or use.ttft >= MARGINAL:
            return 0.0
        return 1.0 if use.ttft < FAR * use.known else max(use.known**2, self._unfilled)

    @property
    def wait_share(self) -> float:
        """Return the share of a TTFT that a step of jobs may take; 0 where requests use all of
        it.
        """
        return (
            WAIT_SHARE_OF_REST
            * max(0.0, 1 - self._use.ttft)
            / max(self._use.ttft, WAIT_SHARE_OF_REST)
        )

    @property
    def _unfilled(self) -> float:
        """Return how far requests left the time unfilled lately: 1 up to the first of FILLED, 0
        from the second on.
        """
        return max(0.0, min(1.0, (FILLED[1] - self._use.time) / (FILLED[1] - FILLED[0])))

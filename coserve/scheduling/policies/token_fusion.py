"""FlexLLM's hybrid token scheduler (section 6.2): every step is filled up to one fixed SLO, s =
argmax f(c, s) <= SLO.

c are the inference tokens that iteration-level scheduling with chunked prefill puts into the step,
s the fine-tuning tokens, f the profiled latency. Tokens that came early in the past count for
nothing, nor does the time since arrival.
"""

from dataclasses import dataclass
from typing import ClassVar

from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import Plan, View
from coserve.scheduling.policies._turns import serving_step, slo_s
from coserve.scheduling.policies.base import Policy


@dataclass(frozen=True, kw_only=True)
class TokenFusion(Policy):
    """FlexLLM's hybrid token scheduler: every step filled up to the tightest TPOT SLO."""

    summary: ClassVar[str] = "every step filled up to the tightest TPOT SLO (FlexLLM)"

    def plan(self, view: View, latency: LatencyModel) -> Plan:
        memory, build = serving_step(view, latency)
        memory.begin_packs()
        build.tune(memory.jobs, slo_s(view, memory))
        return build.build()

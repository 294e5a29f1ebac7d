"""FlexLLM section 6.2: every step is filled up to one fixed objective, s = argmax f(c, s) <= SLO.

c are the inference tokens that iteration-level scheduling with chunked prefill puts into the step, s the fine-tuning
tokens, f the profiled latency. Tokens that came early in the past count for nothing, nor does the time since arrival.
"""

from coserve.scheduling.building import PlanBuilder
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import Plan, View


def plan(view: View, latency: LatencyModel) -> Plan:
    """See the module."""
    build = PlanBuilder(view, latency)
    objective_s = min([request.tpot_s for request in view.requests], default=view.tpot_s)
    build.decode([request for request in view.requests if request.num_rows == 1])
    build.prefill([request for request in view.requests if request.num_rows > 1], objective_s)
    build.tune(view.jobs, objective_s)
    return build.build()

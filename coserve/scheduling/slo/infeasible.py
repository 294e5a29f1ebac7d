"""Requests whose first token comes too late even if nothing else runs: they are served after the
others.
"""

from collections.abc import Sequence

from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.plan import RequestProgress, View

# An infeasible request that has waited for this many of its TTFT SLOs has its turn before all
# others. 5: 6.7 points fewer under overload; 20 is the same (benchmarks/slack-constants.md).
MAX_WAIT_TTFTS = 10.0


def is_infeasible(request: RequestProgress, view: View, latency: LatencyModel) -> bool:
    """Return whether a first token comes too late even if nothing else runs; False once the request
    has waited for very long.
    """
    if request.first_token_s is not None or has_waited(request, view):
        return False
    left_s = request.info.ttft_s - (view.now_s - request.info.arrival_s)
    return left_s <= 0 or left_s < latency.prompt_s(request.num_rows, request.num_past)


def has_waited(request: RequestProgress, view: View) -> bool:
    """Return whether a request has waited long enough for its first token that its turn has come,
    whatever else waits.
    """
    waited_s = view.now_s - request.info.arrival_s
    return request.first_token_s is None and waited_s > MAX_WAIT_TTFTS * request.info.ttft_s


def infeasible_last(
    queue: Sequence[RequestProgress], view: View, latency: LatencyModel
) -> Sequence[RequestProgress]:
    """Return a queue in its order, with infeasible requests moved to its end."""
    # The usual case: nobody is late yet, so no prompt has to be predicted.
    if all(view.now_s <= request.info.arrival_s + request.info.ttft_s for request in queue):
        return queue
    return sorted(queue, key=lambda request: is_infeasible(request, view, latency))

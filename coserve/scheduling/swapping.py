"""Whether a preempted request's keys and values are worth a place on the host (LLMStation's swap, section 4)."""

from coserve.scheduling.latency import LatencyModel


def swap_pays(latency: LatencyModel, *, num_tokens: int, num_bytes: int) -> bool:
    """Whether copying the K and V of a sequence's first tokens to the host and back is quicker than running their rows
    again with that of its next one.
    """
    return latency.copy_s(2 * num_bytes) < latency.rerun_s(num_tokens)

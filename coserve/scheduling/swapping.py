"""The decision whether something that makes room is worth copying to the host: a request's keys and
values (LLMStation's swap, section 4), what a pack has saved, or the moments of an optimizer.
"""

from msgspec import structs

from coserve.scheduling.counts import JobCounts
from coserve.scheduling.latency import LatencyModel
from coserve.scheduling.memory import rows_lost
from coserve.scheduling.plan import JobProgress, whole_pack


def swap_pays(latency: LatencyModel, *, num_tokens: int, num_bytes: int) -> bool:
    """Return whether copying the K and V of a sequence's first tokens to the host and back is
    quicker than running their rows again with that of its next one.
    """
    return latency.copy_s(2 * num_bytes) < latency.rerun_s(num_tokens)


def pack_swap_pays(latency: LatencyModel, job: JobProgress, *, num_bytes: int) -> bool:
    """Return whether copying what a pack in memory has saved to the host and back is quicker than
    running it again up to where it is.
    """
    whole_s = latency.pack_s(structs.replace(job, num_parts_left=job.info.counts.num_parts))
    return latency.copy_s(2 * num_bytes) < whole_s * rows_lost(job) / (2 * job.num_rows)


def optimizer_swap_pays(
    latency: LatencyModel, counts: JobCounts, *, num_rows: float, num_bytes: int
) -> bool:
    """Return whether copying the moments of an optimizer to the host and back is quicker than
    running again the rows that they have come from.

    Args:
        num_rows: Rows forward and backward, each counted. What is left out (attention, optimizer
            steps) would take time, too.
    """
    rows = int(num_rows / 2)
    return rows > 0 and latency.copy_s(2 * num_bytes) < latency.pack_s(whole_pack(counts, rows))

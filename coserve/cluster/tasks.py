"""Tasks of the cluster, made from requests and jobs."""

import time

from coserve.cluster.view import ClusterTask
from coserve.engine.commands import AddRequest, JobStart


def task_of_request(
    request: AddRequest, *, prefix: tuple[bytes, ...], excluded: frozenset[str]
) -> ClusterTask:
    """Return the task of a request.

    Args:
        request: The request.
        prefix: Keys of its prompt's blocks (`coserve.cluster.nodes.prefixes`).
        excluded: Nodes where it cannot go.
    """
    adapter, slo = request.adapter, request.slo
    assert request.arrival_s is not None, "a server says when requests came"
    return ClusterTask(
        id=request.id,
        kind="request",
        arrival_s=request.arrival_s,
        num_tokens=len(request.prompt),
        batch_size=request.params.n,
        num_output_tokens=request.params.max_tokens,
        adapter=None if adapter is None else adapter.name,
        prefix=prefix,
        ttft_s=None if slo is None else slo.ttft_s,
        tpot_s=None if slo is None else slo.tpot_s,
        tenant=request.tenant,
        priority=request.priority,
        batch_due_s=request.batch_due_s,
        excluded=excluded,
    )


def task_of_job(job: JobStart, *, excluded: frozenset[str] = frozenset()) -> ClusterTask:
    """Return the task of a job that arrives now. excluded: nodes where it cannot go."""
    return ClusterTask(
        id=job.id,
        kind="training",
        arrival_s=time.monotonic(),
        num_tokens=job.config.max_sequence_length,
        batch_size=job.config.batch_size,
        adapter=job.name,
        tenant=job.tenant,
        job=job.id,
        excluded=excluded,
    )

"""Charges of tenants for steps, and for the host's work between them."""

from collections.abc import Mapping

import msgspec

from coserve.devices.messages.steps import StepBatch, StepResult
from coserve.engine.jobs.job import Job
from coserve.engine.jobs.job_set import JobSet
from coserve.engine.jobs.lifecycle import largest_pieces, shares_of_time
from coserve.engine.request_queue import RequestQueue
from coserve.scheduling.tenant_times import TenantTimes


class _HostWork(msgspec.Struct, frozen=True):
    """Work of the host after a step."""

    since_s: float
    """Time at which the step ended."""
    step_s: float
    """Duration of the step."""
    shares: Mapping[str, float]
    """Each tenant's share of the work."""


class TenantCharges:
    """Charges of an engine's tenants for the time that steps take, and for the time between two
    steps.
    """

    def __init__(self, times: TenantTimes, requests: RequestQueue, jobs: JobSet) -> None:
        """Begin with nothing charged. times: counters that the charges are added to."""
        self._times, self._requests, self._jobs = times, requests, jobs
        # Work after the last step; None once the next one is planned.
        self._host: _HostWork | None = None

    def note_step(
        self, batch: StepBatch, result: StepResult, *, started_s: float, now_s: float
    ) -> None:
        """Charge each tenant for its share of a step that has just ended."""
        if not self._times.are_shared:
            return
        tenants = {id: request.info.tenant for id, request in self._requests.running.items()}
        step_s = now_s - started_s
        self._times.charge(tenant_seconds(batch, result, tenants, self._jobs, step_s=step_s))
        self._host = _HostWork(now_s, step_s, host_shares(batch, tenants, self._jobs))

    def note_begin(self, now_s: float) -> None:
        """Charge for the time since the last step, in which the host has sent answers: at most as
        long as that step took, since what takes longer is something else.
        """
        if self._host is not None:
            seconds = min(now_s - self._host.since_s, self._host.step_s)
            self._times.charge(
                {tenant: share * seconds for tenant, share in self._host.shares.items()}
            )
            self._host = None

    def note_rest(self) -> None:
        """Charge nobody for the time from now to the next step."""
        self._host = None


def tenant_seconds(
    batch: StepBatch,
    result: StepResult,
    tenants: Mapping[str, str],
    jobs: Mapping[str, Job],
    *,
    step_s: float,
) -> dict[str, float]:
    """Return each tenant's share of a step's duration: of the forward pass by rows, of the work of
    jobs by measured time.

    Args:
        tenants: Tenants by the ids of running requests.
        step_s: Duration of the step.
    """
    tenant_s: dict[str, float] = {}
    num_rows = sum([piece.num_rows for piece in batch.windows])
    num_rows += sum([len(rows.tokens) for rows in batch.requests])
    row_s = result.forward_s / num_rows if num_rows else 0.0
    for rows in batch.requests:
        if (tenant := tenants.get(rows.request)) is not None:
            tenant_s[tenant] = tenant_s.get(tenant, 0.0) + row_s * len(rows.tokens)
    if batch.windows or batch.losses or batch.tasklets or batch.updates:
        for job, seconds in shares_of_time(batch, result).items():
            tenant = jobs[job].tenant
            tenant_s[tenant] = tenant_s.get(tenant, 0.0) + sum(seconds.values())
    counted_s = sum(tenant_s.values())
    # Scaled so that the charges add up to the whole step, with what no section counts.
    times = step_s / counted_s if counted_s > 0 else 0.0
    return {tenant: times * seconds for tenant, seconds in tenant_s.items()}


def host_shares(
    batch: StepBatch, tenants: Mapping[str, str], jobs: Mapping[str, Job]
) -> dict[str, float]:
    """Return each tenant's share of the host's work after a step: answers to its requests that have
    a new token, and its jobs that have moved on, count alike.

    Args:
        tenants: Tenants by the ids of running requests.
    """
    number: dict[str, int] = {}
    for rows in batch.requests:
        if rows.samples and (tenant := tenants.get(rows.request)) is not None:
            number[tenant] = number.get(tenant, 0) + 1
    for job in {*largest_pieces(batch), *[update.job for update in batch.updates]}:
        tenant = jobs[job].tenant
        number[tenant] = number.get(tenant, 0) + 1
    whole = sum(number.values())
    return {tenant: each / whole for tenant, each in number.items()}

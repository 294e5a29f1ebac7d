"""Records and counts that an engine reports: how requests were served, and its current state."""

from dataclasses import dataclass, field

from coserve.devices.messages.commands import RankReport
from coserve.devices.messages.steps import StepResult
from coserve.engine.request import Request
from coserve.scheduling.slo import Slo


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """Record of a finished sequence."""

    request: str
    """Id of the request."""
    adapter: str | None
    """Name of the adapter; None: the bare model."""
    arrival_s: float
    """Time of arrival."""
    ttft_s: float
    """Seconds from arrival to the first token."""
    tpot_s: float | None
    """Mean seconds between later tokens; None if there was only one token."""
    num_prompt_tokens: int
    """Number of prompt tokens, without virtual ones."""
    num_output_tokens: int
    """Number of generated tokens."""
    slo: Slo
    """SLO by which the request was served."""
    asked_slo: Slo | None = None
    """SLO that was requested, if the device could not hold it."""
    index: int = 0
    """Index of the sequence among the request's `n`."""
    queue_s: float = 0.0
    """Seconds from arrival to the step with the request's first rows."""

    @property
    def attained(self) -> bool:
        """Return whether the requested SLO was held."""
        slo = self.asked_slo or self.slo
        return self.ttft_s <= slo.ttft_s and (self.tpot_s is None or self.tpot_s <= slo.tpot_s)


def record_of(request: Request) -> RequestRecord:
    """Return the record of a request that has ended by itself."""
    assert request.first_token_s is not None
    later = request.num_output - 1
    return RequestRecord(
        request=request.request,
        adapter=request.version.name if request.version else None,
        arrival_s=request.info.arrival_s,
        ttft_s=request.first_token_s - request.info.arrival_s,
        tpot_s=(request.last_token_s - request.first_token_s) / later if later else None,
        num_prompt_tokens=len(request.prompt) - request.num_virtual,
        num_output_tokens=request.num_output,
        slo=request.slo,
        asked_slo=request.asked_slo if request.asked_slo != request.slo else None,
        index=request.index,
        queue_s=max(0.0, (request.started_s or request.info.arrival_s) - request.info.arrival_s),
    )


@dataclass(kw_only=True)
class WindowUse:
    """Totals of the window of weights of trainable models."""

    num_bytes_copied: int = 0
    """Bytes that were copied into the window."""
    waited_s: float = 0.0
    """Seconds for which steps have waited for weights."""
    num_declined: int = 0
    """Number of tasklets that were left for a later step, since their weights were not there."""

    def add(self, result: StepResult) -> None:
        """Add a step's share."""
        self.num_bytes_copied += result.weight_bytes
        self.waited_s += result.weights_wait_s
        self.num_declined += result.num_declined


@dataclass(frozen=True, kw_only=True)
class HandoverStats:
    """Counts of prompts that one instance computes for another."""

    role: str
    """Role of this instance, "prefill" or "decode"."""
    num_partners: int
    """Number of connected instances."""
    num_handed_over: int
    """Number of prompts whose pages were received here, or sent from here."""
    num_not_handed_over: int
    """Number of prompts of which no page or only some were handed over, so that the decode instance
    computed the rest.
    """
    num_pages: int
    """Number of pages received or sent."""


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """State of an engine at a moment, and its totals since the start."""

    num_running: int
    """Number of running sequences, without batch work."""
    num_waiting: int
    """Number of waiting sequences, without batch work."""
    num_jobs: int
    """Number of jobs that are not over."""
    num_jobs_running: int
    """Number of jobs that are neither over nor paused."""
    num_steps: int
    """Number of steps so far."""
    num_tokens_trained: int
    """Number of tokens in packs whose gradients were added, of all jobs here so far."""
    num_preemptions: int
    """Number of preemptions of requests so far."""
    num_packs_dropped: int
    """Number of packs whose work was discarded so far."""
    num_pages: int
    """Number of pages in the pool."""
    num_pages_free: int
    """Number of free pages."""
    num_pages_by_owner: dict[str, int]
    """Number of pages by kind of owner; those of the window of weights are "weights", those of
    optimizer moments "optimizer".
    """
    margin: float
    """Share by which steps take longer than predicted, in all but the worst recent steps."""
    num_slos_clamped: int
    """Number of requests so far whose SLO was beyond the device."""
    slo: Slo
    """Default SLO as of now."""
    joined_jobs: tuple[tuple[str, ...], ...]
    """Groups of running jobs whose last tasklets were one batch of rows."""
    num_swapped_out: int = 0
    """Number of pages copied to the host so far, whatever they hold."""
    num_swapped_in: int = 0
    """Number of pages copied back from the host so far."""
    num_host_pages: int = 0
    """Number of pages that fit on the host."""
    num_host_pages_used: int = 0
    """Number of these that are taken."""
    num_pages_moved: int = 0
    """Number of request pages copied within the pool so far, to make contiguous room for a pack."""
    handover: HandoverStats | None = None
    """Counts of handed-over prompts; None where this instance does both prefill and decode."""
    give_back_s: float = 0.0
    """Longest recent wait of a step for pages that were given back: copied to the host, or taken
    from moments or weights of other models.
    """
    num_weight_bytes_copied: int = 0
    """Bytes copied into the window of weights so far."""
    weights_wait_s: float = 0.0
    """Seconds for which steps have waited for weights so far."""
    num_tasklets_declined: int = 0
    """Number of tasklets that were left for a later step so far, since their weights were not
    there.
    """
    num_batch_running: int = 0
    """Number of running sequences of batch work."""
    num_batch_waiting: int = 0
    """Number of waiting sequences of batch work."""
    num_pages_for_requests: int = 0
    """Number of pages that requests could have now: free ones, and those of unused prefixes,
    optimizers, packs and batch work, which make room.
    """
    slack: float = 1.0
    """Share of time that requests' SLOs leave over as of the last step: 1 less the largest recent
    need (`SloUse.time`), at least 0.
    """
    ranks: tuple[RankReport, ...] = ()
    """States of the ranks that hold the model together; empty where one process holds it."""
    measured_share: float | None = None
    """Share of the device's measurements that are finished, while its profile is provisional; None
    afterwards."""
    num_grammars: int = 0
    """Number of compiled grammars that the device keeps."""
    grammar_bytes_by_tenant: dict[str, int] = field(default_factory=dict)
    """Bytes of compiled grammars, with those by which they may grow, by the tenant whose request
    used each last.
    """

"""What the engine says about itself: how requests were served, and counts as of now."""

from dataclasses import dataclass, field

from coserve.devices.messages.commands import RankState
from coserve.devices.messages.steps import StepResult
from coserve.engine.request import Request
from coserve.scheduling.slo import Slo


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """How a finished sequence was served. queue_s: from its arrival to the step with its first
    rows. tpot_s: mean over its tokens after the first; None if there was but one. slo: what it was
    served by. asked_slo: what it asked for, if that was beyond the device.
    """

    request: str
    adapter: str | None
    arrival_s: float
    ttft_s: float
    tpot_s: float | None
    num_prompt_tokens: int
    num_output_tokens: int
    slo: Slo
    asked_slo: Slo | None = None
    index: int = 0
    queue_s: float = 0.0

    @property
    def attained(self) -> bool:
        """Whether the SLO that it asked for was held."""
        slo = self.asked_slo or self.slo
        return self.ttft_s <= slo.ttft_s and (self.tpot_s is None or self.tpot_s <= slo.tpot_s)


def record_of(request: Request) -> RequestRecord:
    """Of a request that has ended by itself."""
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
    """What came of the window of weights so far: bytes that were copied into it, seconds for which
    others waited for them, and tasklets that did not, and were left for a later step.
    """

    num_bytes_copied: int = 0
    waited_s: float = 0.0
    num_declined: int = 0

    def add(self, result: StepResult) -> None:
        """A step's."""
        self.num_bytes_copied += result.weight_bytes
        self.waited_s += result.weights_wait_s
        self.num_declined += result.num_declined


@dataclass(frozen=True, kw_only=True)
class HandoverStats:
    """Prompts that one instance computes for another. role: of this one. num_partners: instances
    that are connected now. num_handed_over: prompts so far whose pages came here, or went from
    here. num_not_handed_over: those of which none or only some did, so that the decode instance
    computed them. num_pages: that came, or went.
    """

    role: str
    num_partners: int
    num_handed_over: int
    num_not_handed_over: int
    num_pages: int


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """The engine at this moment. num_running, num_waiting: sequences that somebody waits for;
    num_batch_running, num_batch_waiting: those of batch work. num_jobs: that are not over;
    num_jobs_running: of these, that are not paused. num_tokens_trained: rows of packs whose
    gradients are in, of all jobs here. num_slos_clamped: requests so far whose SLO was beyond the
    device. slo: of requests that bring none, by what is known of the device now. joined_jobs: jobs
    that run whose last tasklets were one batch of rows, group by group. num_swapped_out,
    num_swapped_in: pages that were copied to the host, and back, whatever they are of.
    num_host_pages: that it has room for, of which num_host_pages_used are taken. handover: None if
    prefill and decode are together. num_pages_moved: of requests, that were copied to other pages
    so that a pack got neighbours. give_back_s: the most seconds that a step has waited lately for
    pages of others, which were copied to the host, or held moments or weights of other models.
    num_weight_bytes_copied, weights_wait_s, num_tasklets_declined: see `WindowUse`; the window's
    pages are in num_pages_by_owner, as those of "weights", and those of moments as "optimizer".
    num_pages_for_requests: that requests could have now: free ones, those of prefixes that no
    request uses, of optimizers, and of packs and batch work, which make room. slack: share of the
    time that SLOs of requests leave over: 1 less the most that they needed of some seconds lately
    (`SloUse.time`), 0 at least; as of the last step.
    """

    num_running: int
    num_waiting: int
    num_jobs: int
    num_jobs_running: int
    num_steps: int
    num_tokens_trained: int
    num_preemptions: int
    num_packs_dropped: int
    num_pages: int
    num_pages_free: int
    num_pages_by_owner: dict[str, int]
    margin: float
    num_slos_clamped: int
    slo: Slo
    joined_jobs: tuple[tuple[str, ...], ...]
    num_swapped_out: int = 0
    num_swapped_in: int = 0
    num_host_pages: int = 0
    num_host_pages_used: int = 0
    num_pages_moved: int = 0
    handover: HandoverStats | None = None
    give_back_s: float = 0.0
    num_weight_bytes_copied: int = 0
    weights_wait_s: float = 0.0
    num_tasklets_declined: int = 0
    num_batch_running: int = 0
    num_batch_waiting: int = 0
    num_pages_for_requests: int = 0
    slack: float = 1.0
    ranks: tuple[RankState, ...] = ()
    """States of the ranks that hold the model together; empty where one process holds it."""
    measured_share: float | None = None
    """Share of the device's measurements that are finished, while its profile is provisional; None
    afterwards."""
    # Compiled grammars that the device keeps, and their bytes, with those by which they may grow,
    # by the tenant whose request used each last.
    num_grammars: int = 0
    grammar_bytes_by_tenant: dict[str, int] = field(default_factory=dict)

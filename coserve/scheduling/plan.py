"""Plain data between the engine and a policy: the `View` that a policy plans from, and its `Plan`.

What stays the same of a request or a job is made once and shared by reference (`RequestInfo`,
`JobInfo`); what changes is `RequestProgress` and `JobProgress`. All fields are given by keyword, so
that a new number concerns the code that makes it and the code that reads it, and none in between. A
step has some hundred requests: each keeps one `RequestProgress`, which the engine brings up to date
before it plans, since making one by keyword would take five times as long; it is a dataclass, since
setting a field of a struct takes four times as long. Structs of numbers and strings alone need no
garbage collection (`gc=False`).
"""

from dataclasses import dataclass
from math import inf
from typing import Any, Literal, NamedTuple

import msgspec

from coserve.scheduling.counts import JobCounts

RowKind = Literal["decode", "prefill", "window"]
JobPhase = Literal["pack", "forward", "loss", "backward", "update"]


class RequestInfo(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The constant part of a request, shared by all of its sequences. Times are seconds of the
    engine's clock.
    """

    arrival_s: float
    """Time of arrival."""
    ttft_s: float
    """SLO of the time to the first token."""
    tpot_s: float
    """SLO of the mean time between later tokens."""
    tenant: str = ""
    """Name of the tenant that owns it."""
    priority: int = 0
    """Priority; the lowest number goes first."""
    batch_due_s: float | None = None
    """Time at which batch work should be done; None for a request that a client waits for."""
    version: str = ""
    """Key of its adapter's version; empty for the bare model."""
    num_bypasses: int = 0
    """Number of sites at which its adapter adds to the model."""
    draws: bool = False
    """Whether its tokens are sampled; otherwise the likeliest ones are chosen."""
    is_masked: bool = False
    """Whether a grammar restricts its tokens."""


@dataclass(slots=True, kw_only=True, eq=False)
class RequestProgress:
    """The progress of one sequence of a request that runs or waits for pages.

    It describes the moment of planning and is brought up to date before the next step: a policy
    neither changes it nor keeps it.
    """

    id: str
    """Name of the sequence."""
    info: RequestInfo
    """Constant part of the request."""
    num_rows: int
    """Tokens to run before the next one can be chosen; 1 for a sequence that decodes."""
    num_past: int
    """Tokens whose keys and values are in memory; for a waiting sequence, those that it would
    share.
    """
    num_output: int
    """Tokens generated so far."""
    first_token_s: float | None
    """Time of its first token; None before that."""
    last_token_s: float
    """Time of its last token; before the first one, its arrival."""
    num_pages: int = 0
    """Pages that its next num_rows rows take from the available ones; for a waiting sequence, with
    its admission.
    """
    num_held: int = 0
    """Pages that are returned when it is preempted."""
    num_scored: int = 0
    """Rows whose next token is scored, for log-probabilities of the prompt."""
    may_start: bool = True
    """False while it waits for a sequence with the same prompt, or for its handover."""
    num_left: int = 2**31
    """Maximum number of remaining tokens."""
    num_sure: int = 0
    """Lower bound on the remaining tokens; at least 0."""
    jobs_s: float = 0.0
    """Seconds that jobs and batch work have taken since its first token; before that, since its
    arrival.
    """


class JobInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The constant part of a job."""

    counts: JobCounts
    """Costs per row of its model and its adapter."""
    tenant: str = ""
    """Name of the tenant that owns it."""


class JobProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a job that could run something now."""

    id: str
    """Name of the job."""
    info: JobInfo
    """Constant part of the job."""
    phase: JobPhase
    """Phase of its pack; "pack" if its next pack is to be begun, "update" if an optimizer step is
    due.
    """
    num_rows: int = 0
    """Rows of its pack."""
    num_rows_left: int = 0
    """Rows still to go forward, through the loss (those that have a target), or backward in the
    current part."""
    num_parts_left: int = 0
    """Parts of the model still to go backward, the current one among them."""
    mean_context_len: float = 0.0
    """Mean number of tokens that a row attends to."""
    waited_s: float = 0.0
    """Seconds since its last progress."""
    num_pages: int = 0
    """Pages that the pack holds, or needs to begin."""
    num_rows_done: int = 0
    """Rows lost if the pack were dropped; the loss, and each part backward, count as a pass
    each."""
    num_rows_run: float = 0.0
    """Rows of all its packs so far."""
    begins_at: JobPhase = "forward"
    """Phase at which a pack that is to be begun starts: "forward", except for one that comes back
    from the host."""


def whole_pack(counts: JobCounts, num_rows: int, mean_context_len: float = 0.0) -> JobProgress:
    """Return a job with a pack of which nothing has run, for questions to a latency model."""
    return JobProgress(
        id="",
        info=JobInfo(counts=counts),
        phase="pack",
        num_rows=num_rows,
        num_rows_left=num_rows,
        num_parts_left=counts.num_parts,
        mean_context_len=mean_context_len,
    )


class TenantView(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant that has requests or jobs here, or had some lately."""

    name: str
    """Its name."""
    served: float = 0.0
    """Weighted tokens that it was served (`scheduling.fairness`)."""
    used_s: float = 0.0
    """Device seconds that it was served, divided by its weight (`scheduling.tenant_times`)."""
    weight: float = 1.0
    """Weight of its share of the device."""
    is_present: bool = True
    """Whether it has work now."""


class SloUse(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Shares of their SLOs that recent requests would have used without jobs, at the 99th
    percentile.

    0 where nothing is known; at 1 nothing is left for jobs (`scheduling.slo.headroom`).
    """

    ttft: float = 0.0
    """Share of the TTFT."""
    tpot: float = 0.0
    """Share of the TPOT."""
    late_share: float = 0.0
    """Share of the requests that would have used more than 1."""
    time: float = 0.0
    """Largest share of some seconds lately that requests used, for prompts and to decode at the
    pace of their SLOs; 0 in the first seconds, and in those after a long pause."""
    known: float = 0.0
    """How far the requests seen so far tell what 99 of 100 use, from 0 to 1."""


_UNKNOWN_USE = SloUse()


class View(msgspec.Struct, frozen=True):
    """The engine's state at the moment of planning.

    A policy that does not distinguish batch work (`Policy.serves_batch`) finds it among the
    requests. The engine gives the first fields by position: Python makes a dictionary for more than
    15 keywords, which takes three times as long.
    """

    now_s: float
    """Time of planning."""
    requests: tuple[RequestProgress, ...] = ()
    """Sequences that run, in the order of admission."""
    waiting: tuple[RequestProgress, ...] = ()
    """Sequences that wait for pages, in the order in which they came, preempted ones first."""
    batch: tuple[RequestProgress, ...] = ()
    """Sequences of batch work that run; no client waits for these."""
    batch_waiting: tuple[RequestProgress, ...] = ()
    """Sequences of batch work that wait for pages."""
    jobs: tuple[JobProgress, ...] = ()
    """Jobs that could run something, the one that has been served least first."""
    tenants: tuple[TenantView, ...] = ()
    """Tenants, for policies that distinguish them (`Policy.is_fair`)."""
    num_free_pages: int = 0
    """Pages available now: free ones, and those of unused prefixes."""
    num_pages: int = 0
    """Pages of the pool; 0 if unknown."""
    block_tokens: int = 16
    """Tokens of a page."""
    ttft_s: float = inf
    """TTFT SLO of a request that brings none, such as the next to arrive."""
    tpot_s: float = inf
    """TPOT SLO of such a request."""
    max_rows: int = 2048
    """Maximum number of rows of a forward pass."""
    max_requests: int = 256
    """Maximum number of sequences that run at once."""
    slo_use: SloUse = _UNKNOWN_USE
    """Shares of their SLOs that requests use by themselves."""
    num_units: int = 1
    """Units of the device, for a `Partition`; 1 if it cannot be divided."""
    history: Any = None
    """The policy's record of earlier steps (`Policy.make_history`); None if it keeps none."""
    give_back_s: float = 0.0
    """Seconds until packs, requests and weights of other models that make room have returned their
    pages.
    """


class PlannedRows(msgspec.Struct, frozen=True, gc=False):
    """Consecutive rows of one work item in the forward pass."""

    item: str
    """Id of the sequence or the job."""
    kind: RowKind
    """Kind of row."""
    start: int
    """First row, counted within the work item."""
    rows: int
    """Number of rows."""


class PlannedLoss(msgspec.Struct, frozen=True):
    """A job's next trained rows to go through the head to their loss."""

    job: str
    """Id of the job."""
    rows: int
    """Number of rows."""


class PlannedTasklets(msgspec.Struct, frozen=True):
    """The next backward tasklets of a job."""

    job: str
    """Id of the job."""
    rows: int
    """Maximum number of rows of a tasklet."""
    num_tasklets: int
    """Number of tasklets."""
    group: int | None = None
    """Hybrid task of the job; None if it runs by itself. Jobs of one group run their tasklets as
    one batch of rows where they are at the same part of the model; one that is ahead waits for the
    others.
    """


class Partition(NamedTuple):
    """A division of the device's units (cores of a CPU, shares of a GPU's multiprocessors) for a
    step that runs jobs beside its forward pass. Both sides together have at most as many units as
    the device.
    """

    forward_units: int
    """Units of the forward pass."""
    backward_units: int
    """Units of losses and tasklets."""
    stops: bool = False
    """Whether tasklets that are left when the forward pass ends stay for a later step; otherwise
    they run on, on the whole device.
    """


class Prediction(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The predicted time of a plan's step: seconds of the whole device, section by section."""

    forward_s: float = 0.0
    """Forward pass, with sampling."""
    prefill_s: float = 0.0
    """Part of forward_s that prompts add."""
    batch_s: float = 0.0
    """Part of forward_s that batch work adds."""
    window_s: float = 0.0
    """Part of forward_s that windows of jobs add."""
    loss_s: float = 0.0
    """Losses of jobs."""
    backward_s: float = 0.0
    """Tasklets."""
    update_s: float = 0.0
    """Optimizer steps."""
    overhead_s: float = 0.0
    """Time outside all sections."""
    forward_correction: float = 1.0
    """Ratio of forward_s to what the profile alone predicts."""
    forward_speed: float = 1.0
    """Speed of the forward pass on its units, as a share of the whole device's."""
    backward_speed: float = 0.0
    """Speed of losses and tasklets beside the forward pass; 0 where they do not run beside it."""
    decode_share: float = 0.0
    """Share of a TPOT that a step of decode rows alone takes, averaged over the requests that
    decode.
    """

    @property
    def step_s(self) -> float:
        """Return the time of the whole step, divided as planned."""
        return self.seconds_with(self.backward_s)

    def seconds_with(self, backward_s: float) -> float:
        """Return the time of the step if its tasklets take `backward_s` seconds of the whole
        device.

        Losses and tasklets that run beside the forward pass add no time of their own.
        """
        forward_s = self.forward_s / self.forward_speed
        left_s = max(0.0, self.loss_s + backward_s - self.backward_speed * forward_s)
        return self.overhead_s + forward_s + left_s + self.update_s


_NOTHING = Prediction()


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A policy's decision on the next step.

    First, memory changes hands: requests are preempted, packs dropped, requests admitted and packs
    begun, in this order. The engine checks each: what cannot be done, because pages are missing, is
    left out, with its rows. Then one step runs: losses, tasklets, optimizer steps, the forward
    pass; in this order, or with a partition losses and tasklets beside the forward pass. The tokens
    of requests come out at the end of the step, where their deadlines are compared with it.
    """

    preempt: tuple[str, ...] = ()
    """Sequences of requests that lose their pages; their tokens are computed again."""
    drop: tuple[str, ...] = ()
    """Jobs whose packs lose their pages."""
    admit: tuple[str, ...] = ()
    """Sequences of requests that get their pages."""
    begin: tuple[str, ...] = ()
    """Jobs whose next packs get their pages."""
    rows: tuple[PlannedRows, ...] = ()
    """Rows of the forward pass."""
    losses: tuple[PlannedLoss, ...] = ()
    """Rows of packs that go through the loss."""
    tasklets: tuple[PlannedTasklets, ...] = ()
    """Work of packs that go backward."""
    updates: tuple[str, ...] = ()
    """Jobs that run an optimizer step."""
    backward_limit_s: float | None = None
    """Seconds after the device begins at which no further tasklet begins; None: no limit."""
    partition: Partition | None = None
    """Division of the device; None if one side runs after the other."""
    prediction: Prediction = _NOTHING
    """Predicted time of the step."""

    @property
    def predicted_s(self) -> float:
        """Return the predicted time of the whole step."""
        return self.prediction.step_s

    @property
    def moved_jobs(self) -> tuple[str, ...]:
        """Return the jobs whose packs advance, each once."""
        windows = [rows.item for rows in self.rows if rows.kind == "window"]
        losses, tasklets = (
            [piece.job for piece in self.losses],
            [part.job for part in self.tasklets],
        )
        return tuple(dict.fromkeys([*windows, *losses, *tasklets]))

    @property
    def runs_nothing(self) -> bool:
        """Return whether there is no step to run; memory may still change hands."""
        return not (self.rows or self.losses or self.tasklets or self.updates)

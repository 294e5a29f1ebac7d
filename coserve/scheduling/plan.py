"""What a policy may see, and what it decides: plain data, small enough to make anew for every step.

The entries are structs, which are quick to make: a step makes several for each of some hundred requests. Those hold
numbers and strings alone, so that the garbage collector need not look at them (`gc=False`). Where many fields are
given, some go by their place: Python makes a dictionary for more than 15 keywords, which takes ten times as long.
"""

from math import inf
from typing import Any, Literal, NamedTuple

import msgspec

from coserve.scheduling.counts import JobCounts

RowKind = Literal["decode", "prefill", "window"]
JobPhase = Literal["pack", "forward", "loss", "backward", "update"]


class RequestView(msgspec.Struct, frozen=True, gc=False):
    """A sequence of a request that runs, or that waits for pages.

    num_rows: tokens to run before its next token can be chosen; 1 for a request that decodes. num_past: tokens whose K
    and V are there (of one that waits: that it would share). num_output: tokens chosen so far. version: of its adapter
    ("" for none), with num_bypasses bypasses. num_pages: by how many the available pages fall when all of num_rows get
    theirs (with admission, if it waits). num_held: pages that it has, which come back when it is preempted. draws:
    whether its tokens are drawn, not the likeliest. is_masked: whether only some tokens may come, by its grammar.
    num_scored: rows whose next token is scored, as prompt log-probabilities are. may_start: False while it waits for a
    sequence with the same prompt. num_left: tokens that may still come at most. num_sure: those that will in any
    case; none below 0. jobs_s: seconds that work of jobs, and batch work, has taken since its first token; before that,
    since it came. priority: the lowest goes first. batch_due_s: of batch work, when it should be done; None: of a
    request that somebody waits for. Times in seconds of the engine's clock.
    """

    id: str
    num_rows: int
    num_past: int
    num_output: int
    arrival_s: float
    first_token_s: float | None
    last_token_s: float
    ttft_s: float
    tpot_s: float
    version: str = ""
    num_bypasses: int = 0
    tenant: str = ""
    num_pages: int = 0
    num_held: int = 0
    draws: bool = False
    num_scored: int = 0
    may_start: bool = True
    num_left: int = 2**31
    jobs_s: float = 0.0
    is_masked: bool = False
    priority: int = 0
    batch_due_s: float | None = None
    num_sure: int = 0


class JobView(msgspec.Struct, frozen=True):
    """A job that could do something now.

    phase: "pack" if its next pack is to be begun, "update" if an optimizer step is due; otherwise what its pack in
    memory is at. num_rows: of the pack. num_rows_left: rows that are still to go forward, through the loss (those that
    have a target), or backward in the current part. num_parts_left: parts that are still to go backward, the current
    one among them. mean_context_len: mean number of tokens that a row attends to. waited_s: since it last got on.
    num_pages: that the pack holds, or needs to begin. num_rows_done: rows that would be lost if the pack were dropped;
    the loss, and each part backward, count as a pass each. num_rows_run: rows of all its packs so far. begins_at: what
    a pack that is to be begun will be at: "forward", but for one that comes back from the host.
    """

    id: str
    phase: JobPhase
    num_rows: int
    num_rows_left: int
    num_parts_left: int
    mean_context_len: float
    counts: JobCounts
    waited_s: float = 0.0
    tenant: str = ""
    num_pages: int = 0
    num_rows_done: int = 0
    num_rows_run: float = 0.0
    begins_at: JobPhase = "forward"


class TenantView(msgspec.Struct, frozen=True):
    """A tenant that has requests or jobs here, or had some lately.

    Attributes:
        served: Weighted tokens that it was served (`scheduling.fairness`).
        used_s: Seconds of the device that it was served, divided by its weight (`scheduling.tenant_times`).
        weight: Its part of the device beside the others'.
        is_present: Whether it has work now.
    """

    name: str
    served: float = 0.0
    used_s: float = 0.0
    weight: float = 1.0
    is_present: bool = True


class NeedView(msgspec.Struct, frozen=True):
    """What recent requests would have needed of their SLOs without jobs, 99 of 100 of them; 0 if nothing is known. At 1
    there is nothing left for jobs (`scheduling.attainment`).

    late_share: of those that needed more than 1. time: the most that they needed lately of some seconds, for prompts
    and to decode at the pace of their SLOs; 0 in the first seconds, and in those after a long pause. known: how far the
    requests seen so far tell what 99 of 100 need, from 0 to 1.
    """

    ttft: float = 0.0
    tpot: float = 0.0
    late_share: float = 0.0
    time: float = 0.0
    known: float = 0.0


_UNKNOWN_NEED = NeedView()


class View(msgspec.Struct, frozen=True):
    """The engine at the moment of planning.

    requests: those that run, in the order of admission. waiting: those that wait for pages, in the order in which they
    came, preempted ones first. batch, batch_waiting: the same of batch work, for which nobody waits; of a policy that
    does not tell the two apart (`Policy.serves_batch`) they are among the others. jobs: the one that has been served
    least first. num_free_pages: that could be had now: free ones, and those of prefixes that nobody uses. num_pages: of
    the pool (0: not known). block_tokens: tokens of a page. ttft_s, tpot_s: the SLO of a request that brings none, such
    as the next to arrive. max_rows: the most rows of a forward pass. max_requests: the most that run at once. need: how
    near to their SLOs requests are by themselves. num_units: of the device, for a `Partition`; 1: it cannot be divided.
    history: what the policy has the engine remember (`Policy.make_history`); None if that is nothing. give_back_s:
    within how many seconds packs, requests and weights of other models that make room have given their pages back.
    tenants: for policies that tell tenants apart (`Policy.is_fair`); the others see none.
    """

    now_s: float
    requests: tuple[RequestView, ...] = ()
    waiting: tuple[RequestView, ...] = ()
    batch: tuple[RequestView, ...] = ()
    batch_waiting: tuple[RequestView, ...] = ()
    jobs: tuple[JobView, ...] = ()
    tenants: tuple[TenantView, ...] = ()
    num_free_pages: int = 0
    num_pages: int = 0
    block_tokens: int = 16
    ttft_s: float = inf
    tpot_s: float = inf
    max_rows: int = 2048
    max_requests: int = 256
    need: NeedView = _UNKNOWN_NEED
    num_units: int = 1
    history: Any = None
    give_back_s: float = 0.0


class PlannedRows(msgspec.Struct, frozen=True, gc=False):
    """Consecutive rows of one work item in the forward pass; start: its first row, counted in the work item."""

    item: str
    kind: RowKind
    start: int
    rows: int


class PlannedLoss(msgspec.Struct, frozen=True):
    """The next trained rows of a job's pack through the head, to their loss."""

    job: str
    rows: int


class PlannedTasklets(msgspec.Struct, frozen=True):
    """The next tasklets of a job, each of at most `rows` rows.

    Jobs of one group run theirs as one batch of rows where they are at the same part of the model; one that is ahead
    waits for the others. group None: by itself.
    """

    job: str
    rows: int
    num_tasklets: int
    group: int | None = None


class Partition(NamedTuple):
    """Units of a device (cores of a CPU, shares of a GPU's multiprocessors) for each side of a step that runs jobs
    beside its forward pass: together at most as many as there are.

    stops: whether tasklets that are left when the forward pass has ended stay for a later step; otherwise they run on,
    on the whole device.
    """

    forward_units: int
    backward_units: int
    stops: bool = False


class Plan(msgspec.Struct, frozen=True):
    """What the engine does next.

    First, memory: requests are preempted (their pages go back, their tokens are computed again), packs dropped,
    requests admitted, and packs begun, in this order. The engine checks each: what cannot be done, because pages are
    missing, is left out, with its rows. Then one step runs: losses, tasklets, optimizer steps, the forward pass; in
    this order, or with a partition losses and tasklets beside the forward pass. The tokens of requests come out at the
    end of the step, where their deadlines are compared with it.

    backward_limit_s: seconds after the device begins at which no further tasklet begins (None: no limit). The
    predictions are in seconds of the whole device; prefill_s, batch_s, window_s: what prompts, batch work and windows
    add to forward_s; overhead_s: beside all sections. forward_correction: forward_s over what the profile alone says.
    forward_speed, backward_speed: of these speeds, what the forward pass and losses and tasklets beside it reach on
    their units; predicted_s counts with them. decode_share: of a TPOT, what a step that only decodes takes, in the mean
    over the requests that do.
    """

    preempt: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    admit: tuple[str, ...] = ()
    begin: tuple[str, ...] = ()
    rows: tuple[PlannedRows, ...] = ()
    losses: tuple[PlannedLoss, ...] = ()
    tasklets: tuple[PlannedTasklets, ...] = ()
    updates: tuple[str, ...] = ()
    backward_limit_s: float | None = None
    partition: Partition | None = None
    forward_s: float = 0.0
    prefill_s: float = 0.0
    batch_s: float = 0.0
    window_s: float = 0.0
    loss_s: float = 0.0
    backward_s: float = 0.0
    update_s: float = 0.0
    overhead_s: float = 0.0
    forward_correction: float = 1.0
    forward_speed: float = 1.0
    backward_speed: float = 0.0
    decode_share: float = 0.0

    @property
    def predicted_s(self) -> float:
        return self.seconds_with(self.backward_s)

    def seconds_with(self, backward_s: float) -> float:
        """The prediction for the step if its tasklets are worth as many seconds of the whole device: what losses and
        tasklets get done beside the forward pass takes no time of its own.
        """
        forward_s = self.forward_s / self.forward_speed
        left_s = max(0.0, self.loss_s + backward_s - self.backward_speed * forward_s)
        return self.overhead_s + forward_s + left_s + self.update_s

    @property
    def moved_jobs(self) -> tuple[str, ...]:
        """The jobs whose packs get on with it."""
        windows = [rows.item for rows in self.rows if rows.kind == "window"]
        losses, tasklets = [piece.job for piece in self.losses], [part.job for part in self.tasklets]
        return tuple(dict.fromkeys([*windows, *losses, *tasklets]))

    @property
    def runs_nothing(self) -> bool:
        """Whether there is no step to run (memory may still change hands)."""
        return not (self.rows or self.losses or self.tasklets or self.updates)

"""What a policy may see, and what it decides: plain data, small enough to make anew for every step.

The entries are named tuples because a step makes dozens of them within its budget of microseconds.
"""

from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple

from coserve.scheduling.counts import JobCounts

RowKind = Literal["decode", "prefill", "window"]
JobPhase = Literal["forward", "loss", "backward", "update"]


class RequestView(NamedTuple):
    """A request that has its pages.

    num_rows: tokens to run before its next token can be chosen; 1 for a request that decodes. num_past: tokens whose K
    and V are there. num_output: tokens chosen so far. version: of its adapter ("" for none), with num_bypasses bypass
    bypasses. Times in seconds of the engine's clock.
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


class JobView(NamedTuple):
    """A job with a pack in memory, or one whose optimizer step is due.

    num_rows: of its pack. num_rows_left: rows that are still to go forward, through the loss (those that have a
    target), or backward in the current part. num_parts_left: parts that are still to go backward, the current one among
    them. mean_context_len: mean number of keys that a row attends to. waited_s: since it last got on.
    """

    id: str
    phase: JobPhase
    num_rows: int
    num_rows_left: int
    num_parts_left: int
    mean_context_len: float
    counts: JobCounts
    waited_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class View:
    """The engine at the moment of planning.

    requests: in the order of arrival. jobs: the one that has been served least first. ttft_s, tpot_s: the objectives of
    a request that brings none, such as the next to arrive. max_rows: the most rows of a forward pass.
    """

    now_s: float
    requests: tuple[RequestView, ...] = ()
    jobs: tuple[JobView, ...] = ()
    num_free_pages: int = 0
    ttft_s: float = inf
    tpot_s: float = inf
    max_rows: int = 2048


class PlannedRows(NamedTuple):
    """Consecutive rows of one work item in the forward pass; start: its first row, counted in the work item."""

    item: str
    kind: RowKind
    start: int
    rows: int


class PlannedLoss(NamedTuple):
    """The next trained rows of a job's pack through the head, to their loss."""

    job: str
    rows: int


class PlannedTasklets(NamedTuple):
    """The next tasklets of a job, each of at most `rows` rows."""

    job: str
    rows: int
    num_tasklets: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one step runs: first losses, then tasklets, then optimizer steps, then the forward pass.

    In this order the tokens of requests come out at the end of the step, where their deadlines are compared with it.
    The predictions are in seconds, without the margin for error.
    """

    rows: tuple[PlannedRows, ...] = ()
    losses: tuple[PlannedLoss, ...] = ()
    tasklets: tuple[PlannedTasklets, ...] = ()
    updates: tuple[str, ...] = ()
    forward_s: float = 0.0
    loss_s: float = 0.0
    backward_s: float = 0.0
    update_s: float = 0.0

    @property
    def predicted_s(self) -> float:
        return self.forward_s + self.loss_s + self.backward_s + self.update_s

    @property
    def moved_jobs(self) -> tuple[str, ...]:
        """The jobs whose packs get on with it."""
        windows = [rows.item for rows in self.rows if rows.kind == "window"]
        losses, tasklets = [piece.job for piece in self.losses], [part.job for part in self.tasklets]
        return tuple(dict.fromkeys([*windows, *losses, *tasklets]))

    @property
    def is_empty(self) -> bool:
        return not (self.rows or self.losses or self.tasklets or self.updates)

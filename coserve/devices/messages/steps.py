"""A step as it crosses between the engine and a device: what to run, and its result.

See `commands.py` for the rest.
"""

import msgspec

from coserve.devices.messages.commands import Command
from coserve.scheduling.plan import Partition


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Chosen token with its log-probability, and the likeliest tokens in its place with theirs."""

    token: int
    """Id of the token."""
    logprob: float
    """Natural logarithm of its probability."""
    top: tuple[tuple[int, float], ...] = ()
    """Ids and log-probabilities of the likeliest tokens, or of those that the request names."""
    rank: int = 0
    """Place of a prompt's token among all, from 1 (the likeliest); 0: not counted."""


class RequestRows(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Consecutive rows of a request; no rows where it only gets pages."""

    request: str
    """Id of the request."""
    start: int
    """Position of the first row in the sequence."""
    tokens: tuple[int, ...]
    """Token ids of the rows."""
    new_pages: tuple[int, ...] = ()
    """Pages that join the request's page table before anything runs, also if the step fails."""
    samples: bool = False
    """Whether a token is chosen after the last row."""
    place: int = 0
    """Number of tokens that were chosen before."""
    forbidden: tuple[int, ...] = ()
    """Token ids that must not be chosen now."""
    scored_row: int = 0
    """Row (position in the sequence) after which the first target is scored."""
    targets: tuple[int, ...] = ()
    """Tokens to score, each after the row that follows the one before."""


class WindowRows(msgspec.Struct, frozen=True, array_like=True):
    """Next rows of a job's pack in the forward pass."""

    job: str
    """Id of the job."""
    num_rows: int
    """Number of rows."""


class LossRows(msgspec.Struct, frozen=True, array_like=True):
    """Next trained rows of a job's pack through the head, to their loss and its gradient."""

    job: str
    """Id of the job."""
    num_rows: int
    """Number of rows."""


class Tasklets(msgspec.Struct, frozen=True, array_like=True):
    """Next tasklets (backward, one part of the model on some rows) of a job's pack."""

    job: str
    """Id of the job."""
    num_rows: int
    """Most rows of a tasklet."""
    num_tasklets: int
    """Number of tasklets."""
    group: int | None = None
    """Group of jobs that take turns together: in each turn the jobs that have done the fewest parts
    of the model run a tasklet each, as one batch of rows. None: the job alone.
    """


class Update(msgspec.Struct, frozen=True, array_like=True):
    """Optimizer step of a job."""

    job: str
    """Id of the job."""
    num_trained: int
    """Number of trained rows that the gradients are of."""
    num_steps: int
    """Number of optimizer steps of the whole job, for the learning rate's schedule."""


class StepBatch(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """All that a device runs in one step.

    Losses run first, then tasklets, group by group, then optimizer steps, and all rows last, as
    one batch. With a `partition`, losses and tasklets run beside the rows.
    """

    step: int
    """Number of the step."""
    commands: tuple[Command, ...] = ()
    """Commands to do before the step, in order; none of them has a reply, nor fails."""
    losses: tuple[LossRows, ...] = ()
    """Rows of jobs through the head."""
    tasklets: tuple[Tasklets, ...] = ()
    """Backward work of jobs."""
    updates: tuple[Update, ...] = ()
    """Optimizer steps of jobs."""
    requests: tuple[RequestRows, ...] = ()
    """Rows of requests; those of one adapter version stand side by side."""
    windows: tuple[WindowRows, ...] = ()
    """Rows of jobs in the forward pass."""
    backward_limit_s: float | None = None
    """Seconds after the step's start at which no further tasklet begins; None: no limit. The step's
    first tasklet runs in any case, so that no job stands still.
    """
    partition: Partition | None = None
    """How the device is divided into two sides, in a step with rows and with losses or tasklets.
    Losses, and tasklets as long as the forward pass lasts, then run beside it from the step's
    start, each side on its units. A tasklet that is under way when the forward pass ends is
    finished on the whole device, and the remaining ones follow, unless the partition stops them;
    then optimizer steps.
    """


class PackSums(msgspec.Struct, frozen=True, array_like=True):
    """Sums over a pack's trained rows; of an objective over sequences, over its units."""

    loss: float
    """Sum of the losses."""
    num_correct: int
    """Rows whose likeliest token is the target."""
    num_trained: int
    """Number of the rows, or units."""
    metrics: dict[str, float] = {}
    """Sums of the objective's metrics."""


class StepFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Reason why a step was not completed: the device ran out of memory.

    Packs that took part must be dropped. Requests may run the same rows again, but those that carry
    states must be closed.
    """

    message: str
    """One line for people."""
    broken_update: str | None = None
    """Job whose optimizer step was under way, so that its parameters may be half moved."""


class StepResult(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Result of a step, by ids; times are in seconds."""

    step: int
    """Number of the step."""
    tokens: dict[str, TokenLogprob] = {}
    """Chosen token by request that samples."""
    ended: tuple[str, ...] = ()
    """Requests whose grammar allows nothing after the chosen token."""
    refused: dict[str, str] = {}
    """Reason by request for which no token can be chosen; its entry in `tokens` means nothing."""
    embeddings: dict[str, tuple[float, ...]] = {}
    """State by request that samples and asks for embeddings."""
    prompts: dict[str, tuple[TokenLogprob, ...]] = {}
    """Scores of its targets by request that has some."""
    num_tasklets: dict[str, int] = {}
    """Number of tasklets by job that ran before the time limit."""
    num_beside: dict[str, int] = {}
    """How many of these ran beside the forward pass, by job."""
    packs: dict[str, PackSums] = {}
    """Sums of the packs that are done with this step, by job. Their gradients join those of the
    optimizer step, unless `DropPack` follows.
    """
    norms: dict[str, float | None] = {}
    """Gradient norm by job that made an optimizer step; None: the gradient was not finite, and the
    step was skipped.
    """
    forward_s: float = 0.0
    """Time of the forward pass, with sampling."""
    loss_s: float = 0.0
    """Time of losses."""
    backward_s: float = 0.0
    """Time of tasklets."""
    update_s: float = 0.0
    """Time of optimizer steps."""
    beside_s: float = 0.0
    """Time of losses and tasklets beside the forward pass, which no other time includes."""
    copy_s: float = 0.0
    """Time for which all work waited for copies to and from the host."""
    broken: dict[str, str] = {}
    """Reason by job whose model's weights can no longer be read."""
    num_declined: int = 0
    """Tasklets that were not begun since weights were not there."""
    weights_wait_s: float = 0.0
    """Time for which others waited for weights, within `backward_s` or `beside_s`."""
    weight_bytes: int = 0
    """Bytes of weights that were copied to the device since the last step."""
    weights_room_s: float = 0.0
    """Time that weights took to make room for others, between the last step and this one."""
    failure: StepFailure | None = None
    """Why the step was not completed; None: it ran as a whole."""

    @property
    def seconds(self) -> float:
        """Return the time of the whole step."""
        return (
            max(self.forward_s, self.beside_s)
            + self.loss_s
            + self.backward_s
            + self.update_s
            + self.copy_s
        )

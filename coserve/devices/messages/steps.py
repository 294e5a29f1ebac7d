"""A step as it crosses between the engine and a device: what is to run, and what came of it; see
`messages.py`.
"""

import msgspec

from coserve.devices.messages.commands import Command
from coserve.scheduling.plan import Partition


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A chosen token with its log-probability, and the likeliest tokens in its place with theirs.

    rank: of a prompt's token, from 1 (the likeliest); 0 where nothing counted.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


class RequestRows(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Consecutive rows of a request: the tokens from position `start` on; none where it only gets
    pages.

    new_pages: join the request's page table before anything runs, so also if the step fails.
    samples: whether a token is chosen after the last row; then place says how many were chosen
    before, and forbidden lists ids that must not come now. targets: tokens to be scored, the first
    after row `scored_row` (counted in the sequence), each next one after the next row.
    """

    request: str
    start: int
    tokens: tuple[int, ...]
    new_pages: tuple[int, ...] = ()
    samples: bool = False
    place: int = 0
    forbidden: tuple[int, ...] = ()
    scored_row: int = 0
    targets: tuple[int, ...] = ()


class WindowRows(msgspec.Struct, frozen=True, array_like=True):
    """The next rows of a job's pack in the forward pass."""

    job: str
    num_rows: int


class LossRows(msgspec.Struct, frozen=True, array_like=True):
    """The next trained rows of a job's pack through the head, to their loss and its gradient."""

    job: str
    num_rows: int


class Tasklets(msgspec.Struct, frozen=True, array_like=True):
    """The next tasklets of a job's pack, each of at most `num_rows` rows.

    group: jobs of one group take their turns together: in each, those of them that have done the
    fewest parts of the model run a tasklet each, as one batch of rows. None: by itself.
    """

    job: str
    num_rows: int
    num_tasklets: int
    group: int | None = None


class Update(msgspec.Struct, frozen=True, array_like=True):
    """An optimizer step over the gradients of `num_trained` rows, of a job of `num_steps` steps."""

    job: str
    num_trained: int
    num_steps: int


class StepBatch(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """One step: first losses, all rows as one batch, then tasklets, group by group, then optimizer
    steps, then the forward pass over all rows.

    commands: done before it, in order; none of them has a reply, nor fails. requests: rows of one
    adapter version stand side by side. backward_limit_s: seconds after the step's start at which no
    further tasklet begins (None: no limit); the step's first tasklet runs in any case, so that no
    job stands still.

    partition: of a step with rows, and with losses or tasklets; then losses, and tasklets as long
    as the forward pass lasts, run beside it, each side on its units, from the step's start. A
    tasklet that is under way when it ends is finished on the whole device, and what tasklets are
    left follow, unless the partition stops them; then optimizer steps.
    """

    step: int
    commands: tuple[Command, ...] = ()
    losses: tuple[LossRows, ...] = ()
    tasklets: tuple[Tasklets, ...] = ()
    updates: tuple[Update, ...] = ()
    requests: tuple[RequestRows, ...] = ()
    windows: tuple[WindowRows, ...] = ()
    backward_limit_s: float | None = None
    partition: Partition | None = None


class PackSums(msgspec.Struct, frozen=True, array_like=True):
    """Sums over a pack's trained rows. num_correct: rows whose likeliest token is the target. Of an
    objective over sequences: sums over its units, and its metrics.
    """

    loss: float
    num_correct: int
    num_trained: int
    metrics: dict[str, float] = {}


class StepFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The device ran out of memory within the step. Packs that took part must be dropped; requests
    may run the same rows again, but for those that carry states, which must be closed.
    broken_update: the job whose optimizer step was under way, so that its parameters may be half
    moved.
    """

    message: str
    broken_update: str | None = None


class StepResult(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """What came of a step, by id.

    tokens: of the requests that sampled. ended: those of them whose grammar lets nothing come after
    the token. refused: those for which no token could be chosen, with the reason; what is in
    `tokens` is none. embeddings: of those that sampled and ask for them. prompts: of those whose
    targets were scored. num_tasklets: of each job, how many ran before the time limit. packs: sums
    of the packs that are done with this step; their gradients join those of the optimizer step,
    unless `DropPack` follows. norms: gradient norms of the optimizer steps that were made, None
    where the gradient was not finite and the step was skipped. Seconds that each section took;
    beside_s: losses and tasklets beside the forward pass, which are in none of the others, and
    num_beside: how many of a job's tasklets these were; copy_s: for which all waited for copies
    from and to the host. failure: None if the step ran as a whole.

    broken: jobs whose model's weights cannot be read any more, and why. num_declined: tasklets that
    were not begun since weights were not there. weights_wait_s: for which others waited for
    weights, within backward_s or beside_s; weight_bytes: that were brought since the last step.
    weights_room_s: which weights took to make room for others since the last step, before this one
    began.
    """

    step: int
    tokens: dict[str, TokenLogprob] = {}
    ended: tuple[str, ...] = ()
    refused: dict[str, str] = {}
    embeddings: dict[str, tuple[float, ...]] = {}
    prompts: dict[str, tuple[TokenLogprob, ...]] = {}
    num_tasklets: dict[str, int] = {}
    num_beside: dict[str, int] = {}
    packs: dict[str, PackSums] = {}
    norms: dict[str, float | None] = {}
    forward_s: float = 0.0
    loss_s: float = 0.0
    backward_s: float = 0.0
    update_s: float = 0.0
    beside_s: float = 0.0
    copy_s: float = 0.0
    broken: dict[str, str] = {}
    num_declined: int = 0
    weights_wait_s: float = 0.0
    weight_bytes: int = 0
    weights_room_s: float = 0.0
    failure: StepFailure | None = None

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return (
            max(self.forward_s, self.beside_s)
            + self.loss_s
            + self.backward_s
            + self.update_s
            + self.copy_s
        )

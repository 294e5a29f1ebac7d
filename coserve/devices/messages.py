"""What crosses between the engine and a device: frozen, serialisable values that hold ids and numbers only.

The engine sends commands and steps in one ordered stream; a device answers each. Requests, jobs, adapter versions and
pages are ids that the engine gives out; what they stand for (tensors, trainers, copies of adapters) is the device's
own. Pages count from 0; times are seconds. Everything here can be encoded by msgspec, written to a file and replayed.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from coserve.devices.grammar import Grammar
from coserve.devices.matching import Vocabulary
from coserve.devices.sampling_params import SamplingParams
from coserve.devices.swap_messages import MovePack, SwapIn, SwapInTensors, SwapOut, SwapOutTensors
from coserve.scheduling.counts import JobCounts
from coserve.scheduling.plan import Partition
from coserve.scheduling.profile import Profile
from coserve.tuning.config import TuningConfig
from coserve.tuning.shard import Shard

# The optimizer's state, beside an adapter's files in a checkpoint.
OPTIMIZER_FILE = "optimizer.safetensors"


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A chosen token with its log-probability, and the likeliest tokens in its place with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class DeviceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A device with a model on it, and its page pool.

    weights: how those of linear layers are stored, "dense" or "int8". device: such as "cpu" or "cuda:0". num_layers:
    blocks. weight_bytes: of the backbone. threads: of the CPU.
    page_bytes: of one page, which holds K and V of `block_tokens` tokens in all blocks. profile: what pieces of a step
    take here. profile_path: the file that it comes from; "" if it is not kept. deterministic: whether tokens and
    gradients are the same bit for bit, whatever runs beside them. num_units: among which sides of a step it can be
    divided (`Partition`): threads of a CPU, shares of a GPU's multiprocessors; 1: it cannot. num_host_pages: slots of
    a page's size in host memory, for pages that give way (`SwapOut`). fingerprint: of the weights, so that two devices
    can be told to hold the same model; "" if there are none.
    """

    model: str
    dtype: str
    weights: str = "dense"
    device: str
    threads: int
    vocab_size: int
    max_positions: int
    num_layers: int
    weight_bytes: int
    num_pages: int
    page_bytes: int
    block_tokens: int
    profile: Profile
    profile_path: str = ""
    deterministic: bool = False
    num_units: int = 1
    num_host_pages: int = 0
    fingerprint: str = ""


# -- commands ---------------------------------------------------------------------------


class OpenRequest(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A request has its pages: a handle for it. pages: those that it shares with earlier requests, in order.

    prompt, output: the tokens so far, for requests whose params penalize used tokens; empty for all others, but that
    those with a grammar have their output, too.
    """

    request: str
    params: SamplingParams
    seed: int
    version: str = ""
    pages: tuple[int, ...] = ()
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()


class CloseRequest(msgspec.Struct, tag=True, frozen=True):
    """The request has ended, or was preempted: its pages are no longer its own. No error if it was not open."""

    request: str


class ExportPages(msgspec.Struct, tag=True, frozen=True):
    """Copy pages to places of a page file (`coserve.memory.page_files`), one to one: another instance reads them there
    as soon as this is done. OSError if the file is not there.
    """

    path: str
    pages: tuple[int, ...]
    places: tuple[int, ...]


class ImportPages(msgspec.Struct, tag=True, frozen=True):
    """Copy places of a page file to pages. data: what lay there, page after page; only in recordings, which are run
    again when the file has gone.
    """

    path: str
    pages: tuple[int, ...]
    places: tuple[int, ...]
    data: bytes = b""


class SetVocabulary(msgspec.Struct, tag=True, frozen=True):
    """What the model's tokens stand for; before the first grammar.

    May come from any thread, and is done beside steps. RequestError if the device has no library for grammars.
    """

    vocabulary: Vocabulary


class OpenGrammar(msgspec.Struct, tag=True, frozen=True):
    """Compile a grammar, so that no step has to; some are kept. RequestError if it cannot be used.

    May come from any thread, and is done beside steps.
    """

    grammar: Grammar


class OpenVersion(msgspec.Struct, tag=True, frozen=True):
    """Put an adapter in PEFT's format on the device, to be served as `version`. Reply: `VersionOpened`.

    May come from any thread, and is done beside steps; none of them names the version yet. AdapterError for its files;
    DeviceMemoryError. model: that it is of, if that is not the one on the device (see `OpenTrainer`): it can be trained
    further, not served.
    """

    version: str
    directory: str
    model: str = ""


class SaveAdapter(msgspec.Struct, tag=True, frozen=True):
    """Write a version in PEFT's format; AdapterError if it cannot be written."""

    version: str
    directory: str


class DropVersion(msgspec.Struct, tag=True, frozen=True):
    """Let go of a version that no request reads; no error if it is not there."""

    version: str


class OpenTrainer(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Make the tensors of a job. Reply: `TrainerOpened`. One of three says where the adapter comes from.

    adapter: the fields of PEFT's adapter_config.json, for a fresh one. version: a copy of a served one. checkpoint: a
    directory that `WriteCheckpoint` made; then the optimizer's state comes from there, too, and `adapter` says what
    the job began with, if it is known. mean_context_len: mean
    number of tokens that a row attends to, for choosing what to recompute.

    model: that it trains, where that is not the one on the device: a directory or hub id (`find_model`), whose weights
    pass through the pages of `ResizeWindow`; "" for the one on the device. shard: this is one node's part of the job.

    AdapterError: it fits nowhere on this model, or the checkpoint is damaged. ModelError: there is no such model.
    DeviceMemoryError.
    """

    job: str
    config: TuningConfig
    mean_context_len: float
    adapter: dict[str, Any] | None = None
    version: str | None = None
    checkpoint: str | None = None
    model: str = ""
    shard: Shard | None = None


class ResizeWindow(msgspec.Struct, tag=True, frozen=True):
    """The run of pages that weights of models other than the device's own pass through, from now on. What lies in
    others is let go of before anything is written to them.
    """

    first_page: int
    num_pages: int


class CloseTrainer(msgspec.Struct, tag=True, frozen=True):
    """The job has ended: pack, gradients and the optimizer's state go; the adapter itself stays until `DropTrainer`."""

    job: str


class DropTrainer(msgspec.Struct, tag=True, frozen=True):
    """Let go of all that there is of a job; no error if it is not there."""

    job: str


class BeginPack(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Lay a pack out on the pages that it was given; DeviceMemoryError begins nothing. It takes the place of one that
    was begun and never done, of which the engine does not know.

    sequences: token ids, and for each whether it is trained on. first_row: its first row among all that the job ever
    trains on. runs: (first page, number of pages) of each group of tensors, in the order of `TrainerOpened`. evaluate:
    measure the loss alone. is_reference: of the model without the adapter, for the pack that comes next, which is the
    same. values, labels: what examples bring for the objective (see `Example`).
    """

    job: str
    sequences: tuple[tuple[tuple[int, ...], tuple[bool, ...]], ...]
    first_row: int
    runs: tuple[tuple[int, int], ...]
    evaluate: bool = False
    is_reference: bool = False
    values: tuple[tuple[float, ...], ...] = ()
    labels: tuple[float, ...] = ()


class DropPack(msgspec.Struct, tag=True, frozen=True):
    """Forget the pack that was begun last, at any moment, also if it was done in a step whose result nobody took.

    Gradients of earlier packs stay.
    """

    job: str


class PublishVersion(msgspec.Struct, tag=True, frozen=True):
    """Keep a copy of a job's adapter as it is, to be served as `version`; DeviceMemoryError keeps none."""

    job: str
    version: str


class TakeCheckpoint(msgspec.Struct, tag=True, frozen=True):
    """Copy a job's adapter, and its optimizer's state unless the trainer is closed; DeviceMemoryError takes none."""

    job: str
    checkpoint: str


class WriteCheckpoint(msgspec.Struct, tag=True, frozen=True):
    """Write a copy to files in a directory that exists; AdapterError or OSError if it cannot be written.

    May come from any thread, and is done beside steps.
    """

    checkpoint: str
    directory: str


class DropCheckpoint(msgspec.Struct, tag=True, frozen=True):
    """Let go of a copy; no error if it is not there."""

    checkpoint: str


class TakeContribution(msgspec.Struct, tag=True, frozen=True):
    """Take what a job's other nodes are to have of it (`coserve.tuning.shard`): the gradients since the last optimizer
    step, which are then the trainer's no more; or its progress. A copy as of `TakeCheckpoint`, with the same commands.
    """

    job: str
    checkpoint: str


class ReadContributions(msgspec.Struct, tag=True, frozen=True):
    """Read what nodes have written, for `CombineContributions`; AdapterError for their files.

    May come from any thread, and is done beside steps; no error if the job is not there any more.
    """

    job: str
    directories: tuple[str, ...]


class CombineContributions(msgspec.Struct, tag=True, frozen=True):
    """Take in the first `number` of those that were read, and not taken in yet. meets: with them, all nodes hold the
    same.
    """

    job: str
    number: int
    meets: bool = False


Command = (
    ResizeWindow
    | OpenRequest
    | CloseRequest
    | SwapOut
    | SwapIn
    | ExportPages
    | ImportPages
    | SwapOutTensors
    | SwapInTensors
    | SetVocabulary
    | OpenGrammar
    | OpenVersion
    | SaveAdapter
    | DropVersion
    | OpenTrainer
    | CloseTrainer
    | DropTrainer
    | BeginPack
    | MovePack
    | DropPack
    | PublishVersion
    | TakeCheckpoint
    | WriteCheckpoint
    | DropCheckpoint
    | TakeContribution
    | ReadContributions
    | CombineContributions
)


# -- replies to commands (None where none is named) ---------------------------------------


class VersionOpened(msgspec.Struct, tag=True, frozen=True):
    """num_bypasses: sites of the adapter. num_bytes: of its parameters, as they go to the host. num_virtual_tokens:
    rows that stand before every prompt, with the ids -1, -2, ….
    """

    num_bypasses: int
    num_bytes: int = 0
    num_virtual_tokens: int = 0


class TrainerOpened(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """What a job costs. training, evaluation: the groups of tensors that a pack takes, each as the bytes of one row of
    each of its tensors: first the workspace, then what is saved of every part before the head, in forward order.
    (`coserve.memory.pack_pages` says when each goes back.) trained_parts: how many of these parts, from the last one
    down, run backward. version_bytes, optimizer_bytes: of the parameters, and of the optimizer's moments after its
    first step, as they go to the host. num_virtual_tokens: rows that stand before every example (see `VersionOpened`).
    other: of a job on a model of its own. changes_model: each of its steps changes the weights that serve.
    """

    counts: JobCounts
    training: tuple[tuple[int, ...], ...]
    evaluation: tuple[tuple[int, ...], ...]
    trained_parts: int
    version_bytes: int = 0
    optimizer_bytes: int = 0
    num_virtual_tokens: int = 0
    changes_model: bool = False
    other: "OtherModel | None" = None


class OtherModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that a job trains beside the one on the device; all that its packs run are tasklets, part by part.

    forward_turns, loss_turns: of these, before the first part goes backward; evaluation_loss_turns: of a pack that only
    measures the loss. least_bytes, all_bytes: of a window in which the next part can come while one
    computes, and of one in which all of them stay.
    """

    vocab_size: int
    max_positions: int
    forward_turns: int
    loss_turns: int
    evaluation_loss_turns: int
    least_bytes: int
    all_bytes: int


Reply = VersionOpened | TrainerOpened | None


# -- a step -------------------------------------------------------------------------------


class RequestRows(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Consecutive rows of a request: the tokens from position `start` on; none where it only gets pages.

    new_pages: join the request's page table before anything runs, so also if the step fails. samples: whether a token
    is chosen after the last row; then place says how many were chosen before, and forbidden lists ids that must not
    come now. targets: tokens to be scored, the first after row `scored_row` (counted in the sequence), each next one
    after the next row.
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

    group: jobs of one group take their turns together: in each, those of them that have done the fewest parts of the
    model run a tasklet each, as one batch of rows. None: by itself.
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
    """One step: first losses, all rows as one batch, then tasklets, group by group, then optimizer steps, then the
    forward pass over all rows.

    commands: done before it, in order; none of them has a reply, nor fails. requests: rows of one adapter version
    stand side by side. backward_limit_s: seconds after the step's start at which no further tasklet begins (None: no
    limit); the step's first tasklet runs in any case, so that no job stands still.

    partition: of a step with rows, and with losses or tasklets; then losses, and tasklets as long as the forward pass
    lasts, run beside it, each side on its units, from the step's start. A tasklet that is under way when it ends is
    finished on the whole device, and what tasklets are left follow, unless the partition stops them; then optimizer
    steps.
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
    """Sums over a pack's trained rows. num_correct: rows whose likeliest token is the target. Of an objective over
    sequences: sums over its units, and its metrics.
    """

    loss: float
    num_correct: int
    num_trained: int
    metrics: dict[str, float] = {}


class StepFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The device ran out of memory within the step. Packs that took part must be dropped; requests may run the same
    rows again. broken_update: the job whose optimizer step was under way, so that its parameters may be half moved.
    """

    message: str
    broken_update: str | None = None


class StepResult(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """What came of a step, by id.

    tokens: of the requests that sampled. ended: those of them whose grammar lets nothing come after the token. refused:
    those for which no token could be chosen, with the reason; what is in `tokens` is none. embeddings: of those that
    sampled and ask for them. prompts: of those whose targets were scored. num_tasklets: of each job, how many ran
    before the time limit. packs: sums of the packs that are done with this step; their gradients join those of the
    optimizer step, unless `DropPack` follows. norms: gradient norms of the optimizer steps that were made, None where
    the gradient was not finite and the step was skipped. Seconds that each section took; beside_s: losses and tasklets
    beside the forward pass, which are in none of the others, and num_beside: how many of a job's tasklets these were;
    copy_s: for which all waited for copies from and to the host. failure: None if the step ran as a whole.

    broken: jobs whose model's weights cannot be read any more, and why. num_declined: tasklets that were not begun
    since weights were not there. weights_wait_s: for which others waited for weights, within backward_s or beside_s;
    weight_bytes: that were brought since the last step.
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
    failure: StepFailure | None = None

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return max(self.forward_s, self.beside_s) + self.loss_s + self.backward_s + self.update_s + self.copy_s


def group_bytes(row_bytes: Sequence[int], num_rows: int) -> int:
    """Bytes that a group of tensors takes in the pool, each tensor aligned to 64 bytes."""
    return sum(-(-each * num_rows // 64) * 64 for each in row_bytes)

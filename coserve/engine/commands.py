"""Commands of an engine: every change of its state is one of these, and `EngineCore` handles them
one after the other.

A server's process sends most of them over the wire (`coserve.protocol`), the methods of `Engine`
make them for a caller in the same process, and a recording holds them in the order in which they
were handled. A command from a server that has a `call` is answered by one `CallReply` with the same
number.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import structs

from coserve.devices.sampling_params import SamplingParams
from coserve.engine.request_queue import ImportedBlocks
from coserve.scheduling.slo import Slo
from coserve.tuning.config import TuningConfig
from coserve.tuning.examples import Example
from coserve.tuning.shard import Combination, DataParallel, Shard

NO_CALL = -1
"""The `call` of a command for whose reply no server waits."""


@dataclass(frozen=True, kw_only=True)
class AdapterRef:
    """A reference to an adapter that requests or jobs use."""

    name: str
    """Name under which the engine serves the adapter."""
    directory: str | None = None
    """PEFT directory from which the adapter is loaded if it is not on the device; None: it must be
    there.
    """


@dataclass(frozen=True, kw_only=True)
class JobStart:
    """Settings with which an engine starts a job, or resumes it from a checkpoint.

    A job begins with `adapter`, with `start`, or at a `checkpoint`; with a checkpoint, `adapter` is
    used only where the checkpoint's PEFT directory does not describe it completely.
    """

    id: str
    """Id of the job."""
    name: str
    """Name of the adapter that the job trains; it is served at the end, and from the first step on
    if the job is live.
    """
    examples: str = ""
    """File of training examples (`coserve.jobs.datasets.examples`); "" where the caller passes them
    in memory.
    """
    validation: str | None = None
    """File of validation examples, in the same format."""
    config: TuningConfig
    """Hyperparameters of the job."""
    adapter: dict[str, Any] | None = None
    """Configuration of a fresh adapter, in PEFT's format."""
    start: AdapterRef | None = None
    """Adapter that is trained further."""
    checkpoint: str | None = None
    """Checkpoint directory, as named by a `Checkpointed`, from which the job resumes."""
    checkpoints: str = ""
    """Directory in which the engine writes checkpoints, as `step-<n>`: every
    `checkpoint_every_steps` steps, at a pause, at a cancellation, and at the end.
    """
    checkpoint_every_steps: int = 0
    """Number of optimizer steps between checkpoints; 0: none while the job runs."""
    keep_best: bool = False
    """Whether the resulting model is the checkpoint of the best evaluation, and not the last one.
    """
    paused: bool = False
    """Whether the job starts paused."""
    tenant: str = ""
    """Owner of the job."""
    alone_until_step: int = 0
    """Optimizer step until which no engine step that works for this job works for another one, so
    that a crash can be attributed.
    """
    model: str = ""
    """Name of the trained model, one of the config's `trainable_models`; "" for the one that
    serves.
    """
    data_parallel: DataParallel | None = None
    """Division of the job among nodes; None: one node. A single engine ignores it, and trains
    everything.
    """
    shard: Shard | None = None
    """Part of the job that this engine trains; None: all of it."""

    @property
    def changes_model(self) -> bool:
        """Return whether the job trains the weights that serve."""
        # Here, since it imports torch, which not every process that passes jobs on has.
        from coserve.adapters.methods import changes_model

        return changes_model(self.adapter)


class AddRequest(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Queue a request.

    It is answered by chunks, the last of each sequence with a finish_reason, or by `RequestRefused`
    if it cannot be served. Chunks on the wire carry tokens without text, and the params carry no
    stop strings: the server's process makes the text.
    """

    id: str
    """Id of the request."""
    prompt: Sequence[int]
    """Token ids of the prompt."""
    params: SamplingParams
    """Sampling parameters."""
    arrival_s: float | None
    """Time of arrival; None: now."""
    slo: Slo | None = None
    """SLO of the request; None: the engine's default."""
    adapter: AdapterRef | None = None
    """Adapter that answers; None: the bare model."""
    tenant: str = ""
    """Owner of the request."""
    priority: int = 0
    """Priority; lower values are served first."""
    batch_due_s: float | None = None
    """Time at which batch work should be done; it runs in capacity that other requests leave over,
    and has no SLO. None: not batch work.
    """
    without_jobs: bool = False
    """Whether no job may have a step beside the request."""

    def by_clock(self, ahead_s: float) -> "AddRequest":
        """Return the request with its times by another clock, which is `ahead_s` seconds ahead."""
        arrival_s = None if self.arrival_s is None else self.arrival_s + ahead_s
        due_s = None if self.batch_due_s is None else self.batch_due_s + ahead_s
        return structs.replace(self, arrival_s=arrival_s, batch_due_s=due_s)


class UseVocabulary(msgspec.Struct, tag=True, frozen=True):
    """Set what tokens stand for, before the first request with a grammar."""

    pieces: Sequence[bytes]
    """Bytes of each token, by id."""
    special: Sequence[int]
    """Ids of special tokens, whose bytes are a name and not text."""


class CancelRequest(msgspec.Struct, tag=True, frozen=True):
    """End a request; the last chunk of each of its sequences has the finish_reason "cancelled"."""

    id: str
    """Id of the request."""


class StopSequence(msgspec.Struct, tag=True, frozen=True):
    """End a sequence whose text has reached a stop string.

    Tokens that the engine has generated beyond it are not counted; the last chunk has no tokens,
    and the finish_reason "stop".
    """

    id: str
    """Id of the request."""
    index: int
    """Index of the sequence among the request's `n`."""
    num_tokens: int
    """Number of tokens that the sequence keeps."""


class HoldRequest(msgspec.Struct, tag=True, frozen=True):
    """Hold a waiting request back until `DeliverBlocks`, while another instance computes its
    prompt.
    """

    id: str
    """Id of the request."""


class DeliverBlocks(msgspec.Struct, tag=True, frozen=True):
    """Deliver the handed-over KV blocks of a held request, which may start from now on."""

    id: str
    """Id of the request."""
    blocks: ImportedBlocks | None
    """Blocks in a page file, which must exist until the request is admitted; None: the handover
    failed, and the prompt is computed here.
    """


class LoadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Load an adapter under its name, unless it is on the device; it counts as used now.

    Where a thread has read the adapter beside steps, `EngineCore.handle` is passed the
    `AdapterLoad`.
    """

    call: int
    """Number of the call, or `NO_CALL`."""
    adapter: AdapterRef
    """Name and directory of the adapter."""
    changed_by: str = ""
    """Job whose full fine-tuning has written the directory, which then holds a model and no adapter
    (see `OpenVersion`); "" otherwise.
    """
    model: str = ""
    """Model that the adapter belongs to, one of the config's `trainable_models`; "" for the one
    that serves.
    """
    stays: bool = False
    """Whether the adapter is never evicted. It is an error then if an adapter of that name is
    loaded already.
    """


class UnloadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Withdraw an adapter: new requests cannot use it. Nothing happens if it is not loaded."""

    call: int
    """Number of the call, or `NO_CALL`."""
    name: str
    """Name of the adapter."""


class SaveVersion(msgspec.Struct, tag=True, frozen=True):
    """Write an adapter version in PEFT's format."""

    label: str
    """Name of the adapter, for its newest version, or `name@step`."""
    directory: str
    """Directory to write to."""


class StartJob(msgspec.Struct, tag=True, frozen=True):
    """Start a job, or resume it from a checkpoint. `EngineCore.handle` is passed its examples,
    which are read beside steps.
    """

    call: int
    """Number of the call, or `NO_CALL`."""
    job: JobStart
    """Settings of the job."""


class PauseJob(msgspec.Struct, tag=True, frozen=True):
    """Pause a job; its current pack goes to the host, or is discarded and restarted on resume. A
    server's engine writes a checkpoint.
    """

    call: int
    """Number of the call, or `NO_CALL`."""
    id: str
    """Id of the job."""


class ResumeJob(msgspec.Struct, tag=True, frozen=True):
    """Resume a paused job."""

    call: int
    """Number of the call, or `NO_CALL`."""
    id: str
    """Id of the job."""


class CancelJob(msgspec.Struct, tag=True, frozen=True):
    """End a job; adapter versions that it has published stay."""

    call: int
    """Number of the call, or `NO_CALL`."""
    id: str
    """Id of the job."""
    keeps: bool = True
    """Whether a server's engine writes a last checkpoint."""


class CombineJob(msgspec.Struct, tag=True, frozen=True):
    """Apply the contributions of a divided job's nodes, and continue. It follows each `Contributed`
    once.
    """

    call: int
    """Number of the call, or `NO_CALL`."""
    id: str
    """Id of the job."""
    combination: Combination
    """Contributions to apply."""


class CopyCheckpoint(msgspec.Struct, tag=True, frozen=True):
    """Copy a job's state after its last whole optimizer step. A job that is over has no optimizer
    state.
    """

    id: str
    """Id of the job."""


class CopyContribution(msgspec.Struct, tag=True, frozen=True):
    """Copy what this node contributes to a divided job, when its event reports that a contribution
    is due.
    """

    id: str
    """Id of the job."""


class ForgetJob(msgspec.Struct, tag=True, frozen=True):
    """Forget a job that is over; adapter versions that it has published stay."""

    id: str
    """Id of the job."""


class Step(msgspec.Struct, tag=True, frozen=True):
    """Plan a step, and have the device begin it."""


class FlushCommands(msgspec.Struct, tag=True, frozen=True):
    """Carry out the commands in the device's log now, because no step is coming or an unrecorded
    command follows.
    """


RequestCommand = (
    AddRequest | UseVocabulary | CancelRequest | StopSequence | HoldRequest | DeliverBlocks
)
AdapterCommand = LoadAdapter | UnloadAdapter | SaveVersion
JobCommand = (
    StartJob
    | PauseJob
    | ResumeJob
    | CancelJob
    | CombineJob
    | CopyCheckpoint
    | CopyContribution
    | ForgetJob
)
EngineCommand = Step | FlushCommands | RequestCommand | AdapterCommand | JobCommand


@dataclass(frozen=True, kw_only=True)
class JobExamples:
    """Tokenized data of a job."""

    examples: Sequence[Example]
    """Training examples."""
    validation: Sequence[Example] = ()
    """Validation examples."""

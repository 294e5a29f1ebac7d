"""What an engine is commanded: every change of its state is one of these, handled one after the
other (`EngineCore`).

The server's process sends most of them over the wire (`coserve.protocol`), a library's caller makes
them by the methods of `Engine`, and a recording has them as they were handled. Those with a `call`
are answered by one `CallReply` with the same number where a server has sent them.
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
    """An adapter by the name under which the engine serves it; directory: where to load it from if
    it is not on the device.
    """

    name: str
    directory: str | None = None


@dataclass(frozen=True, kw_only=True)
class JobStart:
    """All that an engine needs to start a job, or to resume it where a checkpoint was taken.

    name: of the adapter that it makes, and serves when it is done (when live, from the first step
    on). examples, validation: files that `coserve.jobs.datasets.examples` wrote ("" where a library's caller
    has the examples). adapter: a fresh one, by its configuration in PEFT's format; or start: one to
    train further. checkpoint: a directory that a `Checkpointed` named; then neither is used.
    checkpoints: the directory in which the engine writes `step-<n>`: every `checkpoint_every_steps`
    optimizer steps (0: not while it runs), at a pause, at a cancellation, and at the end. paused:
    it waits to be resumed. tenant: whose it is. alone_until_step: until then, no step of the engine
    works for another job as well. model: that it trains, by the engine's name for it, if that is
    not the one that serves. data_parallel: how it is to be divided among nodes; None: not at all,
    and an engine alone trains all of it in any case. shard: the part that this engine gets.
    """

    id: str
    name: str
    examples: str = ""
    validation: str | None = None
    config: TuningConfig
    adapter: dict[str, Any] | None = None
    start: AdapterRef | None = None
    checkpoint: str | None = None
    checkpoints: str = ""
    checkpoint_every_steps: int = 0
    # Whether the model is the checkpoint of the best evaluation, and not the last one.
    keep_best: bool = False
    paused: bool = False
    tenant: str = ""
    alone_until_step: int = 0
    model: str = ""
    data_parallel: DataParallel | None = None
    shard: Shard | None = None

    @property
    def changes_model(self) -> bool:
        """Whether it trains the weights that serve."""
        from coserve.adapters.methods import (
            changes_model,
        )  # with torch, which not all that pass jobs on have

        return changes_model(self.adapter)


class AddRequest(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Answered by chunks, the last of each sequence with a finish_reason; or by `Refused`, if it
    cannot be served.

    Chunks have tokens and no text, and params no stop strings: text is made where the tokens come
    out. priority, batch_due_s, without_jobs: see `TokenEngine.add_tokens`.
    """

    id: str
    prompt: Sequence[int]
    params: SamplingParams
    arrival_s: float | None
    """Time of arrival; None: now."""
    slo: Slo | None = None
    adapter: AdapterRef | None = None
    tenant: str = ""
    priority: int = 0
    batch_due_s: float | None = None
    without_jobs: bool = False

    def by_clock(self, ahead_s: float) -> "AddRequest":
        """With its times by another clock, which is this much ahead."""
        arrival_s = None if self.arrival_s is None else self.arrival_s + ahead_s
        due_s = None if self.batch_due_s is None else self.batch_due_s + ahead_s
        return structs.replace(self, arrival_s=arrival_s, batch_due_s=due_s)


class UseVocabulary(msgspec.Struct, tag=True, frozen=True):
    """Say what tokens stand for, before the first request with a grammar; see `Vocabulary`."""

    pieces: Sequence[bytes]
    special: Sequence[int]


class CancelRequest(msgspec.Struct, tag=True, frozen=True):
    """End a request; its last chunks say "cancelled"."""

    id: str


class StopSequence(msgspec.Struct, tag=True, frozen=True):
    """End a sequence with its first `num_tokens` tokens: its text has a stop string. What the
    engine has run beyond that does not count; its last chunk, without tokens, says "stop".
    """

    id: str
    index: int
    num_tokens: int


class HoldRequest(msgspec.Struct, tag=True, frozen=True):
    """Keep a request that waits from starting before `DeliverBlocks`: another instance computes its
    prompt.
    """

    id: str


class DeliverBlocks(msgspec.Struct, tag=True, frozen=True):
    """Deliver the handed-over blocks of a held request; None means that the handover failed. The
    file must exist until the request is admitted.
    """

    id: str
    blocks: ImportedBlocks | None


class LoadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Put an adapter on the device under its name, unless it is there; it was used now.

    changed_by: see `OpenVersion`. Where a thread has read the adapter beside steps,
    `EngineCore.handle` is given what came of that.
    """

    call: int
    adapter: AdapterRef
    changed_by: str = ""
    model: str = ""
    """Name of the model that the adapter is of, one of the config's `trainable_models`; "" for the
    one that serves."""
    stays: bool = False
    """Whether it is never evicted. Then an adapter of that name must not be there."""


class UnloadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Withdraw an adapter: no new request finds it; no error if it was not there."""

    call: int
    name: str


class SaveVersion(msgspec.Struct, tag=True, frozen=True):
    """Write a version (`name` or `name@step`) in PEFT's format."""

    label: str
    directory: str


class StartJob(msgspec.Struct, tag=True, frozen=True):
    """Start a job, or resume it. `EngineCore.handle` is given its examples, which are read beside
    steps.
    """

    call: int
    job: JobStart


class PauseJob(msgspec.Struct, tag=True, frozen=True):
    """Pause a job; its current pack is discarded and begun again on resume. A server's engine
    writes a checkpoint.
    """

    call: int
    id: str


class ResumeJob(msgspec.Struct, tag=True, frozen=True):
    """Resume a paused job."""

    call: int
    id: str


class CancelJob(msgspec.Struct, tag=True, frozen=True):
    """End a job; versions that it has published stay. A server's engine writes a checkpoint, if it
    is wanted.
    """

    call: int
    id: str
    keeps: bool = True


class CombineJob(msgspec.Struct, tag=True, frozen=True):
    """Take in what the nodes of a job have contributed, and continue; after a `Contributed`,
    once.
    """

    call: int
    id: str
    combination: Combination


class CopyCheckpoint(msgspec.Struct, tag=True, frozen=True):
    """Copy a job as it is after its last whole optimizer step (one that is over: without the
    optimizer's state).
    """

    id: str


class CopyContribution(msgspec.Struct, tag=True, frozen=True):
    """Copy what the other nodes of a job are to have, when its event says that it is due."""

    id: str


class ForgetJob(msgspec.Struct, tag=True, frozen=True):
    """Forget a job that is over; versions that it has published stay."""

    id: str


class Step(msgspec.Struct, tag=True, frozen=True):
    """Plan, and have the device begin a step."""


class FlushCommands(msgspec.Struct, tag=True, frozen=True):
    """Carry out what is in the log to the device now: where no step is coming, or an unrecorded
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
    """The data of a job, as its files have it."""

    examples: Sequence[Example]
    validation: Sequence[Example] = ()

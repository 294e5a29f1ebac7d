"""What a jobs' manager and an engine say to each other about jobs; the engine may be in another process."""

from dataclasses import dataclass
from typing import Any, Protocol

from coserve.jobs.records import AdapterRef
from coserve.tuning.config import TuningConfig
from coserve.tuning.shard import DataParallel, Shard


@dataclass(frozen=True, kw_only=True)
class JobStart:
    """All that an engine needs to start a job, or to resume it where a checkpoint was taken.

    name: of the adapter that it makes, and serves when it is done (when live, from the first step on). examples,
    validation: files that `coserve.jobs.examples` wrote. adapter: a fresh one, by its configuration in PEFT's format;
    or start: one to train further. checkpoint: a directory that a `Checkpointed` named; then neither is used.
    checkpoints: the directory in which the engine writes `step-<n>`: every `checkpoint_every_steps` optimizer steps (0:
    not while it runs), at a pause, at a cancellation, and at the end. paused: it waits to be resumed. tenant: whose it
    is. alone_until_step: until then, no step of the engine works for another job as well. model: that it trains, by the
    engine's name for it, if that is not the one that serves. data_parallel: how it is to be divided among nodes; None:
    not at all, and an engine alone trains all of it in any case. shard: the part that this engine gets.
    """

    id: str
    name: str
    examples: str
    validation: str | None = None
    config: TuningConfig
    adapter: dict[str, Any] | None = None
    start: AdapterRef | None = None
    checkpoint: str | None = None
    checkpoints: str
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
        from coserve.adapters.methods import changes_model  # with torch, which not all that pass jobs on have

        return changes_model(self.adapter)


@dataclass(frozen=True, kw_only=True)
class Checkpointed:
    """A checkpoint of a job after `step` optimizer steps is complete on disk: the adapter in PEFT's format, and all
    that it takes to resume. listed: one that users were promised (every `checkpoint_every_steps`, and the last), not
    one that is only there so that nothing is lost.
    """

    job: str
    step: int
    directory: str
    listed: bool


@dataclass(frozen=True, kw_only=True)
class Contributed:
    """A node has written what the other nodes of a job are to have of it, and waits for the `Combination` that follows.
    step: optimizer steps of its own before that. meets: it waits for all others. num_trained: trained rows in it.
    """

    job: str
    step: int
    directory: str
    meets: bool
    num_trained: int


class JobEngine(Protocol):
    """An engine as the jobs' manager sees it. Every call raises JobError, AdapterError or DataError with one line,
    EngineGoneError if the engine died before it answered, and but for `start_job` JobOverError if the job has ended.
    """

    async def start_job(self, job: JobStart) -> None:
        """Returns when the engine has taken it."""
        ...

    async def pause_job(self, job: str) -> None:
        """It rests; a checkpoint has been written when this returns, or could not be, which is logged."""
        ...

    async def resume_job(self, job: str) -> None:
        """The inverse."""
        ...

    async def cancel_job(self, job: str) -> None:
        """It is over; likewise."""
        ...

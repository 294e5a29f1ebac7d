"""What the server's process and the engine's say to each other: msgpack over one ZeroMQ pair
socket.

The server says what to do (`ServerCommand`: of those that `coserve.engine.commands` describes, and two
more), the engine what came of it (`Report`). Commands with a `call` are answered by one `CallReply`
with the same number; a request is answered by its chunks, and a job by its events. Times are
seconds of the monotonic clock, which both processes share. Nothing but tokens, settings and paths
crosses: no tensor ever does.
"""

from typing import Any

import msgspec

from coserve.engine.commands import (
    AddRequest,
    CancelJob,
    CancelRequest,
    CombineJob,
    LoadAdapter,
    PauseJob,
    ResumeJob,
    StartJob,
    StopSequence,
    UnloadAdapter,
    UseVocabulary,
)
from coserve.engine.config import EngineConfig
from coserve.engine.jobs.events import JobEvent
from coserve.engine.records import EngineStats, RequestRecord
from coserve.engine.request import Chunk
from coserve.jobs.messages import Checkpointed, Contributed
from coserve.scheduling.profile import Profile
from coserve.scheduling.slo import Slo

# Stages of more parts than this are told in percent.
_MAX_COUNTED_PARTS = 100

# -- the first line of the engine's standard input ---------------------------------------


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine's process is to be, as JSON. address: of the socket that the server has
    bound. activity: a file for `coserve.worker.activity`. threads: of the CPU; None: as many as the
    model is worth. record: a file to write all that the engine does to. role, prefill_socket,
    prefill_min_tokens: see `coserve.worker.handover`. max_model_len: tokens of a request, prompt
    and answer, and of an example; None: as many as the model has positions. log_format, log_level:
    see `coserve.logs`. files_url, files_cache_bytes: see `coserve.jobs.files.remote_files`; the process's
    home is the directory here.
    """

    address: str
    activity: str | None = None
    model: str
    dtype: str
    weights: str = "dense"
    device: str
    threads: int | None = None
    record: str | None = None
    role: str = "both"
    prefill_socket: str | None = None
    prefill_min_tokens: int | None = None
    max_model_len: int | None = None
    log_format: str = "text"
    log_level: str = "warning"
    files_url: str | None = None
    files_cache_bytes: int | None = None
    measures_first: bool = True
    """Whether a device without a measured profile is measured before it serves, or beside
    requests."""
    engine: EngineConfig


# -- commands: server to engine ---------------------------------------------------------


class Ping(msgspec.Struct, tag=True, frozen=True):
    """Say that the step loop is alive, by a `Pong`."""


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """Write a checkpoint of every job that is not over, reply, and end the process."""

    call: int


# fmt: off
ServerCommand = (
    AddRequest | UseVocabulary | CancelRequest | StopSequence | LoadAdapter | UnloadAdapter
    | StartJob | PauseJob | ResumeJob | CancelJob | CombineJob | Ping | Shutdown
)
# fmt: on

# -- reports: engine to server ----------------------------------------------------------


class StartProgress(msgspec.Struct, tag=True, frozen=True):
    """Progress of a start."""

    stage: str
    """The stage, such as "loading weights"."""
    done: int
    total: int
    """Parts of the stage; 0 if that is not known."""

    def __str__(self) -> str:
        if not self.total:
            return self.stage
        if self.total > _MAX_COUNTED_PARTS:
            return f"{self.stage}, {100 * self.done // self.total} %"
        return f"{self.stage}, {self.done} of {self.total}"


class Ready(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The engine takes commands. threads: of the CPU. slo: of requests that bring none; it follows
    what steps take. num_state_pages, fingerprint: see `DeviceInfo`. hardware: kind of device.
    profile: what it takes for the pieces of a step; None: not known.
    """

    model: str
    dtype: str
    device: str
    threads: int
    slo: Slo
    vocab_size: int
    max_positions: int
    num_pages: int
    page_bytes: int
    block_tokens: int
    weight_bytes: int
    num_state_pages: int = 0
    hardware: str = ""
    profile: Profile | None = None
    fingerprint: str = ""
    num_ranks: int = 1
    """Number of processes that hold the model together; sizes in bytes and pages are those of
    each."""
    kernels: str = ""
    """Name of the kernel backend."""
    kernels_warning: str = ""
    """Why a faster kernel backend does not run, as one line; "" if none is missing."""


class Pong(msgspec.Struct, tag=True, frozen=True):
    """The step loop has come round: the answer to a `Ping`."""


class StartFailed(msgspec.Struct, tag=True, frozen=True):
    """The engine cannot start as it was asked; starting it again would not help."""

    error: str


class CallReply(msgspec.Struct, tag=True, frozen=True):
    """A command is done, or refused with an error in one line of a kind (the name of its class in
    coserve.errors).
    """

    call: int
    error: str | None = None
    kind: str | None = None


class RequestRefused(msgspec.Struct, tag=True, frozen=True):
    """A request cannot be served at all; error and kind as in `CallReply`."""

    id: str
    error: str
    kind: str


class StepRecord(msgspec.Struct, frozen=True, array_like=True):
    """One step: when it ended, what it took and was believed to take, and the rows in it by kind.

    backward_rows: rows through the loss and of tasklets, over all blocks and the head, divided by
    the number of these.
    """

    end_s: float
    step_s: float
    predicted_s: float
    decode_rows: int
    prefill_rows: int
    window_rows: int
    backward_rows: float


# What no client waits for is reported this often.
STATS_S = 0.2


class StepReport(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """What steps brought. Chunks come at once, all else every `STATS_S` seconds, with events of
    jobs, and when there is nothing left to do.
    """

    chunks: list[Chunk] = []
    job_events: list[JobEvent] = []
    checkpoints: list[Checkpointed] = []
    contributions: list[Contributed] = []
    records: list[RequestRecord] = []
    steps: list[StepRecord] = []
    stats: EngineStats | None = None


Report = StartProgress | Ready | Pong | StartFailed | CallReply | RequestRefused | StepReport

_command_decoder = msgspec.msgpack.Decoder(ServerCommand)
_report_decoder = msgspec.msgpack.Decoder(Report)
encode = msgspec.msgpack.Encoder().encode


def decode_command(message: bytes) -> Any:
    """A `ServerCommand`."""
    return _command_decoder.decode(message)


def decode_report(message: bytes) -> Any:
    """A `Report`."""
    return _report_decoder.decode(message)

"""Messages between the server's process and the engine's: msgpack over one ZeroMQ pair socket.

The server sends commands (`ServerCommand`: most of `coserve.engine.commands`, and two more), the
engine sends reports (`Report`). A command with a `call` is answered by one `CallReply` with the
same number; a request is answered by its chunks, and a job by its events. Times are seconds of the
monotonic clock, which both processes share. Only tokens, settings and paths cross, never a tensor.
"""

from typing import Any

import msgspec

from coserve.devices.messages.commands import ModelOnDevice
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
    """Settings of an engine's process, sent as JSON on the first line of its standard input."""

    address: str
    """Address of the socket that the server has bound."""
    activity: str | None = None
    """File in which the process notes whose work it does (`coserve.worker.activity`)."""
    model: str
    """Directory or hub id of the model, or a `dummy:` preset."""
    dtype: str
    """Data type of weights and activations, or "auto" for the model's own."""
    weights: str = "dense"
    """Storage of linear weights: "dense" or "int8"."""
    device: str
    """Device, such as "cpu" or "cuda:0", or "auto"."""
    threads: int | None = None
    """Number of CPU threads; None: as many as pay for the model's size."""
    record: str | None = None
    """File to which everything that the engine does is recorded."""
    role: str = "both"
    """Role in a prefill/decode split: "prefill", "decode" or "both"."""
    prefill_socket: str | None = None
    """Address at which prefill and decode instances connect (`coserve.worker.handover`)."""
    prefill_min_tokens: int | None = None
    """Minimum number of unknown prompt tokens for which a decode instance asks for a prefill."""
    max_model_len: int | None = None
    """Maximum number of tokens of a request, prompt and answer, and of an example; None: the
    model's positions.
    """
    log_format: str = "text"
    """Format of log lines: "text" or "json" (`coserve.logs`)."""
    log_level: str = "warning"
    """Lowest level that is logged."""
    files_url: str | None = None
    """URL of the store of shared files (`coserve.jobs.files.remote_files`); None: files are on this
    machine.
    """
    files_cache_bytes: int | None = None
    """Maximum size of the local cache of shared files, in the process's home."""
    measures_first: bool = True
    """Whether a device without a measured profile is measured before it serves, and not beside
    requests.
    """
    engine: EngineConfig
    """Configuration of the engine."""


# -- commands: server to engine ---------------------------------------------------------


class Ping(msgspec.Struct, tag=True, frozen=True):
    """Check that the step loop is alive; it answers by a `Pong`."""


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """Write a checkpoint of every job that is not over, reply, and end the process."""

    call: int
    """Number of the call."""


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
    """Parts of the stage that are finished."""
    total: int
    """Parts of the stage; 0 if the number is not known."""

    def __str__(self) -> str:
        if not self.total:
            return self.stage
        if self.total > _MAX_COUNTED_PARTS:
            return f"{self.stage}, {100 * self.done // self.total} %"
        return f"{self.stage}, {self.done} of {self.total}"


class Ready(ModelOnDevice, tag=True, frozen=True, kw_only=True):
    """Notice that the engine takes commands, with what the server has to know of it."""

    slo: Slo
    """Default SLO; it follows measured step times."""
    hardware: str = ""
    """Kind of the device."""
    profile: Profile | None = None
    """Measured times of the pieces of a step; None: not known."""


class Pong(msgspec.Struct, tag=True, frozen=True):
    """Answer of the step loop to a `Ping`."""


class StartFailed(msgspec.Struct, tag=True, frozen=True):
    """Notice that the engine cannot start with its settings; another attempt would not help."""

    error: str
    """Reason, in one line."""


class CallReply(msgspec.Struct, tag=True, frozen=True):
    """Answer to a command that has a call number: it is done, or refused."""

    call: int
    """Number of the call."""
    error: str | None = None
    """Reason of the refusal, in one line; None: the command is done."""
    kind: str | None = None
    """Class name of the error in coserve.errors."""


class RequestRefused(msgspec.Struct, tag=True, frozen=True):
    """Notice that a request cannot be served at all."""

    id: str
    """Id of the request."""
    error: str
    """Reason, in one line."""
    kind: str
    """Class name of the error in coserve.errors."""


class StepRecord(msgspec.Struct, frozen=True, array_like=True):
    """Times and rows of one step."""

    end_s: float
    """Time at which the step ended."""
    step_s: float
    """Duration of the step."""
    predicted_s: float
    """Predicted duration."""
    decode_rows: int
    """Number of decode rows."""
    prefill_rows: int
    """Number of prefill rows."""
    window_rows: int
    """Number of forward rows of fine-tuning."""
    backward_rows: float
    """Number of rows through the loss and of tasklets, summed over all blocks and the head and
    divided by their number.
    """


# Seconds between reports of everything that no client waits for.
STATS_S = 0.2


class StepReport(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Results of steps.

    Chunks are sent at once; the rest every `STATS_S` seconds, with events of jobs, and when there
    is nothing left to do.
    """

    chunks: list[Chunk] = []
    """Chunks of requests."""
    job_events: list[JobEvent] = []
    """Events of jobs."""
    checkpoints: list[Checkpointed] = []
    """Checkpoints that are on disk."""
    contributions: list[Contributed] = []
    """Contributions of divided jobs that are on disk."""
    records: list[RequestRecord] = []
    """Records of requests that have ended."""
    steps: list[StepRecord] = []
    """Records of steps."""
    stats: EngineStats | None = None
    """Counts as of now."""


Report = StartProgress | Ready | Pong | StartFailed | CallReply | RequestRefused | StepReport

_command_decoder = msgspec.msgpack.Decoder(ServerCommand)
_report_decoder = msgspec.msgpack.Decoder(Report)
encode = msgspec.msgpack.Encoder().encode


def decode_command(message: bytes) -> Any:
    """Decode a `ServerCommand`.

    Raises:
        msgspec.DecodeError: the message is none.
    """
    return _command_decoder.decode(message)


def decode_report(message: bytes) -> Any:
    """Decode a `Report`.

    Raises:
        msgspec.DecodeError: the message is none.
    """
    return _report_decoder.decode(message)

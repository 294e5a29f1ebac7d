"""What the store knows, as frozen records: files, jobs, their events and checkpoints, and adapters.
Times are whole seconds of Unix time.
"""

import secrets
import string
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from coserve.engine.commands import AdapterRef

JobStatus = Literal[
    "validating_files", "queued", "running", "paused", "succeeded", "failed", "cancelled"
]
OVER: frozenset[str] = frozenset(("succeeded", "failed", "cancelled"))
Level = Literal["info", "warn", "error"]
# Clients without a key, where none is needed.
DEFAULT_TENANT = "default"
# In the data of an evaluation's event: true if it was the best of its job so far.
IS_BEST = "is_best"

_LETTERS = string.ascii_letters + string.digits


def new_id(prefix: str, length: int = 24) -> str:
    """A name that cannot be guessed."""
    return prefix + "".join(secrets.choice(_LETTERS) for _ in range(length))


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """An uploaded file, or one that a job made."""

    id: str
    tenant: str
    purpose: str
    filename: str
    num_bytes: int
    created_at: int
    expires_at: int | None = None


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """A fine-tuning job.

    model: as it was asked for: the base model, or an adapter to train further. base: the model
    underneath. name: of the adapter that it makes. start: name and directory of the adapter that it
    trains further, if any. settings: a `JobSettings` as plain data. num_examples, num_tokens (of an
    epoch), num_steps: 0 before the files are validated. error: code, message, param.
    """

    id: str
    tenant: str
    created_at: int
    model: str
    base: str
    name: str
    status: JobStatus
    training_file: str
    validation_file: str | None = None
    suffix: str | None = None
    seed: int
    metadata: dict[str, str] | None = None
    settings: dict[str, Any]
    start: dict[str, Any] | None = None
    num_examples: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    num_steps_done: int = 0
    finished_at: int | None = None
    trained_tokens: int | None = None
    result_file: str | None = None
    error: dict[str, Any] | None = None

    @property
    def is_terminal(self) -> bool:
        return self.status in OVER

    @property
    def validated(self) -> bool:
        return self.num_steps > 0


@dataclass(frozen=True, kw_only=True)
class EventRecord:
    """Something that happened to a job. kind and step: of metrics ("step" or "evaluation"), else
    "".
    """

    id: str
    tenant: str
    job: str
    created_at: int
    level: Level = "info"
    message: str
    kind: str = ""
    step: int | None = None
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """A checkpoint on disk. name: of the adapter in it. listed: shown and kept; others are there so
    that nothing is lost, until there is a newer one.
    """

    id: str
    tenant: str
    job: str
    created_at: int
    step: int
    name: str
    directory: str
    listed: bool


@dataclass(frozen=True, kw_only=True)
class AdapterRecord:
    """An adapter that a tenant can ask for. job: that made it; "" if it was loaded from a
    directory. directory: None while a live job trains it: it is on the device alone. engine_name:
    what the engine calls it, if not by its name.

    The other words for an adapter: `AdapterConfig` is its method and shape, `Adapter` its tensors,
    `AdapterVersion` one state of it that the engine serves, `AdapterRef` what a command to the
    engine says of it.
    """

    tenant: str
    name: str
    base: str
    directory: str | None
    job: str = ""
    created_at: int
    engine_name: str = field(default="", metadata={"stored": False})

    @property
    def ref(self) -> AdapterRef:
        """For a command to the engine. Names of jobs' adapters are never given twice, so it calls
        them the same.
        """
        return AdapterRef(name=self.engine_name or self.name, directory=self.directory)

    @property
    def root(self) -> str | None:
        """Where it came from: the job, or the directory."""
        return self.job or self.directory


@dataclass(frozen=True, kw_only=True)
class ResponseRecord:
    """An answer of /v1/responses that is kept. previous: the one that it follows. num_bytes: of
    input and response, as JSON. input: what was new to it, as items. response: as clients see it.
    """

    id: str
    tenant: str
    created_at: int
    expires_at: int
    status: str
    previous: str | None = None
    num_bytes: int
    input: list[Any]
    response: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ConversationRecord:
    """Items that responses are added to. used_at: when some were last added. num_bytes: of its
    items, as JSON.
    """

    id: str
    tenant: str
    created_at: int
    used_at: int
    num_bytes: int = 0
    metadata: dict[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class UploadRecord:
    """A file that comes in parts, each a `FileRecord` of its own until they are joined. num_bytes:
    that it will have. expires_at: when the parts are forgotten. expires_after_s: of the file. file:
    that was made of it.
    """

    id: str
    tenant: str
    created_at: int
    expires_at: int
    status: str = "pending"
    purpose: str
    filename: str
    mime_type: str
    num_bytes: int
    expires_after_s: int | None = None
    file: str | None = None


@dataclass(frozen=True, kw_only=True)
class BatchRecord:
    """Requests of a file that nobody waits for.

    endpoint: of all of them. window: in which they are to be done, as it was asked for. times: when
    it came to each of its states, by OpenAI's names (`in_progress_at`, …). num_total: 0 before the
    file is read. errors: of the file.
    """

    id: str
    tenant: str
    created_at: int
    expires_at: int
    status: str
    endpoint: str
    input_file: str
    window: str
    metadata: dict[str, str] | None = None
    output_expires_after_s: int | None = None
    num_total: int = 0
    num_completed: int = 0
    num_failed: int = 0
    output_file: str | None = None
    error_file: str | None = None
    errors: list[Any] | None = None
    times: dict[str, Any] = field(default_factory=dict)


# In these nothing changes any more.
BATCH_OVER: frozenset[str] = frozenset(("completed", "failed", "expired", "cancelled"))


@dataclass(frozen=True, kw_only=True)
class Page:
    """Part of a list. has_more: whether more comes after it."""

    items: tuple[Any, ...]
    has_more: bool


def job_event(
    job: JobRecord,
    message: str,
    *,
    level: Level = "info",
    kind: str = "",
    step: int | None = None,
    data: dict[str, Any] | None = None,
) -> EventRecord:
    """Make an event of a job, as of now."""
    return EventRecord(
        id=new_id("ftevent-"),
        tenant=job.tenant,
        job=job.id,
        created_at=int(time.time()),
        level=level,
        message=message,
        kind=kind,
        step=step,
        data=data or {},
    )


def adapter_of(job: JobRecord, name: str, directory: str | None) -> AdapterRecord:
    """Make the record of an adapter that a job has made."""
    return AdapterRecord(
        tenant=job.tenant,
        name=name,
        base=job.base,
        directory=directory,
        job=job.id,
        created_at=int(time.time()),
    )

"""Records of the store, as frozen dataclasses: files, jobs, their events and checkpoints, adapters,
responses, conversations, uploads and batches.

Times are whole seconds of Unix time. Every record belongs to a tenant, and has an id that cannot be
guessed.
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
# Tenant of clients without a key, where none is needed.
DEFAULT_TENANT = "default"
# Key in the data of an evaluation's event: true if it was the best of its job so far.
IS_BEST = "is_best"

_LETTERS = string.ascii_letters + string.digits


def new_id(prefix: str, length: int = 24) -> str:
    """Return a random id that cannot be guessed."""
    return prefix + "".join(secrets.choice(_LETTERS) for _ in range(length))


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """An uploaded file, or one that a job made."""

    id: str
    """Id of the file."""
    tenant: str
    """Owner of the file."""
    purpose: str
    """Purpose, by OpenAI's names."""
    filename: str
    """Name that the client gave; never a path."""
    num_bytes: int
    """Size of the file."""
    created_at: int
    """Time of the upload."""
    expires_at: int | None = None
    """Time after which the file is gone (None: never)."""


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """A fine-tuning job."""

    id: str
    """Id of the job."""
    tenant: str
    """Owner of the job."""
    created_at: int
    """Time of creation."""
    model: str
    """Model that the client named: the base model, or an adapter to train further."""
    base: str
    """Base model."""
    name: str
    """Name of the model that the job makes."""
    status: JobStatus
    """Status, by OpenAI's names."""
    training_file: str
    """Id of the training file."""
    validation_file: str | None = None
    """Id of the validation file, if any."""
    suffix: str | None = None
    """Part of the new model's name, if the client gave one."""
    seed: int
    """Seed of initial values, of dropout and of the order of examples."""
    metadata: dict[str, str] | None = None
    """Labels that the client gave."""
    settings: dict[str, Any]
    """A `JobSettings` as plain data."""
    start: dict[str, Any] | None = None
    """Name and directory of the adapter that the job trains further, if any."""
    num_examples: int = 0
    """Number of training examples; 0 before the files are validated."""
    num_tokens: int = 0
    """Number of tokens of an epoch; 0 before the files are validated."""
    num_steps: int = 0
    """Number of optimizer steps; 0 before the files are validated."""
    num_steps_done: int = 0
    """Number of optimizer steps that are on record."""
    finished_at: int | None = None
    """Time of the end; None before."""
    trained_tokens: int | None = None
    """Number of tokens that were trained on, every use counted; None unless the job has succeeded.
    """
    result_file: str | None = None
    """Id of the file of metrics; None unless the job has succeeded."""
    error: dict[str, Any] | None = None
    """Error of a failed job: code, message, param."""

    @property
    def is_terminal(self) -> bool:
        return self.status in OVER

    @property
    def validated(self) -> bool:
        return self.num_steps > 0


@dataclass(frozen=True, kw_only=True)
class EventRecord:
    """An event in the life of a job."""

    id: str
    """Id of the event."""
    tenant: str
    """Owner of the job."""
    job: str
    """Id of the job."""
    created_at: int
    """Time of the event."""
    level: Level = "info"
    """Severity."""
    message: str
    """Text for clients."""
    kind: str = ""
    """Kind of metrics: "step" or "evaluation"; "" if the event has none."""
    step: int | None = None
    """Optimizer step of the metrics, if any."""
    data: dict[str, Any] = field(default_factory=dict)
    """The metrics, by name."""


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """A checkpoint on disk."""

    id: str
    """Id of the checkpoint."""
    tenant: str
    """Owner of the job."""
    job: str
    """Id of the job."""
    created_at: int
    """Time of creation."""
    step: int
    """Number of optimizer steps before the checkpoint."""
    name: str
    """Name of the adapter in the checkpoint."""
    directory: str
    """Directory of the checkpoint."""
    listed: bool
    """Whether clients see the checkpoint and it is kept; others only protect progress, until there
    is a newer one.
    """


@dataclass(frozen=True, kw_only=True)
class AdapterRecord:
    """An adapter that a tenant can request.

    Other classes about adapters: `AdapterConfig` is the method and shape, `Adapter` the tensors,
    `AdapterVersion` one state of an adapter that the engine serves, `AdapterRef` a reference in a
    command to the engine.
    """

    tenant: str
    """Owner of the adapter."""
    name: str
    """Name by which clients request it."""
    base: str
    """Base model."""
    directory: str | None
    """Directory of the adapter; None while a live job trains it: then it exists on the device
    alone.
    """
    job: str = ""
    """Id of the job that made it; "" if it was loaded from a directory."""
    created_at: int
    """Time of creation."""
    engine_name: str = field(default="", metadata={"stored": False})
    """Name in the engine, if it differs from `name`."""

    @property
    def ref(self) -> AdapterRef:
        """Reference for a command to the engine. Names of jobs' adapters are unique, so the engine
        uses them as they are.
        """
        return AdapterRef(name=self.engine_name or self.name, directory=self.directory)

    @property
    def root(self) -> str | None:
        """Origin of the adapter: the job, or the directory."""
        return self.job or self.directory


@dataclass(frozen=True, kw_only=True)
class ResponseRecord:
    """A stored response of /v1/responses."""

    id: str
    """Id of the response."""
    tenant: str
    """Owner of the response."""
    created_at: int
    """Time of creation."""
    expires_at: int
    """Time after which the response is gone."""
    status: str
    """Status, by OpenAI's names."""
    previous: str | None = None
    """Id of the response that this one follows, if any."""
    num_bytes: int
    """Size of input and response as JSON."""
    input: list[Any]
    """Items of the request that are not part of earlier responses."""
    response: dict[str, Any]
    """The response as clients see it."""


@dataclass(frozen=True, kw_only=True)
class ConversationRecord:
    """A conversation of /v1/conversations, to which responses add items."""

    id: str
    """Id of the conversation."""
    tenant: str
    """Owner of the conversation."""
    created_at: int
    """Time of creation."""
    used_at: int
    """Time at which items were last added."""
    num_bytes: int = 0
    """Size of its items as JSON."""
    metadata: dict[str, str] | None = None
    """Labels that the client gave."""


@dataclass(frozen=True, kw_only=True)
class UploadRecord:
    """A file that arrives in parts, each a `FileRecord` of its own until they are joined."""

    id: str
    """Id of the upload."""
    tenant: str
    """Owner of the upload."""
    created_at: int
    """Time of creation."""
    expires_at: int
    """Time after which the parts are gone."""
    status: str = "pending"
    """"pending", "completed" or "cancelled"; see `status_of` for expired ones."""
    purpose: str
    """Purpose of the file, by OpenAI's names."""
    filename: str
    """Name of the file that the client gave."""
    mime_type: str
    """Media type that the client gave."""
    num_bytes: int
    """Size that the file will have."""
    expires_after_s: int | None = None
    """Lifetime of the file in seconds (None: unlimited)."""
    file: str | None = None
    """Id of the completed file; None before."""


@dataclass(frozen=True, kw_only=True)
class BatchRecord:
    """Requests in a file whose answers no client waits for."""

    id: str
    """Id of the batch."""
    tenant: str
    """Owner of the batch."""
    created_at: int
    """Time of creation."""
    expires_at: int
    """Time at which unanswered requests expire."""
    status: str
    """Status, by OpenAI's names."""
    endpoint: str
    """Endpoint of all requests."""
    input_file: str
    """Id of the file of requests."""
    window: str
    """Completion window, as the client gave it."""
    metadata: dict[str, str] | None = None
    """Labels that the client gave."""
    output_expires_after_s: int | None = None
    """Lifetime of the result files in seconds (None: unlimited)."""
    num_total: int = 0
    """Number of requests; 0 before the file is read."""
    num_completed: int = 0
    """Number of requests that succeeded."""
    num_failed: int = 0
    """Number of requests that failed."""
    output_file: str | None = None
    """Id of the file of answers, if any."""
    error_file: str | None = None
    """Id of the file of failed requests, if any."""
    errors: list[Any] | None = None
    """Errors of the input file, if any."""
    times: dict[str, Any] = field(default_factory=dict)
    """Time of each status, by OpenAI's names (`in_progress_at`, …)."""


# Final statuses of batches.
BATCH_OVER: frozenset[str] = frozenset(("completed", "failed", "expired", "cancelled"))


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page of a list."""

    items: tuple[Any, ...]
    """Records of the page."""
    has_more: bool
    """Whether more records follow."""


def job_event(
    job: JobRecord,
    message: str,
    *,
    level: Level = "info",
    kind: str = "",
    step: int | None = None,
    data: dict[str, Any] | None = None,
) -> EventRecord:
    """Return an event of a job, as of now."""
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
    """Return the record of an adapter that a job has made."""
    return AdapterRecord(
        tenant=job.tenant,
        name=name,
        base=job.base,
        directory=directory,
        job=job.id,
        created_at=int(time.time()),
    )

"""Tables of the store, for use within `coserve.jobs.sql` alone.

Columns have the names and meanings of the fields of their records. `seq` is the order of insertion.
"""

from typing import Any, ClassVar

from sqlalchemy import JSON, BigInteger, ForeignKey, Integer, String, Text, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

# SQLite increments only columns of exactly this type.
_SERIAL = BigInteger().with_variant(Integer, "sqlite")


class Table(DeclarativeBase):
    """Base of all tables."""

    type_annotation_map: ClassVar[dict[Any, Any]] = {
        str: Text(),
        dict[str, Any]: JSON(none_as_null=True),
        list[Any]: JSON(none_as_null=True),
    }
    """Column types by annotation."""


class SchemaTable(Table):
    """The version of these tables, in one row."""

    __tablename__ = "coserve_schema"
    version: Mapped[int] = mapped_column(primary_key=True)


class HomeTable(Table):
    """The home that owns a database outside of it, in at most one row."""

    __tablename__ = "coserve_home"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    place: Mapped[str]


class FileTable(Table):
    """Table of `FileRecord`."""

    __tablename__ = "files"
    seq: Mapped[int] = mapped_column(_SERIAL, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    tenant: Mapped[str] = mapped_column(String(128), index=True)
    purpose: Mapped[str]
    filename: Mapped[str]
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[int] = mapped_column(BigInteger)
    expires_at: Mapped[int | None] = mapped_column(BigInteger, index=True)


class JobTable(Table):
    """Table of `JobRecord`."""

    __tablename__ = "jobs"
    seq: Mapped[int] = mapped_column(_SERIAL, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    tenant: Mapped[str] = mapped_column(String(128), index=True)
    created_at: Mapped[int] = mapped_column(BigInteger)
    model: Mapped[str]
    base: Mapped[str]
    name: Mapped[str]
    status: Mapped[str] = mapped_column(String(32), index=True)
    training_file: Mapped[str]
    validation_file: Mapped[str | None]
    suffix: Mapped[str | None]
    seed: Mapped[int] = mapped_column(BigInteger)
    # The record's `metadata`, a name that SQLAlchemy reserves.
    labels: Mapped[dict[str, Any] | None]
    settings: Mapped[dict[str, Any]]
    start: Mapped[dict[str, Any] | None]
    num_examples: Mapped[int] = mapped_column(BigInteger)
    num_tokens: Mapped[int] = mapped_column(BigInteger)
    num_steps: Mapped[int] = mapped_column(BigInteger)
    num_steps_done: Mapped[int] = mapped_column(BigInteger)
    finished_at: Mapped[int | None] = mapped_column(BigInteger)
    trained_tokens: Mapped[int | None] = mapped_column(BigInteger)
    result_file: Mapped[str | None]
    error: Mapped[dict[str, Any] | None]


class EventTable(Table):
    """Table of `EventRecord`; each step's metrics of a job are in it once."""

    __tablename__ = "events"
    __table_args__ = (UniqueConstraint("job", "step", "kind"),)
    seq: Mapped[int] = mapped_column(_SERIAL, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    tenant: Mapped[str] = mapped_column(String(128))
    job: Mapped[str] = mapped_column(String(64), ForeignKey("jobs.id"), index=True)
    created_at: Mapped[int] = mapped_column(BigInteger)
    level: Mapped[str]
    message: Mapped[str]
    kind: Mapped[str] = mapped_column(String(32))
    step: Mapped[int | None] = mapped_column(BigInteger)
    data: Mapped[dict[str, Any]]


class DeathsTable(Table):
    """Table of `Deaths`, by job."""

    __tablename__ = "engine_deaths"
    seq: Mapped[int] = mapped_column(_SERIAL, primary_key=True, autoincrement=True)
    job: Mapped[str] = mapped_column(String(64), ForeignKey("jobs.id"), unique=True)
    num: Mapped[int] = mapped_column(BigInteger)
    step: Mapped[int] = mapped_column(BigInteger)


class CheckpointTable(Table):
    """Table of `CheckpointRecord`."""

    __tablename__ = "checkpoints"
    __table_args__ = (UniqueConstraint("job", "step"),)
    seq: Mapped[int] = mapped_column(_SERIAL, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    tenant: Mapped[str] = mapped_column(String(128))
    job: Mapped[str] = mapped_column(String(64), ForeignKey("jobs.id"), index=True)
    created_at: Mapped[int] = mapped_column(BigInteger)
    step: Mapped[int] = mapped_column(BigInteger)
    name: Mapped[str]
    directory: Mapped[str]
    listed: Mapped[bool]


class _AdapterColumns:
    """Columns of `AdapterRecord`."""

    seq: Mapped[int] = mapped_column(_SERIAL, primary_key=True, autoincrement=True)
    tenant: Mapped[str] = mapped_column(String(128))
    name: Mapped[str] = mapped_column(String(512))
    base: Mapped[str]
    directory: Mapped[str | None]
    job: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[int] = mapped_column(BigInteger)


class AdapterTable(_AdapterColumns, Table):
    """Adapters that jobs have made; those of live jobs that run are not in it."""

    __tablename__ = "adapters"
    __table_args__ = (UniqueConstraint("tenant", "name"),)


class LoadedAdapterTable(_AdapterColumns, Table):
    """Adapters that clients have loaded from directories."""

    __tablename__ = "loaded_adapters"
    __table_args__ = (UniqueConstraint("tenant", "name"),)


class ResponseTable(Table):
    """Table of `ResponseRecord`."""

    __tablename__ = "responses"
    seq: Mapped[int] = mapped_column(_SERIAL, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    tenant: Mapped[str] = mapped_column(String(128), index=True)
    created_at: Mapped[int] = mapped_column(BigInteger)
    expires_at: Mapped[int] = mapped_column(BigInteger, index=True)
    status: Mapped[str] = mapped_column(String(32), index=True)
    previous: Mapped[str | None] = mapped_column(String(64))
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    input: Mapped[list[Any]]
    response: Mapped[dict[str, Any]]


class ConversationTable(Table):
    """Table of `ConversationRecord`."""

    __tablename__ = "conversations"
    seq: Mapped[int] = mapped_column(_SERIAL, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    tenant: Mapped[str] = mapped_column(String(128), index=True)
    created_at: Mapped[int] = mapped_column(BigInteger)
    used_at: Mapped[int] = mapped_column(BigInteger)
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    labels: Mapped[dict[str, Any] | None]


class ConversationItemTable(Table):
    """Items of conversations, in order. The id is the item's own; another conversation may have it
    too.
    """

    __tablename__ = "conversation_items"
    seq: Mapped[int] = mapped_column(_SERIAL, primary_key=True, autoincrement=True)
    id: Mapped[str]
    conversation: Mapped[str] = mapped_column(String(64), index=True)
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    item: Mapped[dict[str, Any]]


class UploadTable(Table):
    """Table of `UploadRecord`."""

    __tablename__ = "uploads"
    seq: Mapped[int] = mapped_column(_SERIAL, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    tenant: Mapped[str] = mapped_column(String(128), index=True)
    created_at: Mapped[int] = mapped_column(BigInteger)
    expires_at: Mapped[int] = mapped_column(BigInteger)
    status: Mapped[str] = mapped_column(String(32))
    purpose: Mapped[str]
    filename: Mapped[str]
    mime_type: Mapped[str]
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    expires_after_s: Mapped[int | None] = mapped_column(BigInteger)
    file: Mapped[str | None]


class BatchTable(Table):
    """Table of `BatchRecord`."""

    __tablename__ = "batches"
    seq: Mapped[int] = mapped_column(_SERIAL, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    tenant: Mapped[str] = mapped_column(String(128), index=True)
    created_at: Mapped[int] = mapped_column(BigInteger)
    expires_at: Mapped[int] = mapped_column(BigInteger)
    status: Mapped[str] = mapped_column(String(32), index=True)
    endpoint: Mapped[str]
    input_file: Mapped[str]
    window: Mapped[str]
    labels: Mapped[dict[str, Any] | None]
    output_expires_after_s: Mapped[int | None] = mapped_column(BigInteger)
    num_total: Mapped[int] = mapped_column(BigInteger)
    num_completed: Mapped[int] = mapped_column(BigInteger)
    num_failed: Mapped[int] = mapped_column(BigInteger)
    output_file: Mapped[str | None]
    error_file: Mapped[str | None]
    errors: Mapped[list[Any] | None]
    times: Mapped[dict[str, Any]]

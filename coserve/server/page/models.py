"""Models made by jobs, on the page."""

from dataclasses import dataclass
from pathlib import Path

from coserve.adapters.file_names import FULL_FILE
from coserve.engine.jobs.checkpoint import JOB_FILES
from coserve.jobs.manager import JobManager
from coserve.jobs.names import is_checkpoint
from coserve.jobs.records import AdapterRecord

_MAX_SHOWN = 50


@dataclass(frozen=True, kw_only=True)
class ModelView:
    """A model made by a job of the tenant."""

    name: str
    """Its name."""
    job: str
    """Id of the job."""
    base: str
    """Name of the base model."""
    created_at: int
    """Unix time of its creation."""
    num_bytes: int
    """Size of its files, without those that only its job needs."""
    is_served: bool
    """Whether this server answers with it."""
    is_whole: bool
    """Whether it is a whole model, made by full fine-tuning, and not an adapter."""


def finished_models(manager: JobManager, tenant: str) -> tuple[ModelView, ...]:
    """Return the newest models of a tenant's jobs, the newest first. Blocks."""
    served = manager.models.served.name
    with manager.store.read() as transaction:
        records = [
            record
            for base in (served, *manager.models.others)
            for record in transaction.adapters(tenant, base)
        ]
    made = [
        each for each in records if each.job and each.directory and not is_checkpoint(each.name)
    ]
    newest = sorted(made, key=lambda each: each.created_at, reverse=True)[:_MAX_SHOWN]
    return tuple(_view(each, served) for each in newest)


def _view(record: AdapterRecord, served: str) -> ModelView:
    directory = Path(record.directory or "")
    try:
        sizes = {path.name: path.stat().st_size for path in directory.iterdir() if path.is_file()}
    except OSError:  # fetched on demand from --files-url
        sizes = {}
    return ModelView(
        name=record.name,
        job=record.job,
        base=record.base,
        created_at=record.created_at,
        num_bytes=sum(size for name, size in sizes.items() if name not in JOB_FILES),
        is_served=record.base == served,
        is_whole=FULL_FILE in sizes,
    )

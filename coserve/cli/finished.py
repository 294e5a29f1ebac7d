"""Finished adapters and fully fine-tuned models in a server's home, by name."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from coserve.adapters.file_names import FULL_FILE
from coserve.cli.at_rest import existing_home
from coserve.errors import AdapterError

if TYPE_CHECKING:
    from coserve.server.config import ServerConfig


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A finished adapter or model."""

    name: str
    """Name of the fine-tuned model, or of a checkpoint."""
    directory: Path
    """Directory of its files."""
    base: str
    """Model that was trained."""

    @property
    def is_model(self) -> bool:
        """Return whether it is a whole model, not an adapter."""
        return (self.directory / FULL_FILE).is_file()


def find_finished(name: str, home: str | None, database: str | None) -> Finished:
    """Find a finished model, while a server may use the home.

    Args:
        name: Name of a fine-tuned model or a checkpoint, id of a job, or "last": the newest.
        home: Home of the server; None: the default.
        database: URL of the server's database; None: the default.

    Raises:
        CoserveError: There is no such home.
        AdapterError: There is no such name (the message lists those that exist), or the job has no
            finished model (the message lists its checkpoints).
    """
    from coserve.jobs.names import is_checkpoint
    from coserve.jobs.records import AdapterRecord, JobRecord
    from coserve.jobs.sql.databases import database_url
    from coserve.jobs.sql.store import Store

    url = database_url(database)
    store = Store.at(existing_home(home, url), url)
    try:
        with store.read() as transaction:
            records = [each for each in transaction.all_of(AdapterRecord) if each.directory]
            status = {job.id: job.status for job in transaction.all_of(JobRecord)}.get(name)
    finally:
        store.close()
    models = [each for each in records if not is_checkpoint(each.name)]
    newest = sorted(models, key=lambda each: each.created_at)[-1:] if name == "last" else []
    for record in (
        [each for each in records if each.name == name]
        or [each for each in models if each.job == name]
        or newest
    ):
        return Finished(name=record.name, directory=Path(record.directory or ""), base=record.base)
    if status is not None:
        steps = ", ".join(record.name for record in records if record.job == name) or "none"
        raise AdapterError(
            f"job {name} is {status} and has no finished model; it has these checkpoints: {steps}"
        )
    known = ", ".join(record.name for record in models) or "none"
    raise AdapterError(f"there is no finished model {name!r}; there are: {known}")


def with_finished_model(config: "ServerConfig") -> "ServerConfig":
    """Return the configuration with the files of a model that a job has made, if the model is the
    name of one; clients also use that name.

    Other models stay as they are.
    """
    if not config.model.startswith("ft:") or Path(config.model).exists():
        return config
    finished = find_finished(config.model, config.home, config.database)
    if not finished.is_model:
        raise AdapterError(
            f"{finished.name} is an adapter: serve its base model, {finished.base}, which then "
            f"serves it by its name"
        )
    names = config.served_model_names or (finished.name,)
    return replace(config, model=str(finished.directory), served_model_names=names)

"""What jobs have made, by name, in a server's home: adapters, and the models of full
fine-tuning.
"""

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
    """name: of the fine-tuned model, or of a checkpoint. directory: its files. base: the model that
    was trained.
    """

    name: str
    directory: Path
    base: str

    @property
    def is_model(self) -> bool:
        """Whether it is a model of its own, and not an adapter."""
        return (self.directory / FULL_FILE).is_file()


def find_finished(name: str, home: str | None, database: str | None) -> Finished:
    """By the name of a fine-tuned model or a checkpoint, by the job's id, or "last": the newest. A
    server may use the home meanwhile.

    Raises:
        CoserveError: there is no such home. AdapterError: no such name, with those that there are;
            or the job has no finished model, with its checkpoints.
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
    """The files of a model that a job has made, by its name; clients call it so, too. Other names
    stay as they are.
    """
    if not config.model.startswith("ft:") or Path(config.model).exists():
        return config
    found = find_finished(config.model, config.home, config.database)
    if not found.is_model:
        raise AdapterError(
            f"{found.name} is an adapter of {found.base}: a server of that model serves it by its "
            f"name"
        )
    names = config.served_model_names or (found.name,)
    return replace(config, model=str(found.directory), served_model_names=names)

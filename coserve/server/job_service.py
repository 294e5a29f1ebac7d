"""Jobs in a server: the manager, told what the engine says, and its adapters among those that requests can name."""

from coserve.jobs.files import Files
from coserve.jobs.manager import JobManager
from coserve.jobs.messages import AdapterRef
from coserve.jobs.records import AdapterRecord
from coserve.jobs.store import Store
from coserve.jobs.validation import BaseModel
from coserve.models.families import build_architecture
from coserve.server.adapters import KnownAdapter
from coserve.server.config import ServerConfig
from coserve.server.context import ServerContext
from coserve.worker.protocol import Ready, StepReport


class JobService:
    """An `EngineListener`, and an `AdapterCatalogue`."""

    def __init__(self, manager: JobManager) -> None:
        self._manager = manager

    def engine_ready(self, ready: Ready) -> None:
        self._manager.engine_ready()

    def engine_gone(self) -> None:
        self._manager.engine_gone()

    def engine_reported(self, happened: StepReport) -> None:
        self._manager.engine_reported(happened.job_events, happened.checkpoints)

    def list(self, tenant: str) -> list[KnownAdapter]:
        return [_known(record) for record in self._manager.adapters(tenant)]

    def find(self, tenant: str, name: str) -> KnownAdapter | None:
        record = self._manager.adapter(tenant, name)
        return None if record is None else _known(record)


async def start_jobs(context: ServerContext) -> None:
    """Open the store, and have jobs go on as soon as there is an engine. StoreError if it cannot be opened.

    `stop_jobs` is to be called when the engine has ended.
    """
    config = context.config
    store = _store(config)
    manager = JobManager(
        store=store,
        files=Files(store, config.directory / "files", max_bytes=config.max_upload_bytes),
        directory=config.directory / "jobs",
        engine=context.link,
        model=BaseModel(
            name=context.model_name,
            architecture=build_architecture(context.prompts.source.config),
            tokenizer=context.prompts.tokenizer,
        ),
    )
    await manager.start()
    service = JobService(manager)
    context.link.listen(service)
    context.catalogues.append(service)
    context.job_manager = manager
    if context.link.ready is not None:
        manager.engine_ready()


async def stop_jobs(context: ServerContext) -> None:
    """Write down what the engine said last, and close the store."""
    if context.job_manager is not None:
        await context.job_manager.close()
        context.job_manager.store.close()


def _store(config: ServerConfig) -> Store:
    return Store.at(config.directory) if config.database is None else Store(config.database)


def _known(record: AdapterRecord) -> KnownAdapter:
    """Names of jobs' models are never given twice, so the engine calls them the same."""
    return KnownAdapter(
        name=record.name,
        ref=AdapterRef(name=record.name, directory=record.directory),
        root=record.job,
        created=record.created_at,
    )

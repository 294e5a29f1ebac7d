"""Jobs in a server: the manager, told what the engine reports; its adapters can be named by requests."""

import asyncio
from math import inf

from coserve.jobs.databases import database_url
from coserve.jobs.files import Files
from coserve.jobs.manager import JobManager
from coserve.jobs.store import Store
from coserve.jobs.validation import BaseModel
from coserve.models.families import build_architecture
from coserve.server.context import ServerContext
from coserve.worker.link import EngineLink
from coserve.worker.protocol import Ready, StepReport


class _JobReports:
    """An `EngineListener`."""

    def __init__(self, manager: JobManager, link: EngineLink) -> None:
        self._manager, self._link = manager, link

    def engine_ready(self, ready: Ready) -> None:
        self._manager.engine_ready()

    def engine_gone(self) -> None:
        self._manager.engine_gone(self._link.jobs_at_death)

    def engine_reported(self, report: StepReport) -> None:
        self._manager.engine_reported(report.job_events, report.checkpoints)


async def start_jobs(context: ServerContext) -> None:
    """Open the store, and have jobs resume as soon as there is an engine. StoreError if it cannot be opened.

    `stop_jobs` is to be called when the engine has ended.
    """
    config = context.config
    store = Store.at(config.directory, database_url(config.database))
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
        max_running=config.max_running_jobs,
        max_running_of=lambda tenant: context.limits_of(tenant).max_running_jobs,
        timeout_s=inf if config.job_timeout_s is None else config.job_timeout_s,
    )
    await asyncio.to_thread(context.loaded.restore, store, base=context.model_name, allowed=config.allow_adapter_paths)
    await manager.start()
    context.link.listen(_JobReports(manager, context.link))
    context.catalogues.append(manager.adapters)
    context.job_manager = manager
    if context.link.ready is not None:
        manager.engine_ready()


async def stop_jobs(context: ServerContext) -> None:
    """Write down what the engine said last, and close the store."""
    if context.job_manager is not None:
        await context.job_manager.close()
        context.job_manager.store.close()

"""Start and end of jobs and batches in a server.

The job manager gets the engine's reports, and its adapters can be named by requests.
"""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from coserve.engine.prompts import end_tokens_of, load_tokenizer
from coserve.engine_client.access import EngineAccess
from coserve.errors import ModelError
from coserve.jobs.files.blobs import Files
from coserve.jobs.files.remote_files import files_url, shared_files
from coserve.jobs.manager import JobManager
from coserve.jobs.metrics.trackers import Trackers
from coserve.jobs.models import BaseModel, JobModels
from coserve.jobs.sql.batch_queries import BATCHES_FOLDER
from coserve.jobs.sql.databases import database_url
from coserve.jobs.sql.store import Store
from coserve.models.families import build_architecture
from coserve.models.source import ModelSource, check_model, find_model
from coserve.protocol.messages import Ready, StepReport
from coserve.server.batches.answers import ANSWERS, LineContext
from coserve.server.batches.retries import until_done
from coserve.server.batches.runner import BatchRunner
from coserve.server.context import ServerContext
from coserve.server.observability.storage import Storage
from coserve.server.responses.store import end_unfinished, unfinished

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Batches have as many concurrent requests as the engines of up to this many nodes run: they are in
# this process's memory.
_MAX_NODES = 32


class _JobReports:
    """An `EngineListener` that passes the engine's reports on to the job manager."""

    def __init__(self, manager: JobManager, link: EngineAccess, trackers: Trackers) -> None:
        self._manager, self._link, self._trackers = manager, link, trackers

    def engine_ready(self, ready: Ready) -> None:
        self._manager.engine_ready()

    def engine_gone(self) -> None:
        self._manager.engine_gone(self._link.jobs_at_death, self._link.jobs_lost)
        self._trackers.rest()

    def engine_reported(self, report: StepReport) -> None:
        self._manager.engine_reported(report.job_events, report.checkpoints)
        self._trackers.take(report.job_events)


class _BatchDeaths:
    """An `EngineListener` that tells batches of deaths of the engine."""

    def __init__(self, batches: BatchRunner) -> None:
        self._batches = batches

    def engine_ready(self, ready: Ready) -> None:
        pass

    def engine_gone(self) -> None:
        self._batches.engine_died()

    def engine_reported(self, report: StepReport) -> None:
        pass


async def start_jobs(context: ServerContext) -> None:
    """Open the store, and resume jobs as soon as there is an engine.

    `stop_jobs` must be called when the engine has ended.

    Raises:
        StoreError: The store cannot be opened, or files cannot be stored.
        ModelError: A model of --trainable-model is missing.
    """
    config = context.config
    shared = shared_files(files_url(config.files_url), config.directory)
    await asyncio.to_thread(shared.check)
    models = await asyncio.to_thread(_models, context)
    store = Store.at(config.directory, database_url(config.database))
    manager = JobManager(
        store=store,
        files=Files(
            store, config.directory / "files", max_bytes=config.max_upload_bytes, shared=shared
        ),
        directory=config.directory / "jobs",
        engine=context.link,
        models=models,
        max_running=config.max_running_jobs,
        max_running_of=lambda tenant: context.keys.ring.limits_of(tenant).max_running_jobs,
        timeout_s=inf if config.job_timeout_s is None else config.job_timeout_s,
    )
    await asyncio.to_thread(
        context.models.loaded.restore,
        store,
        base=context.models.name,
        allowed=config.allow_adapter_paths,
    )
    context.storage = Storage(store, config.directory)
    await context.storage.check()
    # Listed before the first request: only responses of the earlier process may be ended.
    context.ending = asyncio.create_task(
        _end_unfinished(store, await asyncio.to_thread(unfinished, store))
    )
    await manager.start()
    context.trackers = Trackers(store, config.directory / "jobs")
    context.link.listen(_JobReports(manager, context.link, context.trackers))
    context.models.catalogues.append(manager.adapters)
    context.opened_jobs.value = manager
    lines = LineContext(
        generation=context.generation, responses=context.responses, fields=context.fields
    )
    batches = BatchRunner(
        store,
        manager.files,
        config.directory / BATCHES_FOLDER,
        answer=lambda request: ANSWERS[request.endpoint](request, lines),
        most=lambda: config.max_requests * min(max(1, context.link.num_nodes), _MAX_NODES),
    )
    context.opened_batches.value = batches
    batches.start()
    context.link.listen(_BatchDeaths(batches))
    if context.link.ready is not None:
        manager.engine_ready()


async def _end_unfinished(store: Store, ids: list[str]) -> None:
    await until_done(end_unfinished, store, ids, what="the end of responses that broke off")


def _models(context: ServerContext) -> JobModels:
    paths = context.config.engine.trainable_models
    if clashing := sorted(paths.keys() & {*context.models.base_names, context.models.name}):
        raise ModelError(
            f"--trainable-model {clashing[0]}=… has the name of the model that serves: choose "
            f"another"
        )
    served = context.prompts.source
    others = [_base_model(name, source, load_tokenizer(source)) for name, source in _found(paths)]
    model = _base_model(context.models.name, served, context.prompts.tokenizer)
    return JobModels(replace(model, max_positions=context.config.max_model_len), others)


def _found(paths: Mapping[str, str]) -> Iterator[tuple[str, ModelSource]]:
    for name, path in paths.items():
        try:
            check_model(path)
            yield name, find_model(path, with_weights=False)
        except ModelError as error:
            raise ModelError(f"--trainable-model {name}={path}: {error}") from None


def _base_model(
    name: str, source: ModelSource, tokenizer: "PreTrainedTokenizerBase | None"
) -> BaseModel:
    return BaseModel(
        name=name,
        architecture=build_architecture(source.config),
        tokenizer=tokenizer,
        end_tokens=end_tokens_of(source, tokenizer),
    )


async def stop_batches(context: ServerContext) -> None:
    """Stop all batches; they resume at the next start."""
    if (batches := context.opened_batches.value) is not None:
        await batches.close()


async def stop_jobs(context: ServerContext) -> None:
    """Write down the engine's last reports, and close the store."""
    await stop_batches(context)
    await context.responses.runs.close()
    if context.ending is not None:
        context.ending.cancel()
        await asyncio.gather(context.ending, return_exceptions=True)
    if context.trackers is not None:
        await asyncio.to_thread(context.trackers.close)
    if (manager := context.opened_jobs.value) is not None:
        await manager.close()
        manager.store.close()

"""Routes of /v1/fine_tuning/jobs, and the deletion of models made by jobs."""

import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse, Response

from coserve.engine.jobs.checkpoint import JOB_FILES
from coserve.errors import EngineGoneError
from coserve.jobs.files.shared_files import entries
from coserve.jobs.manager import JobManager
from coserve.jobs.records import JobRecord, Page
from coserve.server.bodies.reader import JsonRoute
from coserve.server.context import EnginePart, JobsPart, LimitsPart, ModelsPart, Tenant
from coserve.server.errors import ApiError, not_found
from coserve.server.fine_tuning.job_json import checkpoint_json, event_json, job_json, jobs_json
from coserve.server.fine_tuning.request import read_job_request
from coserve.server.fine_tuning.schemas import CreateJobBody
from coserve.server.http.responses import json_response

router = APIRouter(route_class=JsonRoute)

JOBS = "/v1/fine_tuning/jobs"
# How many a page may have.
_Limit = Annotated[int, Query(ge=1, le=1000)]


@router.post(JOBS)
async def create_job(
    body: CreateJobBody,
    jobs: JobsPart,
    models: ModelsPart,
    engine: EnginePart,
    limits: LimitsPart,
    tenant: Tenant,
) -> Response:
    """Create a fine-tuning job."""
    base, start, settings = await run_in_threadpool(
        read_job_request, body, tenant, jobs=jobs, models=models, num_nodes=engine.num_nodes
    )
    job = await jobs.create(
        tenant,
        model=body.model,
        base=base,
        training_file=body.training_file,
        validation_file=body.validation_file,
        suffix=body.suffix,
        metadata=body.metadata,
        settings=settings,
        start=start,
        max_jobs=limits.max_jobs,
    )
    return json_response(await run_in_threadpool(job_json, jobs, job))


@router.get(JOBS)
def list_jobs(
    request: Request, jobs: JobsPart, tenant: Tenant, after: str | None = None, limit: _Limit = 20
) -> Response:
    """List jobs, the newest first.

    `metadata[key]=value` selects jobs with these pairs, `metadata=null` jobs without metadata.
    """
    metadata = {}
    for name, value in request.query_params.multi_items():
        if (match := re.fullmatch(r"metadata\[(.*)\]", name, re.DOTALL)) is not None:
            metadata[match[1]] = value
    bare = request.query_params.get("metadata")
    if bare not in (None, "null"):
        raise ApiError(
            "'metadata' must be null, or be given as metadata[key]=value.", param="metadata"
        )
    with jobs.store.read() as transaction:
        page = transaction.jobs(
            tenant, after=after, limit=limit, metadata=metadata, bare=bare == "null"
        )
    return _page(page, jobs_json(jobs, page.items))


@router.get(JOBS + "/{job_id}")
def retrieve_job(job_id: str, jobs: JobsPart, tenant: Tenant) -> Response:
    """Return a job."""
    return json_response(job_json(jobs, find_job(jobs, tenant, job_id)))


@router.post(JOBS + "/{job_id}/cancel")
async def cancel_job(job_id: str, jobs: JobsPart, tenant: Tenant) -> Response:
    """Cancel a job."""
    return await _changed(jobs.cancel, job_id, jobs, tenant)


@router.post(JOBS + "/{job_id}/pause")
async def pause_job(job_id: str, jobs: JobsPart, tenant: Tenant) -> Response:
    """Pause a job."""
    return await _changed(jobs.pause, job_id, jobs, tenant)


@router.post(JOBS + "/{job_id}/resume")
async def resume_job(job_id: str, jobs: JobsPart, tenant: Tenant) -> Response:
    """Resume a paused job."""
    return await _changed(jobs.resume, job_id, jobs, tenant)


@router.get(JOBS + "/{job_id}/events")
def list_events(
    job_id: str, jobs: JobsPart, tenant: Tenant, after: str | None = None, limit: _Limit = 20
) -> Response:
    """List a job's events, the newest first."""
    find_job(jobs, tenant, job_id)
    with jobs.store.read() as transaction:
        page = transaction.events(tenant, job_id, after=after, limit=limit)
    return _page(page, [event_json(event) for event in page.items])


@router.get(JOBS + "/{job_id}/checkpoints")
def list_checkpoints(
    job_id: str, jobs: JobsPart, tenant: Tenant, after: str | None = None, limit: _Limit = 10
) -> Response:
    """List a job's checkpoints, the newest first."""
    find_job(jobs, tenant, job_id)
    with jobs.store.read() as transaction:
        page = transaction.checkpoints(tenant, job_id, after=after, limit=limit)
        best = transaction.best_evaluations([job_id]).get(job_id)
        data = [
            checkpoint_json(each, transaction.metrics(job_id, step=each.step), best)
            for each in page.items
        ]
    return _page(page, data)


@router.get(JOBS + "/{job_id}/adapter")
def list_adapter_files(
    job_id: str, jobs: JobsPart, tenant: Tenant, step: Annotated[int, Query(ge=0)] | None = None
) -> Response:
    """List the files of the adapter that a job has made, in PEFT's format.

    Args:
        step: Step of a checkpoint (default: that of its model, or the newest).
    """
    directory = adapter_directory(jobs, find_job(jobs, tenant, job_id), step)
    data = [
        {"name": path.name, "bytes": path.stat().st_size}
        for path in sorted(adapter_files(directory))
    ]
    return json_response({"object": "list", "data": data})


@router.get(JOBS + "/{job_id}/adapter/{name}")
def retrieve_adapter_file(
    job_id: str,
    name: str,
    jobs: JobsPart,
    tenant: Tenant,
    step: Annotated[int, Query(ge=0)] | None = None,
) -> Response:
    """Return a file of the adapter that a job has made."""
    directory = adapter_directory(jobs, find_job(jobs, tenant, job_id), step)
    paths = [path for path in adapter_files(directory) if path.name == name]
    if not paths:
        raise not_found(f"The adapter has no file {name!r}", param="name")
    return FileResponse(paths[0], media_type="application/octet-stream")


@router.delete("/v1/models/{model:path}")
async def delete_model(
    model: str, jobs: JobsPart, models: ModelsPart, engine: EnginePart, tenant: Tenant
) -> Response:
    """Delete a model that a job has made with its checkpoints, or one of those."""
    name = unquote(model)
    if name in models.base_names or models.loaded.has(tenant, name):
        raise ApiError(
            f"The model '{name}' was not made by fine-tuning, and cannot be deleted.", param="model"
        )
    gone = await jobs.delete_adapter(tenant, name)
    if not gone:
        raise not_found(f"The model '{name}' does not exist", param="model", code="model_not_found")
    with suppress(EngineGoneError):  # an engine that is gone has no adapter
        for each in gone:
            await engine.unload_adapter(each)
    return json_response({"id": name, "object": "model", "deleted": True})


async def _changed(
    change: Callable[[str, str], Awaitable[JobRecord]], id: str, jobs: JobManager, tenant: str
) -> Response:
    await run_in_threadpool(find_job, jobs, tenant, id)
    job = await change(tenant, id)
    return json_response(await run_in_threadpool(job_json, jobs, job))


def find_job(jobs: JobManager, tenant: str, id: str) -> JobRecord:
    """Return a tenant's job. Blocks.

    Raises:
        ApiError: The tenant has no job of this id.
    """
    with jobs.store.read() as transaction:
        job = transaction.job(tenant, id)
    if job is None:
        raise not_found(
            f"Could not find fine tune: {id}",
            param="fine_tuning_job_id",
            code="fine_tune_not_found",
        )
    return job


def adapter_directory(jobs: JobManager, job: JobRecord, step: int | None) -> Path:
    """Return the directory of a job's checkpoint. Blocks.

    Args:
        jobs: Job manager.
        job: The job.
        step: Step of the checkpoint; None: that of its model, or the newest.

    Raises:
        ApiError: There is no such checkpoint.
    """
    with jobs.store.read() as transaction:
        listed = [
            each
            for each in transaction.all_checkpoints(job.id)
            if each.listed and step in (None, each.step)
        ]
        model = transaction.adapter(job.tenant, job.name) if step is None else None
    if not listed:
        which = "" if step is None else f" after step {step}"
        raise not_found(f"Job {job.id} has no checkpoint{which}", param="step")
    directory = Path((model.directory if model is not None else None) or listed[-1].directory)
    jobs.files.shared.fetch(directory)
    return directory


def adapter_files(directory: Path) -> list[Path]:
    """Return the files of an adapter, without those that only its job needs to resume."""
    return [path for path in entries(directory) if path.is_file() and path.name not in JOB_FILES]


def _page(page: Page, data: list[dict[str, Any]]) -> Response:
    return json_response(
        {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": page.has_more,
        }
    )

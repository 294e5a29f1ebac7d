"""GET /v1/fine_tuning/jobs/{id}/archive: the adapter of a job, or a merged model, as a ZIP file."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from coserve.adapters.file_names import FULL_FILE
from coserve.errors import AdapterError
from coserve.home import make_private
from coserve.jobs.manager import JobManager
from coserve.jobs.records import JobRecord
from coserve.server.config import ServerConfig
from coserve.server.context import ConfigPart, JobsPart, MergingPart, Tenant
from coserve.server.errors import ApiError
from coserve.server.fine_tuning.archives import Merging, zipped
from coserve.server.routes.fine_tuning import JOBS, adapter_directory, adapter_files, find_job

router = APIRouter()


@router.get(JOBS + "/{job_id}/archive")
async def retrieve_archive(
    job_id: str,
    jobs: JobsPart,
    merging: MergingPart,
    config: ConfigPart,
    tenant: Tenant,
    step: Annotated[int, Query(ge=0)] | None = None,
    merge: bool = False,
) -> Response:
    """Send the files that a job has made as a ZIP archive.

    Args:
        step: Step of a checkpoint (default: the newest).
        merge: Whether to send the base model with the adapter merged into its weights, in the data
            types of its files and in Hugging Face's layout, instead of the adapter in PEFT's
            format.
    """
    job = await run_in_threadpool(find_job, jobs, tenant, job_id)
    directory = await run_in_threadpool(adapter_directory, jobs, job, step)
    name = job.name.replace(":", "-")
    if not merge or (directory / FULL_FILE).is_file():
        return _archive(await run_in_threadpool(adapter_files, directory), name)
    merged = await _merged(
        merging, _base_model(jobs, config, job), directory, config.directory / "run"
    )
    remove = BackgroundTask(shutil.rmtree, merged, ignore_errors=True)
    return _archive(sorted(merged.iterdir()), f"{name}-merged", remove)


async def _merged(merging: Merging, model: str, adapter: Path, run: Path) -> Path:
    """Return a new directory in `run` with the merged model."""
    if merging.is_busy:
        raise ApiError(
            "another adapter is being merged; try again when it is done",
            status=503,
            kind="server_error",
            headers={"Retry-After": "30"},
        )
    # What a killed server leaves there is removed at the next start.
    make_private(run)
    merged = Path(mkdtemp(dir=run, prefix="merged-"))
    try:
        await merging.merge(model, adapter, merged)
    except BaseException as error:
        shutil.rmtree(merged, ignore_errors=True)
        if isinstance(error, AdapterError):
            raise ApiError(f"The adapter cannot be merged: {error}", param="merge") from error
        raise
    return merged


def _base_model(jobs: JobManager, config: ServerConfig, job: JobRecord) -> str:
    """Return the directory, or hub id, of the model that a job's adapter belongs to."""
    if job.base == jobs.models.served.name:
        return config.model
    return config.engine.trainable_models.get(job.base, job.base)


def _archive(paths: list[Path], name: str, after: BackgroundTask | None = None) -> Response:
    chunks: Iterator[bytes] = zipped(paths, folder=name)
    headers = {"Content-Disposition": f'attachment; filename="{name}.zip"'}
    return StreamingResponse(
        chunks, media_type="application/zip", headers=headers, background=after
    )

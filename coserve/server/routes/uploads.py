"""Routes of /v1/uploads: files that are uploaded in parts, as in OpenAI's API."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.responses import Response

from coserve.jobs.files.blobs import PURPOSES
from coserve.jobs.files.uploads import Uploads, status_of
from coserve.jobs.manager import JobManager
from coserve.jobs.records import UploadRecord
from coserve.server.bodies.reader import JsonRoute
from coserve.server.bodies.schemas import Body, List
from coserve.server.bodies.texts import check_texts
from coserve.server.context import JobsPart, LimitsPart, Tenant
from coserve.server.errors import ApiError, not_found
from coserve.server.http.responses import json_response
from coserve.server.routes.files import file_json

router = APIRouter(route_class=JsonRoute)
part_router = APIRouter()

_MAX_PARTS = 10_000


class ExpiresAfter(Body):
    """Expiry of the file."""

    anchor: Literal["created_at"]
    """Time from which it counts."""
    seconds: Annotated[int, Field(ge=3600, le=2_592_000)]
    """Seconds until the file expires."""


class UploadBody(Body):
    """Body of POST /v1/uploads."""

    filename: Annotated[str, Field(min_length=1, max_length=255)]
    """Name of the file."""
    bytes: Annotated[int, Field(ge=1, le=2**53)]
    """Size of the file."""
    purpose: Literal[PURPOSES]  # type: ignore[valid-type]
    """Purpose of the file."""
    mime_type: Annotated[str, Field(max_length=255)] = ""
    """MIME type of the file."""
    expires_after: ExpiresAfter | None = None
    """Expiry of the file (default: never)."""


class CompleteBody(Body):
    """Body of POST /v1/uploads/{upload_id}/complete."""

    part_ids: Annotated[List[str], Field(min_length=1, max_length=_MAX_PARTS)]
    """Parts of the file, in order."""
    md5: str | None = None
    """MD5 digest of the file, to check it."""


@router.post("/v1/uploads")
def create_upload(body: UploadBody, jobs: JobsPart, tenant: Tenant) -> Response:
    """Begin an upload, whose parts follow."""
    for name in ("filename", "mime_type"):
        check_texts(getattr(body, name), param=name)
    record = _uploads(jobs).create(
        tenant,
        purpose=body.purpose,
        filename=body.filename,
        mime_type=body.mime_type,
        num_bytes=body.bytes,
        expires_after_s=None if body.expires_after is None else body.expires_after.seconds,
    )
    return json_response(_upload(record, jobs))


@part_router.post("/v1/uploads/{upload_id}/parts")
async def add_part(
    upload_id: str, request: Request, jobs: JobsPart, limits: LimitsPart, tenant: Tenant
) -> Response:
    """Upload a part, as a form with `data`."""
    upload = await run_in_threadpool(_find, jobs, tenant, upload_id)
    async with request.form(max_files=1, max_fields=1) as form:
        if unknown := [name for name in form if name != "data"]:
            raise ApiError(
                f"Unknown parameter: '{unknown[0]}'.", param=unknown[0], code="unknown_parameter"
            )
        data = form.get("data")
        if not isinstance(data, UploadFile):
            raise ApiError(
                "Missing required parameter: 'data'.",
                param="data",
                code="missing_required_parameter",
            )
        part = await run_in_threadpool(
            _uploads(jobs).add_part, upload, data.file, max_total_bytes=limits.max_file_bytes
        )
    return json_response(
        {
            "id": part.id,
            "object": "upload.part",
            "created_at": part.created_at,
            "upload_id": upload.id,
        }
    )


@router.post("/v1/uploads/{upload_id}/complete")
def complete_upload(
    upload_id: str, body: CompleteBody, jobs: JobsPart, limits: LimitsPart, tenant: Tenant
) -> Response:
    """Join the parts to a file, in the given order."""
    for name in ("part_ids", "md5"):
        check_texts(getattr(body, name), param=name)
    _uploads(jobs).complete(
        _find(jobs, tenant, upload_id),
        body.part_ids,
        md5=body.md5,
        max_total_bytes=limits.max_file_bytes,
    )
    return json_response(_upload(_find(jobs, tenant, upload_id), jobs))


@router.post("/v1/uploads/{upload_id}/cancel")
def cancel_upload(upload_id: str, jobs: JobsPart, tenant: Tenant) -> Response:
    """Cancel an upload, and delete its parts."""
    _uploads(jobs).cancel(_find(jobs, tenant, upload_id))
    return json_response(_upload(_find(jobs, tenant, upload_id), jobs))


router.include_router(part_router)


def _uploads(jobs: JobManager) -> Uploads:
    return Uploads(jobs.store, jobs.files)


def _find(jobs: JobManager, tenant: str, id: str) -> UploadRecord:
    check_texts(id, param="upload_id")
    record = _uploads(jobs).find(tenant, id)
    if record is None:
        raise not_found(f"No such Upload object: {id}", param="upload_id")
    return record


def _upload(record: UploadRecord, jobs: JobManager) -> dict[str, Any]:
    file = None if record.file is None else jobs.files.find(record.tenant, record.file)
    return {
        "id": record.id,
        "object": "upload",
        "bytes": record.num_bytes,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": status_of(record),
        "file": None if file is None else file_json(file),
    }

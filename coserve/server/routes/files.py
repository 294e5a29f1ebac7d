"""Routes of /v1/files: uploads of clients, and results of jobs and batches."""

import base64
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.responses import Response

from coserve.jobs.files.blobs import PURPOSES, RESULTS
from coserve.jobs.manager import JobManager
from coserve.jobs.records import FileRecord
from coserve.server.bodies.texts import check_texts
from coserve.server.context import ConfigPart, JobsPart, LimitsPart, Tenant
from coserve.server.errors import ApiError, not_found
from coserve.server.http.open_file import OpenFileResponse
from coserve.server.http.responses import json_response

router = APIRouter()

_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_FIELDS = ("file", "purpose", _ANCHOR, _SECONDS)
_EXPIRES_S = range(3600, 2592001)
_LONGEST_NAME = 255


@router.post("/v1/files")
async def create_file(
    request: Request, jobs: JobsPart, limits: LimitsPart, tenant: Tenant
) -> Response:
    """Upload a file, as a form with `file` and `purpose`."""
    async with request.form(max_files=1, max_fields=len(_FIELDS)) as form:
        for name in form:
            if name not in _FIELDS:
                raise ApiError(
                    f"Unknown parameter: '{name}'.", param=name, code="unknown_parameter"
                )
        upload, purpose = form.get("file"), form.get("purpose")
        if not isinstance(upload, UploadFile):
            raise _missing("file")
        if purpose is None:
            raise _missing("purpose")
        if purpose not in PURPOSES:
            allowed = ", ".join(PURPOSES)
            raise ApiError(f"'purpose' must be one of {allowed}, not '{purpose}'.", param="purpose")
        filename = upload.filename or "file"
        check_texts(filename, param="file")
        if len(filename) > _LONGEST_NAME:
            raise ApiError(
                f"The file's name has more than {_LONGEST_NAME} characters.", param="file"
            )
        record = await run_in_threadpool(
            jobs.files.create,
            tenant,
            purpose=str(purpose),
            filename=filename,
            source=upload.file,
            expires_after_s=_expires_after_s(form),
            max_total_bytes=limits.max_file_bytes,
        )
    return json_response(file_json(record))


@router.get("/v1/files")
def list_files(
    jobs: JobsPart,
    tenant: Tenant,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    purpose: str | None = None,
) -> Response:
    """List files."""
    with jobs.store.read() as transaction:
        page = transaction.files(
            tenant, purpose=purpose, after=after, limit=limit, newest_first=order == "desc"
        )
    data = [file_json(record) for record in page.items]
    return json_response(
        {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": page.has_more,
        }
    )


@router.get("/v1/files/{file_id}")
def retrieve_file(file_id: str, jobs: JobsPart, tenant: Tenant) -> Response:
    """Return a file's record."""
    return json_response(file_json(_find(jobs, tenant, file_id)))


@router.get("/v1/files/{file_id}/content")
def retrieve_content(
    file_id: str,
    jobs: JobsPart,
    config: ConfigPart,
    tenant: Tenant,
    encoding: Literal["plain", "base64"] | None = None,
) -> Response:
    """Return the content of a file.

    Args:
        encoding: Encoding of a job's result file, base64 in OpenAI's API (default:
            --result-encoding); other files are returned as they are.
    """
    record = _find(jobs, tenant, file_id)
    try:
        file = jobs.files.path(record).open("rb")
    except FileNotFoundError:
        raise not_found(f"The content of {file_id} no longer exists.", param="file_id") from None
    if record.purpose == RESULTS and (encoding or config.result_encoding) == "base64":
        with file:
            return Response(base64.b64encode(file.read()), media_type="application/octet-stream")
    return OpenFileResponse(file, media_type="application/octet-stream")


@router.delete("/v1/files/{file_id}")
def delete_file(file_id: str, jobs: JobsPart, tenant: Tenant) -> Response:
    """Delete a file."""
    check_texts(file_id, param="file_id")
    if not jobs.files.delete(tenant, file_id):
        raise _missing_file(file_id)
    return json_response({"id": file_id, "object": "file", "deleted": True})


def _find(jobs: JobManager, tenant: str, id: str) -> FileRecord:
    record = jobs.files.find(tenant, id)
    if record is None:
        raise _missing_file(id)
    return record


def _missing_file(id: str) -> ApiError:
    return not_found(f"No such File object: {id}", param="id")


def file_json(record: FileRecord) -> dict[str, Any]:
    """Return a file in OpenAI's form."""
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.num_bytes,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
        "status_details": None,
    }


def _expires_after_s(form: FormData) -> int | None:
    anchor, seconds = form.get(_ANCHOR), form.get(_SECONDS)
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise ApiError("'expires_after[anchor]' must be 'created_at'.", param=_ANCHOR)
    digits = str(seconds)
    if (
        len(digits) > 8
        or not (digits.isascii() and digits.isdecimal())
        or int(digits) not in _EXPIRES_S
    ):
        bounds = f"{_EXPIRES_S.start} to {_EXPIRES_S.stop - 1}"
        raise ApiError(
            f"'expires_after[seconds]' must be a whole number from {bounds}.", param=_SECONDS
        )
    return int(digits)


def _missing(name: str) -> ApiError:
    return ApiError(
        f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter"
    )

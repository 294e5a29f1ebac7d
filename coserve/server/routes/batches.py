"""Routes of /v1/batches, as in OpenAI's API."""

import asyncio
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.responses import Response

from coserve.errors import LimitError
from coserve.jobs.files.blobs import QUOTA_RETRY_S
from coserve.jobs.manager import JobManager
from coserve.jobs.records import BatchRecord, Page, new_id
from coserve.server.batches.answers import ANSWERS
from coserve.server.bodies.reader import JsonRoute
from coserve.server.bodies.schemas import Body
from coserve.server.bodies.texts import check_texts
from coserve.server.context import BatchesPart, JobsPart, LimitsPart, Tenant
from coserve.server.errors import ApiError, not_found
from coserve.server.http.responses import json_response
from coserve.server.responses.request import check_metadata
from coserve.server.stored.lookup import find_stored
from coserve.server.units import seconds_of

router = APIRouter(route_class=JsonRoute)

_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
_LONGEST_WINDOW_S = 30 * 24 * 3600


class OutputExpiresAfter(Body):
    """Expiry of output and error file."""

    anchor: Literal["created_at"]
    """Time from which it counts."""
    seconds: Annotated[int, Field(ge=3600, le=2_592_000)]
    """Seconds until the files expire."""


class BatchBody(Body):
    """Body of POST /v1/batches."""

    input_file_id: Annotated[str, Field(max_length=256)]
    """File with the requests."""
    endpoint: Annotated[str, Field(max_length=256)]
    """Path of the requests."""
    completion_window: Annotated[str, Field(max_length=32)]
    """Time within which they are answered: "24h" as in OpenAI's API, or another duration."""
    metadata: dict[str, Any] | None = None
    """The client's own data."""
    output_expires_after: OutputExpiresAfter | None = None
    """Expiry of output and error file (default: never)."""


@router.post("/v1/batches")
async def create_batch(
    body: BatchBody, jobs: JobsPart, batches: BatchesPart, limits: LimitsPart, tenant: Tenant
) -> Response:
    """Start a batch of the requests in a file."""
    check_texts(body.input_file_id, param="input_file_id")
    check_metadata(body.metadata)
    if body.endpoint not in ANSWERS:
        raise ApiError(f"endpoint must be one of {', '.join(ANSWERS)}", param="endpoint")
    window_s = _window_s(body.completion_window)
    file = await asyncio.to_thread(jobs.files.find, tenant, body.input_file_id)
    if file is None:
        raise not_found(f"No such File object: {body.input_file_id}", param="input_file_id")
    if file.purpose != "batch":
        raise ApiError(
            f"{file.id} has the purpose {file.purpose}; it must be batch", param="input_file_id"
        )
    now = int(time.time())
    expires = body.output_expires_after
    record = BatchRecord(
        id=new_id("batch_"),
        tenant=tenant,
        created_at=now,
        expires_at=now + window_s,
        status="validating",
        endpoint=body.endpoint,
        input_file=file.id,
        window=body.completion_window,
        metadata=body.metadata,
        output_expires_after_s=None if expires is None else expires.seconds,
    )
    await asyncio.to_thread(_add, jobs, record, limits.max_batches)
    batches.begin(record)
    return json_response(_batch(record))


@router.get("/v1/batches")
async def list_batches(
    jobs: JobsPart,
    batches: BatchesPart,
    tenant: Tenant,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> Response:
    """List batches, the newest first."""

    def read() -> Page:
        with jobs.store.read() as transaction:
            return transaction.batches(tenant, after=after, limit=limit)

    page = await asyncio.to_thread(read)
    data = [_batch(batches.live(record)) for record in page.items]
    return json_response(
        {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": page.has_more,
        }
    )


@router.get("/v1/batches/{batch_id}")
async def retrieve_batch(
    batch_id: str, jobs: JobsPart, batches: BatchesPart, tenant: Tenant
) -> Response:
    """Return a batch with its progress."""
    return json_response(_batch(batches.live(await _find(jobs, tenant, batch_id))))


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(
    batch_id: str, jobs: JobsPart, batches: BatchesPart, tenant: Tenant
) -> Response:
    """Cancel a batch; answers so far are kept."""
    record = await batches.cancel(await _find(jobs, tenant, batch_id))
    if record.status not in ("cancelling", "cancelled"):
        raise ApiError(
            f"Batch {batch_id} is {record.status}: it cannot be cancelled any more.", status=409
        )
    return json_response(_batch(record))


def _add(jobs: JobManager, record: BatchRecord, most: int | None) -> None:
    with jobs.store.write() as transaction:
        there = transaction.num_unfinished_batches(record.tenant)
        if most is not None and there >= most:
            raise LimitError(
                f"You have {there} batches that have not ended, and may have {most}: wait for one, "
                f"or cancel one.",
                what="batches",
                retry_after_s=QUOTA_RETRY_S,
            )
        if transaction.file(record.tenant, record.input_file) is None:  # it was deleted meanwhile
            raise not_found(f"No such File object: {record.input_file}", param="input_file_id")
        transaction.add_batch(record)


async def _find(jobs: JobManager, tenant: str, id: str) -> BatchRecord:
    missing = f"No batch found with id '{id}'."
    return await find_stored(
        jobs, id, lambda store: store.batch(tenant, id), param="batch_id", missing=missing
    )


def _window_s(given: str) -> int:
    try:
        seconds = seconds_of(given)
    except ValueError as error:
        raise ApiError(f"completion_window: {error}", param="completion_window") from None
    if not 1 <= seconds <= _LONGEST_WINDOW_S:
        raise ApiError(
            "completion_window must be from 1s to 720h, such as 24h", param="completion_window"
        )
    return int(seconds)


def _batch(record: BatchRecord) -> dict[str, Any]:
    counts = {
        "total": record.num_total,
        "completed": record.num_completed,
        "failed": record.num_failed,
    }
    return {
        "id": record.id,
        "object": "batch",
        "endpoint": record.endpoint,
        "errors": None if record.errors is None else {"object": "list", "data": record.errors},
        "input_file_id": record.input_file,
        "completion_window": record.window,
        "status": record.status,
        "output_file_id": record.output_file,
        "error_file_id": record.error_file,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        **{f"{name}_at": record.times.get(f"{name}_at") for name in _TIMES},
        "request_counts": counts,
        "metadata": record.metadata,
    }

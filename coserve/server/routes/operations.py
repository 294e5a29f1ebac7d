"""For those who run the server: whether it is well, how it goes, and its metrics."""

from typing import Annotated

from fastapi import APIRouter, Query
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from coserve.server.context import Context, Tenant
from coserve.server.responses import json_response

router = APIRouter()


@router.get("/health")
async def health() -> Response:
    """200 as long as the server's process answers; the engine may be starting."""
    return json_response({"status": "ok"})


@router.get("/ready")
async def ready(context: Context) -> Response:
    """200 if requests are answered now, 503 otherwise."""
    context.require_ready()
    return json_response({"status": "ready"})


@router.get("/v1/status")
async def status(context: Context, tenant: Tenant) -> Response:
    """How it goes, over the last minute; of finished requests, a tenant's own."""
    return json_response(context.board.status(context.link.ready, context.model_name, tenant))


@router.get("/v1/status/steps")
async def steps(context: Context, tenant: Tenant, after: Annotated[int, Query(ge=0)] = 0) -> Response:
    """All steps and requests after a cursor."""
    return json_response(context.board.steps(after, tenant))


@router.get("/metrics")
async def metrics(context: Context) -> Response:
    """In Prometheus's format."""
    return Response(context.metrics.text(), media_type=CONTENT_TYPE_LATEST)

"""For those who run the server: whether it is well, how it goes, and its metrics."""

from typing import Annotated

from fastapi import APIRouter, Query
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from coserve.server.context import Context, IsOperator, Tenant
from coserve.server.http.responses import json_response
from coserve.server.observability.status import start_json
from coserve.version import VERSION

router = APIRouter()


@router.get("/health")
async def health(context: Context) -> Response:
    """Answer 200 as long as the server's process answers; what an engine that is starting does is
    in the body.
    """
    starting = start_json(context.link.start_progress)
    return json_response({"status": "ok"} | ({} if starting is None else {"starting": starting}))


@router.get("/ping")
@router.post("/ping")
async def ping() -> Response:
    """As /health, for those who ask so (Amazon SageMaker)."""
    return json_response({"status": "ok"})


@router.get("/version")
async def version() -> Response:
    """Of coserve."""
    return json_response({"version": VERSION})


@router.get("/load")
async def load(context: Context, tenant: Tenant, is_operator: IsOperator) -> Response:
    """Requests under way: a tenant's own, for operators all. As vLLM has it."""
    return json_response({"server_load": context.ledger.num_open(None if is_operator else tenant)})


@router.get("/ready")
async def ready(context: Context) -> Response:
    """200 if requests are answered now: the engine has made a step in the last seconds, or makes
    one for this; 503 otherwise.
    """
    context.require_ready()
    await context.readiness.require()
    return json_response({"status": "ready"})


@router.get("/v1/status")
async def status(context: Context, tenant: Tenant, is_operator: IsOperator) -> Response:
    """How it goes, over the last minute; of finished requests a tenant's own, for operators all."""
    whose = None if is_operator else tenant
    others = context.config.engine.trainable_models
    link = context.link
    found = context.board.status(link.ready, context.model_name, whose, others, link.start_progress)
    if context.storage is not None:
        found["storage"] = await context.storage.check()
    return json_response(found)


@router.get("/v1/status/steps")
async def steps(
    context: Context,
    tenant: Tenant,
    is_operator: IsOperator,
    after: Annotated[int, Query(ge=0)] = 0,
) -> Response:
    """All steps after a cursor, and requests: a tenant's own, for operators all."""
    return json_response(context.board.steps(after, None if is_operator else tenant))


@router.get("/metrics")
async def metrics(context: Context, tenant: Tenant, is_operator: IsOperator) -> Response:
    """In Prometheus's format: for operators all, for others what has their own tenant's label."""
    return Response(
        context.metrics.text(None if is_operator else tenant), media_type=CONTENT_TYPE_LATEST
    )

"""Routes for operators: health, status and metrics."""

from typing import Annotated

from fastapi import APIRouter, Query
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from coserve.server.context import (
    BoardPart,
    ConfigPart,
    EnginePart,
    GenerationPart,
    IsOperator,
    LedgerPart,
    MetricsPart,
    ModelsPart,
    ReadinessPart,
    StoragePart,
    Tenant,
)
from coserve.server.http.responses import json_response
from coserve.server.observability.status import start_json
from coserve.version import VERSION

router = APIRouter()


@router.get("/health")
async def health(engine: EnginePart) -> Response:
    """Answer 200 while the server's process answers; the body has the progress of a starting
    engine.
    """
    starting = start_json(engine.start_progress)
    return json_response({"status": "ok"} | ({} if starting is None else {"starting": starting}))


@router.get("/ping")
@router.post("/ping")
async def ping() -> Response:
    """Answer like /health (for Amazon SageMaker)."""
    return json_response({"status": "ok"})


@router.get("/version")
async def version() -> Response:
    """Return the version of coserve."""
    return json_response({"version": VERSION})


@router.get("/load")
async def load(ledger: LedgerPart, tenant: Tenant, is_operator: IsOperator) -> Response:
    """Return the number of open requests: the tenant's own, for operators all (vLLM)."""
    return json_response({"server_load": ledger.num_open(None if is_operator else tenant)})


@router.get("/ready")
async def ready(context: GenerationPart, readiness: ReadinessPart) -> Response:
    """Answer 200 if requests are answered now, else 503.

    The engine has made a step within the last seconds, or makes one for this request.
    """
    context.require_ready()
    await readiness.require()
    return json_response({"status": "ready"})


@router.get("/v1/status")
async def status(
    board: BoardPart,
    models: ModelsPart,
    engine: EnginePart,
    config: ConfigPart,
    storage: StoragePart,
    tenant: Tenant,
    is_operator: IsOperator,
) -> Response:
    """Return the state of the server over the last minute.

    Finished requests are the tenant's own, for operators all.
    """
    whose = None if is_operator else tenant
    others = config.engine.trainable_models
    shown = board.status(engine.ready, models.name, whose, others, engine.start_progress)
    if storage is not None:
        shown["storage"] = await storage.check()
    return json_response(shown)


@router.get("/v1/status/steps")
async def steps(
    board: BoardPart,
    tenant: Tenant,
    is_operator: IsOperator,
    after: Annotated[int, Query(ge=0)] = 0,
) -> Response:
    """Return all steps after a cursor, and requests: the tenant's own, for operators all."""
    return json_response(board.steps(after, None if is_operator else tenant))


@router.get("/metrics")
async def metrics(registry: MetricsPart, tenant: Tenant, is_operator: IsOperator) -> Response:
    """Return Prometheus metrics: all for operators, for others those with their tenant's label."""
    return Response(registry.text(None if is_operator else tenant), media_type=CONTENT_TYPE_LATEST)

"""For those who run the server: whether it is well, how it goes, and its metrics."""

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
    """Answer 200 as long as the server's process answers; what an engine that is starting does is
    in the body.
    """
    starting = start_json(engine.start_progress)
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
async def load(ledger: LedgerPart, tenant: Tenant, is_operator: IsOperator) -> Response:
    """Requests under way: a tenant's own, for operators all. As vLLM has it."""
    return json_response({"server_load": ledger.num_open(None if is_operator else tenant)})


@router.get("/ready")
async def ready(context: GenerationPart, readiness: ReadinessPart) -> Response:
    """200 if requests are answered now: the engine has made a step in the last seconds, or makes
    one for this; 503 otherwise.
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
    """How it goes, over the last minute; of finished requests a tenant's own, for operators all."""
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
    """All steps after a cursor, and requests: a tenant's own, for operators all."""
    return json_response(board.steps(after, None if is_operator else tenant))


@router.get("/metrics")
async def metrics(registry: MetricsPart, tenant: Tenant, is_operator: IsOperator) -> Response:
    """In Prometheus's format: for operators all, for others what has their own tenant's label."""
    return Response(registry.text(None if is_operator else tenant), media_type=CONTENT_TYPE_LATEST)

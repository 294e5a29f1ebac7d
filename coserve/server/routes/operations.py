"""For those who run the server: whether it is well, how it goes, and its metrics."""

from fastapi import APIRouter
from starlette.responses import Response

from coserve.server.context import Context
from coserve.server.responses import json_response

router = APIRouter()


@router.get("/health")
async def health(context: Context) -> Response:
    """200 as long as the server's process answers; the engine may be starting."""
    return json_response({"status": "ok"})


@router.get("/ready")
async def ready(context: Context) -> Response:
    """200 if requests are answered now, 503 otherwise."""
    context.link.require_ready()
    return json_response({"status": "ready"})

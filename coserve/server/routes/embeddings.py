"""Route of /v1/embeddings."""

import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from coserve.server.bodies.reader import JsonRoute
from coserve.server.context import GenerationPart, Tenant
from coserve.server.generation.embeddings import EmbeddingBody, embedding_request, embeddings
from coserve.server.http.request_log import note_completion
from coserve.server.http.responses import answer

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/embeddings")
async def create_embeddings(
    body: EmbeddingBody, request: Request, context: GenerationPart, tenant: Tenant
) -> Response:
    """Return a vector for each input."""
    generation = await embedding_request(body, context, tenant, time.monotonic())
    note_completion(request, generation.id)
    return await answer(request, whole=embeddings(body, generation, context), ignored=body.ignored)

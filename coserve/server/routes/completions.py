"""Route of /v1/completions."""

import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from coserve.server.bodies.reader import JsonRoute
from coserve.server.bodies.schemas import CompletionBody
from coserve.server.context import GenerationPart, Tenant
from coserve.server.generation.completions import CompletionWriter, completion_request
from coserve.server.generation.generation import UsageOptions
from coserve.server.http.request_log import note_completion
from coserve.server.http.responses import answer

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/completions")
async def completions(
    body: CompletionBody, request: Request, context: GenerationPart, tenant: Tenant
) -> Response:
    """Continue prompts."""
    completion = await completion_request(body, context, tenant, time.monotonic())
    writer = CompletionWriter(context, completion)
    note_completion(request, completion.generation.id)
    if body.stream:
        return await answer(
            request,
            events=writer.events(UsageOptions.of(body.stream_options)),
            ignored=body.ignored,
        )
    return await answer(request, whole=writer.whole(), ignored=body.ignored)

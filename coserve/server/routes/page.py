"""The page at / and /ui, and what its script asks for beside OpenAI's routes: parts of it as they are now."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from coserve.errors import DataError
from coserve.server.context import Context, ServerContext, Tenant
from coserve.server.errors import not_found
from coserve.server.page import assets
from coserve.server.page.curves import rate_curves
from coserve.server.page.jobs import newest_jobs
from coserve.server.page.memory import memory_view
from coserve.server.page.rendering import html

router = APIRouter(include_in_schema=False)

_FEW_JOBS, _MOST_JOBS = 6, 200
# Of the curves of tokens per second: one for each second of the last minute.
_NUM_PARTS = 60


@router.get("/")
@router.get("/ui")
async def page(request: Request, context: Context, tenant: Tenant) -> Response:
    """All of it; where keys are needed, without anything that the server knows."""
    is_open = context.keys.ring.is_open
    live = await _live(context, tenant, is_operator=True, most_jobs=_FEW_JOBS) if is_open else None
    return await run_in_threadpool(html, "page.html", is_open=is_open, live=live)


@router.get("/ui/live")
async def live(
    request: Request,
    context: Context,
    tenant: Tenant,
    jobs: Annotated[int, Query(ge=1, le=_MOST_JOBS)] = _FEW_JOBS,
) -> Response:
    """What changes: how it goes, and the newest jobs."""
    values = await _live(context, tenant, is_operator=request.state.is_operator, most_jobs=jobs)
    return await run_in_threadpool(html, "live.html", live=values)


@router.get("/ui/files/{file_id}/examples")
def examples(
    file_id: str, context: Context, tenant: Tenant, max_sequence_length: Annotated[int, Query(ge=2, le=1 << 20)] = 1024
) -> Response:
    """What would be trained of a file: its first examples, as jobs read them."""
    record = context.jobs.files.find(tenant, file_id)
    if record is None:
        raise not_found(f"No such File object: {file_id}", param="id")
    try:
        path = context.jobs.files.path(record)
        preview = context.previews.read(path, name=record.filename, max_sequence_length=max_sequence_length)
    except DataError as error:
        return html("examples.html", record=record, preview=None, error=str(error))
    return html("examples.html", record=record, preview=preview, error="")


@router.get(assets.PATH + "{name}")
def static(name: str, request: Request) -> Response:
    """Style, script and icon."""
    found = assets.asset(name, request.headers.get("if-none-match"))
    if found is None:
        raise not_found(f"Invalid URL ({request.method} {request.url.path})")
    return found


async def _live(context: ServerContext, tenant: str, *, is_operator: bool, most_jobs: int) -> dict[str, Any]:
    status = context.board.status(context.link.ready, context.model_name, None if is_operator else tenant)
    manager = context.job_manager
    return {
        "status": status,
        "rates": rate_curves(context.board.rates(_NUM_PARTS)),
        "memory": memory_view(status["memory"]),
        "jobs": None if manager is None else await run_in_threadpool(newest_jobs, manager, tenant, most_jobs),
        "most_jobs": most_jobs,
        "more_jobs": min(_MOST_JOBS, 2 * most_jobs),
        "has_chat": bool(context.prompts.chat_template),
    }

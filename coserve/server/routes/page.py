"""Routes of the page at / and /ui, and of its parts that its script reloads."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from coserve.errors import DataError
from coserve.server.context import JobsPart, KeysPart, PagePart, Tenant
from coserve.server.errors import ApiError, not_found
from coserve.server.observability.history import SPANS
from coserve.server.page import assets
from coserve.server.page.context import PageContext
from coserve.server.page.curves import rate_chart
from coserve.server.page.jobs import newest_jobs
from coserve.server.page.memory import memory_view
from coserve.server.page.models import finished_models
from coserve.server.page.rendering import html
from coserve.tuning.config import SCHEDULES
from coserve.tuning.objectives import SUPERVISED, objective_names

router = APIRouter(include_in_schema=False)

_FEW_JOBS, _MAX_JOBS = 6, 200
_MAX_SPAN = len(SPANS) - 1


@router.get("/")
@router.get("/ui")
async def page(request: Request, context: PagePart, keys: KeysPart, tenant: Tenant) -> Response:
    """Return the whole page; where keys are needed, without the server's data."""
    is_open = keys.ring.is_open
    live = await _live(context, tenant, is_operator=True, most_jobs=_FEW_JOBS) if is_open else None
    objectives = [name.replace("-", "_") for name in objective_names()]
    return await run_in_threadpool(
        html, "page.html", is_open=is_open, live=live, objectives=objectives, schedules=SCHEDULES
    )


@router.get("/ui/live")
async def live(
    request: Request,
    context: PagePart,
    tenant: Tenant,
    jobs: Annotated[int, Query(ge=1, le=_MAX_JOBS)] = _FEW_JOBS,
    span: Annotated[int, Query(ge=0, le=_MAX_SPAN)] = 0,
) -> Response:
    """Return the parts that change: state, newest jobs, and models.

    Args:
        jobs: Maximum number of jobs.
        span: Index in `history.SPANS`.
    """
    values = await _live(
        context, tenant, is_operator=request.state.is_operator, most_jobs=jobs, span=span
    )
    return await run_in_threadpool(html, "live.html", live=values)


@router.get("/ui/files/{file_id}/examples")
def examples(
    file_id: str,
    context: PagePart,
    jobs: JobsPart,
    tenant: Tenant,
    max_sequence_length: Annotated[int, Query(ge=2, le=1 << 20)] = 1024,
    method: Annotated[str, Query(max_length=64)] = SUPERVISED,
) -> Response:
    """Return a file's first examples as a job with this method would read them."""
    objective = method.replace("_", "-")
    if objective not in objective_names():
        raise ApiError(f"'method' must be one of {', '.join(objective_names())}.", param="method")
    record = jobs.files.find(tenant, file_id)
    if record is None:
        raise not_found(f"No such File object: {file_id}", param="id")
    try:
        path = jobs.files.path(record)
        preview = context.previews.read(
            path, name=record.filename, max_sequence_length=max_sequence_length, objective=objective
        )
    except DataError as error:
        return html("examples.html", record=record, preview=None, error=str(error))
    return html("examples.html", record=record, preview=preview, error="")


@router.get(assets.PATH + "{name}")
def static(name: str, request: Request) -> Response:
    """Return style, script or icon."""
    response = assets.asset(name, request.headers.get("if-none-match"))
    if response is None:
        raise not_found(f"Invalid URL ({request.method} {request.url.path})")
    return response


async def _live(
    context: PageContext, tenant: str, *, is_operator: bool, most_jobs: int, span: int = 0
) -> dict[str, Any]:
    status = context.board.status(
        context.engine.ready, context.models.name, None if is_operator else tenant
    )
    manager = context.jobs.value
    return {
        "status": status,
        "rates": rate_chart(context.board.rates(SPANS[span]), SPANS[span]),
        "spans": SPANS,
        "span": span,
        "memory": memory_view(status["memory"]),
        "jobs": None
        if manager is None
        else await run_in_threadpool(newest_jobs, manager, tenant, most_jobs),
        "models": None
        if manager is None
        else await run_in_threadpool(finished_models, manager, tenant),
        "most_jobs": most_jobs,
        "more_jobs": min(_MAX_JOBS, 2 * most_jobs),
        "has_chat": bool(context.prompts.chat_template),
    }

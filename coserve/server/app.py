"""The HTTP application: routes, middleware, and errors in OpenAI's form."""

from collections.abc import Sequence

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from coserve.discovery import variant_module, variant_names
from coserve.errors import CoserveError, DiskFullError
from coserve.home import is_disk_full
from coserve.logs import request_id
from coserve.server import routes
from coserve.server.bodies.faults import validation_error
from coserve.server.bodies.other_fields import HEADER as IGNORED_HEADER
from coserve.server.context import ServerContext
from coserve.server.errors import ApiError, as_api_error
from coserve.server.http.addresses import AddressMiddleware, HeadMiddleware, PrefixMiddleware
from coserve.server.http.authentication import TenantMiddleware
from coserve.server.http.body_limit import BodyLimitMiddleware
from coserve.server.http.cross_site import CrossSiteMiddleware
from coserve.server.http.deadline import DeadlineMiddleware
from coserve.server.http.request_log import HEADER, RequestLogMiddleware
from coserve.server.http.responses import error_body, json_response
from coserve.server.observability.tracing import TracingMiddleware
from coserve.server.options.hosts import hosts_of
from coserve.server.page import assets
from coserve.version import VERSION

# Methods of the routes, without HEAD, which is answered as GET.
_METHODS = ("GET", "POST", "DELETE")


def create_app(context: ServerContext) -> FastAPI:
    """Return the application of a server; `app.state.context` is its context."""
    app = FastAPI(title="coserve", version=VERSION, docs_url=None, redoc_url=None)
    app.state.context = context
    for group in variant_names(routes.__path__):
        app.include_router(variant_module(routes.__name__, group).router)
    config = context.config
    # The last is the outermost: an id comes before all, and keys before bodies.
    app.add_middleware(HeadMiddleware)
    app.add_middleware(
        BodyLimitMiddleware,
        max_body_bytes=config.max_body_bytes,
        max_upload_bytes=config.max_upload_bytes,
        timeout_s=config.timeout_body_s,
    )
    app.add_middleware(DeadlineMiddleware, timeout_s=config.request_timeout_s)
    app.add_middleware(
        TenantMiddleware,
        keys=context.keys,
        admission=context.admission,
        open_prefixes=(assets.PATH,),
    )
    app.add_middleware(CrossSiteMiddleware, keys=context.keys, cors_origins=config.cors_origins)
    app.add_middleware(AddressMiddleware, hosts=hosts_of(config.allowed_hosts, config.host))
    if config.cors_origins:  # browsers send preflight requests without a key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[HEADER, IGNORED_HEADER],
        )
    if config.root_path:
        app.add_middleware(PrefixMiddleware, prefix=config.root_path)
    app.add_middleware(RequestLogMiddleware)
    if context.tracing is not None:
        app.add_middleware(TracingMiddleware, tracing=context.tracing)
    app.add_exception_handler(ApiError, _answer_api_error)
    app.add_exception_handler(CoserveError, _answer_coserve_error)
    app.add_exception_handler(OSError, _answer_os_error)
    app.add_exception_handler(RequestValidationError, _answer_validation_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_exception_handler(Exception, _answer_bug)
    return app


def _answered(request: Request, error: ApiError) -> Response:
    """Return the answer with an error, in the form of the API that was asked."""
    return json_response(error_body(error, request.url.path), error.status, error.headers)


async def _answer_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _answered(request, error)


async def _answer_coserve_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, CoserveError)
    return _answered(request, as_api_error(error))


async def _answer_os_error(request: Request, error: Exception) -> Response:
    """Answer a full disk, such as that of temporary uploads; any other OSError is a bug."""
    assert isinstance(error, OSError)
    if not is_disk_full(error):
        raise error
    return _answered(
        request,
        as_api_error(DiskFullError("the disk is full: free some space there, and try again")),
    )


async def _answer_validation_error(request: Request, error: Exception) -> Response:
    """Answer with the first fault, by the field's name."""
    assert isinstance(error, RequestValidationError)
    return _answered(request, validation_error(error.errors()))


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, ApiError):  # from `bodies.reader`, wrapped by FastAPI
        return _answered(request, error.__cause__)
    messages = {
        404: f"Invalid URL ({request.method} {request.url.path})",
        405: f"Not allowed to {request.method} on {request.url.path}",
    }
    message = messages.get(error.status_code, str(error.detail))
    headers = (
        {"Allow": _allowed(request)} if error.status_code == 405 else dict(error.headers or {})
    )
    return _answered(request, ApiError(message, status=error.status_code, headers=headers))


def _allowed(request: Request) -> str:
    """Return the methods of all routes at a path; Starlette names only those of the first."""
    methods = [
        method
        for method in _METHODS
        if _is_routed({**request.scope, "method": method}, request.app.routes)
    ]
    return ", ".join([*methods, "HEAD"] if "GET" in methods else methods)


def _is_routed(scope: Scope, among: Sequence[BaseRoute]) -> bool:
    return any(route.matches(scope)[0] == Match.FULL for route in among)


async def _answer_bug(request: Request, error: Exception) -> Response:
    """Answer an unexpected error; Starlette calls this outside of all middleware above."""
    id = request_id.get()
    message = f"The server had an error while processing your request; see its log for {id}."
    return _answered(
        request, ApiError(message, status=500, kind="server_error", headers={HEADER: id})
    )

"""The HTTP application: routes, who may ask, how long bodies may be, and errors in OpenAI's form."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from coserve.errors import CoserveError
from coserve.server.body_limit import BodyLimitMiddleware
from coserve.server.context import ServerContext
from coserve.server.errors import ApiError, as_api_error
from coserve.server.responses import error_response
from coserve.server.routes import chat, completions, files, fine_tuning, models, operations
from coserve.server.tenants import TenantMiddleware
from coserve.version import VERSION

# Every group of routes.
_ROUTERS = (models.router, chat.router, completions.router, files.router, fine_tuning.router, operations.router)
# OpenAI's words for what pydantic finds.
_UNKNOWN = "Unknown parameter: '{name}'."
_MISSING = "Missing required parameter: '{name}'."
_NO_JSON = "The request's body is not valid JSON."


def create_app(context: ServerContext) -> FastAPI:
    """The application of a server; `context` is at `app.state.context`."""
    app = FastAPI(title="coserve", version=VERSION, docs_url=None, redoc_url=None)
    app.state.context = context
    for router in _ROUTERS:
        app.include_router(router)
    # The last is the outermost: keys come before bodies.
    app.add_middleware(
        BodyLimitMiddleware,
        max_body_bytes=context.config.max_body_bytes,
        max_upload_bytes=context.config.max_upload_bytes,
    )
    app.add_middleware(TenantMiddleware, tenants=context.config.tenants)
    app.add_exception_handler(ApiError, _answer_api_error)
    app.add_exception_handler(CoserveError, _answer_coserve_error)
    app.add_exception_handler(RequestValidationError, _answer_validation_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_exception_handler(Exception, _answer_bug)
    return app


async def _answer_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _answer_coserve_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, CoserveError)
    return error_response(as_api_error(error))


async def _answer_validation_error(request: Request, error: Exception) -> Response:
    """The first fault, by the field's name."""
    assert isinstance(error, RequestValidationError)
    return error_response(validation_error(error.errors()))


def validation_error(faults: Any) -> ApiError:
    """Of what pydantic found, the fault that says most: those of a union's other branches say little."""
    wrong_kind = (fault for fault in faults if fault["type"] == "literal_error" and fault["loc"][-1] == "type")
    unknown = (fault for fault in faults if fault["type"] == "extra_forbidden")
    # "auto" is one branch of a union, and says no more than another's type.
    in_range = (fault for fault in faults if not fault["type"].endswith("_type") and fault["type"] != "literal_error")
    deepest = max(faults, key=lambda fault: (fault["loc"][:2] == faults[0]["loc"][:2], len(fault["loc"])))
    first = next(wrong_kind, None) or next(unknown, None) or next(in_range, deepest)
    name = _field_name(first["loc"])
    if first["type"] == "extra_forbidden":
        return ApiError(_UNKNOWN.format(name=name), param=name, code="unknown_parameter")
    if first["type"] == "missing" and name:
        return ApiError(_MISSING.format(name=name), param=name, code="missing_required_parameter")
    if first["type"] == "json_invalid":
        return ApiError(_NO_JSON, code="invalid_json")
    if not name:
        return ApiError("The request's body must be a JSON object, and its Content-Type application/json.")
    # All that would be right; pydantic speaks of itself.
    same = [fault["msg"] for fault in faults if _field_name(fault["loc"]) == name and _is_plain(fault)]
    first_words, *others = dict.fromkeys(same if _is_plain(first) else [first["msg"]])
    words = " or ".join([first_words, *(other.removeprefix("Input should be ") for other in others)])
    words = words.removeprefix("Value error, ").replace(" after validation", "")
    words = words.replace("dictionary or object to extract fields from", "object").replace("dictionary", "object")
    code = "invalid_type" if first["type"].endswith("_type") else "invalid_value"
    return ApiError(f"Invalid value for '{name}': {words}.", param=name, code=code)


def _is_plain(fault: Any) -> bool:
    """Whether it says what a branch of a union takes."""
    return bool(fault["type"].endswith("_type") or fault["type"] == "literal_error")


def _field_name(location: tuple[Any, ...]) -> str:
    """Such as messages[0].content, without the names of a union's branches."""
    name = ""
    for part in location[1:]:  # after "body", "query" or "path"
        if isinstance(part, int):
            name += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool"):
            name += f".{part}" if name else part
        elif not name:
            name = part
    return name


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, ValueError | RecursionError):  # FastAPI's, of bytes that JSON cannot begin with
        return error_response(ApiError(_NO_JSON, code="invalid_json"))
    messages = {
        404: f"Invalid URL ({request.method} {request.url.path})",
        405: f"Not allowed to {request.method} on {request.url.path}",
    }
    message = messages.get(error.status_code, str(error.detail))
    return error_response(ApiError(message, status=error.status_code, headers=dict(error.headers or {})))


async def _answer_bug(request: Request, error: Exception) -> Response:
    message = "The server had an error while processing your request; its log says more."
    return error_response(ApiError(message, status=500, kind="server_error"))

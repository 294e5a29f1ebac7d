"""Errors in the form of OpenAI's API: `{"error": {"message", "type", "param", "code"}}`, with
OpenAI's status codes.
"""

import logging
import math
from typing import Any

from coserve.errors import (
    AdapterError,
    AdapterTooLargeError,
    CoserveError,
    DiskFullError,
    EngineGoneError,
    GrammarMemoryError,
    LimitError,
    StoreError,
)

_log = logging.getLogger(__name__)

# Messages and names that repeat what a client sent are cut to these characters.
_MAX_MESSAGE, _MAX_PARAM = 1000, 200


class ApiError(Exception):
    """A request that is answered with an error."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        """Describe the error.

        Args:
            message: What is wrong, and what would be right.
            status: HTTP status.
            kind: OpenAI's `type`.
            param: Field that is wrong.
            code: Identifier for programs.
            headers: Headers of the answer.
        """
        super().__init__(message)
        self.message, self.status, self.kind, self.code = (
            _cut(message, _MAX_MESSAGE),
            status,
            kind,
            code,
        )
        self.param = None if param is None else _cut(param, _MAX_PARAM)
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """Return the error as JSON."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


def not_found(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """Return an error with status 404."""
    return ApiError(message, status=404, param=param, code=code)


def as_api_error(error: CoserveError) -> ApiError:
    """Return the answer for one of coserve's own errors."""
    if isinstance(error, EngineGoneError | GrammarMemoryError):
        return ApiError(str(error), status=503, kind="server_error", headers={"Retry-After": "2"})
    if isinstance(error, AdapterTooLargeError):
        return ApiError(str(error), status=503, kind="server_error")
    if isinstance(error, AdapterError):
        return not_found(str(error), param="model", code="model_not_found")
    if isinstance(error, DiskFullError):
        # OpenAI's clients would send a file again at once, and time alone makes no room.
        return ApiError(
            str(error),
            status=507,
            kind="server_error",
            code="disk_full",
            headers={"x-should-retry": "false"},
        )
    if isinstance(error, StoreError):  # the message does not reveal where it is
        _log.warning("503 to a client: %s", error)
        message = (
            "The database of files, jobs and answers cannot be reached: try again in a few seconds."
        )
        return ApiError(message, status=503, kind="server_error", headers={"Retry-After": "2"})
    if isinstance(error, LimitError):
        return _over_limit(error)
    return ApiError(str(error), param=getattr(error, "param", None))


def _over_limit(error: LimitError) -> ApiError:
    """Return an error with status 429.

    OpenAI's clients retry by themselves, which helps only where waiting frees what is missing.
    """
    is_rate = error.what in ("requests", "tokens") and error.retry_after_s is not None
    headers = {"x-should-retry": "true" if is_rate else "false"}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    code = "rate_limit_exceeded" if error.what in ("requests", "tokens") else "insufficient_quota"
    return ApiError(str(error), status=429, kind=error.what, code=code, headers=headers)

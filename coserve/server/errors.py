"""Errors as OpenAI's API gives them: `{"error": {"message", "type", "param", "code"}}` with the status that it uses."""

from typing import Any

from coserve.errors import AdapterError, CoserveError, EngineGoneError, StoreError


class ApiError(Exception):
    """A request that is answered with an error.

    status: of HTTP. kind: OpenAI's `type`. param: the field that is wrong. code: a word for programs.
    """

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
        super().__init__(message)
        self.message, self.status, self.kind, self.param, self.code = message, status, kind, param, code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """As JSON."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def not_found(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """404."""
    return ApiError(message, status=404, param=param, code=code)


def as_api_error(error: CoserveError) -> ApiError:
    """One of coserve's own errors, as a client sees it."""
    if isinstance(error, EngineGoneError):
        return ApiError(str(error), status=503, kind="server_error", headers={"Retry-After": "2"})
    if isinstance(error, AdapterError):
        return not_found(str(error), param="model", code="model_not_found")
    if isinstance(error, StoreError):
        return ApiError(str(error), status=503, kind="server_error", headers={"Retry-After": "2"})
    return ApiError(str(error), param=getattr(error, "param", None))

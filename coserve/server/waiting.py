"""How many requests wait for their first token: beyond a bound, more would only wait longer than anybody does."""

from coserve.server.errors import ApiError
from coserve.worker.protocol import Ready, StepReport

_RETRY_AFTER_S = 2


class WaitingRequests:
    """An `EngineListener`: a request waits until its first chunk."""

    def __init__(self, most: int) -> None:
        """most: that may wait; those that run count until their first token."""
        self._most = most
        self._ids: set[str] = set()

    def check(self) -> None:
        """ApiError if no more may wait."""
        if len(self._ids) >= self._most:
            raise ApiError(
                f"{len(self._ids)} requests wait for their first token, which is as many as may "
                "(--max-queued-requests); try again later.",
                status=503,
                kind="server_error",
                code="overloaded",
                headers={"Retry-After": str(_RETRY_AFTER_S)},
            )

    def begin(self, request: str) -> None:
        """It has been sent to the engine."""
        self._ids.add(request)

    def end(self, request: str) -> None:
        """It does not wait any more."""
        self._ids.discard(request)

    def engine_ready(self, ready: Ready) -> None:
        pass

    def engine_gone(self) -> None:
        pass  # every request ends, and says so

    def engine_reported(self, report: StepReport) -> None:
        for chunk in report.chunks:
            self._ids.discard(chunk.request)

"""Bound on the requests that wait for their first token, shared among tenants."""

from collections import Counter

from coserve.protocol.messages import Ready, StepReport
from coserve.server.errors import ApiError

_RETRY_AFTER_S = 2


class WaitingRequests:
    """An `EngineListener` that counts requests until their first chunk.

    A tenant may use all places while no other waits. Once all are used, a tenant is refused only if
    it has its equal share of them, so that a flood by one does not lock out others. Requests that
    already wait keep their places: n tenants have at most 1 + 1/2 + ... + 1/n times as many as
    there are places.
    """

    def __init__(self, max_waiting: int) -> None:
        """Begin without requests.

        Args:
            max_waiting: Number of places, which requests also use while they run before their first
                token.
        """
        self._max_waiting = max_waiting
        self._tenants: dict[str, str] = {}  # by request
        self._num_waiting: Counter[str] = Counter()  # by tenant

    def check(self, tenant: str) -> None:
        """Check that a tenant may have one more request waiting.

        Raises:
            ApiError: There are too many.
        """
        if len(self._tenants) < self._max_waiting:
            return
        own, num_tenants = self._num_waiting[tenant], len(self._num_waiting.keys() | {tenant})
        if own >= max(1, self._max_waiting // num_tenants):
            raise ApiError(
                f"{own} requests wait for their first token, which is as many as may now "
                "(--max-queued-requests, divided among tenants); try again later.",
                status=503,
                kind="server_error",
                code="overloaded",
                headers={"Retry-After": str(_RETRY_AFTER_S)},
            )

    def begin(self, request: str, tenant: str) -> None:
        """Count a request that has been sent to the engine."""
        self._tenants[request] = tenant
        self._num_waiting[tenant] += 1

    def end(self, request: str) -> None:
        """Free the place of a request, if it has one."""
        if (tenant := self._tenants.pop(request, None)) is None:
            return
        self._num_waiting[tenant] -= 1
        if not self._num_waiting[tenant]:
            del self._num_waiting[tenant]

    def engine_ready(self, ready: Ready) -> None:
        pass

    def engine_gone(self) -> None:
        pass  # every request ends, and `end` is called for it

    def engine_reported(self, report: StepReport) -> None:
        for chunk in report.chunks:
            self.end(chunk.request)

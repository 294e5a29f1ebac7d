"""Record of the tenant and adapter of each request, which the engine does not have."""

import time
from collections import deque
from dataclasses import dataclass

from coserve.scheduling.slo import Slo

# Reports on a request come a little later than its end.
_KEPT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class RequestEntry:
    """Origin of one request."""

    tenant: str
    """Tenant that sent it."""
    adapter: str | None
    """The tenant's name for its adapter; None: the base model."""
    num_prompt_tokens: int
    """Number of tokens of its prompt."""
    slo: Slo
    """SLO that it is judged by."""
    is_batch: bool = False
    """Whether it is batch work, without a client that waits."""


class RequestLedger:
    """Origins of requests that are open, or ended a moment ago."""

    def __init__(self) -> None:
        self._entries: dict[str, RequestEntry] = {}
        self._ended: deque[tuple[float, str]] = deque()
        self._open: set[str] = set()

    def begin(self, request: str, entry: RequestEntry) -> None:
        """Add a request that has been sent to the engine."""
        self._entries[request] = entry
        self._open.add(request)

    def end(self, request: str) -> None:
        """Mark a request as ended; it is dropped some seconds later."""
        now_s = time.monotonic()
        self._open.discard(request)
        self._ended.append((now_s, request))
        # Never empty here, since the entry above is recent.
        while self._ended[0][0] < now_s - _KEPT_S:
            self._entries.pop(self._ended.popleft()[1], None)

    def find(self, request: str) -> RequestEntry | None:
        """Return the origin of a request; None if it ended long ago."""
        return self._entries.get(request)

    def num_open(self, tenant: str | None) -> int:
        """Return the number of open requests that are not batch work.

        Args:
            tenant: Tenant whose requests are counted; None: all.
        """
        entries = [self._entries[request] for request in self._open]
        return sum(tenant in (None, entry.tenant) and not entry.is_batch for entry in entries)

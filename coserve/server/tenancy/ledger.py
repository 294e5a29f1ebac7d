"""Whose each request is: the engine knows neither tenants nor the names that they gave to
adapters.
"""

import time
from collections import deque
from dataclasses import dataclass

from coserve.scheduling.slo import Slo

# Reports on a request come a little later than its end.
_KEPT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Entry:
    """adapter: as the tenant calls it; None for the base. is_batch: whether nobody waits for it."""

    tenant: str
    adapter: str | None
    num_prompt_tokens: int
    slo: Slo
    is_batch: bool = False


class Ledger:
    """Requests that are open, or were a moment ago."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._ended: deque[tuple[float, str]] = deque()
        self._open: set[str] = set()

    def begin(self, request: str, entry: Entry) -> None:
        """It has been sent to the engine."""
        self._entries[request] = entry
        self._open.add(request)

    def end(self, request: str) -> None:
        """Its answer is over."""
        now_s = time.monotonic()
        self._open.discard(request)
        self._ended.append((now_s, request))
        while self._ended[0][0] < now_s - _KEPT_S:
            self._entries.pop(self._ended.popleft()[1], None)

    def find(self, request: str) -> Entry | None:
        """None if it ended long ago."""
        return self._entries.get(request)

    def num_open(self, tenant: str | None) -> int:
        """Requests that are not over and that somebody waits for: a tenant's, or all."""
        entries = [self._entries[request] for request in self._open]
        return sum(tenant in (None, entry.tenant) and not entry.is_batch for entry in entries)

"""Parts of the server that stored responses and conversations need."""

from dataclasses import dataclass

from coserve.jobs.manager import JobManager
from coserve.server.responses.background import BackgroundRuns
from coserve.server.stored.opened import Opened


@dataclass(frozen=True, kw_only=True)
class ResponsesContext:
    """Store of responses and conversations, and responses that run in the background."""

    opened: Opened[JobManager]
    """Job manager, whose store holds responses and conversations."""
    max_bytes: int
    """Bytes that a tenant's responses, and its conversations, may take in the store."""
    runs: BackgroundRuns
    """Responses that run in the background."""

    @property
    def jobs(self) -> JobManager:
        """Job manager; EngineGoneError until the store is open."""
        return self.opened.require()

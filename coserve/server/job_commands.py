"""What the engine's process does about adapters and jobs when it is told to."""

from typing import Any

from coserve.engine.engine import Engine
from coserve.engine.job import JobEvent
from coserve.errors import JobError
from coserve.jobs.messages import AdapterRef, Checkpointed


class JobCommands:
    """Adapters and jobs of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._events: list[JobEvent] = []
        self._checkpoints: list[Checkpointed] = []

    def ensure_adapter(self, adapter: AdapterRef) -> None:
        """Have it on the device."""
        if adapter.directory is not None and adapter.name not in self._engine.versions:
            self._engine.load_adapter(adapter.name, adapter.directory)

    def unload_adapter(self, name: str) -> None:
        """No new request finds it."""
        if name in self._engine.versions:
            self._engine.unload_adapter(name)

    def obey(self, command: Any) -> None:
        """StartJob, PauseJob, ResumeJob, CancelJob."""
        raise JobError("not yet")

    def take(self, events: list[JobEvent]) -> None:
        """What came of a step."""
        self._events += events

    def checkpoint_all(self) -> None:
        """Of every job that is not over."""

    def take_news(self) -> tuple[list[JobEvent], list[Checkpointed]]:
        """What has happened since the last time."""
        news = self._events, self._checkpoints
        self._events, self._checkpoints = [], []
        return news

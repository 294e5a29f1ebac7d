"""What the engine's loop asks of the part that an instance has in handing prompts over."""

from collections.abc import Sequence
from typing import Protocol

from coserve.engine.outbox import Event
from coserve.engine.records import HandoverStats


class HandoverEnd(Protocol):
    """Called between steps; nothing waits."""

    def added(self, request: str) -> None:
        """A request has just been added to the engine."""
        ...

    def poll(self) -> None:
        """Take in what has come from the other end. To be called before each step, and when
        `waits_on` can be read.
        """
        ...

    def take(self, events: list[Event]) -> list[Event]:
        """What a step brought: returns those events that are this instance's own."""
        ...

    def waits_on(self) -> Sequence[int]:
        """File descriptors that can be read when there is something to `poll`."""
        ...

    def stats(self) -> HandoverStats | None:
        """Counts as of now; None if nothing is ever handed over."""
        ...

    def close(self) -> None:
        """The other end sees it; files are removed."""
        ...


class Alone:
    """An instance that does both for itself."""

    def added(self, request: str) -> None:
        pass

    def poll(self) -> None:
        pass

    def take(self, events: list[Event]) -> list[Event]:
        return events

    def waits_on(self) -> Sequence[int]:
        return ()

    def stats(self) -> HandoverStats | None:
        return None

    def close(self) -> None:
        pass

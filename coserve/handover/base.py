"""Interface of an instance's part in the handover of prompts, as the engine's loop uses it."""

from collections.abc import Sequence
from typing import Protocol

from coserve.engine.outbox import Event
from coserve.engine.records import HandoverStats


class HandoverEnd(Protocol):
    """One end of the handover, called between steps; no call waits."""

    def added(self, request: str) -> None:
        """Note that a request has just been added to the engine."""
        ...

    def poll(self) -> None:
        """Handle messages from the other end. To be called before each step, and when `waits_on` is
        readable.
        """
        ...

    def take(self, events: list[Event]) -> list[Event]:
        """Take the events of a step, and return those that are this instance's own."""
        ...

    def waits_on(self) -> Sequence[int]:
        """Return file descriptors that are readable when there is something to `poll`."""
        ...

    def stats(self) -> HandoverStats | None:
        """Return counts as of now; None if nothing is ever handed over."""
        ...

    def close(self) -> None:
        """Close the connection, which the other end notices, and remove files."""
        ...


class NoHandover:
    """An instance that computes its prompts itself."""

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

"""Events of steps that wait for their reader."""

from collections.abc import Callable

from coserve.engine.jobs.events import JobEvent
from coserve.engine.request import Chunk

Event = Chunk | JobEvent


class Outbox:
    """A queue of events, in the order in which they happened."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self.put = self._events.append

    def __bool__(self) -> bool:
        return bool(self._events)

    def take_all(self) -> list[Event]:
        """Remove and return all events."""
        events = self._events.copy()
        self._events.clear()
        return events

    def take(self, is_wanted: Callable[[Event], bool]) -> list[Event]:
        """Remove and return the events that are wanted."""
        events = [event for event in self._events if is_wanted(event)]
        self._events[:] = [event for event in self._events if not is_wanted(event)]
        return events

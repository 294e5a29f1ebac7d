"""The order in which commands are done that wait for what threads read."""

from collections.abc import Callable
from threading import Event
from typing import Any

from coserve.errors import CoserveError
from coserve.worker.command_queue import CommandQueue


def test_commands_that_put_others_are_done_in_order_however_many_there_are():
    """Requests with one grammar that is being compiled do this: each then waits for its adapter."""
    may_read, added = Event(), list[int]()

    def do(command: tuple[str, int], read: Callable[[], Any]) -> CoserveError | None:
        kind, number = command
        read()
        if kind == "compiled":
            queue.put(("added", number), ("adapter",), lambda: None)
        else:
            added.append(number)
        return None

    queue = CommandQueue(do)
    for number in range(2000):
        queue.put(("compiled", number), ("grammar",), lambda: may_read.wait)
    assert added == []
    may_read.set()
    while queue.is_waiting:
        queue.poll()
    queue.close()
    assert added == list(range(2000))

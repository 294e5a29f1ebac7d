"""Claim of a cluster by one command: of commands that would have the cluster serve, or end that,
one at a time proceeds.

Claims are keys in Ray's store of the cluster, where a command can write before its machine belongs
to Ray. They are numbered, and the newest alone counts. To claim is to add the next number, which
the store lets one command alone do. The holder changes its claim's value every second; a claim that
has stood still for long belongs to a process that has died. Old keys stay, some bytes each: a
number that was free again could be claimed twice.
"""

import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Protocol

from coserve.errors import ClusterError

_PREFIX = b"claim-"
_FREE = b"free"
_BEAT_S, _POLL_S = 1.0, 0.2
# Time after which a claim that stands still is free: its holder may have to wait for a CPU.
SILENT_S = 20.0


class ClaimStore(Protocol):
    """Ray's store of a cluster. Each call raises ClusterError if the store does not answer."""

    def keys(self, prefix: bytes) -> list[bytes]:
        """Return the keys with a prefix."""
        ...

    def get(self, key: bytes) -> bytes | None:
        """Return the value of a key; None: there is no such key."""
        ...

    def put(self, key: bytes, value: bytes) -> None:
        """Write a value, whether the key exists or not."""
        ...

    def add(self, key: bytes, value: bytes) -> bool:
        """Write a value if the key does not exist, and return whether it was written. Of several
        calls for a key at the same time, one alone writes.
        """
        ...


class DeployClaim:
    """The claim of one command, while a context lasts, or until it is released."""

    def __init__(
        self,
        store: ClaimStore,
        *,
        at_once: bool = False,
        waiting: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Prepare a claim.

        Args:
            store: Ray's store of the cluster.
            at_once: Whether to take the claim from its holder; for commands that have begun the
                cluster, or end what they have begun.
            waiting: Called once if another command holds the claim, for whose end the context
                waits.
            clock: Returns the time in seconds.
            sleep: Waits for some seconds.
        """
        self._store = store
        self._at_once = at_once
        self._waiting = waiting
        self._clock = clock
        self._sleep = sleep
        self._own: bytes | None = None
        self._name = secrets.token_hex(8)
        self._num_beats = 0
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat_on, daemon=True)

    def __enter__(self) -> "DeployClaim":
        """Take the claim as soon as it is free.

        Raises:
            ClusterError: The cluster does not answer.
        """
        seen, seen_s, has_said = (0, _FREE), self._clock(), False
        while self._own is None:
            # Every change of the value is a sign of life.
            if (newest := self._newest()) != seen:
                seen, seen_s = newest, self._clock()
            number, value = newest
            if self._at_once or value == _FREE or self._clock() - seen_s >= SILENT_S:
                # Of several commands that add this number, one succeeds.
                key = _PREFIX + str(number + 1).encode()
                if self._store.add(key, self._value()):
                    self._own = key
            else:
                if not has_said:
                    has_said = True
                    self._waiting()
                self._sleep(_POLL_S)
        self._beating.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.release()

    def check(self) -> None:
        """Raise ClusterError if another command has the claim by now."""
        number, _ = self._newest()
        if self._own != _PREFIX + str(number).encode():
            raise ClusterError(
                "another coserve cluster up begins or ends here at this moment: try again, or join "
                "that"
            )

    def beat(self) -> None:
        """Show that the process lives.

        Raises:
            ClusterError: The cluster does not answer.
        """
        if self._own is not None:
            self._num_beats += 1
            self._store.put(self._own, self._value())

    def release(self) -> None:
        """Release the claim."""
        self._ended.set()
        if self._own is not None:
            self._beating.join()
            with suppress(ClusterError):  # the cluster has ended
                self._store.put(self._own, _FREE)
            self._own = None

    def _newest(self) -> tuple[int, bytes]:
        """Return the number and the value of the newest claim; number 0: there has been none."""
        number = max(
            (int(key.removeprefix(_PREFIX)) for key in self._store.keys(_PREFIX)), default=0
        )
        newest = self._store.get(_PREFIX + str(number).encode()) if number else None
        return number, _FREE if newest is None else newest

    def _value(self) -> bytes:
        return f"{self._name} {self._num_beats}".encode()

    def _beat_on(self) -> None:
        while not self._ended.wait(_BEAT_S):
            with suppress(ClusterError):
                self.beat()

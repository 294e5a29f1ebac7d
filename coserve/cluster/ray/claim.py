"""Of commands that would have a cluster serve, or end that, one at a time does: the one that claims
the cluster.

Claims are in what Ray keeps for a cluster, where a command can write before its machine is one of
Ray's: a key each, numbered, of which the newest alone counts. To claim is to add the next number,
which the cluster lets one alone do. Who holds the claim changes its value every second; one that
has stood still for long is of a process that has died. Old keys stay, some bytes each: a number
that was free again could be had twice.
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
# Of a claim that stands still, until it is another's: the process that holds it may have to wait
# for a CPU.
SILENT_S = 20.0


class ClaimStore(Protocol):
    """What Ray keeps for a cluster. Each call raises ClusterError if it does not answer."""

    def keys(self, prefix: bytes) -> list[bytes]:
        """Those that begin so."""
        ...

    def get(self, key: bytes) -> bytes | None:
        """The value; None: there is no such key."""
        ...

    def put(self, key: bytes, value: bytes) -> None:
        """Write, whether it is there or not."""
        ...

    def add(self, key: bytes, value: bytes) -> bool:
        """Write what is not there; False: it was there. Of several that add the same at once, one
        alone does.
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
        """at_once: also from one that holds it, as is for those who began the cluster, or end what
        they began. waiting: called once if another one holds it, for whose end the context waits.
        """
        self._store, self._at_once, self._waiting = store, at_once, waiting
        self._clock, self._sleep = clock, sleep
        self._own: bytes | None = None
        self._name, self._num_beats = secrets.token_hex(8), 0
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat_on, daemon=True)

    def __enter__(self) -> "DeployClaim":
        """ClusterError if the cluster does not answer."""
        seen, seen_s, has_said = (0, _FREE), self._clock(), False
        while self._own is None:
            if (found := self._newest()) != seen:
                seen, seen_s = found, self._clock()
            number, value = found
            if self._at_once or value == _FREE or self._clock() - seen_s >= SILENT_S:
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
        """ClusterError if another command has the claim by now."""
        number, _ = self._newest()
        if self._own != _PREFIX + str(number).encode():
            raise ClusterError(
                "another coserve cluster up begins or ends here at this moment: try again, or join "
                "that"
            )

    def beat(self) -> None:
        """Show that the process lives; ClusterError."""
        if self._own is not None:
            self._num_beats += 1
            self._store.put(self._own, self._value())

    def release(self) -> None:
        """Let the next one have it."""
        self._ended.set()
        if self._own is not None:
            self._beating.join()
            with suppress(ClusterError):  # the cluster has ended
                self._store.put(self._own, _FREE)
            self._own = None

    def _newest(self) -> tuple[int, bytes]:
        """Its number and value; 0: there has been none."""
        number = max(
            (int(key.removeprefix(_PREFIX)) for key in self._store.keys(_PREFIX)), default=0
        )
        found = self._store.get(_PREFIX + str(number).encode()) if number else None
        return number, _FREE if found is None else found

    def _value(self) -> bytes:
        return f"{self._name} {self._num_beats}".encode()

    def _beat_on(self) -> None:
        while not self._ended.wait(_BEAT_S):
            with suppress(ClusterError):
                self.beat()

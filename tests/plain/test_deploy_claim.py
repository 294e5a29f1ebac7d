"""Claims of a cluster: of commands that would have it serve, one at a time proceeds, also when one
of them dies.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from coserve.cluster.ray.claim import SILENT_S, DeployClaim
from coserve.errors import ClusterError


class Keys:
    """A store of a cluster's keys in this process. Implements `ClaimStore`."""

    def __init__(self) -> None:
        self._kept: dict[bytes, bytes] = {}
        self._turn = threading.Lock()
        self.is_gone = False

    def keys(self, prefix: bytes) -> list[bytes]:
        with self._turn:
            return [key for key in self._kept if key.startswith(prefix)]

    def get(self, key: bytes) -> bytes | None:
        with self._turn:
            return self._kept.get(key)

    def put(self, key: bytes, value: bytes) -> None:
        if self.is_gone:
            raise ClusterError("there is no Ray cluster")
        with self._turn:
            self._kept[key] = value

    def add(self, key: bytes, value: bytes) -> bool:
        with self._turn:
            return self._kept.setdefault(key, value) is value


class Time:
    """Passes when somebody waits; then something may happen."""

    def __init__(self, happens: Callable[[float], None] = lambda now_s: None) -> None:
        self.now_s, self._happens = 0.0, happens

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self._happens(self.now_s)


def test_of_many_at_once_one_alone_has_it_at_a_time():
    keys, inside, most, together = Keys(), list[int](), list[int](), threading.Barrier(8)

    def deploy(number: int) -> None:
        together.wait()
        with DeployClaim(keys, sleep=lambda seconds: None) as claim:
            inside.append(number)
            most.append(len(inside))
            claim.check()
            inside.remove(number)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(deploy, range(8)))
    assert most == [1] * 8


def test_one_that_waits_says_so_once_and_has_it_when_the_other_has_ended():
    keys, said = Keys(), list[str]()
    with DeployClaim(keys) as first:

        def end(now_s: float) -> None:
            if now_s > 5:
                first.release()

        time = Time(end)
        with DeployClaim(
            keys, waiting=lambda: said.append("waits"), clock=time.clock, sleep=time.sleep
        ) as second:
            assert said == ["waits"]
            assert 5 < time.now_s < 6
            second.check()
            with pytest.raises(
                ClusterError, match="another coserve cluster up begins or ends here"
            ):
                first.check()


def test_that_of_a_process_that_has_died_is_free_after_a_while():
    keys = Keys()
    keys.add(b"claim-1", b"of one that has died")
    time = Time()
    with DeployClaim(keys, clock=time.clock, sleep=time.sleep) as claim:
        assert SILENT_S <= time.now_s < SILENT_S + 1
        claim.check()


def test_that_of_a_process_that_lives_is_not_however_long_it_takes():
    keys = Keys()
    with DeployClaim(keys) as first:

        def live(now_s: float) -> None:
            first.beat()
            if now_s > 10 * SILENT_S:
                first.release()

        time = Time(live)
        with DeployClaim(keys, clock=time.clock, sleep=time.sleep):
            assert time.now_s > 10 * SILENT_S


def test_who_began_the_cluster_or_ends_what_it_serves_waits_for_nobody():
    keys = Keys()
    with DeployClaim(keys) as other, DeployClaim(keys, at_once=True) as claim:
        claim.check()
        with pytest.raises(ClusterError, match="try again, or join that"):
            other.check()
        other.release()  # which does not give away what is another's
        claim.check()


def test_a_cluster_that_has_ended_meanwhile_is_no_error_of_the_end():
    keys = Keys()
    with DeployClaim(keys):
        keys.is_gone = True

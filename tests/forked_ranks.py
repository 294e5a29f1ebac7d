"""Processes of ranks, forked from one that has imported everything: a group that is started as
programs waits for imports most of its time.
"""

import multiprocessing
import os
import subprocess
from collections.abc import Callable, Sequence
from multiprocessing.reduction import DupFd
from typing import Any

from coserve.devices.process.child import StartedProcess, StartProcess

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["coserve.devices.process.main", "transformers.models.llama.configuration_llama"]
)
# Descriptors of a forked process from here on are its own; those that it is sent get their old
# numbers, below.
_FIRST_OWN = 1 << 9


def forking(prepare: Callable[[int], None]) -> StartProcess:
    """Return what starts the ranks of a group, each of which first calls a function with its
    number.

    prepare: can be pickled.
    """

    def start(arguments: Sequence[str], descriptors: Sequence[int]) -> StartedProcess:
        return _ForkedRank(prepare, arguments, descriptors)

    return start


class _ForkedRank:
    """A rank; see `coserve.devices.process.child.StartedProcess`."""

    def __init__(
        self, prepare: Callable[[int], None], arguments: Sequence[str], descriptors: Sequence[int]
    ) -> None:
        sent = [(number, DupFd(number)) for number in descriptors]
        self._process = _CONTEXT.Process(
            target=_run, args=(prepare, list(arguments), sent), daemon=True
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
        return self._process.exitcode


def _run(prepare: Callable[[int], None], arguments: list[str], sent: list[tuple[int, Any]]) -> None:
    received = [
        (number, os.dup2(each.detach(), _FIRST_OWN + place))
        for place, (number, each) in enumerate(sent)
    ]
    for number, own in received:
        os.dup2(own, number, inheritable=False)
        os.close(own)
    os.environ["OMP_NUM_THREADS"] = "1"
    prepare(int(arguments[-2]))
    from coserve.devices.process.main import run

    run(arguments)

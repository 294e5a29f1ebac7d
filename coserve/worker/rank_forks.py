"""Forks of the engine's process that become ranks, so that a group is ready sooner.

Importing PyTorch takes seconds of computing for each rank, and twice that beside other ranks. So
the engine's process, which has imported everything, forks blank processes before it has threads,
and each becomes a rank when it receives its descriptors. None of the three things that do not
outlive a fork exists at that moment: threads, a parallel region of PyTorch, a GPU that was touched.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
import warnings
from collections.abc import Sequence
from threading import Lock
from typing import NoReturn

from coserve.devices.process.child import StartedProcess, StartProcess, start_program
from coserve.devices.ranks.places import num_usable_cores
from coserve.errors import DeviceGoneError

_MAX_BYTES, _MAX_DESCRIPTORS = 1 << 16, 8
# First descriptor of a blank process's own files; received ones get their old numbers below.
_FIRST_OWN = 1 << 9


def rank_starter(num_ranks: int) -> StartProcess:
    """Return the function that starts the processes of a group; must be called before this process
    has threads.

    Nothing is forked for one rank, or for more ranks than there are cores: the latter are refused
    later.
    """
    if not 1 < num_ranks <= num_usable_cores() or sys.platform != "linux":
        return start_program
    return _RankForks(num_ranks).start


class _RankForks:
    """Blank processes, each of which can become a rank."""

    def __init__(self, number: int) -> None:
        self._blank: list[_ForkedRank] = []
        for _ in range(number):
            self._blank.append(_fork([each.control for each in self._blank]))

    def start(self, arguments: Sequence[str], descriptors: Sequence[int]) -> StartedProcess:
        """Start a process of `process_main` in one of them."""
        rank = self._blank.pop(0)
        message = json.dumps(
            {"arguments": list(arguments), "descriptors": list(descriptors)}
        ).encode()
        try:
            socket.send_fds(rank.control, [message], list(descriptors))
        except OSError:
            raise DeviceGoneError(
                f"a rank's process ({rank.pid}) has ended before it was ready"
            ) from None
        rank.control.close()
        return rank


class _ForkedRank:
    """A forked process; see `coserve.devices.process.child.StartedProcess`."""

    def __init__(self, pid: int, control: socket.socket) -> None:
        self.pid, self.control = pid, control
        self._end, self._lock = os.pidfd_open(pid), Lock()
        self._returncode: int | None = None

    def kill(self) -> None:
        # Under the lock of `wait`: a process that was reaped cannot be signalled any more.
        with self._lock:
            if self._returncode is None:
                signal.pidfd_send_signal(self._end, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        ends = select.poll()
        ends.register(self._end, select.POLLIN)
        if not ends.poll(None if timeout is None else 1e3 * timeout):
            raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
        with self._lock:
            if self._returncode is None:
                self._returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            return self._returncode


def _fork(others: Sequence[socket.socket]) -> _ForkedRank:
    """Fork off a blank process without the others' sockets, so that it sees the end of its own."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with warnings.catch_warnings():
        # Python also warns of numpy's idle threads, which handle a fork themselves.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        for each in (ours, *others):
            each.close()
        _become_a_rank(theirs)
    theirs.close()
    return _ForkedRank(pid, ours)


def _become_a_rank(control: socket.socket) -> NoReturn:
    """Wait for descriptors, then run as a rank; end if the socket closes. Nothing of the caller's
    stack runs here.
    """
    status = 1
    try:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        message, received, _, _ = socket.recv_fds(control, _MAX_BYTES, _MAX_DESCRIPTORS)
        # The socket was closed: the engine's process has ended.
        if not message:
            os._exit(0)
        start = json.loads(message)
        _place(received, start["descriptors"])
        from coserve.devices.process.main import run

        run(start["arguments"])
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)


def _place(received: Sequence[int], numbers: Sequence[int]) -> None:
    """Give descriptors the numbers that the arguments name, and close all others except the
    standard ones.
    """
    # Above all numbers that are to be used, so that no dup2 below closes one that is needed.
    kept = [os.dup2(each, _FIRST_OWN + place) for place, each in enumerate(received)]
    os.closerange(3, _FIRST_OWN)
    for each, number in zip(kept, numbers, strict=True):
        os.dup2(each, number, inheritable=False)
        os.close(each)

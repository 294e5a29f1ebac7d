"""Template process of a sandbox: it prepares a task once, then forks a process for each call.

It runs no client's code, has one thread, and ends with the process that started it, when the
control socket is closed. Its children end with it.
"""

import gc
import importlib
import os
import resource
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from contextlib import suppress
from typing import NoReturn

import msgspec

from coserve.sandbox.parent_death import end_with_parent
from coserve.sandbox.task import CallExit, CallLimits, SandboxTask

# A frame on the control socket: its length, then the data.
LENGTH = struct.Struct("<Q")
# Bytes of a call's standard error that are kept.
_STDERR_BYTES = 2000
# Exit statuses of a call's process.
DONE, RAISED, OUT_OF_MEMORY, UNSTARTED = 0, 1, 2, 3
_NICENESS = 5


def main() -> NoReturn:
    """Serve calls until the control socket is closed.

    The arguments of the process are the number of the socket and the name of the task.
    """
    control = socket.socket(fileno=int(sys.argv[1]))
    limits = msgspec.convert(msgspec.json.decode(sys.argv[3]), CallLimits)
    os.nice(_NICENESS)
    # A crash leaves no core file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(limits.stack_bytes)
    task = _prepared(sys.argv[2], _receive_frame(control))
    gc.collect()
    gc.freeze()  # collections in the children would copy what they share with this process
    _serve(control, task, limits)
    os._exit(0)


def _prepared(name: str, setup: bytes) -> SandboxTask:
    module, _, attribute = name.partition(":")
    kind = getattr(importlib.import_module(module), attribute)
    assert issubclass(kind, SandboxTask), name
    task: SandboxTask = kind(msgspec.msgpack.decode(setup, type=kind.setup_type))
    return task


def _receive_frame(control: socket.socket) -> bytes:
    (length,) = LENGTH.unpack(_receive_exactly(control, LENGTH.size))
    return _receive_exactly(control, length)


def _receive_exactly(control: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        if not (piece := control.recv(min(1 << 20, length - len(data)))):
            os._exit(0)
        data += piece
    return bytes(data)


class _Child:
    """The process of one call."""

    def __init__(self, pid: int, report: int, stderr: int) -> None:
        """Watch a process.

        Args:
            pid: The process.
            report: File to which its exit is written.
            stderr: File of its standard error.
        """
        self.pid, self.report, self.stderr = pid, report, stderr
        self.pidfd = os.pidfd_open(pid)

    def report_end(self) -> None:
        """Wait for the end of the process, and report it."""
        _, status, usage = os.wait4(self.pid, 0)
        size = os.lseek(self.stderr, 0, os.SEEK_END)
        said = os.pread(self.stderr, _STDERR_BYTES, max(0, size - _STDERR_BYTES))
        ended = CallExit(
            os.waitstatus_to_exitcode(status), said.decode(errors="replace"), usage.ru_maxrss * 1024
        )
        with suppress(OSError):  # nobody waits for it any longer
            os.write(self.report, msgspec.msgpack.encode(ended))  # far less than a pipe holds
        for file in (self.report, self.stderr, self.pidfd):
            os.close(file)


def _serve(control: socket.socket, task: SandboxTask, limits: CallLimits) -> None:
    children: dict[int, _Child] = {}  # by the file that tells of their end
    while True:
        ready, _, _ = select.select([control.fileno(), *children], [], [])
        for file in set(ready) & children.keys():
            children.pop(file).report_end()
        if control.fileno() not in ready:
            continue
        message, files, _, _ = socket.recv_fds(control, 1, 2)
        if not message:
            return
        data, report = files
        child = _forked(task, limits, data, report)
        os.close(data)
        children[child.pidfd] = child


def _forked(task: SandboxTask, limits: CallLimits, data: int, report: int) -> _Child:
    stderr = os.memfd_create("stderr")
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _run_child(task, limits, data, stderr, parent)
    return _Child(pid, report, stderr)


# -- the process of one call ----------------------------------------------------------------


def _run_child(
    task: SandboxTask, limits: CallLimits, data: int, stderr: int, parent: int
) -> NoReturn:
    """Run one call; never returns to the caller's stack."""
    status = UNSTARTED
    try:
        end_with_parent()
        if os.getppid() != parent:  # it ended before the kernel was told
            os._exit(RAISED)
        os.dup2(stderr, 2)
        _close_all_but(data)
        _limit(limits)
        status = _run_on_thread(task, data)
    except BaseException:
        traceback.print_exc()
    os._exit(status)


def _close_all_but(kept: int) -> None:
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))


def _limit(limits: CallLimits) -> None:
    # The default actions end the process even while it runs native code.
    for number in (signal.SIGALRM, signal.SIGXCPU):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limits.wall_s)
    # The soft limit sends SIGXCPU, which tells the cause; the hard one kills for certain.
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 1))
    # Nothing but standard error is written, to a file in memory.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    # The thread's stack comes on top, and what the allocator reserves for a thread (64 MiB, hardly
    # any of it used).
    most = _address_space_bytes() + limits.memory_bytes + limits.stack_bytes + (128 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _address_space_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _run_on_thread(task: SandboxTask, data: int) -> int:
    """Run the call in a thread with the limited stack; return the exit status of the process."""
    statuses: list[int] = []

    def run() -> None:
        try:
            with os.fdopen(data, "r+b", buffering=0) as file:
                call = msgspec.msgpack.decode(file.read(), type=task.call_type)
                reply = memoryview(msgspec.msgpack.encode(task.run(call)))
                while reply:
                    reply = reply[file.write(reply) or 0 :]
            statuses.append(DONE)
        except MemoryError:
            statuses.append(OUT_OF_MEMORY)
        except BaseException:
            traceback.print_exc()

    # `threading.stack_size` has no effect on the main thread.
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return statuses[0] if statuses else RAISED


if __name__ == "__main__":
    main()

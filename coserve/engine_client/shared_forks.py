"""Fork server that all nodes of a machine share, and that outlives each of them.

What a fork server imports takes seconds of computing, many more by the clock beside engines that
serve, for which a node that has died would have to wait. So nodes of one machine share one: it
belongs to none, listens in their home, and ends when nobody has been connected for a while. Each
node that connects gets a child of its own, which forks engines for it alone, and ends with the
connection. See `coserve.engine_client.fork_server`.

Nodes share one only if they would have imported the same: by their program, code, directory and
what libraries may read of the environment when they are imported. Each engine has the whole
environment of its node.
"""

import asyncio
import fcntl
import gc
import hashlib
import os
import select
import socket
import sys
import time
from pathlib import Path

import coserve
from coserve.engine_client.fork_server import import_for_engines, serve_connection
from coserve.home import home_directory, make_private

# Limit of connecting (it listens before it imports anything), interval of starts, and of attempts.
_CONNECT_S, _START_S, _POLL_S = 60.0, 5.0, 0.05
_LOOK_S, _IDLE_S = 1.0, 60.0
# unix(7): sun_path without the zero at its end.
_MAX_ADDRESS_BYTES = 103
_MAX_WAITING = 256
_OF_IMPORTS = (
    *(
        "COSERVE_",
        "CUDA_",
        "GOMP_",
        "HF_",
        "KMP_",
        "LD_",
        "MALLOC_",
        "MKL_",
        "NVIDIA_",
        "OMP_",
        "OPENBLAS_",
        "PYTHON",
    ),
    *("PYTORCH_", "TORCH", "TRANSFORMERS_", "TRITON_"),
)


async def connect(model: str) -> socket.socket | None:
    """Connect to the fork server of this machine, which is started if there is none; return None if
    that fails.

    Args:
        model: Model that engines serve, which decides what is imported.
    """
    try:
        path = _path()
    except OSError:  # the home cannot be written
        return None
    if path is None:
        return None
    begin_s, started_s = time.monotonic(), float("-inf")
    while (now_s := time.monotonic()) - begin_s < _CONNECT_S:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(str(path))
            return connection
        except OSError:
            connection.close()
        # Again after a while: the one that was started may have failed, or found another's lock.
        if now_s - started_s > _START_S:
            started_s = now_s
            await _start(path, model)
        await asyncio.sleep(_POLL_S)
    return None


async def _start(path: Path, model: str) -> None:
    """Start one that is nobody's child; it ends at once if there is one by then."""
    command = [sys.executable, "-m", __name__, str(path), model]
    pid = os.posix_spawn(sys.executable, command, os.environ)
    await asyncio.to_thread(os.waitpid, pid, 0)


def _path() -> Path | None:
    """Return the path of the socket that nodes of this kind share; None where others could reach
    it, or where it is too long for a socket.
    """
    directory = home_directory() / "forks"
    if not make_private(directory):
        return None
    code = Path(coserve.__file__).parent
    same = [
        sys.executable,
        os.getcwd(),
        str(code),
        max(file.stat().st_mtime_ns for file in code.rglob("*.py")),
    ]
    same += sorted(f"{name}={value}" for name, value in os.environ.items() if _is_of_imports(name))
    path = directory / hashlib.sha256(repr(same).encode()).hexdigest()[:16]
    return path if len(os.fsencode(path)) <= _MAX_ADDRESS_BYTES else None


def _is_of_imports(variable: str) -> bool:
    """Return whether a library may read a variable when it is imported. Variables that select
    devices are read later, when devices are first used.
    """
    return variable.startswith(_OF_IMPORTS) and not variable.endswith("_VISIBLE_DEVICES")


# -- the process that forks -----------------------------------------------------------------------


def main() -> None:
    """Run as a program. Arguments are the path of its socket, and the model."""
    path, model = Path(sys.argv[1]), sys.argv[2]
    if os.fork() != 0:
        os._exit(0)  # detached, since Ray ends a worker's children
    os.setsid()
    with path.with_suffix(".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        # Left by a process that was killed; the lock shows that nobody listens there.
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(str(path))
            listening.listen(_MAX_WAITING)
            run_engine = import_for_engines(model)
            gc.freeze()
            children: set[int] = set()
            used_s = time.monotonic()
            while children or time.monotonic() - used_s < _IDLE_S:
                if select.select([listening], [], [], _LOOK_S)[0]:
                    control, _ = listening.accept()
                    if (pid := os.fork()) == 0:
                        serve_connection(control, run_engine)
                    control.close()
                    children.add(pid)
                ended = {pid for pid in children if os.waitpid(pid, os.WNOHANG)[0] == pid}
                # Used until the last child has ended, not only until it began.
                if children:
                    used_s = time.monotonic()
                children -= ended
            path.unlink(missing_ok=True)
            # A process that has opened it by now holds a lock all the same.
            path.with_suffix(".lock").unlink(missing_ok=True)


if __name__ == "__main__":
    main()

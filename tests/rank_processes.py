"""Ranks as processes that share an arena: each runs a function of `rank_tasks.py`, or one that it can import."""

import multiprocessing
import os
import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from typing import Any

import pytest

from coserve.kernels.groups._arena import RankArena
from coserve.kernels.groups.shared_memory import SharedMemoryGroup

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["coserve.kernels.groups.shared_memory"])
# What a rank that was killed leaves instead of a result.
KILLED = "killed"
_START_TIMEOUT_S = 300.0


def run_processes(
    size: int,
    task: Callable[..., Any],
    *arguments: Any,
    is_plain: bool | list[bool] = False,
    timeout_s: float = 300.0,
    buffer_bytes: int = 128 << 10,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Return what each rank's call of `task(group, *arguments)` returned, raised or, if it was killed, `KILLED`.

    is_plain: take the collectives in Python; of all ranks, or of each.
    """
    arena = RankArena.create(size, buffer_bytes)
    plain = is_plain if isinstance(is_plain, list) else [is_plain] * size
    results, processes = [], []
    for rank in range(size):
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        given = (DupFd(arena.fd), rank, task, arguments, plain[rank], timeout_s, dict(environment or {}), theirs)
        processes.append(_CONTEXT.Process(target=_run, args=given, daemon=True))
        processes[-1].start()
        theirs.close()
        results.append(ours)
    found = [_result(each) for each in results]
    for process in processes:
        process.join(60)
        assert process.exitcode is not None, "an orphan"
    arena.close()
    return found


def _result(connection: Connection) -> Any:
    with connection:
        try:
            return pickle.loads(connection.recv_bytes())
        except EOFError:
            return KILLED


def _run(
    arena: Any,
    rank: int,
    task: Callable[..., Any],
    arguments: tuple[Any, ...],
    is_plain: bool,
    timeout_s: float,
    environment: dict[str, str],
    results: Connection,
) -> None:
    os.environ.update({"OMP_NUM_THREADS": "1", **environment})
    group = None
    try:
        group = SharedMemoryGroup(
            RankArena(arena.detach()),
            rank,
            timeout_s=timeout_s,
            start_timeout_s=_START_TIMEOUT_S,
            may_be_compiled=not is_plain,
        )
        found = task(group, *arguments)
    except Exception as error:
        if group is not None:
            group.fail(f"{type(error).__name__}: {error}")
        found = error
    with suppress(BrokenPipeError):
        # Not with `send`, which would share tensors' memory.
        results.send_bytes(pickle.dumps(found))
    results.close()
    if group is not None:
        group.close()


IMPLEMENTATIONS = pytest.mark.parametrize("is_plain", [False, True], ids=["compiled", "plain"])

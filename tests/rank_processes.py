"""Ranks as processes: each runs a function of `rank_tasks.py`, or one that it can import."""

import multiprocessing
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from typing import Any

import pytest

from coserve.kernels.groups._arena import RankArena
from coserve.kernels.groups.base import RankGroup
from coserve.kernels.groups.shared_memory import SharedMemoryGroup
from coserve.kernels.groups.torch_distributed import RankStore, TorchGroup

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
    """Return what each rank's call of `task(group, *arguments)` returned, raised or, if it was
    killed, `KILLED`.

    is_plain: take the collectives in Python; of all ranks, or of each.
    """
    arena = RankArena.create(size, buffer_bytes)
    plain = is_plain if isinstance(is_plain, list) else [is_plain] * size
    joins = [
        partial(_join_arena, DupFd(arena.fd), rank, plain[rank], timeout_s) for rank in range(size)
    ]
    found = _run_all(joins, partial(_call, task, arguments), environment)
    arena.close()
    return found


def run_torch_processes(
    size: int,
    task: Callable[..., Any],
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Do the same with ranks that gloo connects, on loopback."""
    store = RankStore()
    joins = [partial(_join_torch, rank, size, store.port) for rank in range(size)]
    return _run_all(joins, partial(_call, task, arguments), environment)


def _join_arena(arena: Any, rank: int, is_plain: bool, timeout_s: float) -> RankGroup:
    return SharedMemoryGroup(
        RankArena(arena.detach()),
        rank,
        timeout_s=timeout_s,
        start_timeout_s=_START_TIMEOUT_S,
        may_be_compiled=not is_plain,
    )


def _join_torch(rank: int, size: int, port: int) -> RankGroup:
    return TorchGroup(rank=rank, size=size, host="127.0.0.1", port=port, own_address="127.0.0.1")


def _call(task: Callable[..., Any], arguments: tuple[Any, ...], group: RankGroup) -> Any:
    return task(group, *arguments)


def _run_all(
    joins: Sequence[Callable[[], RankGroup]],
    call: Callable[[RankGroup], Any],
    environment: Mapping[str, str] | None,
) -> list[Any]:
    results, processes = [], []
    for join in joins:
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        processes.append(
            _CONTEXT.Process(
                target=_run, args=(join, call, dict(environment or {}), theirs), daemon=True
            )
        )
        processes[-1].start()
        theirs.close()
        results.append(ours)
    found = [_result(each) for each in results]
    for process in processes:
        process.join(60)
        assert process.exitcode is not None, "an orphan"
    return found


def _result(connection: Connection) -> Any:
    with connection:
        try:
            return pickle.loads(connection.recv_bytes())
        except EOFError:
            return KILLED


def _run(
    join: Callable[[], RankGroup],
    call: Callable[[RankGroup], Any],
    environment: dict[str, str],
    results: Connection,
) -> None:
    os.environ.update({"OMP_NUM_THREADS": "1", **environment})
    group = None
    try:
        group = join()
        found = call(group)
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

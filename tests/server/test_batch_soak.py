"""Batches again and again while what starts engines is replaced: nothing that is counted grows."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from batches import COMPLETIONS, begin, completion, wait_for
from served import Served, serving

pytestmark = pytest.mark.long

NUM_ROUNDS, NUM_BATCHES, NUM_LINES = 4, 12, 6
# Pools of threads fill up, and connections to the store, in the first round.
MAX_MORE_FILES, MAX_MORE_THREADS = 8, 12


def processes(served: Served) -> list[int]:
    return [served.process.pid, served.fork_server_pid(), served.engine_pid()]


def held(pid: int) -> tuple[int, int]:
    """Open files and threads of a process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir())), len(
        list(Path(f"/proc/{pid}/task").iterdir())
    )


def run_batches(client: Any) -> None:
    lines = [completion(f"{number}") for number in range(NUM_LINES)]
    batches = [begin(client, lines, endpoint=COMPLETIONS) for _ in range(NUM_BATCHES)]
    for batch in batches:
        done = wait_for(client, batch)
        counts = done.request_counts
        assert (done.status, counts.completed, counts.failed) == ("completed", NUM_LINES, 0)


def test_batches_after_the_fork_server_was_replaced_hold_no_more_than_before():
    with serving() as served:
        client = served.client()
        run_batches(client)
        at_first = [held(pid) for pid in processes(served)]
        for _ in range(NUM_ROUNDS):
            os.kill(served.fork_server_pid(), signal.SIGKILL)
            served.wait_until(lambda: served.get("/ready").status_code == 503)
            served.wait_until(lambda: served.get("/ready").status_code == 200)
            run_batches(client)
            now = [held(pid) for pid in processes(served)]
            assert len(now) == len(at_first)
            for (files, threads), (more_files, more_threads) in zip(at_first, now, strict=True):
                assert (
                    more_files <= files + MAX_MORE_FILES
                    and more_threads <= threads + MAX_MORE_THREADS
                ), (
                    at_first,
                    now,
                )
            status = served.get("/v1/status").json()
            assert status["batch"] == {"running": 0, "waiting": 0}
            assert not list((served.home / "batches").iterdir()), (
                "each batch has given up its folder"
            )
        assert served.log.read_text().count("the engine died") == NUM_ROUNDS

"""`coserve up`: the server. Its options are the fields of `ServerConfig`."""

import asyncio
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from coserve.cli.finished import with_finished_model
from coserve.cli.server_options import server_config, with_server_options
from coserve.logs import configure_logs
from coserve.models.source import check_model
from coserve.secret_variables import DATABASE, take_variable
from coserve.server.keys import is_digest

if TYPE_CHECKING:
    from rich.progress import TaskID

    from coserve.server.context import ServerContext
    from coserve.worker.protocol import Ready, StartProgress

_log = logging.getLogger(__name__)


def _up(**given: Any) -> None:
    """Serve MODEL: OpenAI's API for requests and for fine-tuning jobs, both at once on one device.

    Without MODEL it is the small built-in one, so that you can try everything at once. MODEL may also be the name
    (ft:…) of what full fine-tuning has made in this home. Point any OpenAI client at `http://127.0.0.1:8000/v1`. Jobs
    run in whatever time the SLOs of requests leave over. Ctrl-C ends it in good order: open answers are finished, jobs
    keep their last checkpoints and resume at the next start.
    """
    given["database"] = given.get("database") or take_variable(DATABASE) or None
    config = with_finished_model(server_config(**given))
    configure_logs(config.log_format, config.log_level)
    if any(not is_digest(text.rpartition("=")[2]) for text in given.get("api_keys", ())):
        _log.warning(
            "ps shows the key of --api-key to all users of this machine: use --api-keys-file or COSERVE_API_KEYS"
        )
    check_model(config.model)  # before seconds of imports

    from coserve.server.serve import serve

    with _Screen() as screen:
        asyncio.run(serve(config, screen))


class _Screen:
    """What the start looks like in a terminal."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        from coserve.cli.tables import console

        self._console = console(stderr=True)
        self._bars = Progress(
            *(TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn()),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "_Screen":
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    def progress(self, progress: "StartProgress") -> None:
        """One more piece of the start is done."""
        if progress.stage not in self._tasks:
            for task in self._tasks.values():
                self._bars.update(task, total=1, completed=1)
            self._tasks[progress.stage] = self._bars.add_task(progress.stage, total=progress.total or None)
        self._bars.update(self._tasks[progress.stage], completed=progress.done)

    def ready(self, ready: "Ready", context: "ServerContext", url: str) -> None:
        """The start-up line."""
        self._bars.stop()
        print(start_line(ready, context.model_name, url), flush=True)

    def stopping(self, num_open: int, drain_s: float) -> None:
        """What takes the time between Ctrl-C and the end."""
        self._bars.stop()
        try:
            print(stop_line(num_open, drain_s), flush=True)
        except OSError:
            # The reader of the start-up line may have gone since; the end is to be in good order for all that. What
            # could not be written would be tried again at exit, and be an error there.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def start_line(ready: "Ready", model: str, url: str) -> str:
    """Model, dtype, memory, SLOs and URL."""
    pool = ready.num_pages * ready.page_bytes
    return (
        f"coserve serves {model} ({ready.dtype}, {ready.device}): weights {_size(ready.weight_bytes)}, "
        f"pool {_size(pool)} for {ready.num_pages * ready.block_tokens:,} tokens; "
        f"SLOs TTFT {_time(ready.slo.ttft_s)}, TPOT {_time(ready.slo.tpot_s)}; {url}/v1"
    )


def stop_line(num_open: int, drain_s: float) -> str:
    """What is waited for. Checkpoints are written in any case: a second Ctrl-C only ends the waiting for requests."""
    if not num_open or not drain_s:
        return "coserve ends: running jobs are checkpointed, and resume at the next start"
    requests = "1 open request" if num_open == 1 else f"{num_open} open requests"
    return (
        f"coserve ends: it waits for {requests}, {_time(drain_s)} at most (a second Ctrl-C: no longer), "
        "then running jobs are checkpointed, and resume at the next start"
    )


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


up = with_server_options(_up)

"""`coserve up`: the server. Its options are the fields of `ServerConfig`."""

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coserve.cli.finished import with_finished_model
from coserve.cli.server_options import server_config, with_server_options
from coserve.cli.start_view import StartBars, StartLines, start_view
from coserve.kernels.cpu_library import start_compiling
from coserve.logs import configure_logs
from coserve.models.fast_imports import without_collections
from coserve.models.source import check_model
from coserve.server.tenancy.keys import is_digest

if TYPE_CHECKING:
    from coserve.protocol.messages import Ready, StartProgress
    from coserve.server.context import ServerContext

_log = logging.getLogger(__name__)


def _up(**given: Any) -> None:
    """Serve MODEL over OpenAI's API, for requests and fine-tuning jobs at once on one device.

    MODEL is the small built-in model by default, so that you can try everything at once. It may be
    the name (ft:…) of a fully fine-tuned model in this home. Point any OpenAI client at
    `http://127.0.0.1:8000/v1`. Jobs run in the time that the SLOs of requests leave over. Ctrl-C
    ends the server gracefully: open answers finish, and jobs keep their last checkpoints and resume
    at the next start.
    """
    config = with_finished_model(server_config(**given))
    configure_logs(config.log_format, config.log_level)
    if any(not is_digest(text.rpartition("=")[2]) for text in given.get("api_keys", ())):
        _log.warning(
            "ps shows the key of --api-key to all users of this machine: use --api-keys-file or "
            "COSERVE_API_KEYS"
        )
    check_model(config.model)
    with start_view(config.log_level) as view:
        view.show("loading libraries")
        if _serves_on_cpu(config.device):
            start_compiling()  # beside the imports, which take seconds
        with without_collections():
            from coserve.server.serve import serve

        asyncio.run(serve(config, _Watcher(view)))


def _serves_on_cpu(device: str) -> bool:
    """Return whether a server will run on the CPU, as far as PyTorch is not needed to know."""
    return device == "cpu" or (device == "auto" and not Path("/dev/nvidiactl").exists())


class _Watcher:
    """A reporter of a server's start and end."""

    def __init__(self, view: StartBars | StartLines) -> None:
        self._view = view

    def progress(self, progress: "StartProgress") -> None:
        """Show the progress of the start."""
        self._view.show(progress.stage, progress.done, progress.total)

    def ready(self, ready: "Ready", context: "ServerContext", url: str) -> None:
        """Print the start-up line."""
        self._view.show(f"ready at {url}")
        self._view.close()
        print(start_line(ready, context.models.name, url), flush=True)

    def stopping(self, num_open: int, drain_s: float) -> None:
        """Print what the end of the server waits for."""
        self._view.close()
        try:
            print(stop_line(num_open, drain_s), flush=True)
        except OSError:
            # The reader of the start-up line may have gone since; the end is to be in good order
            # for all that. What could not be written would be tried again at exit, and be an error
            # there.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def start_line(ready: "Ready", model: str, url: str) -> str:
    """Return a line with the model, dtype, memory, SLOs and URL."""
    pool = ready.num_pages * ready.page_bytes
    return (
        f"coserve serves {model} ({ready.dtype}, {ready.device}): weights "
        f"{_size(ready.weight_bytes)}, "
        f"pool {_size(pool)} for {ready.num_pages * ready.block_tokens:,} tokens; "
        f"SLOs TTFT {_time(ready.slo.ttft_s)}, TPOT {_time(ready.slo.tpot_s)}; {url}/v1"
    )


def stop_line(num_open: int, drain_s: float) -> str:
    """Return a line with what the end of the server waits for.

    Checkpoints are written in any case: a second Ctrl-C only ends the wait for requests.
    """
    if not num_open or not drain_s:
        return (
            "coserve is shutting down: running jobs are checkpointed, and resume at the next start"
        )
    requests = "1 open request" if num_open == 1 else f"{num_open} open requests"
    return (
        f"coserve is shutting down: it waits up to {_time(drain_s)} for {requests} (a second "
        "Ctrl-C ends the wait), then running jobs are checkpointed, and resume at the next start"
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

"""Connections of commands to a server: `--url` and `--api-key`, which they share, or a server of
their own.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from coserve.client.http import DEFAULT_URL, Client
from coserve.client.ports import free_port
from coserve.errors import ServerError
from coserve.jobs.names import is_checkpoint
from coserve.secret_variables import CLIENT_KEY
from coserve.server.lifecycle.running import running_servers


def _found_url(context: typer.Context, parameter: typer.CallbackParam, url: str) -> str:
    """Return the given URL, or else that of the one server that this user runs on this machine.

    Raises:
        ServerError: Several servers run, none of them at the usual address.
    """
    source = context.get_parameter_source(parameter.name or "")
    if context.resilient_parsing or source is None or source.name != "DEFAULT":
        return url
    servers = running_servers()
    if not servers or any(server.url == DEFAULT_URL for server in servers):
        return url
    if len(servers) > 1:
        named = ", ".join(f"{server.url} ({server.model})" for server in servers[:_MAX_NAMED])
        raise ServerError(
            f"{len(servers)} servers run here: {named}; choose one with --url or COSERVE_URL"
        )
    typer.echo(f"using the server at {servers[0].url} ({servers[0].model})", err=True)
    return servers[0].url


Url = Annotated[
    str,
    typer.Option(
        envvar="COSERVE_URL",
        metavar="URL",
        help=(
            "Server to use. By default, the server that coserve up runs on this machine, on any "
            "port."
        ),
        callback=_found_url,
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar=CLIENT_KEY, metavar="KEY", help="API key of the server, if it requires one."
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one line of JSON at the end, for programs.")
]

# A server loads and measures its model first; the guard is for one that hangs.
_START_GUARD_S = 600.0
_END_GUARD_S = 60.0
# Models that an error names.
_MAX_NAMED = 10


def is_there(url: str, api_key: str | None = None) -> bool:
    """Return whether a server answers at a URL."""
    try:
        with Client(url, api_key) as client:
            client.get("/v1/models")
    except ServerError as error:
        return error.status is not None
    return True


@contextmanager
def own_server(
    model: str,
    *options: str,
    home: Path | None = None,
    log: Path,
    while_starting: Callable[[], None] = lambda: None,
) -> Iterator[str]:
    """Start a server, wait until it is ready, and yield its URL; it ends with the context.

    Args:
        model: Model to serve.
        options: Further options of `coserve up`.
        home: Home of the server; None: that of `coserve up`.
        log: File for the server's output.
        while_starting: Function that is called a few times a second until the server is ready.

    Raises:
        ServerError: The server ended before it was ready; the message has its last line of output.
    """
    url = f"http://127.0.0.1:{free_port()}"
    command = [
        sys.executable,
        "-m",
        "coserve",
        "up",
        model,
        "--port",
        url.rsplit(":", 1)[1],
        *options,
    ]
    if home is not None:
        command += ["--home", str(home)]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        # In a session of its own: Ctrl-C is for the command, which ends the server in its turn.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, "COSERVE_RUN_DIR": ""},  # other commands do not find it
        )
    try:
        _wait_until_ready(process, url, log, while_starting)
        yield url
    finally:
        _end(process)


def _wait_until_ready(
    process: "subprocess.Popen[bytes]", url: str, log: Path, while_starting: Callable[[], None]
) -> None:
    until_s = time.monotonic() + _START_GUARD_S
    with Client(url) as client:
        while time.monotonic() < until_s:
            if process.poll() is not None:
                raise ServerError(f"the server did not start: {_last_words(log)}")
            try:
                client.get("/ready")
            except ServerError:
                while_starting()
                time.sleep(0.1)
            else:
                return
    raise ServerError(f"the server was not ready after {_START_GUARD_S:.0f} s; see {log}")


def _last_words(log: Path) -> str:
    lines = [
        line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()
    ]
    return lines[-1].removeprefix("error: ") if lines else "it printed nothing"


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a server, first by SIGTERM, on which it writes checkpoints of running jobs."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            process.send_signal(number)
            try:
                process.wait(_END_GUARD_S)
            except subprocess.TimeoutExpired:
                continue


def base_model(client: Client) -> str:
    """Return the id of the server's base model."""
    models: Sequence[dict[str, object]] = client.get("/v1/models")["data"]
    return str(next(model["id"] for model in models if not model.get("parent")))


def find_model(client: Client, name: str) -> str:
    """Return the id of the model that a name means: the id itself, or the newest whose id has the
    name between its colons, such as a suffix.

    Raises:
        ServerError: There is no such model.
    """
    models: Sequence[dict[str, object]] = client.get("/v1/models", checkpoints=True)["data"]
    if any(model["id"] == name for model in models):
        return name
    # The server lists what came later at the end: of one second, the last is the newest.
    # Checkpoints carry the suffix, too; they are meant only where there is no finished model.
    ids = [str(model["id"]) for model in sorted(models, key=_rank)][::-1]
    meant = next((id for id in ids if name in id.split(":")), None)
    if meant is None:
        more = (
            f", and {len(ids) - _MAX_NAMED} more: coserve models" if len(ids) > _MAX_NAMED else ""
        )
        raise ServerError(
            f"the server has no model {name!r}; it has {', '.join(ids[:_MAX_NAMED])}{more}"
        )
    return meant


def _rank(model: dict[str, object]) -> tuple[bool, bool, int]:
    """Return a sort key: the base model highest, checkpoints lowest, and newer models above older
    ones.
    """
    return (
        not model.get("parent"),
        not is_checkpoint(str(model["id"])),
        int(str(model.get("created") or 0)),
    )


__all__ = [
    "DEFAULT_URL",
    "ApiKey",
    "Json",
    "Url",
    "base_model",
    "find_model",
    "is_there",
    "own_server",
]

"""`coserve wait`: waits until a server answers requests."""

import sys
import time
from typing import Annotated, Any

import typer

from coserve.cli.connection import DEFAULT_URL, ApiKey, Url
from coserve.cli.start_view import start_view
from coserve.errors import ServerError
from coserve.server.units import seconds_of

_POLL_S = 0.2


def wait(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    timeout: Annotated[
        str, typer.Option(metavar="TIME", help="Maximum time to wait, such as 30s or 10min.")
    ] = "10min",
) -> None:
    """Wait until a server is ready, and show its progress: for scripts that start one in the
    background.

    The status is 0 once the server answers requests, and 1 if that takes longer than --timeout. The
    command also waits for a server that does not exist yet.
    """
    from coserve.client.http import Client

    try:
        limit_s = seconds_of(timeout)
    except ValueError as error:
        raise typer.BadParameter(f"--timeout {error}") from None
    until_s = time.monotonic() + limit_s
    with Client(url, api_key) as client, start_view("info") as view:
        while (doing := _doing(client)) is not None:
            if time.monotonic() > until_s:
                raise ServerError(
                    f"the server at {url} was not ready within {timeout}: {doing['text']}"
                )
            view.show(doing["stage"], doing["done"], doing["total"])
            time.sleep(_POLL_S)
        view.close()
        status = client.get("/v1/status")
    if warning := status["kernels"]["warning"]:
        print(f"warning: {warning}", file=sys.stderr)
    print(f"{url} is ready: it serves {status['model']}")


def _doing(client: Any) -> dict[str, Any] | None:
    """Return what a starting server is doing; None if it is ready."""
    try:
        client.get("/ready")
        return None
    except ServerError as error:
        if error.status is None:
            return _stage("waiting for the server")
        if error.status != 503:
            raise
    try:
        return client.get("/health").get("starting") or _stage("starting")
    except ServerError:
        return _stage("waiting for the server")


def _stage(text: str) -> dict[str, Any]:
    return {"stage": text, "done": 0, "total": 0, "text": text}

"""`coserve models`: what a server can be asked for."""

import json
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from coserve.cli.connection import DEFAULT_URL, ApiKey, Json, Url
from coserve.jobs.names import is_checkpoint


def models(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    families: Annotated[
        bool,
        typer.Option(
            "--families", help="List the families of models that can be run; no server is asked."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """List what the server answers as: the base model, adapters that were loaded or learned here,
    their checkpoints.

    Any of these ids is a `model` of a request (`coserve chat --adapter ID`), and a `model` that a
    job can train further (`coserve tune FILE --model ID`).
    """
    if families:
        _show_families(as_json=as_json)
        return
    from coserve.client.http import Client

    with Client(url, api_key) as client:
        found = client.get("/v1/models", checkpoints=True)["data"]
    if as_json:
        print(json.dumps({"models": [model["id"] for model in found]}))
        return
    from coserve.cli.tables import console, table

    listing = table("=model", "kind", "since")
    for model in found:
        listing.add_row(model["id"], _kind(model), moment(model.get("created")))
    console().print(listing)


def _show_families(*, as_json: bool) -> None:
    from coserve.models.families import described_families

    found = described_families()
    if as_json:
        print(json.dumps({"families": [vars(family) for family in found]}))
        return
    from coserve.cli.tables import console, table

    listing = table("=model_type", "what it is")
    for family in found:
        listing.add_row(family.model_type, family.summary)
    console().print(listing)


def moment(seconds: int | None) -> str:
    """A time as it is told here."""
    return (
        ""
        if not seconds
        else datetime.fromtimestamp(seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M")
    )


def _kind(model: dict[str, Any]) -> str:
    if is_checkpoint(model["id"]):
        return "checkpoint"
    if "@" in model["id"]:
        return "version"
    return "adapter" if model.get("parent") else "base"

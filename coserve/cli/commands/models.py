"""`coserve models`: lists the models that a server answers as."""

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
            "--families", help="List the model families that coserve supports; needs no server."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """List the server's models: the base model, adapters, and checkpoints of jobs.

    Each id can be the `model` of a request (`coserve chat --adapter ID`), and the `model` that a
    job trains further (`coserve tune FILE --model ID`).
    """
    if families:
        _show_families(as_json=as_json)
        return
    from coserve.client.http import Client

    with Client(url, api_key) as client:
        listed = client.get("/v1/models", checkpoints=True)["data"]
    if as_json:
        print(json.dumps({"models": [model["id"] for model in listed]}))
        return
    from coserve.cli.tables import console, table

    listing = table("=model", "kind", "since")
    for model in listed:
        listing.add_row(model["id"], _kind(model), moment(model.get("created")))
    console().print(listing)


def _show_families(*, as_json: bool) -> None:
    from coserve.models.families import described_families

    known = described_families()
    if as_json:
        print(json.dumps({"families": [vars(family) for family in known]}))
        return
    from coserve.cli.tables import console, table

    listing = table("=model_type", "what it is")
    for family in known:
        listing.add_row(family.model_type, family.summary)
    console().print(listing)


def moment(seconds: int | None) -> str:
    """Return a Unix time as local date and time, to the minute."""
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

"""`coserve keys`: creates API keys, and writes nothing: the user copies the output."""

import json
import re
from typing import Annotated

import typer

from coserve.cli.connection import Json
from coserve.server.tenancy.keys import TENANT_NAME, digest_of, new_key

app = typer.Typer(
    name="keys",
    help="Create API keys for a server's clients.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@app.callback()
def keys() -> None:
    """Create API keys for a server's clients."""


@app.command()
def new(
    tenant: Annotated[
        str,
        typer.Argument(metavar="TENANT", help="Tenant of the key; a tenant may have several keys."),
    ],
    as_json: Json = False,
) -> None:
    """Create a key, and the line with its digest for the file of `coserve up --api-keys-file`."""
    if re.fullmatch(TENANT_NAME, tenant) is None:
        raise typer.BadParameter(
            "a tenant's name has 1 to 64 letters, digits, dots, hyphens or underscores"
        )
    key = new_key()
    line = f'"{digest_of(key)}" = "{tenant}"'
    if as_json:
        print(json.dumps({"tenant": tenant, "key": key, "line": line}))
        return
    print(f"key of {tenant} (shown only once): {key}")
    print(f"line for the keys' file, under [keys]: {line}")

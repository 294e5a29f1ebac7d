"""`coserve keys`: keys of a server's clients. Nothing is written: what is printed goes where it
belongs.
"""

import json
import re
from typing import Annotated

import typer

from coserve.cli.connection import Json
from coserve.server.tenancy.keys import TENANT_NAME, digest_of, new_key

app = typer.Typer(
    name="keys",
    help="Keys of a server's clients.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@app.callback()
def keys() -> None:
    """Keys of a server's clients."""


@app.command()
def new(
    tenant: Annotated[
        str, typer.Argument(metavar="TENANT", help="Whose key it is; a tenant may have several.")
    ],
    as_json: Json = False,
) -> None:
    """Make a key, and its line for the file of `coserve up --api-keys-file`, which holds only its
    digest.
    """
    if re.fullmatch(TENANT_NAME, tenant) is None:
        raise typer.BadParameter(
            "a tenant's name has 1 to 64 letters, digits, dots, hyphens or underscores"
        )
    key = new_key()
    line = f'"{digest_of(key)}" = "{tenant}"'
    if as_json:
        print(json.dumps({"tenant": tenant, "key": key, "line": line}))
        return
    print(f"key of {tenant} (it is shown this once): {key}")
    print(f"line for the keys' file, below [keys]: {line}")

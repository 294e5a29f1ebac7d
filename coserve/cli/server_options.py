"""Options of `coserve up` and `coserve cluster up`, made from the fields of `ServerConfig`."""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from coserve.errors import CoserveError
from coserve.secret_variables import CLIENT_KEY, SERVER_KEYS, take_database, take_variable
from coserve.server.config import ServerConfig
from coserve.server.options import GROUPS, option_of
from coserve.server.tenancy.keys import tenant_and_digest


def server_config(**given: Any) -> ServerConfig:
    """Return the configuration for options, with COSERVE_API_KEYS and COSERVE_DATABASE, which are
    removed from the environment.

    Raises:
        CoserveError: An option is wrong; the message has the names of options.
    """
    take_variable(CLIENT_KEY)  # a server needs no client's key
    given["database"] = take_database(given.get("database"))
    keys = given.pop("api_keys", ())
    try:
        return ServerConfig(**given, api_keys=_with_environment(keys))
    except ValueError as error:
        raise CoserveError(_by_option_names(str(error))) from None


def _with_environment(keys: Sequence[str]) -> tuple[str, ...]:
    """Return the keys of --api-key, followed by further ones of the environment."""
    tenants = {digest: tenant for tenant, digest in map(tenant_and_digest, keys)}
    more: list[str] = []
    for tenant, digest in map(tenant_and_digest, take_variable(SERVER_KEYS).split()):
        if digest not in tenants:
            tenants[digest] = tenant
            more.append(f"{tenant}={digest}")
        elif tenants[digest] != tenant:
            raise CoserveError(
                f"{SERVER_KEYS} gives tenant {tenant!r} a key that already belongs to "
                f"tenant {tenants[digest]!r}"
            )
    return (*keys, *more)


def _by_option_names(message: str) -> str:
    """Return an error of the configuration with options in place of fields: a field is the first
    word, or has underscores.
    """
    options = {one.name: option_of(one).option for one in fields(ServerConfig)}
    first, space, rest = message.partition(" ")
    rest = re.sub(r"\w+_\w+", lambda word: options.get(word[0]) or word[0], rest)
    return f"{options.get(first) or first}{space}{rest}"


def _parameter(one: "Field[Any]", kind: Any, title: str) -> inspect.Parameter:
    """Return a field of the configuration as a parameter for Typer, under a title of the help."""
    option = option_of(one)
    default, parse = one.default, option.parse
    shared: dict[str, Any] = {
        "help": option.help,
        "show_default": option.shown if option.shown is not None else True,
        "rich_help_panel": title,
    }
    if not option.option:
        marked: Any = Annotated[str, typer.Argument(help=option.help, metavar="[MODEL]")]
    elif parse is not None:
        shared |= {"parser": _parser(parse), "metavar": option.metavar}
        marked = Annotated[str | None, typer.Option(option.option, **shared)]
        default = None
    elif isinstance(default, tuple):
        element = Path if Path in get_args(kind) else str
        shared["metavar"] = option.metavar
        info = typer.Option(option.option, **shared)
        marked = Annotated[list[element], info]  # type: ignore[valid-type]
        default = []
    else:
        marked = Annotated[kind, typer.Option(option.option, **shared)]
    return inspect.Parameter(
        one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=marked
    )


def _parser(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return parsed


def with_server_options(
    run: Callable[..., None], more: Sequence[inspect.Parameter] = ()
) -> Callable[..., None]:
    """Return a command with a parameter for every field of the server's configuration, and more
    after the first.
    """
    kinds = get_type_hints(ServerConfig)
    first, *others = [
        _parameter(one, kinds[one.name], title)
        for title, group in GROUPS.items()
        for one in fields(group)
    ]
    parameters = [first, *more, *others]

    def up(**given: Any) -> None:
        run(
            **{
                name: tuple(v) if isinstance(v, list) else v
                for name, v in given.items()
                if v is not None
            }
        )

    up.__doc__ = run.__doc__
    up.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    up.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return up

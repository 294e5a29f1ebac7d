"""The option that takes some rows of a trace."""

from collections.abc import Sequence
from typing import Annotated

import typer


def _checked(pairs: list[str] | None) -> list[str] | None:
    """Check the pairs before anything is read."""
    for pair in pairs or ():
        column, equals, _ = pair.partition("=")
        if not (column.strip() and equals):
            raise typer.BadParameter(f"{pair!r} must be COLUMN=VALUE, such as slice=dense")
    return pairs


Where = Annotated[
    list[str] | None,
    typer.Option(
        metavar="COLUMN=VALUE",
        callback=_checked,
        help="Use only the rows of the trace with this value in this column, such as slice=dense.",
    ),
]


def values_by_column(pairs: Sequence[str] | None) -> dict[str, str]:
    """Return the values of the option by column; the last value of a column counts."""
    values = {}
    for pair in pairs or ():
        column, _, value = pair.partition("=")
        values[column.strip()] = value.strip()
    return values

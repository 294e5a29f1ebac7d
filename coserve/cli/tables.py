"""Output of commands: one console and one style of tables; without a terminal, lines that programs
can split.
"""

import os
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table


def console(*, stderr: bool = False) -> Console:
    """Return a console for stdout or stderr, which keeps the columns of tables in a file or a pipe.

    Text is printed as it is: names may hold what looks like markup or an emoji's name, as `:one:`
    in `ft:tiny:coserve:one:ID`. Styles are given as `Text`.
    """
    screen = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not screen.is_terminal and "COLUMNS" not in os.environ:
        screen.width = 160
    return screen


def table(*columns: str, title: str | None = None) -> Table:
    """Return a table; columns whose names begin with > hold numbers, and those with = are never
    broken, so that they can be copied.
    """
    result = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for column in columns:
        justify: Literal["left", "right"] = "right" if column.startswith(">") else "left"
        result.add_column(
            column.lstrip(">="), justify=justify, overflow="fold", no_wrap=column.startswith("=")
        )
    return result

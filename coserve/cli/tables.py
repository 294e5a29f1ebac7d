"""How commands print: one console, one manner of tables; without a terminal, lines that programs
can cut.
"""

import os
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table


def console(*, stderr: bool = False) -> Console:
    """Of stdout, or of stderr; tables in a file or a pipe keep their columns. Text stays as it is:
    what names hold is neither markup nor an emoji's name, as `:one:` would be in
    `ft:tiny:coserve:one:ID`; styles are given as `Text`.
    """
    made = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = 160
    return made


def table(*columns: str, title: str | None = None) -> Table:
    """Columns whose names begin with > are numbers; those that begin with = are to be copied, and
    never broken.
    """
    made = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for column in columns:
        justify: Literal["left", "right"] = "right" if column.startswith(">") else "left"
        made.add_column(
            column.lstrip(">="), justify=justify, overflow="fold", no_wrap=column.startswith("=")
        )
    return made

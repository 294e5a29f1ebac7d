"""How commands print: one console, one manner of tables; where nobody looks, lines that programs can cut."""

import os

from rich import box
from rich.console import Console
from rich.table import Table


def console() -> Console:
    """Of stdout; tables in a file or a pipe keep their columns."""
    made = Console(highlight=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = 160
    return made


def table(*columns: str, title: str | None = None) -> Table:
    """Columns whose names begin with > are numbers."""
    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        made.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left", overflow="fold")
    return made

"""Commands, one file each, found by the file's name: the function of that name, or a group's `app`.

Files import what is heavy inside their functions, so that `coserve --help` stays fast.
"""

import typer

from coserve.discovery import variant_module, variant_names


def add_to(app: typer.Typer) -> None:
    """Add every command to the application."""
    for name in variant_names(__path__):
        module = variant_module(__name__, name)
        if group := getattr(module, "app", None):
            app.add_typer(group, name=name)
        else:
            app.command(name)(getattr(module, name.replace("-", "_")))

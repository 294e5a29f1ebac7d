"""The `coserve` command. Errors come out as one line; logging is configured here and nowhere else."""

import logging
import os
import sys

import typer

import coserve
from coserve.cli.inspect import inspect
from coserve.errors import CoserveError

app = typer.Typer(
    help="Serve a language model and fine-tune it at the same time, from one copy of the weights.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.callback()
def _options() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")


@app.command()
def version() -> None:
    """Print the version."""
    print(coserve.__version__)


app.command()(inspect)


def main() -> None:
    """Entry point of the console script."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        app()
    except CoserveError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()

"""The `coserve` command: prints errors as one line, and configures logging, as `coserve up` does
again.
"""

import asyncio
import logging
import os
import signal
import sys
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from coserve.cli import commands
from coserve.errors import CoserveError
from coserve.version import VERSION

# Typer's own copy of click, or click itself where Typer still uses it: the base of everything wrong
# with a command line.
_UsageError: Any = typer.BadParameter.__mro__[1]

app = typer.Typer(
    help="Serve a language model and fine-tune it at the same time, from one copy of the weights.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


# The status of what SIGTERM has ended.
_ENDED = 128 + signal.SIGTERM
# The server's own words are about HTTP.
_KEY_HINT = " Here: --api-key KEY, or COSERVE_API_KEY."


def _print_version(wanted: bool) -> None:
    if wanted:
        print(VERSION)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")


@app.command()
def version() -> None:
    """Print the version."""
    print(VERSION)


commands.add_to(app)


def main() -> None:
    """Run `coserve`: the entry point of the console script."""
    run(app, "coserve")


def run(app: typer.Typer, name: str) -> NoReturn:
    """Run an application and exit: every mistake is one line on stderr and a status that is not 0.

    Args:
        app: The application.
        name: The command that starts it, for help and error messages.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    was_ended = False

    def end(number: int, _: FrameType | None) -> None:
        """Exit on SIGTERM, so that servers that a command has started end with it."""
        nonlocal was_ended
        was_ended = True
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            sys.exit(_ENDED)
        # SystemExit in the middle of one task can leave others waiting for good; SIGINT has them
        # cancelled.
        signal.raise_signal(signal.SIGINT)

    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, end)
    try:
        status = app(prog_name=name, standalone_mode=False)
    except CoserveError as error:
        # What a command says that was ended in its middle may be a consequence of that.
        _fail(
            f"{error}{_KEY_HINT if getattr(error, 'status', None) == 401 else ''}",
            _ENDED if was_ended else 1,
        )
    except _UsageError as error:
        if not error.format_message():  # no command: its help has been shown
            raise SystemExit(error.exit_code) from None
        command = error.ctx.command_path if error.ctx else name
        _fail(
            f"{' '.join(error.format_message().split()).rstrip('.')}; see {command} --help",
            error.exit_code,
        )
    except typer.Abort:
        _fail("interrupted", _ENDED if was_ended else 130)
    except Exception as error:
        if not was_ended:
            raise
        _fail(f"interrupted, and then: {type(error).__name__}: {error}", _ENDED)
    else:
        if was_ended:  # which comes out as interrupted
            raise SystemExit(_ENDED)
        raise SystemExit(status if isinstance(status, int) else 0)


def _fail(message: str, status: int) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(status) from None


if __name__ == "__main__":
    main()

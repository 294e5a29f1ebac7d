"""Results of the scripts: a line of JSON on stdout, and a file if the command asks for one."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coserve.bench.results import save_result

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def add_save_option(parser: argparse.ArgumentParser) -> None:
    """Add `--save [DIRECTORY]` to a script's options."""
    parser.add_argument(
        "--save",
        type=Path,
        nargs="?",
        const=RESULTS,
        metavar="DIRECTORY",
        help="also write the result to a file there [benchmarks/results]",
    )


def print_result(experiment: str, numbers: Mapping[str, Any], save: Path | None) -> None:
    """Print a result as one line of JSON, and save it if a directory is given."""
    print(json.dumps(numbers))
    if save is not None:
        save_result(save, experiment, numbers)


def save_option(description: str | None) -> Path | None:
    """Parse the command line of a script without other options, and return the directory of
    `--save`.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_save_option(parser)
    directory: Path | None = parser.parse_args().save
    return directory

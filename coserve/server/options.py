"""How fields of a configuration look on the command line."""

from collections.abc import Callable
from dataclasses import Field, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Option:
    """How a field looks on the command line. option: its name ("" for the positional argument). parse: from text, with
    metavar for what the text says.
    """

    option: str
    help: str
    parse: Callable[[str], Any] | None = None
    metavar: str | None = None
    shown: str | None = None


def option(default: Any, option: str, help: str, **more: Any) -> Any:
    """A dataclass's field with an option."""
    return field(default=default, metadata={"option": Option(option=option, help=help, **more)})


def option_of(one: "Field[Any]") -> Option:
    """How a field looks on the command line."""
    option: Option = one.metadata["option"]
    return option

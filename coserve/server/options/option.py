"""How fields of a configuration look on the command line, and what several of them are checked
for.
"""

from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, field
from typing import Any

from coserve.settings import is_number


@dataclass(frozen=True, kw_only=True)
class Option:
    """How a field looks on the command line. option: its name ("" for the positional argument).
    parse: from text, with metavar for what the text says.
    """

    option: str
    help: str
    parse: Callable[[str], Any] | None = None
    metavar: str | None = None
    shown: str | None = None


@dataclass(frozen=True, kw_only=True)
class OptionGroup:
    """Fields that belong together, and what they are checked for."""

    def check(self) -> None:
        """ValueError names the field and its range."""


def option(default: Any, option: str, help: str, **more: Any) -> Any:
    """A dataclass's field with an option."""
    return field(default=default, metadata={"option": Option(option=option, help=help, **more)})


def option_of(one: "Field[Any]") -> Option:
    """How a field looks on the command line."""
    option: Option = one.metadata["option"]
    return option


def check_seconds(name: str, value: Any) -> None:
    """ValueError unless it is None or a number above 0."""
    if value is not None and (not is_number(value) or value <= 0):
        raise ValueError(f"{name} must be a number of seconds above 0, not {value!r}")


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """ValueError unless it is one of them."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")

"""Fields of a configuration as options of the command line, and their common checks."""

from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, field
from typing import Any

from coserve.settings import is_number


@dataclass(frozen=True, kw_only=True)
class Option:
    """A field as an option of the command line."""

    option: str
    """Name of the option; "" for the positional argument."""
    help: str
    """Help text."""
    parse: Callable[[str], Any] | None = None
    """Function that parses the text; None: that of the field's type."""
    metavar: str | None = None
    """Placeholder of the value in help texts, if there is a `parse`."""
    shown: str | None = None
    """Default value in help texts; None: the field's."""


@dataclass(frozen=True, kw_only=True)
class OptionGroup:
    """A group of fields, with their checks."""

    def check(self) -> None:
        """Check the fields.

        Raises:
            ValueError: One is out of range; the message names it.
        """


def option(default: Any, option: str, help: str, **more: Any) -> Any:
    """Return a dataclass field with an option."""
    return field(default=default, metadata={"option": Option(option=option, help=help, **more)})


def option_of(one: "Field[Any]") -> Option:
    """Return the option of a field."""
    option: Option = one.metadata["option"]
    return option


def check_seconds(name: str, value: Any) -> None:
    """Check a duration.

    Raises:
        ValueError: It is neither None nor a number above 0.
    """
    if value is not None and (not is_number(value) or value <= 0):
        raise ValueError(f"{name} must be a number of seconds above 0, not {value!r}")


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Check a choice.

    Raises:
        ValueError: It is not among the allowed values.
    """
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")

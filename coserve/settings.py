"""Checks that every settings class shares, and what variants that are found by name set; the
messages say what would be right.
"""

import re
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from math import inf, isfinite
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

# Of counts, such as steps: what a column of any database holds.
MOST_WHOLE = 2**31 - 1
_MOST_SHOWN = 200
T = TypeVar("T")
_TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def shown(value: Any) -> str:
    """A value as a message shows it, however long it is."""
    try:
        text = repr(value)
    except ValueError:  # a number with thousands of digits
        text = (
            f"a number of {value.bit_length()} bits"
            if isinstance(value, int)
            else f"a {type(value).__name__}"
        )
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}… ({len(text)} characters)"


def without_password(url: str) -> str:
    """A URL as a message shows it."""
    return re.sub(
        r"([?&]password=)[^&]*", r"\1***", re.sub(r"://([^:@/]*):[^@/]*@", r"://\1:***@", url)
    )


def is_number(value: Any) -> bool:
    """Whether it is a finite number that fits a float (and not a truth value)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 2**63 if isinstance(value, int) else isfinite(value)


def is_whole(value: Any, least: int, most: int | None = None) -> bool:
    """Whether it is a whole number (and not a truth value) from `least` to `most`; None: without an
    upper bound.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return least <= value and (most is None or value <= most)


def check_whole(name: str, value: Any, least: int, most: int | None = None) -> None:
    """ValueError, with the setting's name and its range, unless `is_whole`."""
    if not is_whole(value, least, most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be a whole number {bounds}, not {shown(value)}")


def check_number(
    name: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
) -> None:
    """ValueError, with the setting's name and its range, unless it is a finite number in it.

    least: the smallest that is allowed. above: what it must be more than. most: the largest that is
    allowed.
    """
    is_in_range = is_number(value) and (
        (least is None or value >= least)
        and (above is None or value > above)
        and (most is None or value <= most)
    )
    if not is_in_range:
        bounds = f"above {above:,g}" if above is not None else f"of at least {least:,g}"
        if most is not None:
            bounds += f" and at most {most:,g}"
        raise ValueError(f"{name} must be a number {bounds}, not {shown(value)}")


def check_kind(name: str, value: T, kind: type) -> T:
    """The value; ValueError unless it is one of a class, or None."""
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"{name} must be of the class {kind.__name__}, not {shown(value)}")
    return value


class Setting(NamedTuple):
    """What there is to know about a setting. least, most: its range, both included."""

    name: str
    default: float | bool
    least: float
    most: float
    help: str


def setting(default: float | bool, help: str, *, least: float = 0.0, most: float = inf) -> Any:
    """A field of a variant: a number in a range, a whole number if the default is one, or a truth
    value.
    """
    return field(default=default, metadata={"help": help, "least": least, "most": most})


@dataclass(frozen=True, kw_only=True)
class HasSettings:
    """A variant whose fields are `setting`s. ValueError when created names a setting and its
    range.
    """

    kind: ClassVar[str]  # what the variants are, for messages

    def __post_init__(self) -> None:
        for one in self.settings():
            _check(one, getattr(self, one.name))

    @classmethod
    def settings(cls) -> tuple[Setting, ...]:
        """All that can be set."""
        if plain := [one.name for one in fields(cls) if "help" not in one.metadata]:
            declared = f'{plain[0]}: float = setting(0.5, "what it is")'
            raise TypeError(f"{cls.__name__}.{plain[0]} must be a setting, such as {declared}")
        return tuple(_setting_of(one) for one in fields(cls))

    @classmethod
    def from_settings(cls, name: str, given: Mapping[str, Any]) -> Self:
        """With settings by name, as values or as text (as on a command line).

        Raises:
            ValueError: there is no such setting (then it lists those that there are), or its value
                is out of range.
        """
        known = {one.name: one for one in cls.settings()}
        if unknown := [key for key in given if key not in known]:
            have = f"its settings are {', '.join(known)}" if known else "it has none"
            raise ValueError(f"{cls.kind} {name!r} has no setting {unknown[0]!r}; {have}")
        return cls(
            **{
                key: _parse(known[key], value) if isinstance(value, str) else value
                for key, value in given.items()
            }
        )


def _setting_of(one: "Field[Any]") -> Setting:
    default: Any = one.default
    return Setting(name=one.name, default=default, **one.metadata)


def _parse(one: Setting, text: str) -> Any:
    """A value from text; text that says none stays as it is, for `_check` to name."""
    if isinstance(one.default, bool):
        return _TRUTHS.get(text.strip().lower(), text)
    try:
        return int(text) if isinstance(one.default, int) else float(text)
    except ValueError:
        return text


def _check(one: Setting, value: Any) -> None:
    """ValueError unless it is a value that the setting can have."""
    if isinstance(one.default, bool):
        kind, right = "true or false", isinstance(value, bool)
    else:
        whole = isinstance(one.default, int)
        bounds = (
            f"of at least {one.least:g}"
            if one.most == inf
            else f"from {one.least:g} to {one.most:g}"
        )
        kind = f"a {'whole ' * whole}number {bounds}"
        right = (
            is_number(value)
            and one.least <= value <= one.most
            and (isinstance(value, int) or not whole)
        )
    if not right:
        raise ValueError(f"setting {one.name} must be {kind}, not {value!r}")

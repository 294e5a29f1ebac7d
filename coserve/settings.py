"""Checks that every settings class shares; the messages say what would be right."""

from math import isfinite
from typing import Any

# Of counts, such as steps: what a column of any database holds.
MOST_WHOLE = 2**31 - 1
_MOST_SHOWN = 200


def shown(value: Any) -> str:
    """A value as a message shows it, however long it is."""
    try:
        text = repr(value)
    except ValueError:  # a number with thousands of digits
        text = f"a number of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}… ({len(text)} characters)"


def is_number(value: Any) -> bool:
    """Whether it is a finite number that fits a float (and not a truth value)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 2**63 if isinstance(value, int) else isfinite(value)


def is_whole(value: Any, least: int, most: int | None = None) -> bool:
    """Whether it is a whole number (and not a truth value) from `least` to `most`; None: without an upper bound."""
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return least <= value and (most is None or value <= most)


def check_whole(name: str, value: Any, least: int, most: int | None = None) -> None:
    """ValueError, with the setting's name and its range, unless `is_whole`."""
    if not is_whole(value, least, most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be a whole number {bounds}, not {shown(value)}")


def check_number(
    name: str, value: Any, *, least: float | None = None, above: float | None = None, most: float | None = None
) -> None:
    """ValueError, with the setting's name and its range, unless it is a finite number in it.

    least: the smallest that is allowed. above: what it must be more than. most: the largest that is allowed.
    """
    is_in_range = is_number(value) and (
        (least is None or value >= least) and (above is None or value > above) and (most is None or value <= most)
    )
    if not is_in_range:
        bounds = f"above {above:,g}" if above is not None else f"of at least {least:,g}"
        if most is not None:
            bounds += f" and at most {most:,g}"
        raise ValueError(f"{name} must be a number {bounds}, not {shown(value)}")

"""Checks that every settings class shares; the messages say what would be right."""

from math import isfinite
from typing import Any


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
        raise ValueError(f"{name} must be a whole number {bounds}, not {value!r}")

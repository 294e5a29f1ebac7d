"""Checks that every settings class shares; each says in its own words what would be right."""

from math import isfinite
from typing import Any


def is_number(value: Any) -> bool:
    """Whether it is a finite number that fits a float (and not a truth value)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 2**63 if isinstance(value, int) else isfinite(value)

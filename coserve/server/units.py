"""Sizes and durations as people write them."""

import re
from math import inf

from coserve.settings import shown

_UNITS = {
    "": 1,
    "b": 1,
    "k": 1e3,
    "m": 1e6,
    "g": 1e9,
    "t": 1e12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
_DURATIONS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "min": 60.0, "h": 3600.0}


def bytes_of(text: str) -> int:
    """Return the number of bytes of a text such as 512MB, 4GiB or 1000000."""
    number, unit = _number_and_unit(text)
    name = unit.removesuffix("b") if unit != "b" else unit
    if name not in _UNITS:
        raise ValueError(f"{text!r} is not a size; give one such as 512MB or 4GiB")
    return int(number * _UNITS[name])


def seconds_of(text: str) -> float:
    """Return the seconds of a text such as 40ms, 2s, 10min, 2h, or 0.5 (seconds)."""
    number, unit = _number_and_unit(text)
    if unit not in _DURATIONS:
        raise ValueError(f"{text!r} is not a duration; give one such as 40ms, 2s, 10min or 2h")
    return number * _DURATIONS[unit]


def slo_seconds(text: str) -> float:
    """Return the seconds of a text such as 40ms; it must name a unit.

    SLOs are usually in milliseconds, so a bare number would be mistaken for seconds.
    """
    number, unit = _number_and_unit(text)
    if not unit:
        raise ValueError(
            f"{text!r} has no unit: use {number:g}ms (which is {number / 1e3:g}s), or {number:g}s"
        )
    value = seconds_of(text)
    if not 0 < value < inf:
        raise ValueError(f"{shown(text)} must be above 0 and finite: use a time such as 40ms")
    return value


def _number_and_unit(text: str) -> tuple[float, str]:
    if (match := re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)", text.strip())) is None:
        negative = text.strip().startswith("-")
        raise ValueError(
            f"{text!r} is negative" if negative else f"{text!r} is not a number with a unit"
        )
    return float(match[1]), match[2].lower()

"""Numbers as text; a dash for what has not been measured."""

from datetime import UTC, datetime

NOTHING = "–"
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86400


def iso(moment_s: float) -> str:
    """Return a Unix time in the form of HTML's `datetime`."""
    return datetime.fromtimestamp(moment_s, UTC).isoformat()


def utc(moment_s: float) -> str:
    """Return a Unix time for readers without JavaScript, such as 2026-11-29 07:04 UTC."""
    return datetime.fromtimestamp(moment_s, UTC).strftime("%Y-%m-%d %H:%M UTC")


def milliseconds(value_ms: float | None) -> str:
    """Return a duration such as 84 ms or 2.3 s."""
    return NOTHING if value_ms is None else seconds(value_ms / 1e3)


def seconds(value_s: float | None) -> str:
    """Return a duration such as 84 ms, 2.3 s, 4 min, 3 h 20 min or 2 days."""
    if value_s is None:
        return NOTHING
    if value_s < 1:
        return f"{value_s * 1e3:.3g} ms"
    if value_s < _MINUTE_S:
        return f"{value_s:.3g} s"
    if value_s < _HOUR_S:
        return f"{round(value_s / _MINUTE_S)} min"
    if value_s < 2 * _DAY_S:
        hours, minutes = divmod(round(value_s / _MINUTE_S), 60)
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    return f"{round(value_s / _DAY_S)} days"


def whole(value: float | None) -> str:
    """Return a number such as 12,345."""
    return NOTHING if value is None else f"{round(value):,}"


def number(value: float | None) -> str:
    """Return a number with three digits, such as 0.123, 12.3 or 1,230."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def share(value: float | None) -> str:
    """Return a share such as 98.5 %; 100 % means all of it."""
    if value is None:
        return NOTHING
    percent = int(value * 1000) / 10  # never rounded up to 100 %
    return f"{percent:g} %"


def size(num_bytes: float | None) -> str:
    """Return a size such as 1.5 GB."""
    if num_bytes is None:
        return NOTHING
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB"

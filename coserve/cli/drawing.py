"""Parts of live views, as pure functions to rich texts: sparklines, stacked bars, latencies beside
their SLOs.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import isnan

from rich.console import Console
from rich.status import Status
from rich.text import Text

_BLOCKS = "▁▂▃▄▅▆▇█"
GOOD, BAD, DIM = "green", "bold red", "dim"


def sparkline(
    values: Sequence[float],
    width: int,
    *,
    high: float | None = None,
    low: float | None = None,
    limit: float | None = None,
) -> Text:
    """Return the last values as blocks; those above the limit are red."""
    shown = [value for value in values if not isnan(value)][-width:]
    if not shown:
        return Text("·" * width, style=DIM)
    least = min(shown) if low is None else low
    span = (max(shown) if high is None else high) - least
    text = Text()
    for value in shown:
        share = (value - least) / span if span > 0 else 0.0
        block = _BLOCKS[min(len(_BLOCKS) - 1, max(0, int(share * len(_BLOCKS))))]
        text.append(block, style=BAD if limit is not None and value > limit else "cyan")
    return text


def resampled(values: Sequence[float], width: int) -> list[float]:
    """Return values resampled to a width, each the mean of its part."""
    if len(values) <= width:
        return list(values)
    edges = [len(values) * index // width for index in range(width + 1)]
    return [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]


def stacked_bar(
    parts: Iterable[tuple[float, str]], width: int, *, total: float | None = None
) -> Text:
    """Return a bar of a width with coloured parts, as shares of the total (by default, of their
    sum).
    """
    sizes = [(max(0.0, size), colour) for size, colour in parts]
    whole = total or sum(size for size, _ in sizes)
    text, below = Text(), 0.0
    for size, colour in sizes:
        start, below = _cells(below, whole, width), below + size
        text.append("█" * (_cells(below, whole, width) - start), style=colour)
    text.append("░" * (width - len(text)), style=DIM)
    return text


def progress_bar(share: float, width: int) -> Text:
    """Return a bar of what is done and what is to do."""
    done = round(min(max(share, 0.0), 1.0) * width)
    return Text("━" * done, style=GOOD).append("━" * (width - done), style="bright_black")


def against(value_ms: float | None, slo_ms: float | None) -> Text:
    """Return a latency beside its SLO."""
    if value_ms is None:
        return Text("–", style=DIM)
    held = slo_ms is None or value_ms <= slo_ms
    text = Text().append(milliseconds(value_ms), style=GOOD if held else BAD)
    return text if slo_ms is None else text.append(f" of {milliseconds(slo_ms)}", style=DIM)


def milliseconds(value_ms: float | None) -> str:
    """Return a time with a fitting unit."""
    if value_ms is None:
        return "–"
    if value_ms >= 10_000:
        return f"{value_ms / 1e3:.1f} s"
    return f"{value_ms:,.0f} ms" if value_ms >= 10 else f"{value_ms:.1f} ms"


def duration(seconds: float | None) -> str:
    """Return a time in hours, minutes and seconds."""
    if seconds is None:
        return "–"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def printable(text: str) -> str:
    """Replace characters that a terminal takes as commands: models can generate any text."""
    return "".join(letter if letter in "\n\t" or letter.isprintable() else "�" for letter in text)


def starting(model: str, console: Console) -> Status:
    """Return a spinner for the start of a command's own server."""
    # A `Text`: of strings a spinner takes markup and emojis' names, whatever its console does.
    return console.status(Text(f"starting a server for {model}"))


def _cells(size: float, whole: float, width: int) -> int:
    return round(width * min(1.0, size / whole)) if whole > 0 else 0

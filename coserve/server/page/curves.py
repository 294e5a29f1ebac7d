"""Charts of a job's steps and of tokens per second.

Lines are points of SVG, in a box of 1000 by 1000 that the style sheet stretches, with the numbers
on their axes and the values under the pointer.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import Any

from coserve.server.observability.history import TimeSpan
from coserve.server.page.words import number, seconds

_BOX = 1000
# Share of a curve's range that is left free above and below it.
_MARGIN = 0.08
# A smoothed value averages over at most this many values, and over at most this share of the curve.
_MAX_AVERAGED, _SHARE_AVERAGED = 20, 0.1
# Shorter curves are not smoothed.
_MIN_SMOOTHED = 20
_MAX_TICKS = 4

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Range:
    """Range of values on an axis, which may be a single value."""

    low: float
    """Lower end."""
    high: float
    """Upper end."""

    @classmethod
    def of(cls, values: Iterable[float], margin: float = _MARGIN) -> "Range":
        """Return the range from the smallest value to the largest, with some margin."""
        listed = list(values)
        low, high = min(listed), max(listed)
        room = margin * (high - low)
        return cls(low=low - room, high=high + room)

    def share(self, value: float) -> float:
        """Return the position of a value, from 0 to 1; in the middle if the range is a single
        value.
        """
        width = self.high - self.low
        return 0.5 if width <= 0 else min(1.0, max(0.0, (value - self.low) / width))


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A number on the vertical axis."""

    text: str
    """The number as text."""
    top: float
    """Its position in the box, from the upper edge."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A named series of values."""

    name: str
    """Name in the legend and of the values under the pointer."""
    style: str
    """Class of the style sheet."""
    points: str
    """Attribute `points` of a polyline; "" if only dots are drawn."""
    dots: tuple[tuple[float, float], ...] = ()
    """Positions of single values in the box."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Lines over one horizontal axis."""

    lines: tuple[Line, ...]
    """The lines."""
    ticks: tuple[Tick, ...]
    """Numbers on the vertical axis."""
    first: str
    """Label of the left end of the horizontal axis."""
    last: str
    """Label of the right end of the horizontal axis."""
    words: str
    """Description of the chart for screen readers."""
    data: str
    """JSON of the values, for `chart.js`; see `_data`."""


@dataclass(frozen=True, kw_only=True)
class LossCurve:
    """Losses of a job over its steps so far."""

    chart: Chart
    """The chart."""
    first: float
    """First training loss."""
    last: float
    """Last training loss."""
    last_valid: float | None
    """Last validation loss."""


def place(point: tuple[float, float], x: Range, y: Range) -> tuple[float, float]:
    """Return a point's place in the box, whose y grows downward."""
    return round(_BOX * x.share(point[0]), 1), round(_BOX * (1 - y.share(point[1])), 1)


def polyline(points: Points, x: Range, y: Range) -> str:
    """Return points in the form of the attribute `points`."""
    return " ".join(f"{left:g},{top:g}" for left, top in (place(point, x, y) for point in points))


def smoothed(points: Points) -> list[tuple[float, float]]:
    """Return the exponential moving mean, which begins with the first value."""
    weight = 1 / min(_MAX_AVERAGED, max(1.0, _SHARE_AVERAGED * len(points)))
    means: list[tuple[float, float]] = []
    for step, value in points:
        before = means[-1][1] if means else value
        means.append((step, before + weight * (value - before)))
    return means


def ticks(y: Range) -> tuple[Tick, ...]:
    """Return at most four round numbers within a range, at equal distances of 1, 2 or 5 times a
    power of ten.
    """
    width = y.high - y.low
    if width <= 0:
        return (Tick(text=number(y.low), top=_BOX / 2),)
    power = 10.0 ** floor(log10(width / _MAX_TICKS))
    step = next(power * each for each in (1, 2, 5, 10, 20) if width / (power * each) < _MAX_TICKS)
    values = [step * index for index in range(ceil(y.low / step), floor(y.high / step) + 1)]
    return tuple(Tick(text=_tick(value, step), top=place((0, value), y, y)[1]) for value in values)


def _tick(value: float, step: float) -> str:
    digits = max(0, -floor(log10(step)))
    return (
        f"{value:.{digits}f}"
        if 0 < digits <= 4
        else f"{value:,.0f}"
        if step >= 1
        else f"{value:.3g}"
    )


def loss_curve(metrics: Mapping[int, Mapping[str, Any]], num_steps: int) -> LossCurve | None:
    """Return the chart of a job's losses; None before there is one.

    Args:
        metrics: Metrics by step; see `coserve.jobs.metrics.results.by_step`.
        num_steps: Number of steps of the job.
    """
    train, valid = _series(metrics, "train_loss"), _series(metrics, "valid_loss")
    if not train:
        return None
    x, y = _steps(train, num_steps), Range.of(loss for _, loss in (*train, *valid))
    (first_step, first), (last_step, last) = train[0], train[-1]
    words = f"Loss {first:.3g} at step {first_step:g}, {last:.3g} at step {last_step:g}"
    if valid:
        words += f"; of validation {valid[-1][1]:.3g}"
    is_long = len(train) >= _MIN_SMOOTHED
    lines = [Line(name="loss", style="raw" if is_long else "one", points=polyline(train, x, y))]
    series = [("loss", train)]
    if is_long:
        lines.append(Line(name="mean", style="one", points=polyline(smoothed(train), x, y)))
        series.append(("mean", smoothed(train)))
    if valid:
        dots = tuple(place(point, x, y) for point in valid)
        lines.append(Line(name="validation", style="valid", points="", dots=dots))
        series.append(("validation", valid))
    chart = _chart(lines, series, x, y, words=words, kind="step")
    return LossCurve(
        chart=chart,
        first=train[0][1],
        last=train[-1][1],
        last_valid=valid[-1][1] if valid else None,
    )


def step_curve(
    metrics: Mapping[int, Mapping[str, Any]], num_steps: int, key: str, name: str
) -> Chart | None:
    """Return the chart of one value of a job's steps, such as its learning rate; None before there
    is one.

    Args:
        metrics: Metrics by step.
        num_steps: Number of steps of the job.
        key: Name of the metric.
        name: Name in the legend.
    """
    points = _series(metrics, key)
    if not points:
        return None
    x, y = _steps(points, num_steps), Range.of(value for _, value in points)
    words = f"{name.capitalize()} {points[-1][1]:.3g} at step {points[-1][0]:g}"
    lines = [Line(name=name, style="one", points=polyline(points, x, y))]
    return _chart(lines, [(name, points)], x, y, words=words, kind="step")


def rate_chart(rates: Sequence[tuple[float, float]], span: TimeSpan) -> Chart | None:
    """Return the chart of tokens per second over a time span until now; None if there were none.

    Args:
        rates: Generated and trained tokens per second of each part of the span, the oldest first.
        span: The time span.
    """
    highest = max(map(max, rates), default=0.0)
    if highest <= 0:
        return None
    # Seconds until now, at most 0, of the end of each part.
    times_s = [float((index + 1 - len(rates)) * span.part_s) for index in range(len(rates))]
    x, y = Range(low=min(-1, times_s[0]), high=0), Range(low=0, high=highest / (1 - _MARGIN))
    generated = [(time_s, pair[0]) for time_s, pair in zip(times_s, rates, strict=True)]
    trained = [(time_s, pair[1]) for time_s, pair in zip(times_s, rates, strict=True)]
    series = [("generated", generated), ("trained", trained)]
    lines = [
        Line(name="generated", style="one", points=polyline(generated, x, y)),
        Line(name="trained", style="two", points=polyline(trained, x, y)),
    ]
    words = f"Tokens per second over the last {span.name}: at most {highest:.3g}"
    return _chart(lines[::-1], series, x, y, words=words, kind="ago")


def _series(metrics: Mapping[int, Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    return [(float(step), data[key]) for step, data in metrics.items() if data.get(key) is not None]


def _steps(points: Points, num_steps: int) -> Range:
    return Range(low=1, high=max(num_steps, points[-1][0], 2))


def _chart(
    lines: Sequence[Line],
    series: Sequence[tuple[str, Points]],
    x: Range,
    y: Range,
    *,
    words: str,
    kind: str,
) -> Chart:
    is_time = kind == "ago"
    return Chart(
        lines=tuple(lines),
        ticks=ticks(y),
        first=f"{seconds(-x.low)} ago" if is_time else f"step {x.low:g}",
        last="now" if is_time else f"{x.high:,.0f}",
        words=words,
        data=_data(series, x, kind),
    )


def _data(series: Sequence[tuple[str, Points]], x: Range, kind: str) -> str:
    """Return the data that `chart.js` shows under the pointer: the ends of the axis, and each line.

    Args:
        series: Name and points of each line.
        x: Range of the horizontal axis.
        kind: Whether x are steps ("step") or seconds until now, at most 0 ("ago").
    """
    lines = []
    for name, points in series:
        rounded = [(round(at, 1), float(f"{value:.4g}")) for at, value in points]
        lines.append({"name": name, "points": rounded})
    return json.dumps(
        {"kind": kind, "low": x.low, "high": x.high, "lines": lines}, separators=(",", ":")
    )

"""Curves as points of SVG, drawn into a box of 1000 by 1000 that the style sheet stretches."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_BOX = 1000
# What is left free above and below a curve, of its range.
_MARGIN = 0.08
# In the mean that shows where noisy losses go, as many values count as this many weigh; of a short curve, fewer.
_MOST_AVERAGED, _SHARE_AVERAGED = 20, 0.1
# Points of which a mean says more than they do.
_FEWEST_SMOOTHED = 20

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class LossCurve:
    """A job's losses over its steps, as far as it is. raw, smooth: points of polylines; smooth is "" of few points.
    valid: where the losses of validation lie. words: for those who cannot see it.
    """

    raw: str
    smooth: str
    valid: tuple[tuple[float, float], ...]
    first: float
    last: float
    last_valid: float | None
    words: str


@dataclass(frozen=True, kw_only=True)
class Range:
    """Of values on an axis; of one value alone, too."""

    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float], margin: float = _MARGIN) -> "Range":
        """From the least to the greatest, and some room."""
        found = list(values)
        low, high = min(found), max(found)
        room = margin * (high - low)
        return cls(low=low - room, high=high + room)

    def share(self, value: float) -> float:
        """From 0 to 1; in the middle, where there is one value alone."""
        width = self.high - self.low
        return 0.5 if width <= 0 else min(1.0, max(0.0, (value - self.low) / width))


def place(point: tuple[float, float], x: Range, y: Range) -> tuple[float, float]:
    """In the box, whose y grows downward."""
    return round(_BOX * x.share(point[0]), 1), round(_BOX * (1 - y.share(point[1])), 1)


def polyline(points: Points, x: Range, y: Range) -> str:
    """For the attribute `points`."""
    return " ".join(f"{left:g},{top:g}" for left, top in (place(point, x, y) for point in points))


def smoothed(points: Points) -> list[tuple[float, float]]:
    """Exponential moving mean; it begins with the first value."""
    weight = 1 / min(_MOST_AVERAGED, max(1.0, _SHARE_AVERAGED * len(points)))
    found: list[tuple[float, float]] = []
    for step, value in points:
        before = found[-1][1] if found else value
        found.append((step, before + weight * (value - before)))
    return found


def loss_curve(metrics: Mapping[int, Mapping[str, Any]], num_steps: int) -> LossCurve | None:
    """Of a job. metrics: by step, see `coserve.jobs.results.by_step`. None before there is a loss."""
    train = [(float(step), data["train_loss"]) for step, data in metrics.items() if data.get("train_loss") is not None]
    valid = [(float(step), data["valid_loss"]) for step, data in metrics.items() if data.get("valid_loss") is not None]
    if not train:
        return None
    x = Range(low=1, high=max(num_steps, train[-1][0], 2))
    y = Range.of(loss for _, loss in (*train, *valid))
    words = f"Loss {train[0][1]:.3g} at step {train[0][0]:g}, {train[-1][1]:.3g} at step {train[-1][0]:g}"
    if valid:
        words += f"; of validation {valid[-1][1]:.3g}"
    return LossCurve(
        raw=polyline(train, x, y),
        smooth=polyline(smoothed(train), x, y) if len(train) >= _FEWEST_SMOOTHED else "",
        valid=tuple(place(point, x, y) for point in valid),
        first=train[0][1],
        last=train[-1][1],
        last_valid=valid[-1][1] if valid else None,
        words=words,
    )


@dataclass(frozen=True, kw_only=True)
class RateCurves:
    """Tokens per second over the last seconds. highest: at the top of the box."""

    generated: str
    trained: str
    highest: float


def rate_curves(rates: Sequence[tuple[float, float]]) -> RateCurves | None:
    """rates: generated and trained tokens per second, one pair for each of equal parts of the time. None before there
    is anything to see.
    """
    highest = max((each for pair in rates for each in pair), default=0.0)
    if highest <= 0:
        return None
    x, y = Range(low=0, high=max(1, len(rates) - 1)), Range(low=0, high=highest / (1 - _MARGIN))
    curves = [polyline([(index, pair[which]) for index, pair in enumerate(rates)], x, y) for which in (0, 1)]
    return RateCurves(generated=curves[0], trained=curves[1], highest=highest)

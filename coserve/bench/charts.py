"""Charts as inline SVG, for reports that need no network: pure functions from numbers to text.

Colours are names of CSS variables (`--blue`), which the page sets for light and dark. Each dot and
bar has its numbers in a `<title>`, which browsers show at the pointer. Legends are HTML above the
picture, so that they wrap and never cover anything.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 18, 12, 46
_MAX_TICKS = 6


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A range of values with a label."""

    label: str
    """What the values are, with the unit."""
    low: float
    """Value at the start."""
    high: float
    """Value at the end."""
    is_log: bool = False
    """Whether the scale is logarithmic."""
    names: tuple[tuple[float, str], ...] = ()
    """Ticks with names, in place of round numbers."""

    def share(self, value: float) -> float:
        """Return the position of a value, from 0 to 1; values outside are at the ends."""
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.is_log:
            low, high, value = log10(low), log10(high), log10(value)
        return (value - low) / (high - low)

    def ticks(self) -> list[float]:
        """Return some round values from low to high, or those that have names."""
        if self.names:
            return [value for value, _ in self.names]
        if not self.is_log:
            step = _round_step((self.high - self.low) / _MAX_TICKS)
            return [
                index * step
                for index in range(ceil(self.low / step - 1e-9), floor(self.high / step + 1e-9) + 1)
            ]
        decades = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
        for factors in ((1, 2, 5), (1, 3), (1,)):
            ticks = [factor * 10.0**decade for decade in decades for factor in factors]
            ticks = [tick for tick in ticks if self.low * 0.999 <= tick <= self.high * 1.001]
            if len(ticks) <= _MAX_TICKS:
                break
        return ticks

    def words(self, tick: float) -> str:
        """Return the label of a tick."""
        return escape(dict(self.names).get(tick) or number(tick))


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Place of the axes in a picture."""

    x: Axis
    """Horizontal axis."""
    y: Axis
    """Vertical axis."""
    width: int
    """Width in pixels."""
    height: int
    """Height in pixels."""

    def left(self, value: float) -> float:
        """Return the pixels from the left of a value."""
        return _LEFT + self.x.share(value) * (self.width - _LEFT - _RIGHT)

    def top(self, value: float) -> float:
        """Return the pixels from the top of a value."""
        return self.height - _BOTTOM - self.y.share(value) * (self.height - _TOP - _BOTTOM)


# A function that draws into a frame.
Mark = Callable[[Frame], str]


def chart(
    title: str, x: Axis, y: Axis, marks: Iterable[Mark], *, width: int = 480, height: int = 260
) -> str:
    """Return a picture with axes; the title is for those who cannot see it."""
    frame = Frame(x=x, y=y, width=width, height=height)
    drawn = "".join([_grid(frame), *(mark(frame) for mark in marks)])
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}" '
        f'xmlns="http://www.w3.org/2000/svg">{drawn}</svg>'
    )


def dots(points: Iterable[tuple[float, float, str]], colour: str, *, crossed: bool = False) -> Mark:
    """Return a mark of points with x, y and words; crosses differ from dots without any colour."""

    def draw(frame: Frame) -> str:
        return "".join(
            _dot(frame.left(x), frame.top(y), words, colour, crossed) for x, y, words in points
        )

    return draw


def line(points: Sequence[tuple[float, float]], colour: str, *, dashed: bool = False) -> Mark:
    """Return a mark of a line through points in their order."""

    def draw(frame: Frame) -> str:
        path = " ".join(f"{frame.left(x):.1f},{frame.top(y):.1f}" for x, y in points)
        dash = ' stroke-dasharray="6 5"' if dashed else ""
        stroke = f'stroke="var(--{colour})" stroke-width="2"{dash}'
        return f'<polyline points="{path}" fill="none" {stroke}/>'

    return draw


def rule(value: float, colour: str = "ink") -> Mark:
    """Return a mark of a dashed line across, at a value of y."""
    return lambda frame: line([(frame.x.low, value), (frame.x.high, value)], colour, dashed=True)(
        frame
    )


def stacks(
    bins: Sequence[tuple[float, float, Sequence[float]]],
    names: Sequence[str],
    colours: Sequence[str],
) -> Mark:
    """Return a mark of bars from start to end, each a stack of parts."""

    def draw(frame: Frame) -> str:
        return "".join(
            _stack(frame, start, end, parts, names, colours) for start, end, parts in bins
        )

    return draw


def legend(entries: Iterable[tuple[str, str, str]]) -> str:
    """Return HTML of a legend: a shape ("dot", "cross", "line", "dash", "box"), a colour and words
    for each entry.
    """
    items = "".join(
        f'<span class="entry">{_swatch(shape, colour)}{escape(words)}</span>'
        for shape, colour, words in entries
    )
    return f'<p class="legend">{items}</p>'


def number(value: float) -> str:
    """Return a number with three significant digits, as people write it."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def nice_high(values: Iterable[float], least: float = 1.0) -> float:
    """Return a round end for an axis that starts at 0."""
    top = max(max(values, default=least), least)
    step = _round_step(top / _MAX_TICKS)
    return step * ceil(top / step - 1e-9)


def _round_step(least: float) -> float:
    """Return 1, 2 or 5 times a power of ten, at least this."""
    power = 10.0 ** floor(log10(least))
    return power * next(factor for factor in (1, 2, 5, 10) if factor * power >= least * 0.999)


def _grid(frame: Frame) -> str:
    bottom, right = frame.height - _BOTTOM, frame.width - _RIGHT
    parts = []
    for tick in frame.y.ticks():
        top = frame.top(tick)
        parts.append(
            f'<line x1="{_LEFT}" x2="{right}" y1="{top:.1f}" y2="{top:.1f}" class="grid"/>'
        )
        parts.append(
            f'<text x="{_LEFT - 7}" y="{top + 4:.1f}" text-anchor="end">'
            f"{frame.y.words(tick)}</text>"
        )
    for tick in frame.x.ticks():
        left = frame.left(tick)
        parts.append(
            f'<line x1="{left:.1f}" x2="{left:.1f}" y1="{bottom}" y2="{bottom + 4}" class="tick"/>'
        )
        parts.append(
            f'<text x="{left:.1f}" y="{bottom + 19}" text-anchor="middle">'
            f"{frame.x.words(tick)}</text>"
        )
    middle = (_TOP + bottom) / 2
    parts.append(f'<line x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}" class="tick"/>')
    parts.append(
        f'<text x="{(_LEFT + right) / 2:.1f}" y="{frame.height - 7}" text-anchor="middle" '
        f'class="label">'
        f"{escape(frame.x.label)}</text>"
        f'<text transform="translate(13 {middle:.1f}) rotate(-90)" text-anchor="middle" '
        f'class="label">'
        f"{escape(frame.y.label)}</text>"
    )
    return "".join(parts)


def _dot(left: float, top: float, words: str, colour: str, crossed: bool) -> str:
    title = f"<title>{escape(words)}</title>"
    if crossed:
        path = f"M{left - 4:.1f} {top - 4:.1f}l8 8m0 -8l-8 8"
        return (
            f'<path d="{path}" stroke="var(--{colour})" stroke-width="2" fill="none">{title}</path>'
        )
    return (
        f'<circle cx="{left:.1f}" cy="{top:.1f}" r="3.2" fill="var(--{colour})" '
        f'fill-opacity="0.8">{title}</circle>'
    )


def _stack(
    frame: Frame,
    start: float,
    end: float,
    parts: Sequence[float],
    names: Sequence[str],
    colours: Sequence[str],
) -> str:
    left, right, below, drawn = frame.left(start), frame.left(end), 0.0, []
    words = ", ".join(f"{number(part)} {name}" for name, part in zip(names, parts, strict=True))
    for part, colour in zip(parts, colours, strict=True):
        if part <= 0:
            continue
        top, bottom = frame.top(below + part), frame.top(below)
        below += part
        drawn.append(
            f'<rect x="{left:.1f}" width="{max(right - left - 0.5, 0.5):.1f}" y="{top:.1f}" '
            f'height="{bottom - top:.1f}" fill="var(--{colour})"/>'
        )
    moment = f"{number(start)} to {number(end)}"
    return f"<g><title>{escape(f'{moment}: {words}')}</title>{''.join(drawn)}</g>"


def _swatch(shape: str, colour: str) -> str:
    draw = {
        "dot": f'<circle cx="8" cy="6" r="4" fill="var(--{colour})"/>',
        "cross": f'<path d="M4 2l8 8m0 -8l-8 8" stroke="var(--{colour})" stroke-width="2"/>',
        "line": f'<line x1="0" x2="16" y1="6" y2="6" stroke="var(--{colour})" stroke-width="2.5"/>',
        "dash": f'<line x1="0" x2="16" y1="6" y2="6" stroke="var(--{colour})" stroke-width="2" '
        'stroke-dasharray="4 3"/>',
        "box": f'<rect x="2" y="0" width="12" height="12" fill="var(--{colour})"/>',
    }
    return f'<svg class="swatch" viewBox="0 0 16 12" aria-hidden="true">{draw[shape]}</svg>'

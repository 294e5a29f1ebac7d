"""Picture of `python -m experiments.profile`: each kind of step beside its floors."""

from typing import Any

from coserve.bench.charts import Axis, chart, legend, nice_high, number, stacks
from coserve.bench.report import escape, figure, page, subtitle

_COLOURS = {
    "products": "blue",
    "attention": "sky",
    "adapters": "orange",
    "head and loss": "red",
    "sampling": "purple",
    "elementwise": "green",
    "Python": "dim",
    "waiting": "line",
}


def profile_html(result: dict[str, Any]) -> str:
    """Return the page of a result of `profile.run`."""
    title = "Where the time of a step goes"
    entries = legend([("box", colour, part) for part, colour in _COLOURS.items()])
    figures = "".join(
        figure(f"{step['step']}: {number(step['step_ms'])} ms", _piles(step))
        for step in result["steps"]
    )
    words = (
        f"{result['requests']} requests decode at context {result['context']}; the window has "
        f"{result['window_rows']} "
        f"rows, the backward pass {result['rows']}. Times are {result['clock']}. A floor is what a "
        f"part takes "
        f"at least: bytes read once at {result['bytes_per_s'] / 1e9:.1f} GB/s, or FLOPs at "
        f"{result['flops_per_s'] / 1e9:.0f} GFLOP/s, as measured in the same run."
    )
    body = f'<h1>{title}</h1>{subtitle(result)}<p class="note">{escape(words)}</p>{entries}'
    return page(title, f'{body}<div class="pair">{figures}</div>')


def _piles(step: dict[str, Any]) -> str:
    measured, floors = (
        [step[name][part] for part in _COLOURS] for name in ("parts_ms", "floor_ms")
    )
    x = Axis(label=f"{step['step']} step", low=0, high=2, names=((0.5, "measured"), (1.5, "floor")))
    y = Axis(label="ms", low=0, high=nice_high([sum(measured)], least=1e-3))
    bins = [(0.15, 0.85, measured), (1.15, 1.85, floors)]
    return chart(
        f"{step['step']} step by part",
        x,
        y,
        [stacks(bins, list(_COLOURS), list(_COLOURS.values()))],
    )

"""Report of `python -m experiments.compare`: one page that loads nothing."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from coserve.bench.cells import ATTAINMENT, JOBS_ALONE, Cell
from coserve.bench.charts import Axis, Mark, chart, dots, legend, line, nice_high, number, rule
from coserve.bench.open_loop import Sample
from coserve.bench.report import escape, figure, page, section, subtitle
from coserve.workloads.summary import percentile
from experiments.compare.comparison import Compared

_COLOURS = ("orange", "blue", "green", "purple", "red", "sky", "ink", "dim")
_NUM_BINS = 60
# The burst is the stretch of this share of the trace's time in which most requests come; as much is
# drawn around it.
_BURST_SHARE = 1 / 8

# A policy's place among the policies -> its line.
_Styles = dict[str, tuple[str, bool]]


def compare_html(result: dict[str, Any], places: Sequence[Compared]) -> str:
    """Return the page of results on several places and of what was printed as JSON."""
    title = "Every policy on one trace"
    body = "".join(_place(compared) for compared in places)
    return page(
        title,
        f"<h1>{title}</h1>{subtitle(result)}{body}{section('How it was run', _settings(result))}",
    )


def _place(compared: Compared) -> str:
    styles = _styles(compared.cells)
    slos = (
        f"SLOs: {number(1e3 * compared.slo.ttft_s)} ms to the first token, "
        f"{number(1e3 * compared.slo.tpot_s)} ms per "
        f"later one; a decode step of one request alone takes {number(1e3 * compared.solo_s)} ms. "
        f"Lengths of the trace "
        f"times {compared.length_factor:g}."
    )
    if compared.saturation is not None:
        slos += f" Requests alone hold both up to {number(compared.saturation)} requests/s."
    charts = (
        _over_rates(
            compared, styles, "tuning tokens/s", lambda cell: cell.played.tuning_tokens_per_s, None
        ),
        _over_rates(
            compared,
            styles,
            "share of requests that held both SLOs",
            lambda cell: cell.attainment,
            ATTAINMENT,
        ),
        _distribution(compared, styles, "ttft_s", "time to first token"),
        _distribution(compared, styles, "tpot_s", "time per output token"),
        *_burst(compared, styles),
    )
    entries = legend(
        ("dash" if dashed else "line", colour, policy)
        for policy, (colour, dashed) in styles.items()
    )
    pair = f'<div class="pair">{"".join(charts)}</div>'
    body = f'<p class="note">{escape(slos)}</p>{entries}{pair}{_table(compared)}'
    return section(compared.place, body + _ended(compared) + _model_error(compared))


def _ended(compared: Compared) -> str:
    told = (
        f"{each.policy} has no row from {each.load} on: {each.reason}" for each in compared.ended
    )
    return "".join(f'<p class="note">{escape(words)}</p>' for words in told)


def _styles(cells: Iterable[Cell]) -> _Styles:
    policies = list(dict.fromkeys(cell.policy for cell in cells))
    return {
        policy: (_COLOURS[i % len(_COLOURS)], i >= len(_COLOURS))
        for i, policy in enumerate(policies)
    }


def _drawn(points: Sequence[tuple[float, float]], style: tuple[str, bool]) -> Mark:
    return line(points, style[0], dashed=style[1])


def _over_rates(
    compared: Compared,
    styles: _Styles,
    words: str,
    value: Callable[[Cell], float],
    goal: float | None,
) -> str:
    rates = [cell.rate for cell in compared.cells]
    marks = [] if goal is None else [rule(goal)]
    for policy, style in styles.items():
        points = [(cell.rate, value(cell)) for cell in compared.cells if cell.policy == policy]
        told = [
            (x, y, f"{policy} at {number(x)} requests/s: {number(y)} {words}") for x, y in points
        ]
        marks += [_drawn(points, style), dots(told, style[0])]
    x = Axis(label="requests/s", low=0, high=nice_high(rates, least=1e-3))
    high = (
        1.0 if goal is not None else nice_high((value(cell) for cell in compared.cells), least=1e-3)
    )
    caption = words.capitalize()
    return figure(caption, chart(caption, x, Axis(label=words, low=0, high=high), marks))


def _distribution(compared: Compared, styles: _Styles, kind: str, words: str) -> str:
    """Return a chart of the share of requests with at most a latency, at the highest rate."""
    slo_s = getattr(compared.slo, kind)
    values_by = {
        cell.policy: [
            getattr(each, kind) for each in cell.played.outcomes if getattr(each, kind) is not None
        ]
        for cell in compared.cells
        if cell.rate == max(each.rate for each in compared.cells) and cell.policy != JOBS_ALONE
    }
    values = [1e3 * value for each in values_by.values() for value in each if value > 0] or [
        1e3 * slo_s
    ]
    x = Axis(
        label=f"{words}, ms",
        low=max(percentile(values, 0.01) / 1.5, 1e-3),
        high=1.5 * max(*values, 1e3 * slo_s),
        is_log=True,
    )
    y = Axis(label="share of requests", low=0, high=1)
    marks = [line([(1e3 * slo_s, 0), (1e3 * slo_s, 1)], "ink", dashed=True)]
    for policy, each in values_by.items():
        points = (
            [(1e3 * percentile(each, share / 100), share / 100) for share in range(101)]
            if each
            else []
        )
        marks.append(_drawn(points, styles[policy]))
    caption = f"{words.capitalize()} at the highest rate (dashed: SLO)"
    return figure(caption, chart(caption, x, y, marks))


def _burst(compared: Compared, styles: _Styles) -> Iterable[str]:
    """Return charts of the middle rate, around the time when most requests arrive."""
    rates = sorted({cell.rate for cell in compared.cells})
    middle = [cell for cell in compared.cells if cell.rate == rates[len(rates) // 2]]
    # Jobs alone see no burst, and what separate processes do meanwhile is not known.
    cells = [cell for cell in middle if cell.policy != JOBS_ALONE and not cell.is_separate]
    if not cells or not cells[0].played.outcomes:
        return
    seconds = cells[0].played.seconds
    low, high = _around_burst([each.arrival_s for each in cells[0].played.outcomes], seconds)
    width = (high - low) / _NUM_BINS
    x = Axis(label="seconds from the start of the trace", low=low, high=high)
    for caption, label, value in (
        ("A burst: requests under way", "requests", _num_open),
        ("A burst: fine-tuning meanwhile", "tuning tokens/s", _tuning_rate),
    ):
        curves = {cell.policy: list(value(cell.played.samples, low, high, width)) for cell in cells}
        top = nice_high((y for points in curves.values() for _, y in points), least=1.0)
        marks = [_drawn(points, styles[policy]) for policy, points in curves.items()]
        yield figure(caption, chart(caption, x, Axis(label=label, low=0, high=top), marks))


def _around_burst(arrivals_s: Sequence[float], seconds: float) -> tuple[float, float]:
    width = seconds * _BURST_SHARE
    start_s = max(
        arrivals_s, key=lambda at_s: sum(at_s <= other < at_s + width for other in arrivals_s)
    )
    low = max(0.0, min(start_s - width, seconds - 3 * width))
    return low, low + 3 * width


def _num_open(
    samples: Sequence[Sample], low: float, high: float, width: float
) -> Iterable[tuple[float, float]]:
    for start, inside in _binned(samples, low, high, width):
        if inside:
            yield start + width / 2, max(sample.num_open for sample in inside)


def _tuning_rate(
    samples: Sequence[Sample], low: float, high: float, width: float
) -> Iterable[tuple[float, float]]:
    before = max((sample.num_trained for sample in samples if sample.at_s <= low), default=0.0)
    for start, inside in _binned(samples, low, high, width):
        after = inside[-1].num_trained if inside else before
        yield start + width / 2, max(0.0, after - before) / width
        before = after


def _binned(
    samples: Sequence[Sample], low: float, high: float, width: float
) -> Iterable[tuple[float, list[Sample]]]:
    bins: list[list[Sample]] = [[] for _ in range(_NUM_BINS)]
    for sample in samples:
        if low < sample.at_s < high:
            bins[min(int((sample.at_s - low) / width), _NUM_BINS - 1)].append(sample)
    return [(low + index * width, inside) for index, inside in enumerate(bins)]


_COLUMNS: tuple[tuple[str, str], ...] = (
    ("requests", "requests"),
    ("attainment", "held both SLOs"),
    ("ttft_p50_ms", "TTFT ms p50"),
    ("ttft_p99_ms", "p99"),
    ("tpot_p50_ms", "TPOT ms p50"),
    ("tpot_p99_ms", "p99"),
    ("inference_tokens_per_s", "output tokens/s"),
    ("tuning_tokens_per_s", "tuning tokens/s"),
    ("evictions", "evictions"),
    ("prediction_error", "prediction error"),
)
_SHARES = ("attainment", "prediction_error")


def _table(compared: Compared) -> str:
    head = "".join(f'<th scope="col">{escape(words)}</th>' for _, words in _COLUMNS)
    body = ""
    for cell in compared.cells:
        row = cell.row()
        cells = "".join(f"<td>{_cell(name, row[name])}</td>" for name, _ in _COLUMNS)
        body += f'<tr><th scope="row">{escape(cell.policy)}, {number(cell.rate)}/s</th>{cells}</tr>'
    return (
        '<div class="scroll"><table class="numbers"><thead><tr><td></td>'
        f"{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1%}" if name in _SHARES else number(value)


def _model_error(compared: Compared) -> str:
    if not compared.modelled:
        return ""
    errors = compared.result()["model_error"]
    names = {
        "tuning_tokens_per_s": "tuning tokens/s",
        "ttft_p99_ms": "TTFT p99",
        "tpot_p99_ms": "TPOT p99",
    }
    errors = ", ".join(
        f"{names[name]} {_cell('attainment', value)}" for name, value in errors.items()
    )
    words = f"Mean errors of the model of this device over these rows: {errors}."
    return f'<p class="note">{escape(words)}</p>'


def _settings(result: dict[str, Any]) -> str:
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(str(value))}</dd></div>"
        for name, value in result["settings"].items()
    )
    return f"<dl>{items}</dl>"

"""Report of the demo: one page that needs no network, made from the data of `results.json` only."""

import re
from collections.abc import Callable, Iterable, Sequence
from html import escape as html_escape
from importlib.resources import files
from typing import Any

from coserve.bench.charts import Axis, chart, dots, legend, line, nice_high, number, rule, stacks
from coserve.workloads.summary import percentile

# Phases by their names in the results: what they are called, and their colour.
_PHASES = {
    "requests": ("requests alone", "blue"),
    "both": ("with fine-tuning", "orange"),
    "job": ("job alone", "green"),
}
_KINDS = {
    "decode": "blue",
    "prefill": "sky",
    "fine-tuning, forward": "orange",
    "fine-tuning, backward": "red",
}
_OWNER_COLOURS = {"kv": "blue", "activations": "orange"}
_MORE_COLOURS = ("green", "purple", "sky", "red")
# Bars across a chart.
_NUM_BINS = 60


# Characters that XML does not allow: models can generate any text.
_UNPRINTABLE = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def report_html(results: dict[str, Any]) -> str:
    """Return the page."""
    title = "Serving and fine-tuning at once"
    parts = [
        f"<h1>{title}</h1>",
        subtitle(results),
        _tiles(results),
        section("Results", _comparison(results)),
        section("Every request, with and without fine-tuning", _request_charts(results)),
        section("The device", _device_charts(results)),
        section("What was learned", _learned(results)),
        section("Settings", _settings(results)),
    ]
    return page(title, "".join(parts))


def page(title: str, body: str) -> str:
    """Return a page with everything in it, which is also XHTML."""
    return (
        '<!DOCTYPE html>\n<html lang="en" xmlns="http://www.w3.org/1999/xhtml"><head>'
        '<meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>coserve: {escape(title.lower())}</title><style>{_style()}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def escape(text: str) -> str:
    """Return text escaped for the page or one of its attributes."""
    return html_escape(_UNPRINTABLE.sub("\ufffd", text))


def _style() -> str:
    return files("coserve.bench").joinpath("report.css").read_text("utf-8")


def section(title: str, body: str) -> str:
    """Return a part of the page, with its heading."""
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def subtitle(results: dict[str, Any]) -> str:
    """Return the model, its dtype, the machine and the date."""
    words = [results["model"], results["dtype"], results["machine"], results["date"]]
    return f'<p class="subtitle">{escape(" · ".join(str(word) for word in words))}</p>'


def _tiles(results: dict[str, Any]) -> str:
    """Return the few numbers that matter."""
    alone, both, job = (results["phases"][name] for name in ("requests", "both", "job"))
    ours, theirs = both["summary"], alone["summary"]
    slos = results["objectives"]
    trained, most = both["tuning"]["tokens_per_s"], job["tuning"]["tokens_per_s"]
    losses = [loss for _, _, loss in both["tuning"]["losses"]]
    tiles = [
        (
            _share(ours["attainment"]),
            "of requests held both SLOs while the model was fine-tuned",
            f"{_share(theirs['attainment'])} without",
        ),
        (_ms(ours["ttft_ms"]["p99"]), "p99 time to first token", f"SLO {_ms(slos['ttft_ms'])}"),
        (_ms(ours["tpot_ms"]["p99"]), "p99 time per output token", f"SLO {_ms(slos['tpot_ms'])}"),
        (
            _count(trained),
            "tokens/s of fine-tuning harvested meanwhile",
            f"{_share(trained / most)} of the job alone" if trained and most else "",
        ),
    ]
    if losses:
        tiles.append(
            (
                f"{losses[-1]:.3g}",
                "training loss at the end",
                f"from {losses[0]:.3g} at the first step",
            )
        )
    items = "".join(
        f"<li><strong>{escape(value)}</strong><span>{escape(words)}</span>"
        f'<span class="dim">{escape(more)}</span></li>'
        for value, words, more in tiles
    )
    return f'<ul class="tiles">{items}</ul>'


# -- the comparison -----------------------------------------------------------------------


def _comparison(results: dict[str, Any]) -> str:
    phases, slos = results["phases"], results["objectives"]

    def served(read: Callable[[dict[str, Any]], str]) -> list[str]:
        summaries = [phases[name]["summary"] for name in ("requests", "both")]
        return [*(read(summary) for summary in summaries), ""]

    def engine(read: Callable[[dict[str, Any]], str]) -> list[str]:
        return [*(read(phases[name]["engine"]) for name in ("requests", "both")), ""]

    def trained(read: Callable[[dict[str, Any]], str]) -> list[str]:
        return ["", *(read(phases[name]["tuning"]) for name in ("both", "job"))]

    rows = [
        ("requests", served(lambda s: _count(s["requests"]))),
        ("that failed", served(lambda s: _count(s["failed"]))),
        ("held both SLOs", served(lambda s: _share(s["attainment"]))),
        ("time to first token, p50", served(lambda s: _ms(s["ttft_ms"]["p50"]))),
        (f"p99 (SLO {_ms(slos['ttft_ms'])})", served(lambda s: _ms(s["ttft_ms"]["p99"]))),
        ("time per output token, p50", served(lambda s: _ms(s["tpot_ms"]["p50"]))),
        (f"p99 (SLO {_ms(slos['tpot_ms'])})", served(lambda s: _ms(s["tpot_ms"]["p99"]))),
        ("gap between two pieces of text, p99", served(lambda s: _ms(s["gap_ms"]["p99"]))),
        ("held both, by the engine's clock", engine(lambda e: _share(e["attainment"]))),
        (
            "time per output token, p99, by the engine's clock",
            engine(lambda e: _ms(e["tpot_p99_ms"])),
        ),
        ("output tokens/s", served(lambda s: _count(s["output_tokens_per_s"]))),
        ("fine-tuning tokens/s", trained(lambda t: _count(t["tokens_per_s"]))),
        (
            "optimizer steps",
            trained(lambda t: f"{t['steps']:,}" + ("" if t["finished"] else " (stopped)")),
        ),
        ("time it took", trained(lambda t: f"{t['seconds']:.1f} s")),
    ]
    head = "".join(
        f'<th scope="col">{escape(words)}</th>' for words in ("requests alone", "both", "job alone")
    )
    body = ""
    for name, cells in rows:
        columns = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        body += f'<tr><th scope="row">{escape(name)}</th>{columns}</tr>'
    return (
        '<div class="scroll"><table class="numbers"><thead><tr><td></td>'
        f"{head}</tr></thead><tbody>{body}</tbody></table></div>"
        '<p class="note">The trace of requests and the job are the same in all phases. Latencies '
        "are those that senders see over HTTP, from the time at which the trace has a request "
        "arrive. A gap between two pieces of text can be several tokens long, as tokens without "
        "text (such as the end of an answer, left out here) send nothing. Only requests that "
        "arrive while the job beside them runs are counted. The job alone is stopped after the "
        "time of the trace; beside requests, it has as many epochs as are expected to fill that "
        "time.</p>"
    )


# -- charts ---------------------------------------------------------------------------------


def _request_charts(results: dict[str, Any]) -> str:
    kinds = [("ttft_ms", "time to first token"), ("tpot_ms", "time per output token")]
    return "".join(_request_chart(results, kind, words) for kind, words in kinds)


def _request_chart(results: dict[str, Any], kind: str, words: str) -> str:
    """Return both phases over the same axis: the trace is the same, so dots above each other are
    the same request.
    """
    slo = results["objectives"][kind]
    by_phase = {
        name: [o for o in results["phases"][name]["outcomes"] if o[kind]]
        for name in ("requests", "both")
    }
    values = [outcome[kind] for outcomes in by_phase.values() for outcome in outcomes] + [slo]
    x = Axis(label="seconds from the start of the trace", low=0, high=results["config"]["seconds"])
    # Few are far below the others (two tokens that arrive at once): they are at the edge.
    y = Axis(
        label=f"{words}, ms",
        low=max(percentile(values, 0.05) / 2, 1e-3),
        high=max(values) * 1.5,
        is_log=True,
    )
    # Requests after the end of the job have a colour of their own.
    end_s = results["phases"]["both"].get("job_end_s") or float("inf")
    groups = [
        (_PHASES["requests"], by_phase["requests"]),
        (_PHASES["both"], [o for o in by_phase["both"] if o["arrival_s"] <= end_s]),
        (
            ("after the job had ended", "dim"),
            [o for o in by_phase["both"] if o["arrival_s"] > end_s],
        ),
    ]
    marks, entries = [rule(slo)], []
    for (name, colour), outcomes in groups:
        held = [outcome for outcome in outcomes if outcome[kind] <= slo]
        late = [outcome for outcome in outcomes if outcome[kind] > slo]
        marks += [
            dots([_dot(outcome, kind) for outcome in held], colour),
            dots([_dot(outcome, kind) for outcome in late], colour, crossed=True),
        ]
        if outcomes:
            entries.append(("dot", colour, name))
        if late:
            entries.append(("cross", colour, f"{name}, too late"))
    entries.append(("dash", "ink", f"SLO, {_ms(slo)}"))
    caption = f"{words.capitalize()} of every request"
    return figure(
        caption, legend(entries) + chart(caption, x, y, marks, width=960, height=260), wide=True
    )


def _dot(outcome: dict[str, Any], kind: str) -> tuple[float, float, str]:
    words = (
        f"request at {outcome['arrival_s']:.1f} s: {_ms(outcome[kind])}, "
        f"{outcome['num_output_tokens']} tokens"
    )
    return outcome["arrival_s"], outcome[kind], words


def _device_charts(results: dict[str, Any]) -> str:
    charts = (_tuning_rate(results), _rows(results), _loss(results), _memory(results))
    return f'<div class="pair">{"".join(charts)}</div>'


def _tuning_rate(results: dict[str, Any]) -> str:
    high_s = _seconds(results, "both", "job")
    width_s = max(1.0, high_s / _NUM_BINS)
    curves = {}
    for name in ("both", "job"):
        bins = _binned(results["phases"][name]["steps"], width_s)
        curves[name] = [
            ((index + 0.5) * width_s, _trained(steps) / width_s) for index, steps in bins
        ]
    x = Axis(label="seconds", low=0, high=high_s)
    y = Axis(
        label="tokens/s",
        low=0,
        high=nice_high(rate for curve in curves.values() for _, rate in curve),
    )
    caption = "Fine-tuning: tokens per second"
    marks = [line(curve, _PHASES[name][1]) for name, curve in curves.items()]
    entries = [
        ("line", _PHASES[name][1], "beside requests" if name == "both" else "job alone")
        for name in curves
    ]
    return figure(caption, legend(entries) + chart(caption, x, y, marks))


def _trained(steps: Iterable[Sequence[float]]) -> float:
    """Return the tokens that steps train; forward and backward each count half."""
    # Columns 5 and 6 are rows of windows (forward) and of tasklets (backward).
    return sum(step[5] + step[6] for step in steps) / 2


def _mean_rows(steps: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean rows of steps by kind, in the order of `_KINDS`."""
    return [sum(step[3 + kind] for step in steps) / len(steps) for kind in range(len(_KINDS))]


def _rows(results: dict[str, Any]) -> str:
    phase = results["phases"]["both"]
    width_s = max(0.5, phase["seconds"] / _NUM_BINS)
    bins = [
        (index * width_s, (index + 1) * width_s, _mean_rows(steps))
        for index, steps in _binned(phase["steps"], width_s)
        if steps
    ]
    x = Axis(label="seconds", low=0, high=phase["seconds"])
    y = Axis(
        label="rows of a step, mean", low=0, high=nice_high(sum(parts) for _, _, parts in bins)
    )
    caption = "Rows of a step, by kind"
    picture = chart(caption, x, y, [stacks(bins, list(_KINDS), list(_KINDS.values()))])
    return figure(
        caption, legend([("box", colour, name) for name, colour in _KINDS.items()]) + picture
    )


def _loss(results: dict[str, Any]) -> str:
    curves = {name: results["phases"][name]["tuning"]["losses"] for name in ("both", "job")}
    steps = [step for curve in curves.values() for _, step, _ in curve]
    values = [loss for curve in curves.values() for _, _, loss in curve]
    x = Axis(label="optimizer step", low=0, high=max(steps, default=1))
    y = Axis(label="training loss", low=0, high=nice_high(values, least=0.1))
    caption = "Loss: the same, whatever runs beside the job"
    # The job alone is dashed and on top, so that both are visible where they agree.
    styles = [("both", False, "line", "beside requests"), ("job", True, "dash", "job alone")]
    marks = [
        line([(s, v) for _, s, v in curves[name]], _PHASES[name][1], dashed=dashed)
        for name, dashed, _, _ in styles
    ]
    entries = [(shape, _PHASES[name][1], words) for name, _, shape, words in styles]
    return figure(caption, legend(entries) + chart(caption, x, y, marks))


def _memory(results: dict[str, Any]) -> str:
    phase = results["phases"]["both"]
    owners = sorted(
        {owner for _, pages in phase["memory"] for owner in pages} - {"free"}, key=_owner_order
    )
    colours = (
        dict(zip((o for o in owners if o not in _OWNER_COLOURS), _MORE_COLOURS, strict=False))
        | _OWNER_COLOURS
    )
    width_s = max(0.5, phase["seconds"] / _NUM_BINS)
    bins = []
    parts = [0] * len(owners)
    for i, samples in _binned(phase["memory"], width_s):
        if samples:  # an idle engine reports nothing: its memory is unchanged
            parts = [max(pages.get(owner, 0) for _, pages in samples) for owner in owners]
        bins.append((i * width_s, (i + 1) * width_s, parts))
    total = max((sum(pages.values()) for _, pages in phase["memory"]), default=0)
    x = Axis(label="seconds", low=0, high=phase["seconds"])
    y = Axis(label="pages in use", low=0, high=nice_high(sum(parts) for _, _, parts in bins))
    caption = f"Memory: pages in use by owner, of {total:,}"
    drawn = [colours.get(owner, "purple") for owner in owners]
    entries = [
        ("box", colour, _OWNERS.get(owner, owner))
        for owner, colour in zip(owners, drawn, strict=True)
    ]
    return figure(caption, legend(entries) + chart(caption, x, y, [stacks(bins, owners, drawn)]))


_OWNERS = {"kv": "keys and values", "activations": "activations of fine-tuning"}


def _owner_order(owner: str) -> tuple[bool, str]:
    return owner not in _OWNER_COLOURS, owner if owner not in _OWNER_COLOURS else str(
        list(_OWNER_COLOURS).index(owner)
    )


def _binned(samples: Iterable[Sequence[Any]], width_s: float) -> list[tuple[int, list[Any]]]:
    """Return samples, which begin with their second, by bins of some seconds from 0, with the empty
    ones.
    """
    bins: dict[int, list[Any]] = {}
    for sample in samples:
        bins.setdefault(max(0, int(sample[0] / width_s)), []).append(sample)
    return [(index, bins.get(index, [])) for index in range(max(bins, default=-1) + 1)]


def _seconds(results: dict[str, Any], *names: str) -> float:
    seconds: list[float] = [results["phases"][name]["seconds"] for name in names]
    return max(1.0, *seconds)


def figure(caption: str, body: str, *, wide: bool = False) -> str:
    """Return a chart with its title."""
    name = "wide" if wide else "half"
    return f'<figure class="{name}"><figcaption>{escape(caption)}</figcaption>{body}</figure>'


# -- words -----------------------------------------------------------------------------------


def _learned(results: dict[str, Any]) -> str:
    rows = "".join(
        f'<tr><td data-name="question">{escape(q["question"])}</td>'
        f'<td data-name="before">{escape(q["before"])}</td>'
        f'<td data-name="after">{escape(q["after"])}</td></tr>'
        for q in results["questions"]
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("question", "before", "after"))
    model, score = results["job"]["model"] or "none: the job made no checkpoint", results["score"]
    return (
        f'<table class="words"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
        f'<p class="note">None of these questions was among the examples. Of {score["asked"]} '
        f"such questions, {_share(score['before'])} were answered word for word as in the lesson "
        f"before, and {_share(score['after'])} after. Before: the base model, "
        f"{escape(results['model'])}. After: <code>{escape(model)}</code>; its weights are beside "
        f"this page in <code>adapter/</code>, in PEFT's format.</p>"
    )


def _settings(results: dict[str, Any]) -> str:
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(str(value))}</dd></div>"
        for name, value in results["settings"].items()
    )
    return f"<dl>{items}</dl>"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}".replace(".0%", "%")


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{number(value)} ms"


def _count(value: float | None) -> str:
    return "–" if value is None else number(value)

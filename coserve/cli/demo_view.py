"""Views of `coserve demo` while it runs and at its end, as rich renderables of its state and
results.
"""

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from coserve.bench.demo import PHASES, DemoState, PhaseName, Recording
from coserve.cli.drawing import (
    BAD,
    DIM,
    GOOD,
    against,
    duration,
    milliseconds,
    printable,
    progress_bar,
    resampled,
    sparkline,
    stacked_bar,
)
from coserve.cli.tables import table
from coserve.workloads.summary import percentile

_NAMES: dict[PhaseName, str] = {
    "requests": "requests alone",
    "job": "job alone",
    "both": "both at once",
}
_KINDS = (("decode", "blue"), ("prefill", "cyan"), ("forward", "yellow"), ("backward", "red"))
_OWNERS = {"kv": ("keys and values", "blue"), "activations": ("activations", "yellow")}
# Rows are shown as the mean over this many of the last steps.
_RECENT_STEPS = 40


def live_view(state: DemoState, width: int) -> RenderableType:
    """Return the whole screen; 80 columns are enough."""
    current = state.current
    parts: list[RenderableType] = [
        Panel(_phases(state), title="coserve demo", title_align="left", border_style="cyan")
    ]
    if current is not None:
        half = width // 2
        pair = Table.grid(expand=True)
        pair.add_column(ratio=1)
        pair.add_column(ratio=1)
        requests = Panel(
            _requests(current, half - 4), title="requests, and their p99", title_align="left"
        )
        tuning = Panel(_tuning(current, width - half - 4), title="fine-tuning", title_align="left")
        pair.add_row(requests, tuning)
        parts += [pair, Panel(_device(current, width - 4), title="the device", title_align="left")]
    return Group(*parts)


def _phases(state: DemoState) -> Text:
    """Return a line for each phase: done, running, or to come."""
    lines = []
    for name in PHASES:
        recording = state.recordings.get(name)
        if recording is None:
            lines.append(Text(f"  {_NAMES[name]}", style=DIM))
        elif recording is state.current and not recording.seconds:
            lines.append(
                Text(f"▶ {_NAMES[name]:<15} ", style="bold").append(_clock(recording), style="none")
            )
        else:
            lines.append(
                Text("✓ ", style=GOOD)
                .append(f"{_NAMES[name]:<15} ", style="none")
                .append_text(_came_to(recording))
            )
    asks = state.current is None or state.current.seconds
    lines.append(Text(state.doing if asks else "", style=DIM))
    return Text("\n").join(lines)


def _clock(recording: Recording) -> str:
    return f"{duration(recording.now_s)} of about {duration(recording.planned_s)}"


def _came_to(recording: Recording) -> Text:
    parts = []
    if recording.load is not None:
        parts.append(f"p99 to first token {milliseconds(_p99_ms(_firsts(recording)))}")
        parts.append(f"per token {milliseconds(_p99_ms(_means(recording)))}")
    if recording.progress is not None:
        parts.append(f"{recording.tuned_per_s or 0.0:,.0f} tokens/s trained")
    return Text(", ".join(parts), style=DIM)


def _requests(recording: Recording, width: int) -> Text:
    load, slos = recording.load, recording.status.get("objectives") or {}
    if load is None:
        return Text("none in this phase\n\n\n", style=DIM)
    failed = sum(outcome.error is not None for outcome in load.outcomes)
    lines = [Text(f"{len(load.outcomes)} answered, {load.num_open} open")]
    if failed:
        lines[0].append(f", {failed} failed", style=BAD)
    kinds = (("to 1st", _firsts(recording), "ttft_ms"), ("per tok", _means(recording), "tpot_ms"))
    for words, values_s, name in kinds:
        slo = slos.get(name)
        values = [1e3 * value for value in values_s]
        line = Text(f"{words:<8}")
        line.append_text(sparkline(values, max(4, width - 29), low=0.0, limit=slo)).append(" ")
        lines.append(line.append_text(against(_p99_ms(values_s), slo)))
    if slos and load.outcomes:
        limits = {f"{kind}_s": slos[f"{kind}_ms"] / 1e3 for kind in ("ttft", "tpot")}
        held = sum(outcome.attained(**limits) for outcome in load.outcomes) / len(load.outcomes)
        lines.append(
            Text(f"{held:.1%}", style=GOOD if held >= 0.99 else BAD).append(
                " held both SLOs", style="none"
            )
        )
    return Text("\n").join(_padded(lines, 4))


def _tuning(recording: Recording, width: int) -> Text:
    progress = recording.progress
    if progress is None:
        return Text("none in this phase\n\n\n", style=DIM)
    lines = [Text(progress.job["status"], style="bold")]
    if progress.num_steps:
        lines[0].append(f"  step {progress.step:,} of {progress.num_steps:,}", style="none")
        if progress.left_s is not None:
            lines[0].append(f"  {duration(progress.left_s)} left", style=DIM)
        lines.append(progress_bar(progress.step / progress.num_steps, width))
    if progress.loss is not None:
        room = max(4, width - 18)
        curve = sparkline(resampled(list(progress.losses.values()), room), room, low=0.0)
        lines.append(Text("loss     ").append_text(curve).append(f" {progress.loss:.3g}"))
    rates = _rates(recording)
    curve = sparkline(rates, max(4, width - 18), low=0.0)
    lines.append(Text("tokens/s ").append_text(curve).append(f" {rates[-1] if rates else 0:,.0f}"))
    return Text("\n").join(_padded(lines, 4))


def _device(recording: Recording, width: int) -> Text:
    steps = recording.steps[-_RECENT_STEPS:]
    means = [
        sum(step[3 + kind] for step in steps) / len(steps) if steps else 0.0 for kind in range(4)
    ]
    bar_width = max(10, width - 7)
    colours = [colour for _, colour in _KINDS]
    rows = Text("rows   ").append_text(stacked_bar(zip(means, colours, strict=True), bar_width))
    labels = Text("       ")
    for (name, colour), mean in zip(_KINDS, means, strict=True):
        labels.append("■ ", style=colour).append(f"{mean:.0f} {name}  ")
    labels.append("a step", style=DIM)
    pages: dict[str, int] = recording.memory[-1][1] if recording.memory else {}
    total, owners = sum(pages.values()), [owner for owner in pages if owner != "free"]
    looks = {owner: _OWNERS.get(owner, (owner, "magenta")) for owner in owners}
    parts = [(pages[owner], looks[owner][1]) for owner in owners]
    memory = Text("pages  ").append_text(stacked_bar(parts, bar_width, total=total))
    shares = Text("       ")
    for owner in owners:
        shares.append("■ ", style=looks[owner][1]).append(f"{pages[owner]:,} {looks[owner][0]}  ")
    shares.append(f"of {total:,}", style=DIM)
    return Text("\n").join([rows, labels, memory, shares])


# -- at the end ---------------------------------------------------------------------------


def comparison(results: dict[str, Any]) -> Table:
    """Return a table of the three phases side by side."""
    shown = table("", ">requests alone", ">both at once", ">job alone")
    phases, slos = results["phases"], results["objectives"]
    summaries = [phases[name]["summary"] for name in ("requests", "both")]
    for kind, words in (("ttft_ms", "p99 to first token"), ("tpot_ms", "p99 per output token")):
        cells = [against(summary[kind]["p99"], slos[kind]) for summary in summaries]
        shown.add_row(words, *cells, "")
    shares = [summary["attainment"] for summary in summaries]
    shown.add_row(
        "held both SLOs", *("–" if share is None else f"{share:.1%}" for share in shares), ""
    )
    tunings = [phases[name]["tuning"] for name in ("both", "job")]
    rates = [tuning["tokens_per_s"] for tuning in tunings]
    shown.add_row(
        "fine-tuning tokens/s", "", *("–" if rate is None else f"{rate:,.0f}" for rate in rates)
    )
    shown.add_row(
        "optimizer steps",
        "",
        *(f"{tuning['steps']:,} in {tuning['seconds']:.0f} s" for tuning in tunings),
    )
    return shown


def questions(results: dict[str, Any]) -> Table:
    """Return a table of the questions with the answers before and after."""
    shown = table("question", "before", "after")
    for asked in results["questions"]:
        shown.add_row(*(Text(printable(asked[name])) for name in ("question", "before", "after")))
    return shown


# -- numbers ------------------------------------------------------------------------------


def _firsts(recording: Recording) -> list[float]:
    return [outcome.ttft_s for outcome in recording.outcomes if outcome.ttft_s is not None]


def _means(recording: Recording) -> list[float]:
    return [outcome.tpot_s for outcome in recording.outcomes if outcome.tpot_s is not None]


def _p99_ms(values_s: Sequence[float]) -> float | None:
    return 1e3 * percentile(values_s, 0.99) if values_s else None


def _rates(recording: Recording) -> list[float]:
    """Return the fine-tuning tokens of each second so far."""
    if not recording.steps:
        return []
    counts = [0.0] * (int(recording.steps[-1][0]) + 1)
    for step in recording.steps:
        # Rows of windows (forward) and of tasklets (backward), each half a trained token.
        counts[max(0, int(step[0]))] += (step[5] + step[6]) / 2
    return counts[:-1]  # the last second is not over


def _padded(lines: list[Text], height: int) -> list[Text]:
    """Return lines padded to a height, so that the view does not jump."""
    return lines + [Text()] * (height - len(lines))

"""Time of a step by its parts: `python -m experiments.profile`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coserve.cli.bench_options import DEFAULT_MODEL, Dtype, Model, Place, Runs, Save, Weights
from coserve.cli.bench_result import MeasuredModel, measure
from coserve.cli.main import run
from coserve.cli.report_option import report_option, write_report

if TYPE_CHECKING:
    from rich.table import Table

    from coserve.models.backbone import Backbone

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command()
def profile(
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = "best",
    weights: Weights = "dense",
    place: Place = "cpu",
    runs: Runs = 3,
    streams: Annotated[
        int, typer.Option(min=1, help="Number of requests that decode at once, at context 512.")
    ] = 8,
    picture: Annotated[
        Path,
        typer.Option(callback=report_option, help="Picture to write, as an HTML page."),
    ] = Path("profile.html"),
    save: Save = None,
) -> None:
    """Measure the parts of a step on a CPU, each beside its floor.

    The steps: requests decode; they decode beside a window of a job; the loss and the backward pass
    of that window. The parts: products, attention, adapters, head and loss, sampling, elementwise
    operations, Python and waiting.
    """
    from experiments.profile import steps as experiment
    from experiments.profile.page import profile_html

    def results(backbone: "Backbone") -> dict[str, Any]:
        return experiment.run(backbone, runs=runs, streams=streams)

    measured = MeasuredModel(model, dtype, weights, place)
    result = measure("profile", _fill, measured, runs, results, save)
    write_report(picture, profile_html(result))


def _fill(table: "Table", result: dict[str, Any]) -> None:
    """Fill the table of each part of each kind of step, its share, and its floor."""
    table.add_column("")
    for step in result["steps"]:
        for name in (f"{step['step']} ms", "share", "floor ms"):
            table.add_column(name, justify="right")
    for part in result["steps"][0]["parts_ms"]:
        cells = []
        for step in result["steps"]:
            spent, least = step["parts_ms"][part], step["floor_ms"][part]
            cells += [
                f"{spent:.2f}",
                f"{spent / step['timed_ms']:.1%}",
                f"{least:.2f}" if least else "",
            ]
        table.add_row(part, *cells)
    sums = [
        [f"{s['timed_ms']:.2f}", "", f"{sum(s['floor_ms'].values()):.2f}"] for s in result["steps"]
    ]
    table.add_row("sum", *(cell for cells in sums for cell in cells))
    wholes = [
        [f"{s['step_ms']:.2f}", f"{s['timed_ms'] / s['step_ms']:.1%}", ""] for s in result["steps"]
    ]
    table.add_row("the step, not timed by part", *(cell for cells in wholes for cell in cells))


if __name__ == "__main__":
    run(app, "python -m experiments.profile")

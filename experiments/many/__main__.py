"""Many jobs of short sequences at once: `python -m experiments.many`."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from coserve.cli.bench_options import DEFAULT_MODEL, Dtype, Model, Place, Runs, Save, Weights
from coserve.cli.bench_result import MeasuredModel, measure
from coserve.cli.main import run

if TYPE_CHECKING:
    from rich.table import Table

    from coserve.models.backbone import Backbone

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command()
def many(
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = "best",
    weights: Weights = "dense",
    place: Place = "auto",
    runs: Runs = 3,
    jobs: Annotated[int, typer.Option(min=1, help="Number of jobs that run at once.")] = 8,
    batch: Annotated[
        int, typer.Option(min=1, help="Sequences per optimizer step of each job.")
    ] = 4,
    save: Save = None,
) -> None:
    """Measure many jobs of sequences of 64 tokens at once.

    Beside them: the same jobs one after another, one job with the batch of all, and PEFT, one after
    another. Also measures memory beyond the weights, and a decode step of eight requests, without
    adapters and with one for each. Checks that each job's losses are those of its run alone.
    """
    from experiments.many import decode_steps
    from experiments.many import jobs as experiment

    def results(backbone: "Backbone") -> dict[str, Any]:
        result = experiment.run(backbone, runs=runs, num_jobs=jobs, batch=batch)
        steps = decode_steps.run(backbone, runs=runs)
        return {
            **result,
            **{name: steps[name] for name in ("decode_step_ms", "decode_step_adapters_ms")},
        }

    measured = MeasuredModel(model, dtype, weights, place)
    measure("many", _fill, measured, runs, results, save)


def _fill(table: "Table", result: dict[str, Any]) -> None:
    """Fill the table of jobs at once beside the same work done otherwise."""
    for name in ("", "tokens/s", "jobs at once / this", "memory MB"):
        table.add_column(name, justify="left" if not name else "right")
    ours = result["tokens_per_s"]
    for words, name, held in (
        (f"{result['jobs']} jobs at once, batch {result['batch']}", "tokens_per_s", "memory_bytes"),
        ("one after another", "one_after_another_tokens_per_s", None),
        ("one job with the batch of all", "one_job_tokens_per_s", None),
        ("PEFT, one after another", "peft_sequential_tokens_per_s", "peft_memory_bytes"),
    ):
        memory = f"{result[held] / 1e6:.0f}" if held else ""
        table.add_row(words, f"{result[name]:.0f}", f"{ours / result[name]:.2f} ×", memory)
    step, adapters = result["decode_step_ms"], result["decode_step_adapters_ms"]
    table.add_row(
        "decode step without and with adapters, ms",
        f"{step:.1f}, {adapters:.1f}",
        f"{adapters / step:.2f}",
        "",
    )


if __name__ == "__main__":
    run(app, "python -m experiments.many")

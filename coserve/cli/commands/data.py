"""`coserve data check`: shows what a job would train on."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coserve.cli.connection import Json
from coserve.errors import DataError
from coserve.tuning.objectives import method_names

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from coserve.jobs.datasets.preview import Preview, ShownExample
    from coserve.models.source import ModelSource

app = typer.Typer(
    name="data",
    help="Check training files before they are used.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

# Examples that are cut or left out, by name.
_MAX_NAMED = 10
_SHARES = {"median": 0.5, "p90": 0.9, "longest": 1.0}


@app.callback()
def _group() -> None:
    """Check training files before they are used."""


@app.command()
def check(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="Training file: JSONL, JSON, CSV or Parquet (docs/jobs.md)."
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="Model whose tokenizer and chat template read the file: a directory or a hub id.",
        ),
    ] = "tiny",
    method: Annotated[
        str,
        typer.Option(metavar="NAME", help=f"Training method: {', '.join(method_names())}."),
    ] = "supervised",
    max_length: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=2,
            help="Maximum tokens per example; longer ones are cut. [as for jobs]",
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Number of passes over the examples. [as for jobs]"),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Examples per optimizer step. [as for jobs]"),
    ] = None,
    examples: Annotated[
        int, typer.Option(metavar="N", min=0, help="Number of examples to show, token by token.")
    ] = 3,
    as_json: Json = False,
) -> None:
    """Read FILE as a job on MODEL would, and show what the job would train on.

    Shows counts and lengths; in the first examples, which text is trained on and which is only
    read; what would be cut, left out or not trained on, and why; the lines at which a job would
    fail; and how long a job takes with the device to itself, if this machine has measured the
    model. The status is 1 if a job would refuse the file.
    """
    from coserve.cli.tables import console
    from coserve.engine.prompts import end_tokens_of, load_tokenizer
    from coserve.jobs.datasets.preview import read_preview
    from coserve.jobs.settings import job_settings
    from coserve.models.families import build_architecture
    from coserve.models.source import find_model
    from coserve.tuning.objectives import objective_names
    from coserve.tuning.training_files import TrainingFile

    if method not in (names := [each.replace("-", "_") for each in objective_names()]):
        raise typer.BadParameter(
            f"{method!r} is not one of {', '.join(names)}", param_hint="--method"
        )
    source = find_model(model, with_weights=False)
    architecture, tokenizer = build_architecture(source.config), load_tokenizer(source)
    if tokenizer is None:
        raise DataError(f"{model} has no tokenizer: it cannot be trained on text files")
    settings = job_settings(
        hyperparameters={"n_epochs": epochs, "batch_size": batch_size},
        extension={"max_sequence_length": max_length},
        seed=0,
        architecture=architecture,
        is_fresh=True,
        objective=method.replace("_", "-"),
    )
    try:
        preview = read_preview(
            TrainingFile(file),
            tokenizer,
            max_sequence_length=settings.max_sequence_length,
            objective=settings.objective,
            vocab_size=architecture.vocab_size,
            end_tokens=end_tokens_of(source, tokenizer),
            num_shown=examples,
        )
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from None
    report = {"model": model, **_numbers(preview, settings.max_sequence_length)}
    if preview.found and not preview.faults:
        config = settings.tuning_config(preview.num_examples)
        report |= _time(preview, config, source)
    screen = console()
    _show(screen, preview, report)
    if as_json:
        print(json.dumps({"file": str(file), "method": method, **report}))
    if preview.faults or not preview.found:
        raise typer.Exit(1)


def _numbers(preview: "Preview", max_length: int) -> dict[str, Any]:
    lengths = sorted(len(example.tokens) for example in preview.found)
    return {
        "examples": preview.num_examples,
        "tokens": preview.num_tokens,
        "trained_tokens": preview.num_trained,
        "lengths": {
            name: lengths[round(share * (len(lengths) - 1))]
            for name, share in _SHARES.items()
            if lengths
        },
        "max_sequence_length": max_length,
        "cut": preview.cut,
        "num_left_out": preview.report.left_out.num_places,
        "left_out": preview.report.left_out.lines(),
        "warnings": preview.report.warnings.lines(),
        "faults": preview.faults.lines(),
    }


def _time(preview: "Preview", config: Any, source: "ModelSource") -> dict[str, Any]:
    from coserve.devices.profiles.kept import stored_profile
    from coserve.jobs.lifecycle.estimate import seconds_alone
    from coserve.tuning.order import TrainingOrder

    order, stored = TrainingOrder(preview.found, config), stored_profile(source.config)
    return {
        "epochs": config.num_epochs,
        "batch_size": config.batch_size,
        "steps": order.num_steps,
        "measured_on": stored and stored[0],
        "seconds_alone": stored and seconds_alone(order, stored[1]),
    }


# -- how it is shown --------------------------------------------------------------------


def _show(screen: "Console", preview: "Preview", report: dict[str, Any]) -> None:
    for example in preview.examples:
        screen.print(_example(example, in_colour=screen.is_terminal), soft_wrap=True)
    if preview.examples:
        place = "green" if screen.is_terminal else "between ⟦ and ⟧"
        screen.print(f"Trained text is {place}; the rest is only read.\n", style="dim")
    _list(
        screen, "A job would refuse the file because of", preview.faults.lines(), style="bold red"
    )
    _list(
        screen,
        f"Not trained on, by {report['model']}'s chat template",
        report["warnings"],
        style="yellow",
    )
    if not preview.is_whole:
        return
    lengths = ", ".join(f"{name} {length:,}" for name, length in report["lengths"].items())
    screen.print(
        f"{report['examples']:,} examples, {report['tokens']:,} tokens, "
        f"{report['trained_tokens']:,} trained on"
        + (f"; tokens of an example: {lengths}" if lengths else "")
    )
    longest = f"{report['max_sequence_length']:,} tokens (--max-length)"
    _list(screen, f"Cut to {longest}", preview.cut, style="yellow")
    _list(screen, "Left out, with nothing to train on", report["left_out"], style="yellow")
    if "steps" in report:
        _show_time(screen, report)


def _show_time(screen: "Console", report: dict[str, Any]) -> None:
    from coserve.cli.drawing import duration

    size = report["batch_size"]
    examples = "1 example" if size == 1 else f"{size} examples"
    steps = f"{report['epochs']} epochs, {report['steps']:,} optimizer steps of {examples}: "
    if report["seconds_alone"] is None:
        screen.print(
            f"{steps}no estimate, as this machine has not measured the model; coserve up MODEL "
            f"measures it."
        )
    else:
        seconds = report["seconds_alone"]
        time = f"about {duration(seconds)}" if seconds >= 1 else "less than a second"
        about = f"{time} without other load, with the default adapter of jobs"
        screen.print(f"{steps}{about} ({report['measured_on']}).")


def _list(screen: "Console", title: str, lines: list[str], *, style: str) -> None:
    from rich.text import Text

    if not lines:
        return
    screen.print(Text(f"{title} ({len(lines):,}):", style=style))
    for line in lines[:_MAX_NAMED]:
        screen.print(f"  {line}", soft_wrap=True)
    if len(lines) > _MAX_NAMED:
        screen.print(f"  and {len(lines) - _MAX_NAMED:,} more")


def _example(example: "ShownExample", *, in_colour: bool) -> "Text":
    from rich.text import Text

    from coserve.cli.drawing import printable

    shown = Text.assemble(
        (f"{example.place}, {example.num_trained:,} of {example.num_tokens:,} tokens", "bold"), "\n"
    )
    was_trained = False
    for token in example.tokens:
        if not in_colour and token.is_trained != was_trained:
            shown.append("⟦" if token.is_trained else "⟧")
        was_trained = token.is_trained
        shown.append(printable(token.text), "bold green" if token.is_trained else "dim")
    if was_trained and not in_colour:
        shown.append("⟧")
    if example.num_more:
        shown.append(f" … and {example.num_more:,} more tokens", "dim")
    if example.truncated:
        shown.append(" … cut here", "yellow")
    return shown.append("\n")

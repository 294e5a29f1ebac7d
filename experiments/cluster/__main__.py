"""`python -m experiments.cluster`: placements on a modelled cluster, at LeMix's settings."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coserve.cli.bench_options import Save
from coserve.cli.bench_result import print_result
from coserve.cli.main import run

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


class Nodes(StrEnum):
    """Nodes that placements are compared on."""

    modelled = "modelled"
    here = "here"


@app.command()
def cluster(
    device: Annotated[
        Nodes,
        typer.Option(
            help=(
                "modelled: nodes in virtual time; here: three nodes on this machine's CPU, "
                "beside their model."
            )
        ),
    ] = Nodes.modelled,
    models: Annotated[
        str, typer.Option(metavar="NAMES", help="Models of LeMix's table II, separated by commas.")
    ] = "gpt-2.5b,llama-8b,llama-70b",
    rates: Annotated[
        str, typer.Option(metavar="NUMBERS", help="Tasks per second, separated by commas.")
    ] = "20,50,150",
    training_rates: Annotated[
        str,
        typer.Option(metavar="SHARES", help="Shares of the tasks that train, separated by commas."),
    ] = "0.1,0.25,0.35,0.5,0.75,0.9",
    training_in_flight: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum number of training tasks that a node runs at once.",
            show_default="as many as come",
        ),
    ] = None,
    tasks: Annotated[int, typer.Option(min=10, help="Requests and training tasks per run.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of arrivals and lengths.")] = 0,
    rate: Annotated[
        float, typer.Option(min=0.01, help="With --device here: requests per second.")
    ] = 12.0,
    placement: Annotated[
        str, typer.Option(help="With --device here: name of the placement.", metavar="NAME")
    ] = "round-robin",
    runs: Annotated[
        int,
        typer.Option(
            min=1, help="With --device here: number of times that real nodes get the requests."
        ),
    ] = 2,
    save: Save = None,
) -> None:
    """Compare placements on four modelled nodes of two GPUs, at LeMix's models, rates and training
    rates.

    Shows throughput, utilisation, SLO attainment and the requests' loss, ratios over separate nodes
    beside the paper's, and the time of placing a task. With --device here: three nodes of this
    machine with the built-in model, beside the same cluster in virtual time and its errors.
    """
    if device is Nodes.here:
        _cluster_here(
            rate=rate, num_requests=tasks, placement=placement, runs=runs, seed=seed, save=save
        )
        return
    import torch

    from coserve.bench.machine import describe
    from coserve.cli.tables import console
    from experiments.cluster import lemix as experiment

    names = tuple(name.strip() for name in models.split(","))
    if unknown := [name for name in names if name not in experiment.MODELS]:
        raise typer.BadParameter(
            f"{unknown[0]!r} is not one of {', '.join(experiment.MODELS)}", param_hint="--models"
        )
    config = experiment.ClusterConfig(
        models=names,
        rates=_numbers(rates, "--rates", most=1e6),
        training_shares=_numbers(training_rates, "--training-rates", most=1.0),
        num_tasks=tasks,
        training_in_flight=training_in_flight,
        seed=seed,
    )
    numbers = experiment.run(config, watch=console(stderr=True).print)
    what = {
        "device": device.value,
        "machine": describe(torch.device("cpu")),
        "tasks": tasks,
        "training_in_flight": training_in_flight,
        "seed": seed,
    }
    print_result("cluster", _fill, what, numbers, save)


def _cluster_here(
    *, rate: float, num_requests: int, placement: str, runs: int, seed: int, save: Path | None
) -> None:
    import torch

    from coserve.bench.machine import describe
    from coserve.cli.tables import console
    from coserve.cluster.placement import placement_class
    from coserve.models import load_backbone
    from experiments.cluster import here as experiment

    try:
        placement_class(placement)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--placement") from None
    config = experiment.HereConfig(
        rate=rate, num_requests=num_requests, placement=placement, num_runs=runs, seed=seed
    )
    backbone = load_backbone(config.model, dtype=config.dtype, device="meta")
    numbers = experiment.run(backbone, config, watch=console(stderr=True).print)
    what = {
        "device": "here",
        "machine": describe(torch.device("cpu")),
        "model": config.model,
        "nodes": config.num_nodes,
    }
    load = {"rate": rate, "requests": num_requests, "placement": placement, "seed": seed}
    print_result("cluster_here", _fill_here, {**what, **load}, numbers, save)


def _numbers(text: str, option: str, *, most: float) -> tuple[float, ...]:
    """Return numbers above 0 that are separated by commas."""
    try:
        values = tuple(float(each) for each in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(0 < value <= most for value in values):
        raise typer.BadParameter(
            f"{text!r} must be numbers above 0, up to {most:g}, with commas", param_hint=option
        )
    return values


def _fill_here(table: "Table", result: dict[str, Any]) -> None:
    """Fill the table of real nodes, the same in virtual time, their differences, and the spread of
    each side's runs.
    """
    names = list(result["error"])
    for name in ("nodes", *names):
        table.add_column(name, justify="left" if name == "nodes" else "right")
    for row in result["rows"]:
        table.add_row(row["nodes"], *(f"{row[name]:.2f}" for name in names))
    differences = {
        "difference": result["error"],
        "difference of the medians": result["median_error"],
        "largest run beside the smallest: real": result["spread"]["real"],
        "modelled": result["spread"]["modelled"],
    }
    for words, each in differences.items():
        table.add_row(words, *(f"{each[name]:+.1%}" for name in names))
    number = {name: len(runs) for name, runs in result["runs"].items()}
    table.caption = (
        f"Of {number['real']} real runs and {number['modelled']} modelled ones, each side "
        f"together. Modelled messages "
        f"take {result['messages_ms']} ms, as measured of lone requests."
    )


def _fill(table: "Table", result: dict[str, Any]) -> None:
    """Fill the table of placements: means over the settings, and the most over separate nodes."""
    names = (
        "placement",
        "tasks/s",
        "utilisation",
        "attainment",
        "loss",
        "scheduling ms/task",
        "overloaded",
        "over separate",
    )
    for name in names:
        table.add_column(name, justify="left" if name == "placement" else "right")
    for row in result["rows"]:
        over = result["over_separate"].get(row["placement"])
        table.add_row(
            row["placement"],
            *(f"{row['throughput']:.2f}", f"{row['utilisation']:.0%}", f"{row['attainment']:.1%}"),
            f"{row['inference_loss']:.3f}",
            *(
                f"{result[each][row['placement']]:.3f}"
                for each in ("scheduling_ms", "scheduling_overload_ms")
            ),
            f"{over['throughput']:.2f} × tasks/s, {over['attainment']:.2f} × attainment"
            if over
            else "",
        )
    paper = result["paper_over_separate"]
    table.caption = (
        f"LeMix's paper: {paper['throughput']} × tasks/s, {paper['attainment']} × attainment; "
        f"nodes that never "
        f"idle, split or not: {result['bound_over_separate']:.2f} × tasks/s. At an attainment of "
        f"{result['equal_attainment']:.0%} ours does {result['ours_over_lemix']:.2f} × the tasks/s "
        f"of lemix."
    )


if __name__ == "__main__":
    run(app, "python -m experiments.cluster")

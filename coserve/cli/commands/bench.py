"""`coserve bench`: what this machine reaches, beside what others reach on it, measured in one
run.
"""

import json
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coserve.cli import bench_compare
from coserve.cli.report_option import report_option, write_report

if TYPE_CHECKING:
    from coserve.models.backbone import Backbone

Model = Annotated[str, typer.Option(help="A directory, a hub id, or dummy:PRESET.")]
Dtype = Annotated[
    str,
    typer.Option(
        help="float32, bfloat16, float16, or best: what this machine has instructions for."
    ),
]
Weights = Annotated[str, typer.Option(help="How weights of linear layers are stored, as in up.")]
Place = Annotated[
    str,
    typer.Option(
        "--device",
        help="Such as cpu or cuda:0; auto takes a GPU if there is one.",
        metavar="DEVICE",
    ),
]
Runs = Annotated[
    int, typer.Option(min=1, help="Turns that each side takes; numbers are medians over them.")
]
Dropout = Annotated[
    float, typer.Option(min=0, max=0.99, help="Of the adapters of jobs, and of PEFT's.")
]
DEFAULT_MODEL = "dummy:smollm2-135m"

app = typer.Typer(
    name="bench",
    help=(
        "Measure what this machine reaches, beside what others reach on it: a table, then one line "
        "of JSON."
    ),
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
app.command()(bench_compare.compare)


@app.command()
def decode(
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = "best",
    weights: Weights = "dense",
    place: Place = "auto",
    runs: Runs = 5,
    openvino: Annotated[
        Path | None,
        typer.Option(
            metavar="PYTHON",
            help=(
                "Of an environment with openvino and optimum-intel, whose model takes turns (CPU)."
            ),
        ),
    ] = None,
) -> None:
    """A decode step of 1, 4 and 8 requests at context 512: against reading the weights and the
    cache once at this machine's bandwidth, against transformers' generate, and against OpenVINO's
    model alone, without choosing tokens.
    """
    from coserve.bench import decode as experiment
    from coserve.bench.openvino import openvino_model

    if openvino is not None and place not in ("auto", "cpu"):
        raise typer.BadParameter(
            "OpenVINO runs beside a CPU alone: leave out --device", param_hint="--openvino"
        )

    def run(backbone: "Backbone") -> dict[str, Any]:
        if openvino is None:
            return experiment.run(backbone, runs=runs)
        with openvino_model(openvino, model, dtype=backbone.dtype) as other:
            return experiment.run(backbone, runs=runs, openvino=other)

    _measure("decode", model, dtype, weights, place if openvino is None else "cpu", runs, run)


@app.command()
def train(
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = "best",
    weights: Weights = "dense",
    place: Place = "auto",
    runs: Runs = 5,
    compiled: Annotated[
        bool,
        typer.Option(
            "--compiled/--no-compiled", help="Whether PEFT under torch.compile takes turns, too."
        ),
    ] = True,
    max_recompute: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            min=0,
            max=1,
            help="Beside a job that keeps less, for as many more FLOPs (0: none).",
        ),
    ] = 0.0,
    dropout: Dropout = 0.0,
) -> None:
    """Fine-tuning alone, on sequences of 512 and 1,024 tokens: tokens per second and activation
    memory against PEFT, as it is and under torch.compile, which takes some minutes to compile.
    """
    from coserve.bench import train as experiment

    def run(backbone: "Backbone") -> dict[str, Any]:
        return experiment.run(
            backbone, runs=runs, compiled=compiled, max_recompute=max_recompute, dropout=dropout
        )

    _measure("train", model, dtype, weights, place, runs, run)


@app.command()
def many(
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = "best",
    weights: Weights = "dense",
    place: Place = "auto",
    runs: Runs = 3,
    jobs: Annotated[int, typer.Option(min=1, help="Jobs that run at once.")] = 8,
    batch: Annotated[
        int, typer.Option(min=1, help="Sequences of an optimizer step of each job.")
    ] = 4,
) -> None:
    """Many jobs of sequences of 64 tokens at once: tokens per second against the same jobs one
    after another, one job with the batch of all, and PEFT, one after another; memory beyond the
    weights; and a decode step of eight requests, without adapters and with one for each. Checks
    that each job's losses are those of its run alone.
    """
    from coserve.bench import adapters
    from coserve.bench import many as experiment

    def run(backbone: "Backbone") -> dict[str, Any]:
        found = experiment.run(backbone, runs=runs, num_jobs=jobs, batch=batch)
        steps = adapters.run(backbone, runs=runs)
        return {
            **found,
            **{name: steps[name] for name in ("decode_step_ms", "decode_step_adapters_ms")},
        }

    _measure("many", model, dtype, weights, place, runs, run)


@app.command()
def profile(
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = "best",
    weights: Weights = "dense",
    place: Place = "cpu",
    runs: Runs = 3,
    streams: Annotated[
        int, typer.Option(min=1, help="Requests that decode at once, at context 512.")
    ] = 8,
    picture: Annotated[
        Path,
        typer.Option(
            callback=report_option, help="Where the picture is written, as a page for browsers."
        ),
    ] = Path("profile.html"),
) -> None:
    """What the time of a step goes to (CPU only): one in which requests decode, one with a window
    of a job beside them, and the loss and backward pass of that window, split into products,
    attention, adapters, head and loss, sampling, elementwise operations, Python and waiting, each
    beside what it takes at least.
    """
    from coserve.bench import profile as experiment
    from coserve.bench.profile_page import profile_html

    def run(backbone: "Backbone") -> dict[str, Any]:
        return experiment.run(backbone, runs=runs, streams=streams)

    result = _measure("profile", model, dtype, weights, place, runs, run)
    write_report(picture, profile_html(result))


@app.command()
def coserve(
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = "best",
    weights: Weights = "dense",
    place: Place = "auto",
    runs: Runs = 5,
    streams: Annotated[int, typer.Option(min=1, help="Requests that decode at once.")] = 4,
    jobs: Annotated[int, typer.Option(min=1, help="Jobs that run at once.")] = 1,
    seconds: Annotated[float, typer.Option(min=1, help="Time for each policy.")] = 60.0,
    dropout: Dropout = 0.0,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Also what --deterministic of up costs.")
    ] = False,
) -> None:
    """Steady streams with an SLO for the time per output token of 2.5 × their step alone, and
    fine-tuning in what they leave over; with the same under inference-only and tuning-only, and
    PEFT alone.
    """
    from coserve.bench import coserve as experiment

    def run(backbone: "Backbone") -> dict[str, Any]:
        return experiment.run(
            backbone,
            runs=runs,
            streams=streams,
            num_jobs=jobs,
            seconds=seconds,
            dropout=dropout,
            deterministic=deterministic,
        )

    _measure("coserve", model, dtype, weights, place, runs, run)


@app.command()
def serve(
    model: Annotated[
        str,
        typer.Option(
            help="A directory, a hub id, or dummy:PRESET, which is written to a directory first."
        ),
    ] = DEFAULT_MODEL,
    dtype: Dtype = "best",
    runs: Runs = 3,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Another server with OpenAI's routes, which has the same model."
        ),
    ] = None,
    vllm: Annotated[
        Path | None,
        typer.Option(
            metavar="PYTHON",
            help="Of an environment with vLLM for CPUs, which is started for the purpose.",
        ),
    ] = None,
) -> None:
    """Requests over HTTP, 512 tokens in and 64 out, 1, 4 and 8 at once: output tokens per second,
    and percentiles of the time to the first token and per output token; of coserve and of another
    server, by the same client, in turns.
    """
    import torch

    from coserve.bench import serve as experiment
    from coserve.bench.machine import best_dtype, describe, versions
    from coserve.bench.model_directory import write_model
    from coserve.bench.separate import own_cores
    from coserve.bench.vllm import vllm_server
    from coserve.cli.connection import own_server
    from coserve.cli.tables import console
    from coserve.models.source import find_model

    cpu = torch.device("cpu")
    dtype = best_dtype(cpu) if dtype == "best" else dtype
    vocab_size = find_model(model, with_weights=False).config.vocab_size
    with TemporaryDirectory() as place, ExitStack() as running:
        root, directory = Path(place), model
        if model.startswith("dummy:"):
            directory = str(root / "model")
            write_model(model, Path(directory), dtype=dtype)
        options = ("--dtype", dtype, "--measure-first")
        servers = {
            "coserve": running.enter_context(
                own_server(directory, *options, log=root / "coserve.log")
            )
        }
        if against is not None:
            servers["other"] = against
        if vllm is not None:
            servers["vllm"] = running.enter_context(
                vllm_server(
                    vllm, Path(directory), dtype=dtype, log=root / "vllm.log", cores=own_cores()
                )
            )
        found = experiment.run(
            servers, vocab_size=vocab_size, runs=runs, watch=console(stderr=True).print
        )
    _tell(
        "serve",
        {
            "model": model,
            "dtype": dtype,
            "runs": runs,
            "machine": describe(cpu),
            "versions": versions(vllm),
        },
        found,
    )


class Nodes(StrEnum):
    """What nodes placements are compared on."""

    modelled = "modelled"
    here = "here"


@app.command()
def cluster(
    device: Annotated[
        Nodes,
        typer.Option(
            help=(
                "modelled: nodes in virtual time; here: three on this machine's CPU, beside their "
                "model."
            )
        ),
    ] = Nodes.modelled,
    models: Annotated[
        str, typer.Option(metavar="NAMES", help="Of LeMix's table II, with commas between them.")
    ] = "gpt-2.5b,llama-8b,llama-70b",
    rates: Annotated[
        str, typer.Option(metavar="NUMBERS", help="Tasks per second, with commas between them.")
    ] = "20,50,150",
    training_rates: Annotated[
        str,
        typer.Option(
            metavar="SHARES", help="Of the tasks, those that train, with commas between them."
        ),
    ] = "0.1,0.25,0.35,0.5,0.75,0.9",
    training_in_flight: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Training tasks that a node runs at once, such as 1.",
            show_default="as many as come",
        ),
    ] = None,
    tasks: Annotated[
        int, typer.Option(min=10, help="Requests and training tasks of each run.")
    ] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals and lengths.")] = 0,
    rate: Annotated[
        float, typer.Option(min=0.01, help="With --device here: requests per second.")
    ] = 12.0,
    placement: Annotated[
        str, typer.Option(help="With --device here.", metavar="NAME")
    ] = "round-robin",
    runs: Annotated[
        int, typer.Option(min=1, help="With --device here: how often real nodes get the requests.")
    ] = 2,
) -> None:
    """Placements on four modelled nodes of two GPUs, with LeMix's models, rates and training rates:
    throughput, utilisation, SLO attainment and the requests' loss, ratios over separate nodes
    beside the paper's, and what placing a task takes.

    With --device here: three nodes of this machine with the built-in model, the same cluster in
    virtual time, and what that errs by.
    """
    if device is Nodes.here:
        _cluster_here(rate=rate, num_requests=tasks, placement=placement, runs=runs, seed=seed)
        return
    import torch

    from coserve.bench import cluster as experiment
    from coserve.bench.machine import describe
    from coserve.cli.tables import console

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
    found = experiment.run(config, watch=console(stderr=True).print)
    what = {
        "device": device.value,
        "machine": describe(torch.device("cpu")),
        "tasks": tasks,
        "training_in_flight": training_in_flight,
        "seed": seed,
    }
    _tell("cluster", what, found)


def _cluster_here(*, rate: float, num_requests: int, placement: str, runs: int, seed: int) -> None:
    import torch

    from coserve.bench import cluster_here as experiment
    from coserve.bench.machine import describe
    from coserve.cli.tables import console
    from coserve.cluster.placement import placement_class
    from coserve.models import load_backbone

    try:
        placement_class(placement)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--placement") from None
    config = experiment.HereConfig(
        rate=rate, num_requests=num_requests, placement=placement, num_runs=runs, seed=seed
    )
    backbone = load_backbone(config.model, dtype=config.dtype, device="meta")
    found = experiment.run(backbone, config, watch=console(stderr=True).print)
    what = {
        "device": "here",
        "machine": describe(torch.device("cpu")),
        "model": config.model,
        "nodes": config.num_nodes,
    }
    load = {"rate": rate, "requests": num_requests, "placement": placement, "seed": seed}
    _tell("cluster_here", {**what, **load}, found)


def _numbers(text: str, option: str, *, most: float) -> tuple[float, ...]:
    """Numbers above 0 with commas between them."""
    try:
        values = tuple(float(each) for each in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(0 < value <= most for value in values):
        raise typer.BadParameter(
            f"{text!r} must be numbers above 0, up to {most:g}, with commas", param_hint=option
        )
    return values


def _measure(
    experiment: str,
    model: str,
    dtype: str,
    weights: str,
    place: str,
    runs: int,
    run: Callable[["Backbone"], dict[str, Any]],
) -> dict[str, Any]:
    """Load the model, run, show what was found, and return it."""
    import torch

    from coserve.bench.machine import best_dtype, describe
    from coserve.devices.torch.process_memory import keep_freed_memory
    from coserve.models import load_backbone

    device = torch.device(
        ("cuda" if torch.cuda.is_available() else "cpu") if place == "auto" else place
    )
    dtype = best_dtype(device) if dtype == "best" else dtype
    keep_freed_memory()  # as the server's engine does; for all sides
    backbone = load_backbone(model, dtype=dtype, device=device, weights=weights)
    what = {
        "model": model,
        "dtype": dtype,
        "weights": weights,
        "runs": runs,
        "machine": describe(device),
    }
    return _tell(experiment, what, run(backbone))


def _tell(experiment: str, what: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Print a table and a line of JSON, and return the whole; what: was measured, and where."""
    from rich.table import Table

    from coserve.bench.machine import versions
    from coserve.cli import bench_tables
    from coserve.cli.tables import console

    said = {"versions": versions(), "date": datetime.now(UTC).date().isoformat()}
    result = {"experiment": experiment, **said, **what, **found}
    words = ", ".join(
        str(what[name]) for name in ("model", "dtype", "weights", "machine") if name in what
    )
    table = Table(title=f"{experiment}: {words}", title_justify="left")
    getattr(bench_tables, experiment)(table, result)
    console().print(table)
    print(json.dumps(result))
    return result

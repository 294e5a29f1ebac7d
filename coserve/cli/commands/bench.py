"""`coserve bench`: measures what this machine reaches, beside alternatives in the same run."""

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coserve.cli import bench_tables
from coserve.cli.bench_options import (
    DEFAULT_MODEL,
    Dropout,
    Dtype,
    Model,
    Place,
    Runs,
    Save,
    Weights,
)
from coserve.cli.bench_result import MeasuredModel, measure, print_result

if TYPE_CHECKING:
    from coserve.models.backbone import Backbone

app = typer.Typer(
    name="bench",
    help=(
        "Measure what this machine reaches, beside alternatives in the same run. Prints a table, "
        "then one line of JSON."
    ),
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


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
                "Python of an environment with openvino and optimum-intel, whose model takes "
                "turns (CPU only)."
            ),
        ),
    ] = None,
    save: Save = None,
) -> None:
    """Measure a decode step of 1, 4 and 8 requests at context 512.

    Beside it: reading the weights and the cache once at this machine's bandwidth, transformers'
    generate, and OpenVINO's model without choosing tokens (--openvino).
    """
    from coserve.bench import decode as experiment
    from coserve.bench.openvino import openvino_model

    if openvino is not None and place not in ("auto", "cpu"):
        raise typer.BadParameter(
            "OpenVINO is measured on a CPU only: remove --device", param_hint="--openvino"
        )

    def run(backbone: "Backbone") -> dict[str, Any]:
        if openvino is None:
            return experiment.run(backbone, runs=runs)
        with openvino_model(openvino, model, dtype=backbone.dtype) as other:
            return experiment.run(backbone, runs=runs, openvino=other)

    measure(
        "decode",
        bench_tables.decode,
        MeasuredModel(model, dtype, weights, place if openvino is None else "cpu"),
        runs,
        run,
        save,
    )


@app.command()
def train(
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = "best",
    weights: Weights = "dense",
    place: Place = "auto",
    runs: Runs = 5,
    compiled: Annotated[
        bool,
        typer.Option("--compiled/--no-compiled", help="Also measure PEFT under torch.compile."),
    ] = True,
    max_recompute: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            min=0,
            max=1,
            help=(
                "Also measure a job that spends up to this share of extra FLOPs to keep fewer "
                "activations; 0: no such job."
            ),
        ),
    ] = 0.0,
    dropout: Dropout = 0.0,
    save: Save = None,
) -> None:
    """Measure fine-tuning alone, on sequences of 512 and 1,024 tokens.

    Tokens per second and activation memory beside PEFT, as it is and under torch.compile, which
    takes some minutes to compile.
    """
    from coserve.bench import train as experiment

    def run(backbone: "Backbone") -> dict[str, Any]:
        return experiment.run(
            backbone, runs=runs, compiled=compiled, max_recompute=max_recompute, dropout=dropout
        )

    measured = MeasuredModel(model, dtype, weights, place)
    measure("train", bench_tables.train, measured, runs, run, save)


@app.command()
def coserve(
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = "best",
    weights: Weights = "dense",
    place: Place = "auto",
    runs: Runs = 5,
    streams: Annotated[
        int, typer.Option(min=1, help="Number of requests that decode at once.")
    ] = 4,
    jobs: Annotated[int, typer.Option(min=1, help="Number of jobs that run at once.")] = 1,
    seconds: Annotated[float, typer.Option(min=1, help="Time for each policy.")] = 60.0,
    dropout: Dropout = 0.0,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic", help="Also measure what --deterministic of coserve up costs."
        ),
    ] = False,
    save: Save = None,
) -> None:
    """Measure streams of requests with an SLO, and fine-tuning in the time that they leave over.

    The SLO per output token is 2.5 × the step of the streams alone. Beside it: the policies
    inference-only and tuning-only, and PEFT alone.
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

    measured = MeasuredModel(model, dtype, weights, place)
    measure("coserve", bench_tables.coserve, measured, runs, run, save)


@app.command()
def serve(
    model: Annotated[
        str,
        typer.Option(
            help="Directory, hub id, or dummy:PRESET, which is written to a directory first."
        ),
    ] = DEFAULT_MODEL,
    dtype: Dtype = "best",
    runs: Runs = 3,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="URL of another server with OpenAI's routes, which serves the same model.",
        ),
    ] = None,
    vllm: Annotated[
        Path | None,
        typer.Option(
            metavar="PYTHON",
            help=(
                "Python of an environment with vLLM for CPUs; a vLLM server is started for the "
                "measurement."
            ),
        ),
    ] = None,
    save: Save = None,
) -> None:
    """Measure requests over HTTP: 512 tokens in and 64 out, 1, 4 and 8 at once.

    Output tokens per second, and percentiles of TTFT and TPOT, of coserve and of another server, by
    the same client, in turns.
    """
    import torch

    from coserve.bench import serve as experiment
    from coserve.bench.machine import best_dtype, describe, own_cores, versions
    from coserve.bench.model_directory import write_model
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
        numbers = experiment.run(
            servers, vocab_size=vocab_size, runs=runs, watch=console(stderr=True).print
        )
    print_result(
        "serve",
        bench_tables.serve,
        {
            "model": model,
            "dtype": dtype,
            "runs": runs,
            "machine": describe(cpu),
            "versions": versions(vllm),
        },
        numbers,
        save,
    )

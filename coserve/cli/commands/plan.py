"""`coserve plan`: predicts how much fine-tuning a trace leaves over, on how many devices, and what
that saves.
"""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coserve.cli.modelled_options import (
    TensorParallel,
    modelled_place,
    refuse_beyond_positions,
)
from coserve.cli.report_option import report_option, write_report
from coserve.cli.slo_option import slo_option
from coserve.cli.where_option import Where, values_by_column

if TYPE_CHECKING:
    from coserve.bench.plan import Hour

_MEAN_PROMPT_TOKENS, _MEAN_OUTPUT_TOKENS = 1024, 256


def plan(
    trace: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help=(
                "Trace with arrivals and lengths, in the format of Azure or BurstGPT; or "
                "requests by hour of a day (hour_of_day,requests), with --rate."
            ),
        ),
    ],
    model: Annotated[
        str, typer.Option(help="Directory, hub id, or dummy:PRESET.")
    ] = "dummy:llama-3.1-8b",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    hardware: Annotated[
        str, typer.Option(metavar="NAME", help="Modelled hardware, such as a100, h100, h200, a40.")
    ] = "a100",
    tensor_parallel: TensorParallel = 1,
    rate: Annotated[
        float | None,
        typer.Option(
            min=1e-6, max=1e9, help="Mean requests per second over all hours. [the trace's]"
        ),
    ] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="Number of devices. [as many as requests alone need]")
    ] = None,
    price: Annotated[
        float, typer.Option(min=0, max=1e9, help="Price of a device per hour, in any currency.")
    ] = 2.0,
    slo_ttft: Annotated[
        str,
        typer.Option(
            metavar="TIME", callback=slo_option, help="SLO: time to first token, such as 5s."
        ),
    ] = "5s",
    slo_tpot: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            callback=slo_option,
            help="SLO: mean time per later token. [2.5 decode steps]",
        ),
    ] = None,
    lengths: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=(
                "File of prompt and answer lengths, such as ShareGPT's, for a trace by hour. "
                "[around 1024 in, 256 out]"
            ),
        ),
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, max=64, help="Number of jobs that run at once on each device.")
    ] = 1,
    sequence: Annotated[int, typer.Option(min=2, help="Tokens per training example.")] = 512,
    sample: Annotated[
        float, typer.Option(min=1, max=3600, help="Seconds of each hour that are simulated.")
    ] = 60.0,
    where: Where = None,
    picture: Annotated[
        Path,
        typer.Option(callback=report_option, help="Report to write, as an HTML page."),
    ] = Path("plan.html"),
    seed: Annotated[int, typer.Option(min=0, help="Seed of arrivals, prompts and examples.")] = 0,
) -> None:
    """Predict how much fine-tuning a trace of requests leaves over, hour by hour, and on how many
    devices.

    Also predicts what it would cost to train as much on separate devices. Devices are modelled, and
    the error of the model is shown. Writes a report; the last line is JSON.
    """
    import torch

    from coserve.bench.cells import CompareConfig
    from coserve.bench.model_error import model_error
    from coserve.bench.places import num_parameters
    from coserve.bench.plan import plan as run
    from coserve.bench.plan_page import plan_html
    from coserve.cli.tables import console
    from coserve.models import load_backbone
    from coserve.server.units import slo_seconds

    hours = _hours(trace, where, rate=rate, lengths=lengths, sample_s=sample, seed=seed)
    shapes = load_backbone(model, dtype=dtype, device=torch.device("meta"))
    refuse_beyond_positions(shapes, sequence)
    place = modelled_place(shapes, hardware, tensor_parallel)
    config = CompareConfig(
        policies=(),
        seconds=sample,
        ttft_s=slo_seconds(slo_ttft),
        tpot_s=None if slo_tpot is None else slo_seconds(slo_tpot),
        num_jobs=jobs,
        sequence=sequence,
        seed=seed,
    )
    # A device of the plan is a group, whose devices are paid one by one.
    group_price, watch = tensor_parallel * price, console(stderr=True).print
    predicted = run(place, hours, config, num_devices=devices, price=group_price, watch=watch)
    result = {
        "experiment": "plan",
        "model": model,
        "dtype": dtype,
        "machine": f"{predicted.num_devices} × {predicted.place}, modelled",
        "date": datetime.now(UTC).date().isoformat(),
        "tensor_parallel": tensor_parallel,
        "trace": " ".join([str(trace), *(where or ())]),
        **predicted.result(),
        "model_error": model_error(
            predicted.place.removeprefix(f"{tensor_parallel} x "), num_parameters(shapes)
        ),
    }
    _print(result)
    write_report(picture, plan_html(result, predicted))


def _hours(
    path: Path,
    where: list[str] | None,
    *,
    rate: float | None,
    lengths: Path | None,
    sample_s: float,
    seed: int,
) -> "list[Hour]":
    from coserve.bench.plan import hours_of_day, hours_of_trace
    from coserve.workloads.arrivals import LengthSource, LogNormalLengths, RecordedLengths
    from coserve.workloads.traces import is_day, read_day, read_lengths, read_trace

    if not is_day(path):
        if lengths is not None:
            raise typer.BadParameter(f"{path} already has lengths", param_hint="--lengths")
        return hours_of_trace(read_trace(path, where=values_by_column(where)), rate)
    if where:
        raise typer.BadParameter(
            f"{path} has requests by hour, so there are no rows to select", param_hint="--where"
        )
    if rate is None:
        raise typer.BadParameter(
            f"{path} has requests by hour: set their mean rate per second", param_hint="--rate"
        )
    drawn: LengthSource = LogNormalLengths(
        mean_prompt_tokens=_MEAN_PROMPT_TOKENS, mean_output_tokens=_MEAN_OUTPUT_TOKENS
    )
    if lengths is not None:
        drawn = RecordedLengths(read_lengths(lengths))
    return hours_of_day(read_day(path), rate=rate, sample_s=sample_s, lengths=drawn, seed=seed)


def _print(result: dict[str, Any]) -> None:
    from coserve.cli.tables import console, table

    shown = table(
        *(">hour", ">requests/s", ">attainment", ">tuning tokens/s", ">tuning tokens"),
        title=f"plan: {result['model']}, {result['dtype']}, {result['machine']}",
    )
    for row in result["rows"]:
        numbers = (f"{row['tuning_tokens_per_s']:,.0f}", f"{row['tuning_tokens']:,}")
        shown.add_row(str(row["hour"]), f"{row['rate']:.3g}", f"{row['attainment']:.1%}", *numbers)
    screen = console()
    screen.print(shown)
    screen.print(
        f"{result['devices']} devices for {result['hours']:g} h cost {result['cost']:,.2f} and "
        f"train {result['tuning_tokens']:,} tokens beside the requests; on separate devices that "
        f"takes {result['separate_devices']} of them, and {result['separate_cost']:,.2f}. "
        f"{result['model_error']['words']}"
    )
    print(json.dumps(result))

"""A day of traffic on modelled hardware: `python -m experiments.simulate_cluster`."""

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from coserve.cli.bench_options import Save
from coserve.cli.main import run
from coserve.cli.modelled_options import TensorParallel, modelled_place
from coserve.cli.where_option import Where, values_by_column

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command()
def simulate_cluster(
    trace: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="Trace with arrivals and lengths, in the format of Azure or BurstGPT.",
        ),
    ],
    jobs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Jobs in the format of Philly's: submit_s,num_gpus,duration_s. [none]",
        ),
    ] = None,
    where: Where = None,
    nodes: Annotated[
        int,
        typer.Option(min=1, help="Number of devices, or of groups of --tensor-parallel devices."),
    ] = 1000,
    hardware: Annotated[
        str, typer.Option(metavar="NAME", help="Modelled hardware, such as a100, h100, h200, a40.")
    ] = "h100",
    tensor_parallel: TensorParallel = 1,
    model: Annotated[
        str, typer.Option(help="Directory, hub id, or dummy:PRESET.")
    ] = "dummy:llama-3.1-8b",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    rate: Annotated[
        float | None,
        typer.Option(min=1e-6, max=1e9, help="Requests per second over the cluster. [the trace's]"),
    ] = None,
    hours: Annotated[float, typer.Option(min=0.001, max=1e6, help="Hours of virtual time.")] = 24.0,
    cell: Annotated[
        int, typer.Option(min=1, help="Number of nodes that one scheduler places on.")
    ] = 8,
    placement: Annotated[
        str, typer.Option(help="Name of the placement, such as lemix.")
    ] = "slack-affinity",
    workers: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 2,
    save: Save = None,
) -> None:
    """Simulate a day of traffic on a cluster.

    Shows attainment, latencies, tokens trained, and the errors of the coarse model of a node beside
    the engine itself.
    """
    from coserve.bench.results import save_result
    from coserve.cli.tables import console
    from coserve.cluster.placement import placement_names
    from coserve.models.backbone import load_backbone
    from coserve.workloads.traces import read_jobs, read_trace
    from experiments.simulate_cluster import at_scale

    if placement not in placement_names():
        raise typer.BadParameter(
            f"{placement!r} is not one of {', '.join(placement_names())}", param_hint="--placement"
        )
    if nodes % min(cell, nodes):
        raise typer.BadParameter(
            f"{nodes} nodes are not a multiple of the cells of {cell}", param_hint="--nodes"
        )
    requests, seconds = read_trace(trace, where=values_by_column(where)), 3600 * hours
    given = [] if jobs is None else at_scale.jobs_of_day(read_jobs(jobs), seconds)
    span_s = requests[-1].at_s * len(requests) / max(1, len(requests) - 1) or 1.0
    config = at_scale.ScaleConfig(
        num_nodes=nodes,
        rate=rate or len(requests) / span_s,
        seconds=seconds,
        cell_nodes=min(cell, nodes),
        placement=placement,
        workers=workers,
    )
    place = modelled_place(
        load_backbone(model, dtype=dtype, device="meta"), hardware, tensor_parallel
    )
    begin_s, out = time.monotonic(), console(stderr=True)
    numbers = at_scale.run(place, requests, given, config, watch=out.print)
    result = {
        "experiment": "simulate cluster",
        "model": model,
        "hardware": place.name,
        "trace": " ".join([str(trace), *(where or ())]),
        "date": datetime.now(UTC).date().isoformat(),
        "wall_s": round(time.monotonic() - begin_s, 1),
        **numbers,
    }
    _print(result)
    if save is not None:
        save_result(save, "simulate_cluster", result)


def _print(result: dict[str, Any]) -> None:
    """Print the result, the errors of the coarse model, and the line of JSON."""
    from coserve.cli.tables import console, table

    shown = table("", ">", title=f"{result['nodes']} × {result['hardware']}, {result['model']}")
    for name in (
        "requests",
        "requests_per_s",
        "attainment",
        "ttft_p50_ms",
        "ttft_p99_ms",
        "utilisation",
    ):
        shown.add_row(name.replace("_", " "), f"{result[name]:,}")
    for name in ("tokens_trained_per_s", "jobs", "jobs_ended", "scheduling_ms", "wall_s"):
        shown.add_row(name.replace("_", " "), f"{result[name]:,}")
    console().print(shown)
    errors = table(
        "coarse node beside the engine", ">requests/s/node", ">engine", ">coarse", ">error"
    )
    for check in result["coarse_errors"]:
        for name, error in check["error"].items():
            rate, fine, coarse = (
                check["requests_per_s_per_node"],
                check["fine"][name],
                check["coarse"][name],
            )
            errors.add_row(
                name.replace("_", " "), f"{rate:g}", f"{fine:.5g}", f"{coarse:.5g}", f"{error:+.1%}"
            )
    console().print(errors)
    print(json.dumps(result))


if __name__ == "__main__":
    run(app, "python -m experiments.simulate_cluster")

"""Every policy on one trace: `python -m experiments.compare`."""

import json
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coserve.cli.bench_options import Save
from coserve.cli.main import run
from coserve.cli.modelled_options import modelled_places, refuse_beyond_positions
from coserve.cli.report_option import report_option, write_report
from coserve.cli.slo_option import slo_option
from coserve.cli.where_option import Where, values_by_column

if TYPE_CHECKING:
    from coserve.bench.cells import CompareConfig
    from coserve.bench.places import TorchPlace
    from coserve.models.backbone import Backbone
    from coserve.tuning.examples import Example
    from experiments.compare.separate import SeparateProcesses

# Real time for all cells on a device that is here, and time of the trace for each on a modelled
# one.
_MINUTES, _QUICK_MINUTES = 40.0, 4.0
_MODELLED_S, _QUICK_MODELLED_S = 300.0, 60.0
# In so little time on a device that is here: the default, requests alone, and the two rivals that
# came nearest to it so far (benchmarks/compare.md), at one rate. Shares of four minutes for all of
# them at three say nothing.
_QUICK_POLICIES, _QUICK_LOADS = ("slack", "inference-only", "token-fusion", "harli"), ("middle",)
_ALL = "all"
_POOL_BYTES = 4 << 30
_MAX_EXAMPLES, _CHARACTERS_PER_TOKEN = 1000, 4


app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


class On(StrEnum):
    """Devices that a comparison runs on."""

    torch = "torch"
    modelled = "modelled"


@app.command()
def compare(
    trace: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help=(
                "Trace with arrivals and lengths: CSV or JSONL, gzipped or not, in the format "
                "of Azure or BurstGPT."
            ),
        ),
    ],
    model: Annotated[
        str, typer.Option(help="Directory, hub id, or dummy:PRESET.")
    ] = "dummy:qwen2.5-0.5b",
    dtype: Annotated[
        str,
        typer.Option(
            help=(
                "float32, bfloat16, float16, or best: the fastest that this machine has "
                "instructions for."
            )
        ),
    ] = "best",
    device: Annotated[
        On,
        typer.Option(
            help="torch: this machine, in real time; modelled: modelled devices, in virtual time."
        ),
    ] = On.torch,
    hardware: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Modelled devices, separated by commas: a100, h100, … [a100]",
        ),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help=(
                "Policies, separated by commas, with settings after colons, such as "
                "slack,temporal-sharing:n=64; all: every policy. [all]"
            ),
        ),
    ] = None,
    rates: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBERS",
            help=(
                "Requests per second, separated by commas. [30, 60 and 90% of what requests "
                "alone hold]"
            ),
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=1,
            help=(
                "Seconds of the trace, for each policy at each rate. [modelled: 300; torch: 40 "
                "minutes for all]"
            ),
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help=(
                "modelled: a minute of the trace; torch: five minutes for four policies at the "
                "middle rate."
            ),
        ),
    ] = False,
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
            help="SLO: mean time per later token. [2.5 decode steps of one request]",
        ),
    ] = None,
    length_factor: Annotated[
        float | None,
        typer.Option(
            min=1e-3,
            max=10,
            help="Factor of all lengths. [1, 1/2, …: as fits]",
        ),
    ] = None,
    lengths: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File of lengths, such as ShareGPT's, to draw from at random."
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(min=0, max=64, help="Number of jobs that run at once.")] = 1,
    sequence: Annotated[
        int, typer.Option(min=2, help="Maximum tokens per training example.")
    ] = 512,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Examples of the jobs: Alpaca, GSM8K, …, or a training file. [random tokens]",
        ),
    ] = None,
    where: Where = None,
    picture: Annotated[
        Path,
        typer.Option(callback=report_option, help="Report to write, as an HTML page."),
    ] = Path("compare.html"),
    separate: Annotated[
        bool | None,
        typer.Option(
            "--separate/--no-separate",
            help=(
                "Also run separate processes, transformers beside PEFT. [on torch, if PEFT is "
                "installed, but not with --quick]"
            ),
        ),
    ] = None,
    vllm: Annotated[
        Path | None,
        typer.Option(
            metavar="PYTHON",
            help="Python of an environment with vLLM, which then also runs beside PEFT.",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Number of processes, with --device modelled. [one per core]"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of arrivals, prompts and examples.")] = 0,
    save: Save = None,
) -> None:
    """Compare every policy on one trace and one mix of jobs, with the same SLOs, in one run.

    Shows attainment, latencies, tokens per second of requests and of jobs, evictions and prediction
    errors at a light, a middle and a heavy rate. Writes a report; the last line is JSON.
    """
    from coserve.bench.machine import own_cores, versions
    from coserve.bench.results import save_result
    from coserve.cli.tables import console
    from coserve.server.units import slo_seconds
    from coserve.workloads.traces import read_trace
    from experiments.compare.comparison import compare as run_comparison
    from experiments.compare.page import compare_html

    _check_device(device, hardware, workers)
    requests = read_trace(trace, where=values_by_column(where))
    if lengths is not None:
        requests = _with_lengths(requests, lengths, seed)
    wanted, hurries = _rates(rates), quick and device is On.torch and seconds is None
    names = _policies(policies) if policies or not hurries else _QUICK_POLICIES
    budget_s = 60 * (_QUICK_MINUTES if quick else _MINUTES)
    shapes, dtype = _shapes(model, dtype, device)
    refuse_beyond_positions(shapes, sequence)
    config = _config(
        names,
        seconds=seconds or (_QUICK_MODELLED_S if quick else _MODELLED_S),
        budget_s=budget_s if device is On.torch and seconds is None else None,
        ttft_s=slo_seconds(slo_ttft),
        tpot_s=None if slo_tpot is None else slo_seconds(slo_tpot),
        length_factor=length_factor,
        num_jobs=jobs,
        sequence=sequence,
        examples=_examples(data, model, shapes, sequence),
        rates=wanted,
        **({"loads": _QUICK_LOADS} if hurries else {}),
        seed=seed,
    )
    screen = console(stderr=True)
    if hurries and separate is None and vllm is None:
        separate = False
    rivals, separately = _separate(separate, vllm, model, dtype, device)
    if rivals is None and separate is None and device is On.torch:
        screen.print(f"separate processes do not run beside the policies: {separately}")
    places = (
        modelled_places(shapes, hardware or "a100")
        if device is On.modelled
        else [_here(model, dtype)]
    )
    ran = versions(
        vllm
    )  # before all else, which takes half an hour: the environment may have no vLLM
    workers = workers or len(own_cores())
    compared = [
        run_comparison(
            place,
            requests,
            config,
            shapes=shapes,
            separate=rivals,
            workers=workers,
            watch=screen.print,
        )
        for place in places
    ]
    result = {
        "experiment": "compare",
        "model": model,
        "dtype": dtype,
        "machine": ", ".join(each.place for each in compared),
        "date": datetime.now(UTC).date().isoformat(),
        "settings": {
            "trace": " ".join([str(trace), *(where or ())]),
            "lengths": str(lengths) if lengths else "the trace's",
            "device": device.value,
            "seconds of the trace": round(compared[0].seconds, 1),
            "jobs": jobs,
            "examples": str(data) if data else f"random, {sequence} tokens",
            "seed": seed,
            "separate processes": separately,
            "versions": ran,
        },
    }
    result |= _told([each.result() for each in compared])
    _print(result)
    if save is not None:
        save_result(save, "compare", result)
    write_report(picture, compare_html(result, compared))


def _check_device(device: On, hardware: str | None, workers: int | None) -> None:
    """Refuse options of modelled devices on this machine, where they would have no effect for most
    of an hour.

    Raises:
        BadParameter: Such an option is given.
    """
    for option, value in (("--hardware", hardware), ("--workers", workers)):
        if device is On.torch and value is not None:
            raise typer.BadParameter(
                f"{option} {value} is for modelled devices, and this comparison would run on this "
                f"machine: add "
                f"--device modelled, or leave out {option}",
                param_hint=option,
            )


def _told(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the result of one device; of several devices, all rows, and the rest by device."""
    if len(results) == 1:
        return results[0]
    rows = [{"place": result["place"], **row} for result in results for row in result["rows"]]
    places = [
        {name: value for name, value in result.items() if name != "rows"} for result in results
    ]
    return {"places": places, "rows": rows}


def _config(policies: tuple[str, ...], **settings: Any) -> "CompareConfig":
    from coserve.bench.cells import CompareConfig

    return CompareConfig(policies=policies, **settings)


def _policies(text: str | None) -> tuple[str, ...]:
    from coserve.bench.cells import policy_of
    from coserve.scheduling.policies import make_policy, policy_names

    given = [name.strip() for name in (text or _ALL).split(",")]
    names = [name for each in given for name in (policy_names() if each == _ALL else (each,))]
    for name in names:
        try:
            make_policy(*policy_of(name))
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--policies") from None
    return tuple(dict.fromkeys(names))


def _rates(text: str | None) -> tuple[float, ...]:
    try:
        result = tuple(float(number) for number in text.split(",")) if text else ()
    except ValueError:
        result = (-1.0,)
    if not all(0 < rate < float("inf") for rate in result):
        raise typer.BadParameter(
            f"{text!r} must be numbers above 0 with commas between them", param_hint="--rates"
        )
    return result


def _with_lengths(requests: Any, path: Path, seed: int) -> Any:
    from dataclasses import replace
    from random import Random

    from coserve.workloads.arrivals import RecordedLengths
    from coserve.workloads.traces import read_lengths

    lengths, random = RecordedLengths(read_lengths(path)), Random(seed)
    drawn = ((each, lengths.draw(random)) for each in requests)
    return [
        replace(each, num_prompt_tokens=prompt, num_output_tokens=output)
        for each, (prompt, output) in drawn
    ]


def _shapes(model: str, dtype: str, device: On) -> "tuple[Backbone, str]":
    """Return the model without weights, and the name of its dtype."""
    import torch

    from coserve.bench.machine import best_dtype
    from coserve.models import load_backbone

    if dtype == "best":
        dtype = "bfloat16" if device is On.modelled else best_dtype(_torch_device())
    return load_backbone(model, dtype=dtype, device=torch.device("meta")), dtype


def _torch_device() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _here(model: str, dtype: str) -> "TorchPlace":
    from coserve.bench.machine import describe
    from coserve.bench.places import TorchPlace
    from coserve.devices.loading import torch_device
    from coserve.devices.torch.process_memory import keep_freed_memory
    from coserve.models import load_backbone

    keep_freed_memory()
    place = _torch_device()
    backbone = load_backbone(model, dtype=dtype, device=place)
    memory_bytes = _POOL_BYTES if place.type == "cpu" else None
    return TorchPlace(
        name=describe(place), device=torch_device(backbone, memory_bytes=memory_bytes)
    )


def _separate(
    wanted: bool | None, vllm: Path | None, model: str, dtype: str, device: On
) -> "tuple[SeparateProcesses | None, str]":
    """Return the separate processes that run beside the policies, if any, and their description.

    Raises:
        BadParameter: They cannot run.
    """
    from importlib.util import find_spec

    if device is On.modelled:
        if wanted or vllm is not None:
            raise typer.BadParameter(
                "separate processes run on this machine: leave out --device modelled"
            )
        return None, "none, as they are not modelled"
    if find_spec("peft") is None and (wanted or vllm is not None):
        raise typer.BadParameter("separate processes fine-tune with PEFT: pip install peft")
    if wanted is False and vllm is not None:
        raise typer.BadParameter("--vllm is one of the separate processes: leave out --no-separate")
    if wanted is False:
        return None, "left out (--no-separate, or --quick)"
    if find_spec("peft") is None:
        return None, "PEFT, which they fine-tune with, is not installed (pip install peft)"
    from coserve.bench.machine import own_cores
    from experiments.compare.separate import SeparateProcesses

    place = _torch_device().type
    memory_bytes = _POOL_BYTES if place == "cpu" else None
    processes = SeparateProcesses(
        model=model,
        dtype=dtype,
        cores=own_cores(),
        device=place,
        memory_bytes=memory_bytes,
        vllm=vllm,
    )
    return processes, ", ".join(
        dict.fromkeys(f"{each.server} beside PEFT" for each in processes.arrangements())
    )


def _examples(
    path: Path | None, model: str, shapes: "Backbone", length: int
) -> "tuple[Example, ...]":
    """Return the examples of a file: in the model's tokens, or about as many random ones without a
    tokenizer.
    """
    if path is None:
        return ()
    from random import Random

    from coserve.engine.prompts import load_tokenizer
    from coserve.models.source import find_model
    from coserve.tuning.examples import Example, read_examples
    from coserve.workloads.datasets import read_dataset

    lines = [json.dumps(line) for line in read_dataset(path, most=_MAX_EXAMPLES)]
    tokenizer = load_tokenizer(find_model(model, with_weights=False))
    if tokenizer is not None:
        return tuple(read_examples(lines, tokenizer, max_sequence_length=length))
    random, vocab = Random(0), range(shapes.architecture.vocab_size)
    counts = [min(length, max(2, len(line) // _CHARACTERS_PER_TOKEN)) for line in lines]
    return tuple(
        Example(tokens=tuple(random.choices(vocab, k=count)), trained=(True,) * count)
        for count in counts
    )


def _print(result: dict[str, Any]) -> None:
    from coserve.cli.tables import console, table

    shown = table(
        *(
            "=policy",
            "=load",
            ">requests/s",
            ">attainment",
            ">TTFT ms p50",
            ">p99",
            ">TPOT ms p50",
            ">p99",
        ),
        *(">output tok/s", ">tuning tok/s", ">evictions", ">error"),
        title=f"compare: {result['model']}, {result['dtype']}, {result['machine']}",
    )
    for row in result["rows"]:
        times = [row[f"{name}_p{share}_ms"] for name in ("ttft", "tpot") for share in (50, 99)]
        error = row["prediction_error"]
        shown.add_row(
            f"{row['place']}: {row['policy']}" if "place" in row else row["policy"],
            *(row["load"], f"{row['rate']:.3g}", f"{row['attainment']:.1%}"),
            *(
                "–" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
                for value in times
            ),
            *(f"{row[f'{name}_tokens_per_s']:,.0f}" for name in ("inference", "tuning")),
            "–" if row["evictions"] is None else str(row["evictions"]),
            "–" if error is None else f"{error:.1%}",
        )
    console().print(shown)
    for each in result.get("ended", ()):
        console().print(f"{each['policy']} has no row from {each['load']} on: {each['reason']}")
    print(json.dumps(result))


if __name__ == "__main__":
    run(app, "python -m experiments.compare")

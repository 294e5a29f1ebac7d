"""`coserve bench`: what this machine reaches, beside what others reach on it, measured in one run."""

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from rich.table import Table

Experiment = Literal["decode", "train", "coserve"]


def bench(
    experiment: Annotated[Experiment, typer.Argument(help="What to measure.")],
    model: Annotated[str, typer.Option(help="A directory, a hub id, or dummy:PRESET.")] = "dummy:smollm2-135m",
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, float16, or best: what this machine has instructions for.")
    ] = "best",
    weights: Annotated[str, typer.Option(help="How weights of linear layers are stored, as in up.")] = "dense",
    device: Annotated[str, typer.Option(help="Such as cpu or cuda:0; auto takes a GPU if there is one.")] = "auto",
    runs: Annotated[int, typer.Option(min=1, help="Turns that each side takes; numbers are medians over them.")] = 5,
    streams: Annotated[int, typer.Option(min=1, help="coserve: requests that decode at once.")] = 4,
    jobs: Annotated[int, typer.Option(min=1, help="coserve: jobs that run at once.")] = 1,
    seconds: Annotated[float, typer.Option(min=1, help="coserve: time for each policy.")] = 60.0,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="coserve: also what --deterministic of up costs.")
    ] = False,
) -> None:
    """Measure EXPERIMENT and print a table, then one line of JSON.

    **decode**: a step of 1, 4 and 8 requests at context 512, against reading the weights and the cache once at this
    machine's bandwidth, and against transformers' generate. **train**: tokens per second and activation memory against
    PEFT, on sequences of 512 and 1,024 tokens. **coserve**: steady streams with an SLO for the time per output
    token of 2.5 × their step alone, and fine-tuning in what they leave over; with the same under inference-only and
    tuning-only, and PEFT alone.
    """
    import torch

    from coserve.bench import coserve as whole
    from coserve.bench import decode, train
    from coserve.bench.machine import best_dtype, describe
    from coserve.devices.process_memory import keep_freed_memory
    from coserve.models import load_backbone

    place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    dtype = best_dtype(place) if dtype == "best" else dtype
    keep_freed_memory()  # as the server's engine does; for both sides
    backbone = load_backbone(model, dtype=dtype, device=place, weights=weights)
    if experiment == "decode":
        found = decode.run(backbone, runs=runs)
    elif experiment == "train":
        found = train.run(backbone, runs=runs)
    else:
        found = whole.run(
            backbone, runs=runs, streams=streams, num_jobs=jobs, seconds=seconds, deterministic=deterministic
        )
    result = {
        "experiment": experiment,
        "model": model,
        "dtype": dtype,
        "weights": weights,
        "runs": runs,
        "machine": describe(place),
        "date": datetime.now(UTC).date().isoformat(),
        **found,
    }
    _show(result)
    print(json.dumps(result))


def _show(result: dict[str, Any]) -> None:
    """The result as a table."""
    from rich.table import Table

    from coserve.cli.tables import console

    names = ("model", "dtype", "weights", "machine")
    title = f"{result['experiment']}: {', '.join(result[name] for name in names)}"
    show = {"decode": _decode_table, "train": _train_table, "coserve": _coserve_table}[result["experiment"]]
    console().print(show(Table(title=title, title_justify="left"), result))


def _decode_table(table: "Table", result: dict[str, Any]) -> "Table":
    for name in ("batch", "context", "step ms", "read-once ms", "step / read-once", "transformers ms", "speed-up"):
        table.add_column(name, justify="right")
    for row in result["rows"]:
        step, floor, other = row["step_ms"], row["floor_ms"], row["transformers_ms"]
        table.add_row(
            str(row["batch"]),
            str(row["context"]),
            *(f"{step:.1f}", f"{floor:.1f}", f"{step / floor:.2f}", f"{other:.1f}", f"{other / step:.2f} ×"),
        )
    return table


def _train_table(table: "Table", result: dict[str, Any]) -> "Table":
    for name in ("sequence", "tokens/s", "PEFT tokens/s", "speed-up", "activations MB", "PEFT MB", "share"):
        table.add_column(name, justify="right")
    for row in result["rows"]:
        ours, peft = row["tokens_per_s"], row["peft_tokens_per_s"]
        held, theirs = row["activation_bytes"], row["peft_activation_bytes"]
        table.add_row(
            str(row["sequence"]),
            *(f"{ours:.0f}", f"{peft:.0f}", f"{ours / peft:.2f} ×"),
            *(f"{held / 1e6:.0f}", f"{theirs / 1e6:.0f}", f"{held / theirs:.0%}"),
        )
    return table


def _coserve_table(table: "Table", result: dict[str, Any]) -> "Table":
    for name in ("", "co-serving", "requests alone", "jobs alone", "PEFT alone"):
        table.add_column(name, justify="left" if not name else "right")
    r = result
    slo = f"(SLO {r['objective_tpot_ms']:.0f})"
    ttft = f"(SLO {r['objective_ttft_ms']:.0f})"
    rows: list[tuple[str, ...]] = [
        ("TPOT p50 ms", f"{r['tpot_p50_ms']:.1f}", f"{r['inference_only_tpot_p50_ms']:.1f}", "", ""),
        (f"TPOT p99 ms {slo}", f"{r['tpot_p99_ms']:.1f}", f"{r['inference_only_tpot_p99_ms']:.1f}", "", ""),
        (f"TTFT p99 ms {ttft}", f"{r['ttft_p99_ms']:.0f}", f"{r['inference_only_ttft_p99_ms']:.0f}", "", ""),
        ("attainment", f"{r['attainment']:.1%}", f"{r['inference_only_attainment']:.1%}", "", ""),
        (
            "fine-tuning tokens/s",
            f"{r['tuning_tokens_per_s']:.0f}",
            "",
            f"{r['tuning_only_tokens_per_s']:.0f}",
            f"{r['peft_alone_tokens_per_s']:.0f}",
        ),
        ("prediction error, median", f"{r['prediction_error_median']:.1%}", "", "", ""),
        ("prediction error, p95", f"{r['prediction_error_p95']:.1%}", "", "", ""),
    ]
    if (d := r.get("deterministic")) is not None:
        rows += [
            ("deterministic: decode step", "", f"{d['cost_decode']:.2f} ×", "", ""),
            ("deterministic: prompt", "", f"{d['cost_prompt']:.2f} ×", "", ""),
            ("deterministic: time per trained token", "", "", f"{d['cost_training']:.2f} ×", ""),
            ("deterministic: fine-tuning tokens/s", f"{d['tuning_tokens_per_s']:.0f}", "", "", ""),
        ]
    for row in rows:
        table.add_row(*row)
    return table

"""Tables of `coserve bench`, one function per subcommand."""

from typing import Any

from rich.table import Table


def decode(table: Table, result: dict[str, Any]) -> None:
    """Fill the table of decode steps: each batch beside its floor, transformers, and OpenVINO if it
    ran.
    """
    others = [
        name for name in ("transformers", "OpenVINO") if f"{name.lower()}_ms" in result["rows"][0]
    ]
    columns = ["batch", "context", "step ms", "read-once ms", "step / read-once"]
    for name in columns + [column for other in others for column in (f"{other} ms", "speed-up")]:
        table.add_column(name, justify="right")
    for row in result["rows"]:
        step, floor = row["step_ms"], row["floor_ms"]
        cells = [
            str(row["batch"]),
            str(row["context"]),
            f"{step:.1f}",
            f"{floor:.1f}",
            f"{step / floor:.2f}",
        ]
        for other_ms in [row[f"{name.lower()}_ms"] for name in others]:
            cells += [f"{other_ms:.1f}", f"{other_ms / step:.2f} ×"]
        table.add_row(*cells)


def train(table: Table, result: dict[str, Any]) -> None:
    """Fill the table of training: each sequence length beside PEFT."""
    for name in (
        "sequence",
        "tokens/s",
        "PEFT tokens/s",
        "speed-up",
        "compiled PEFT tokens/s",
        "speed-up",
    ):
        table.add_column(name, justify="right")
    for name in ("activations MB", "PEFT MB", "share"):
        table.add_column(name, justify="right")
    for row in result["rows"]:
        ours, peft, compiled = (
            row.get(f"{who}tokens_per_s") for who in ("", "peft_", "peft_compiled_")
        )
        held, theirs = row["activation_bytes"], row["peft_activation_bytes"]
        table.add_row(
            str(row["sequence"]),
            *(f"{ours:.0f}", f"{peft:.0f}", f"{ours / peft:.2f} ×"),
            *((f"{compiled:.0f}", f"{ours / compiled:.2f} ×") if compiled else ("", "")),
            *(f"{held / 1e6:.0f}", f"{theirs / 1e6:.0f}", f"{held / theirs:.0%}"),
        )
        if "recompute_tokens_per_s" in row:
            ours, held = row["recompute_tokens_per_s"], row["recompute_activation_bytes"]
            table.add_row(
                "… recomputing",
                *(f"{ours:.0f}", "", f"{ours / peft:.2f} ×", "", ""),
                *(f"{held / 1e6:.0f}", "", f"{held / theirs:.0%}"),
            )


def _divided(r: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return rows about divided steps, on devices that can divide them."""
    if "divided_share" not in r:
        return []
    return [
        ("the same, never side by side", f"{r['in_turns_tokens_per_s']:.0f}", "", "", ""),
        ("steps of jobs that were divided", f"{r['divided_share']:.0%}", "", "", ""),
    ]


def coserve(table: Table, result: dict[str, Any]) -> None:
    """Fill the table of co-serving: what each policy reached, beside PEFT alone."""
    for name in ("", "co-serving", "requests alone", "jobs alone", "PEFT alone"):
        table.add_column(name, justify="left" if not name else "right")
    r = result
    slo = f"(SLO {r['objective_tpot_ms']:.0f})"
    ttft = f"(SLO {r['objective_ttft_ms']:.0f})"
    rows: list[tuple[str, ...]] = [
        (
            "TPOT p50 ms",
            f"{r['tpot_p50_ms']:.1f}",
            f"{r['inference_only_tpot_p50_ms']:.1f}",
            "",
            "",
        ),
        (
            f"TPOT p99 ms {slo}",
            f"{r['tpot_p99_ms']:.1f}",
            f"{r['inference_only_tpot_p99_ms']:.1f}",
            "",
            "",
        ),
        ("TPOT p99, of its turn's SLO", f"{r['tpot_p99_of_objective']:.1%}", "", "", ""),
        (
            f"TTFT p99 ms {ttft}",
            f"{r['ttft_p99_ms']:.0f}",
            f"{r['inference_only_ttft_p99_ms']:.0f}",
            "",
            "",
        ),
        ("attainment", f"{r['attainment']:.1%}", f"{r['inference_only_attainment']:.1%}", "", ""),
        (
            "fine-tuning tokens/s",
            f"{r['tuning_tokens_per_s']:.0f}",
            "",
            f"{r['tuning_only_tokens_per_s']:.0f}",
            f"{r['peft_alone_tokens_per_s']:.0f}",
        ),
        *_divided(r),
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


def serve(table: Table, result: dict[str, Any]) -> None:
    """Fill the table of servers, each at each number of concurrent requests."""
    table.add_column("server")
    for name in (
        "at once",
        "output tokens/s",
        "TTFT ms p50",
        "p90",
        "p99",
        "TPOT ms p50",
        "p90",
        "p99",
    ):
        table.add_column(name, justify="right")
    for row in result["rows"]:
        times = [
            row[f"{name}_{share}_ms"]
            for name in ("ttft", "tpot")
            for share in ("p50", "p90", "p99")
        ]
        table.add_row(
            row["server"],
            str(row["concurrent"]),
            f"{row['output_tokens_per_s']:.1f}",
            *(f"{value:.1f}" for value in times),
        )

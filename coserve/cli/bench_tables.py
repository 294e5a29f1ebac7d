"""Tables of `coserve bench`: one for each experiment, of its name."""

from typing import Any

from rich.table import Table


def decode(table: Table, result: dict[str, Any]) -> None:
    """Each batch beside reading once, transformers, and OpenVINO if it ran."""
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
    """Each length beside PEFT."""
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
    """Where steps can be divided: how many were, and what is reached without."""
    if "divided_share" not in r:
        return []
    return [
        ("the same, never side by side", f"{r['in_turns_tokens_per_s']:.0f}", "", "", ""),
        ("steps of jobs that were divided", f"{r['divided_share']:.0%}", "", "", ""),
    ]


def coserve(table: Table, result: dict[str, Any]) -> None:
    """What each policy reached, beside PEFT alone."""
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


def many(table: Table, result: dict[str, Any]) -> None:
    """Jobs at once beside the same work done otherwise."""
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


def profile(table: Table, result: dict[str, Any]) -> None:
    """Each part of each kind of step, its share, and its floor."""
    table.add_column("")
    for step in result["steps"]:
        for name in (f"{step['step']} ms", "share", "floor ms"):
            table.add_column(name, justify="right")
    for part in result["steps"][0]["parts_ms"]:
        cells = []
        for step in result["steps"]:
            spent, least = step["parts_ms"][part], step["floor_ms"][part]
            cells += [
                f"{spent:.2f}",
                f"{spent / step['timed_ms']:.1%}",
                f"{least:.2f}" if least else "",
            ]
        table.add_row(part, *cells)
    sums = [
        [f"{s['timed_ms']:.2f}", "", f"{sum(s['floor_ms'].values()):.2f}"] for s in result["steps"]
    ]
    table.add_row("sum", *(cell for cells in sums for cell in cells))
    wholes = [
        [f"{s['step_ms']:.2f}", f"{s['timed_ms'] / s['step_ms']:.1%}", ""] for s in result["steps"]
    ]
    table.add_row("the step, not timed by part", *(cell for cells in wholes for cell in cells))


def serve(table: Table, result: dict[str, Any]) -> None:
    """Each server at each number of requests."""
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


def cluster_here(table: Table, result: dict[str, Any]) -> None:
    """Real nodes, the same in virtual time, by what the latter differ, and runs of each side among
    themselves.
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


def cluster(table: Table, result: dict[str, Any]) -> None:
    """Each placement in the mean over the settings, and the most that it reaches over separate
    nodes.
    """
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

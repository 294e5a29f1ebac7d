"""`coserve demo`: serving and fine-tuning on the built-in model in three minutes, with a report."""

import json
import os
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from coserve.adapters.file_names import CONFIG_FILE
from coserve.cli.connection import own_server
from coserve.cli.report_option import report_directory_option
from coserve.cli.slo_option import slo_option
from coserve.cli.where_option import Where, values_by_column
from coserve.errors import CoserveError

if TYPE_CHECKING:
    from coserve.bench.demo import DemoConfig, DemoState

LessonName = Literal["pirate", "zub"]
# For the built-in model: enough pages for all that is asked here, few enough to see in a chart; and
# answers at 25 tokens a second, faster than people read. The usual SLO, 2.5 times a step of some 3
# ms, is less than what requests alone took at p99 on two cores that server, engine and clients
# share (8 to 10 ms).
_TINY_OPTIONS = {"--memory": "256MB", "--slo-ttft": "500ms", "--slo-tpot": "40ms"}
_QUICK: dict[str, Any] = {
    "seconds": 3.0,
    "rate": 4.0,
    "num_scored": 4,
    "num_questions": 4,
    "checkpoint_every_steps": 5,
}


def demo(
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            callback=report_directory_option,
            help="Directory for the report; it replaces the one of an earlier demo.",
        ),
    ] = Path("demo-report"),
    lesson: Annotated[
        LessonName,
        typer.Option(
            help="What the model learns: to talk like a pirate, or words of a new language (zub)."
        ),
    ] = "pirate",
    model: Annotated[
        str, typer.Option(help="Directory, hub id, or tiny, the built-in model.")
    ] = "tiny",
    seconds: Annotated[
        float, typer.Option(min=1, help="Length of each of the three phases.")
    ] = 35.0,
    rate: Annotated[
        float, typer.Option(min=0.1, help="Mean requests per second; they arrive in bursts.")
    ] = 2.0,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=(
                "Recorded trace to take the arrivals from, as CSV in the format of Azure or "
                "BurstGPT."
            ),
        ),
    ] = None,
    where: Where = None,
    slo_ttft: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            callback=slo_option,
            help="SLO: time to first token, such as 500ms or 2s. [tiny: 500ms]",
        ),
    ] = None,
    slo_tpot: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            callback=slo_option,
            help="SLO: mean time per later token, such as 40ms or 0.04s. [tiny: 40ms]",
        ),
    ] = None,
    tensor_parallel: Annotated[
        int,
        typer.Option(min=1, help="Number of ranks that hold the model together, as in coserve up."),
    ] = 1,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the lesson, the trace and the job.")
    ] = 0,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Run each phase for a few seconds only, to see that it works."
        ),
    ] = False,
) -> None:
    """Show what coserve does, in three minutes and without any set-up.

    Starts a server and asks it some questions; plays a bursty trace of requests alone, runs a
    fine-tuning job alone, then both at once; asks the same questions again. Writes `report.html`
    with the latency of every request against its SLO, `results.json`, and `adapter/` in PEFT's
    format.
    """
    from coserve.bench.demo import DemoConfig
    from coserve.workloads.traces import read_trace

    if where and trace is None:
        raise typer.BadParameter("needs --trace", param_hint="--where")
    config = DemoConfig(
        seconds=seconds,
        rate=rate,
        seed=seed,
        trace_file=None if trace is None else str(trace),
        trace_where=values_by_column(where),
    )
    if trace is not None:
        read_trace(trace, where=config.trace_where)  # a file that is none is said at once
    config = replace(config, **_QUICK) if quick else config
    start_s = monotonic()
    with TemporaryDirectory(prefix="coserve-demo-") as directory:
        options = _server_options(model, slo_ttft, slo_tpot, tensor_parallel)
        results = _run(config, lesson, model, options, Path(directory))
        results["settings"]["the whole demo"] = f"{monotonic() - start_s:.0f} s"
        _write(out, results, _adapter_directory(Path(directory), results["job"]["id"]))
    _tell(results, out)


def _server_options(
    model: str, slo_ttft: str | None, slo_tpot: str | None, tensor_parallel: int
) -> list[str]:
    """Return options of `coserve up`; models other than the built-in one keep its defaults."""
    given = {
        name: value
        for name, value in (("--slo-ttft", slo_ttft), ("--slo-tpot", slo_tpot))
        if value is not None
    }
    if tensor_parallel > 1:
        given["--tensor-parallel"] = str(tensor_parallel)
    options = (_TINY_OPTIONS if model == "tiny" else {}) | given
    return [*(word for pair in options.items() for word in pair), "--measure-first"]


def _run(
    config: "DemoConfig", lesson_name: str, model: str, options: list[str], directory: Path
) -> dict[str, Any]:
    from rich.live import Live

    from coserve.bench.demo import Demo
    from coserve.cli.demo_view import live_view
    from coserve.cli.drawing import starting
    from coserve.cli.tables import console
    from coserve.workloads.lessons import LESSONS

    lesson, screen = LESSONS[lesson_name](seed=config.seed), console()
    training_file = directory / f"{lesson_name}.jsonl"
    training_file.write_text("".join(json.dumps(line) + "\n" for line in lesson.train), "utf-8")
    server = own_server(model, *options, home=directory / "home", log=directory / "server.log")
    with ExitStack() as stack:
        if screen.is_terminal:
            waiting = stack.enter_context(starting(model, screen))
            url = stack.enter_context(server)
            waiting.stop()
            live = stack.enter_context(Live(console=screen, refresh_per_second=4))

            def watch(state: "DemoState") -> None:
                live.update(live_view(state, screen.width))
        else:
            printed: set[str] = set()
            url = stack.enter_context(server)

            def watch(state: "DemoState") -> None:
                """A line for everything new, without its numbers."""
                words = state.doing.split(" (")[0]
                if words not in printed:
                    printed.add(words)
                    screen.print(words)

        results = Demo(url, lesson, training_file, config, watch=watch).run()
    import torch

    from coserve.bench.machine import describe

    machine = describe(torch.device(results["device"]), results["threads"])
    num_ranks = results["tensor_parallel"]
    results["machine"] = machine if num_ranks == 1 else f"{num_ranks} ranks, each {machine}"
    results["settings"] = _settings(results["config"], lesson, num_ranks)
    return results


def _settings(config: dict[str, Any], lesson: Any, num_ranks: int) -> dict[str, str]:
    """Return the settings that the report shows, by their labels."""
    ranks = {} if num_ranks == 1 else {"ranks": f"{num_ranks} processes hold the model together"}
    return {
        "trace": (
            f"{config['trace_file'] or 'bursty'}, {config['seconds']:g} s, seed {config['seed']}"
        ),
        "arrivals": f"{config['rate']:g} requests/s on average",
        "answers": f"{config['mean_output_tokens']:g} tokens on average",
        "examples": f"{len(lesson.train)} of the lesson “{lesson.name}”",
        "epochs": f"{config['epochs']}, batches of {config['batch_size']}",
        "adapter": f"LoRA at every linear layer, r {config['r']}, alpha {2 * config['r']}",
        "optimizer": f"AdamW, learning rate {config['learning_rate']:g}",
        **ranks,
        "command": "coserve demo" + (f" --tensor-parallel {num_ranks}" if ranks else ""),
    }


def _adapter_directory(home: Path, job_id: str) -> Path | None:
    """Return the directory of the job's newest adapter in the server's home."""
    directories = [path.parent for path in home.rglob(CONFIG_FILE) if job_id in str(path)]
    return max(directories, key=lambda path: (path / CONFIG_FILE).stat().st_mtime_ns, default=None)


def _write(out: Path, results: dict[str, Any], adapter: Path | None) -> None:
    from coserve.bench.report import report_html

    try:
        shutil.rmtree(out / "adapter", ignore_errors=True)
        out.mkdir(parents=True, exist_ok=True)
        (out / "results.json").write_text(json.dumps(results), "utf-8")
        (out / "report.html").write_text(report_html(results), "utf-8")
        if adapter is not None:
            (out / "adapter").mkdir()
            for path in adapter.iterdir():
                if path.name.startswith("adapter_"):
                    shutil.copyfile(path, out / "adapter" / path.name)
    except OSError as error:
        raise CoserveError(
            f"the report cannot be written to {out}: {error.strerror or error}"
        ) from None


def _tell(results: dict[str, Any], out: Path) -> None:
    """Print tables for people, and one line for programs."""
    from coserve.cli.demo_view import comparison, questions
    from coserve.cli.tables import console

    screen = console()
    screen.print(comparison(results), questions(results))
    screen.print(
        f"The report: {out / 'report.html'}\nThe adapter: {out / 'adapter'}{os.sep}", soft_wrap=True
    )
    print(json.dumps(_main_numbers(results) | {"report": str(out / "report.html")}))


def _main_numbers(results: dict[str, Any]) -> dict[str, Any]:
    phases = results["phases"]
    alone, both = phases["requests"]["summary"], phases["both"]["summary"]
    return {
        "tensor_parallel": results["tensor_parallel"],
        "objective_ttft_ms": results["objectives"]["ttft_ms"],
        "objective_tpot_ms": results["objectives"]["tpot_ms"],
        "requests": both["requests"],
        "failed": both["failed"] + alone["failed"],
        "attainment": both["attainment"],
        "ttft_p99_ms": both["ttft_ms"]["p99"],
        "tpot_p99_ms": both["tpot_ms"]["p99"],
        "requests_alone_attainment": alone["attainment"],
        "requests_alone_ttft_p99_ms": alone["ttft_ms"]["p99"],
        "requests_alone_tpot_p99_ms": alone["tpot_ms"]["p99"],
        "engine_attainment": phases["both"]["engine"]["attainment"],
        "requests_alone_engine_attainment": phases["requests"]["engine"]["attainment"],
        "tuning_tokens_per_s": phases["both"]["tuning"]["tokens_per_s"],
        "job_alone_tokens_per_s": phases["job"]["tuning"]["tokens_per_s"],
        "fine_tuned_model": results["job"]["model"],
        "score_before": results["score"]["before"],
        "score_after": results["score"]["after"],
    }

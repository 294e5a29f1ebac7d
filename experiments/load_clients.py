"""TTFT and TPOT as load clients measure them, beside the engine's own for the same requests.

    python -m experiments.load_clients [--vllm PYTHON] [--aiperf DIRECTORY] [--guidellm DIRECTORY]

PYTHON has vLLM (`vllm bench serve`), a DIRECTORY is an environment with bin/. Each given client
loads one `coserve up` in turn: prompts of 64 tokens, answers of 32, `--at-once` requests at once.
The model has random weights of SmolLM2-135M's shape, so that a decode step takes as long as with a
model that people serve. The engine's figures are those of `/v1/status/steps`, request by request,
without the warm-up of a client. Prints a row for each client, and one line of JSON.

TPOT is the mean time of a token after the first: (end - first token) / (tokens - 1). aiperf and
guidellm call that inter-token latency.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import httpx
import torch

from coserve.bench.machine import describe
from experiments.results import add_save_option, print_result
from experiments.vllm_entrypoint_models import llama, tokenizer

NUM_REQUESTS, PROMPT, OUTPUT, VOCABULARY = 24, 64, 32, 49_152
NAME = "shape"


class Seen(NamedTuple):
    """Means over requests."""

    num_requests: int
    """Number of requests."""
    ttft_ms: float
    """Milliseconds to the first token."""
    tpot_ms: float
    """Milliseconds per later token."""


class Load(NamedTuple):
    """Settings of a client."""

    url: str
    """URL of the server, without /v1."""
    model: Path
    """Directory of the model."""
    output: Path
    """Directory for the client's files."""
    at_once: int
    """Number of requests at once."""


def vllm(python: str, load: Load) -> Seen:
    """Run `vllm bench serve` through its module, as its command is not in every build."""
    code = (
        "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
        "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
    )
    options = {
        "--backend": "openai",
        "--base-url": load.url,
        "--endpoint": "/v1/completions",
        "--model": NAME,
        "--tokenizer": str(load.model),
        "--dataset-name": "random",
        "--random-input-len": str(PROMPT),
        "--random-output-len": str(OUTPUT),
        "--num-prompts": str(NUM_REQUESTS),
        "--max-concurrency": str(load.at_once),
        "--result-dir": str(load.output),
        "--result-filename": "vllm.json",
    }
    _run([python, "-c", code, *_words(options), "--ignore-eos", "--save-result"])
    report = json.loads((load.output / "vllm.json").read_text())
    return Seen(report["completed"], report["mean_ttft_ms"], report["mean_tpot_ms"])


def aiperf(directory: str, load: Load) -> Seen:
    """Run NVIDIA's aiperf."""
    options = {
        "--model": NAME,
        "--url": load.url,
        "--endpoint-type": "completions",
        "--tokenizer": str(load.model),
        "--isl": str(PROMPT),
        "--osl": str(OUTPUT),
        "--concurrency": str(load.at_once),
        "--request-count": str(NUM_REQUESTS),
        "--extra-inputs": "ignore_eos:true",
        "--ui": "none",
        "--artifact-dir": str(load.output / "aiperf"),
    }
    _run([f"{directory}/bin/aiperf", "profile", *_words(options), "--streaming"])
    [path] = (load.output / "aiperf").rglob("profile_export_aiperf.json")
    report = json.loads(path.read_text())
    return Seen(
        int(report["request_count"]["avg"]),
        report["time_to_first_token"]["avg"],
        report["inter_token_latency"]["avg"],
    )


def guidellm(directory: str, load: Load) -> Seen:
    """Run guidellm of the vLLM project, whose exit status says nothing of failed requests."""
    command = [
        *(f"{directory}/bin/guidellm", "run"),
        *("--backend", f"kind=openai_http,target={load.url},model={NAME}"),
        *("--tokenizer", f"kind=huggingface_auto,model={load.model}"),
        *("--profile", f"kind=concurrent,streams={load.at_once}"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}"),
        *("--output", "kind=json"),
    ]
    folder = load.output / "guidellm"
    folder.mkdir()
    _run(command, cwd=folder)
    [path] = folder.rglob("*.json")
    metrics = json.loads(path.read_text())["benchmarks"][0]["metrics"]
    totals = metrics["request_totals"]
    if totals["errored"]:
        raise SystemExit(f"guidellm: requests failed: {totals}")
    means = [
        metrics[name]["successful"]["mean"]
        for name in ("time_to_first_token_ms", "inter_token_latency_ms")
    ]
    return Seen(totals["successful"], *means)


CLIENTS: dict[str, Callable[[str, Load], Seen]] = {
    "vllm": vllm,
    "aiperf": aiperf,
    "guidellm": guidellm,
}


def _words(options: dict[str, str]) -> list[str]:
    return [word for option in options.items() for word in option]


def _run(command: list[str], **settings: Any) -> None:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment, **settings)
    if done.returncode:
        raise SystemExit(f"{command[0]}: {done.stdout[-2000:]}{done.stderr[-4000:]}")


def make_model(directory: Path) -> None:
    """Write random weights of SmolLM2-135M's shape, with a tokenizer."""
    model = llama(
        VOCABULARY,
        576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    model.save_pretrained(directory)
    tokenizer(VOCABULARY).save_pretrained(directory)


@contextmanager
def serving(model: Path, home: Path, threads: int) -> Iterator[str]:
    """Start a server, and yield its URL once it is ready."""
    command = [
        sys.executable,
        "-m",
        "coserve",
        "up",
        str(model),
        "--served-model-name",
        NAME,
        "--port",
        "0",
    ]
    command += ["--threads", str(threads), "--memory", "1GiB", "--home", str(home)]
    with (home / "server.log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            match = re.search(r"(https?://\S+)/v1", process.stdout.readline())
            if match is None:
                raise SystemExit((home / "server.log").read_text())
            yield match[1]
        finally:
            process.terminate()
            process.wait(60)


def engines_own(url: str, after: int, num_requests: int) -> Seen:
    """Return the engine's figures of the last requests; those before them warmed up."""
    requests = httpx.get(f"{url}/v1/status/steps", params={"after": after}).json()["requests"][
        -num_requests:
    ]
    return Seen(
        len(requests),
        1e3 * mean(each["ttft_s"] for each in requests),
        1e3 * mean(each["tpot_s"] for each in requests),
    )


def main() -> None:
    """Measure, print, and end with a line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in CLIENTS:
        parser.add_argument(f"--{name}")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument(
        "--model", type=Path, help="where the model is, or is made and kept [a temporary folder]"
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="of the engine: a client needs a core, too"
    )
    add_save_option(parser)
    given = parser.parse_args()
    print(f"{describe(torch.device('cpu'), given.threads)}; {given.at_once} at once\n")
    print("| client | requests | TTFT, client | TTFT, engine | | TPOT, client | TPOT, engine | |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    results = {}
    with TemporaryDirectory(prefix="coserve-load-") as directory:
        model, home = given.model or Path(directory) / "model", Path(directory) / "home"
        if not model.exists():
            make_model(model)
        with serving(model, home, given.threads) as url:
            for name, client in CLIENTS.items():
                if (where := getattr(given, name)) is None:
                    continue
                output = Path(directory) / name
                output.mkdir()
                after = httpx.get(f"{url}/v1/status/steps").json()["cursor"]
                seen = client(where, Load(url, model, output, given.at_once))
                own = engines_own(url, after, seen.num_requests)
                print(row(name, seen, own), flush=True)
                results[name] = {"client": seen._asdict(), "engine": own._asdict()}
    print_result("load_clients", results, given.save)


def row(name: str, client: Seen, engine: Seen) -> str:
    """Return a row of the table."""
    cells = [name, str(client.num_requests)]
    for told, own in ((client.ttft_ms, engine.ttft_ms), (client.tpot_ms, engine.tpot_ms)):
        cells += [f"{told:.1f} ms", f"{own:.1f} ms", f"{100 * (told / own - 1):+.1f}%"]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()

"""Times of jobs on the built-in model, beside the estimates of `coserve data check`.

    python -m experiments.job_estimate [ROUNDS]

A server of its own measures the model, and runs one job after the other without other load: short
chats, long ones, and texts, in small batches and large. Prints a table, and one line of JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from coserve.client.http import Client
from coserve.client.ports import free_port
from coserve.errors import ServerError
from coserve.workloads.facts import COLOURS
from experiments.results import add_save_option, print_result

_OVER = ("succeeded", "failed", "cancelled")
_POLL_S, _START_S = 0.05, 300.0
# Name: examples, words of an answer, epochs, examples of an optimizer step.
_JOBS = {
    "short chats, 1 at a time": (48, 8, 1, 1),
    "short chats, 16 at a time": (192, 8, 2, 16),
    "short chats, 4 times as many": (768, 8, 2, 16),
    "long chats, 16 at a time": (96, 120, 1, 16),
    "long chats, 4 times as many": (384, 120, 1, 16),
}


def write_chats(path: Path, num_examples: int, num_words: int) -> None:
    """Write chats with answers of about this many words."""
    rng, words = Random(0), list(COLOURS)
    lines = []
    for _ in range(num_examples):
        answer = " ".join(
            rng.choices(words, k=max(1, num_words + rng.randint(-num_words // 3, num_words // 3)))
        )
        turns = [
            {"role": "user", "content": "Which colours?"},
            {"role": "assistant", "content": answer},
        ]
        lines.append(json.dumps({"messages": turns}))
    path.write_text("\n".join(lines) + "\n")


def estimated_s(file: Path, epochs: int, batch_size: int) -> float:
    """Return the estimate of `coserve data check`."""
    options = [
        "--model",
        "tiny",
        "--epochs",
        str(epochs),
        "--batch-size",
        str(batch_size),
        "--json",
    ]
    command = [sys.executable, "-m", "coserve", "data", "check", str(file), *options]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return float(json.loads(out.splitlines()[-1])["seconds_alone"])


def taken_s(client: Client, file: Path, epochs: int, batch_size: int) -> float:
    """Return the seconds from the start of a job until its end, with its last checkpoint."""
    body = {
        "model": "tiny",
        "training_file": client.upload(file)["id"],
        "method": {
            "type": "supervised",
            "supervised": {"hyperparameters": {"n_epochs": epochs, "batch_size": batch_size}},
        },
    }
    job = client.post("/v1/fine_tuning/jobs", body)
    started_s: float | None = None
    while job["status"] not in _OVER:
        job = client.get(f"/v1/fine_tuning/jobs/{job['id']}")
        if started_s is None and job["status"] in ("running", *_OVER):
            started_s = time.monotonic()
        time.sleep(_POLL_S)
    assert job["status"] == "succeeded" and started_s is not None, job
    return time.monotonic() - started_s


def measure(url: str, directory: Path, rounds: int) -> list[dict[str, Any]]:
    """Run every job some times in turn."""
    result = []
    with Client(url, None) as client:
        for name, (num_examples, num_words, epochs, batch_size) in _JOBS.items():
            file = directory / "chats.jsonl"
            write_chats(file, num_examples, num_words)
            said_s = estimated_s(file, epochs, batch_size)
            took_s = sorted(taken_s(client, file, epochs, batch_size) for _ in range(rounds))
            result.append(
                {
                    "job": name,
                    "estimated_s": said_s,
                    "taken_s": took_s,
                    "ratio": took_s[rounds // 2] / said_s,
                }
            )
    return result


def main() -> None:
    """Start a server, and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rounds", type=int, nargs="?", default=3, help="runs of each job [3]")
    add_save_option(parser)
    given = parser.parse_args()
    rounds, port = given.rounds, free_port()
    url = f"http://127.0.0.1:{port}"
    with TemporaryDirectory() as name:
        os.environ["COSERVE_HOME"] = name
        command = [sys.executable, "-m", "coserve", "up", "tiny", "--port", str(port)]
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as server:
            try:
                _wait(url)
                rows = measure(url, Path(name), rounds)
            finally:
                server.terminate()
    print(f"{'job':28} {'estimated':>10} {'taken':>10} {'ratio':>6}")
    for each in rows:
        print(
            f"{each['job']:28} {each['estimated_s']:8.2f} s {each['taken_s'][rounds // 2]:8.2f} s "
            f"{each['ratio']:6.2f}"
        )
    print_result("job_estimate", {"rows": rows}, given.save)


def _wait(url: str) -> None:
    until_s = time.monotonic() + _START_S
    while time.monotonic() < until_s:
        try:
            with Client(url, None) as client:
                client.get("/ready")
            return
        except ServerError:
            time.sleep(0.2)
    raise TimeoutError(f"the server has not started within {_START_S:.0f} s")


if __name__ == "__main__":
    main()

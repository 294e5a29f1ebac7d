"""Many clients at once beside jobs: are all requests answered, is memory flat, how long does
/health take, and an answer after the engine was killed?

    python -m experiments.soak --minutes 10 --clients 64 --jobs 1

Starts a server on the built-in model in a directory of its own. Each client streams one chat after
another; when a job ends, the next begins. At the end, without clients, the engine is killed. The
last line is JSON: requests, errors, seconds of /health, seconds from the kill to the next answer,
and resident megabytes of the processes over time.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from coserve.cli.connection import own_server
from coserve.workloads.lessons import pirate
from experiments.results import add_save_option, print_result

_QUESTIONS = (
    "What colour is grass?",
    "What is 3 + 4?",
    "Write a story about a cat.",
    "What is the opposite of hot?",
)


def _processes(url: str) -> dict[str, int]:
    """Return the ids of the server's process, its child that forks engines, and the engine."""
    port = url.rsplit(":", 1)[1]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode().split("\0")
            if "up" in words and port in words:
                server = int(path.parent.name)
                forks = _child(server)
                return {"server": server, "forks": forks, "engine": _child(forks)}
        except (OSError, UnicodeDecodeError):
            continue
    return {}


def _child(process: int) -> int:
    children = (
        Path(f"/proc/{process}/task/{process}/children").read_text().split() if process else []
    )
    return int(children[0]) if children else 0


def _resident_mb(url: str) -> dict[str, int]:
    result = {}
    for name, process in _processes(url).items():
        with suppress(OSError):
            result[name] = (
                int(Path(f"/proc/{process}/statm").read_text().split()[1]) * 4096 // 1_000_000
            )
    return result


def _health(url: str, until_s: float) -> list[float]:
    """Return the seconds of each /health, ten a second, each on a connection of its own, as a
    supervisor's are.

    A process of its own runs this, as that of the clients is busy.
    """
    times_s = []
    while time.monotonic() < until_s:
        start_s = time.monotonic()
        httpx.get(f"{url}/health", timeout=60).raise_for_status()
        times_s.append(time.monotonic() - start_s)
        time.sleep(0.1)
    return sorted(times_s)


async def _recovery_s(http: httpx.AsyncClient, url: str) -> float:
    """Return the seconds from the engine's death to the first answer."""
    os.kill(_processes(url)["engine"], signal.SIGKILL)
    start_s = time.monotonic()
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
    while (await http.post("/v1/completions", json=body)).status_code != 200:
        await asyncio.sleep(0.05)
    return time.monotonic() - start_s


async def _client(http: httpx.AsyncClient, until_s: float, seed: int, seen: dict[str, int]) -> None:
    rng = random.Random(seed)
    while time.monotonic() < until_s:
        messages = [{"role": "user", "content": rng.choice(_QUESTIONS)}]
        body = {
            "model": "tiny",
            "messages": messages,
            "stream": True,
            "max_tokens": rng.choice((8, 24, 60)),
        }
        ended = False
        try:
            async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    ended |= line == "data: [DONE]"
                    if '"error"' in line:
                        break
        except httpx.HTTPError as error:  # a connection that was lost is a request that was lost
            print(f"failed: {error!r}", flush=True)
        seen["answered" if ended else "failed"] += 1


async def _jobs(http: httpx.AsyncClient, file: str, until_s: float, seen: dict[str, int]) -> None:
    """Run jobs one after the other."""
    while time.monotonic() < until_s:
        method = {
            "type": "supervised",
            "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": 8}},
        }
        body: dict[str, Any] = {
            "model": "tiny",
            "training_file": file,
            "method": method,
            "suffix": "soak",
        }
        job = (await http.post("/v1/fine_tuning/jobs", json=body)).json()
        while (
            job["status"] not in ("succeeded", "failed", "cancelled") and time.monotonic() < until_s
        ):
            await asyncio.sleep(1)
            job = (await http.get(f"/v1/fine_tuning/jobs/{job['id']}")).json()
        seen[f"jobs {job['status']}"] = seen.get(f"jobs {job['status']}", 0) + 1


async def _soak(url: str, minutes: float, clients: int, jobs: int) -> dict[str, Any]:
    seen, memory = {"answered": 0, "failed": 0}, []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http:
        lines = "".join(json.dumps(line) + "\n" for line in pirate(seed=0).train)
        form = {"files": {"file": ("pirate.jsonl", lines)}, "data": {"purpose": "fine-tune"}}
        file = (await http.post("/v1/files", **form)).json()["id"]  # type: ignore[arg-type]
        start_s = time.monotonic()
        until_s = start_s + 60 * minutes
        work = [_client(http, until_s, seed, seen) for seed in range(clients)]
        work += [_jobs(http, file, until_s, seen) for _ in range(jobs)]
        process = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        health = asyncio.get_running_loop().run_in_executor(process, _health, url, until_s)
        running = asyncio.gather(*work, health)
        while not running.done():
            memory.append({"s": round(time.monotonic() - start_s), **_resident_mb(url)})
            print(memory[-1], seen, flush=True)
            await asyncio.wait([running], timeout=15)
        await running
        process.shutdown()
        recovery_s = await _recovery_s(http, url)
    times_s = await health
    health_s = {
        name: times_s[int(q * (len(times_s) - 1))]
        for name, q in (("p50", 0.5), ("p99", 0.99), ("most", 1.0))
    }
    asked = {"minutes": minutes, "clients": clients, "jobs": jobs}
    return {**asked, **seen, "health_s": health_s, "recovery_s": recovery_s, "memory_mb": memory}


def main() -> None:
    """Start a server, run the load, and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--jobs", type=int, default=1)
    add_save_option(parser)
    asked = parser.parse_args()
    with (
        TemporaryDirectory() as home,
        own_server("tiny", "--memory", "256MB", home=Path(home), log=Path(home) / "log") as url,
    ):
        print_result(
            "soak", asyncio.run(_soak(url, asked.minutes, asked.clients, asked.jobs)), asked.save
        )


if __name__ == "__main__":
    main()

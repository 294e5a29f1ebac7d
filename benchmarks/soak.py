"""Many clients at once, a job always running, for as long as asked: is every request answered, does memory stay flat?

    python benchmarks/soak.py --minutes 10 --clients 64

Starts a server on the built-in model in a directory of its own. Each client streams one chat after another; when a job
is over, the next begins. The last line is JSON: requests, errors, and resident megabytes of both processes over time.
"""

import argparse
import asyncio
import json
import random
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from coserve.cli.connection import own_server
from coserve.workloads.lessons import pirate

_QUESTIONS = ("What colour is grass?", "What is 3 + 4?", "Write a story about a cat.", "What is the opposite of hot?")


def _resident_mb(url: str) -> dict[str, int]:
    """Of the server's process and its child, the engine's."""
    port = url.rsplit(":", 1)[1]
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode().split("\0")
            if "up" in words and port in words:
                server = path.parent
                children = (server / "task" / server.name / "children").read_text().split()
                for name, process in (("server", server), *(("engine", Path("/proc") / child) for child in children)):
                    pages = int((process / "statm").read_text().split()[1])
                    found[name] = pages * 4096 // 1_000_000
        except (OSError, UnicodeDecodeError):
            continue
    return found


async def _client(http: httpx.AsyncClient, until_s: float, seed: int, seen: dict[str, int]) -> None:
    rng = random.Random(seed)
    while time.monotonic() < until_s:
        messages = [{"role": "user", "content": rng.choice(_QUESTIONS)}]
        body = {"model": "tiny", "messages": messages, "stream": True, "max_tokens": rng.choice((8, 24, 60))}
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
    while time.monotonic() < until_s:
        method = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": 8}}}
        body: dict[str, Any] = {"model": "tiny", "training_file": file, "method": method, "suffix": "soak"}
        job = (await http.post("/v1/fine_tuning/jobs", json=body)).json()
        while job["status"] not in ("succeeded", "failed", "cancelled") and time.monotonic() < until_s:
            await asyncio.sleep(1)
            job = (await http.get(f"/v1/fine_tuning/jobs/{job['id']}")).json()
        seen[f"jobs {job['status']}"] = seen.get(f"jobs {job['status']}", 0) + 1


async def _soak(url: str, minutes: float, clients: int) -> dict[str, Any]:
    seen, memory = {"answered": 0, "failed": 0}, []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http:
        lines = "".join(json.dumps(line) + "\n" for line in pirate(seed=0).train)
        form = {"files": {"file": ("pirate.jsonl", lines)}, "data": {"purpose": "fine-tune"}}
        file = (await http.post("/v1/files", **form)).json()["id"]  # type: ignore[arg-type]
        start_s = time.monotonic()
        until_s = start_s + 60 * minutes
        work = [_client(http, until_s, seed, seen) for seed in range(clients)]
        running = asyncio.gather(*work, _jobs(http, file, until_s, seen))
        while not running.done():
            memory.append({"s": round(time.monotonic() - start_s), **_resident_mb(url)})
            print(memory[-1], seen, flush=True)
            await asyncio.wait([running], timeout=15)
        await running
    return {"minutes": minutes, "clients": clients, **seen, "memory_mb": memory}


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=64)
    asked = parser.parse_args()
    with (
        TemporaryDirectory() as home,
        own_server("tiny", "--memory", "256MB", home=Path(home), log=Path(home) / "log") as url,
    ):
        print(json.dumps(asyncio.run(_soak(url, asked.minutes, asked.clients))))


if __name__ == "__main__":
    main()

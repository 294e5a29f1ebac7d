"""Service of tenant b while tenant a loads the server, each with a key and without limits.

    python -m experiments.tenants [--attack NAME ...] [--seconds 12] [--policy slack]

Starts `coserve up` on the built-in model with the default settings. Tenant b opens a stream (a
prompt of 40 words, an answer of 32 tokens) every quarter of a second and runs one fine-tuning job.
First b is alone, then each attack of tenant a runs beside it:

- `streams`: 200 streams with prompts of 1,400 words and answers of 64 tokens;
- `samples`: eight posts at a time of n=128 with log-probabilities;
- `structured`: the same, with a JSON schema;
- `slo`: 32 streams of 512 tokens with a TPOT that they just hold while they have the server to
  themselves.

Each client of an attack sends its next request when the one before has ended. Load comes from
processes of their own, which read answers and do not parse them. Prints a row for each attack, and
one line of JSON.
"""

import argparse
import asyncio
import json
import multiprocessing
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import torch

from coserve.bench.machine import describe
from coserve.home import home_directory
from coserve.workloads.lessons import pirate
from experiments.attacked_server import Place, Server, until
from experiments.results import add_save_option, print_result

INTERVAL_S = 0.25  # between two streams of tenant b
WARM_UP_S = 3.0  # of an attack, before tenant b is measured
ANSWER_LIMIT_S = 60.0
# The SLO of attack `slo`: this many times the pace at which as many streams come that have the
# server to themselves.
NUM_SLO_STREAMS, PACE_TOKENS, TIGHT = 32, 128, 1.1
# Each is one token of the built-in model.
WORDS = [
    "the",
    "of",
    "we",
    "was",
    "day",
    "it",
    "come",
    "to",
    "me",
    "no",
    "he",
    "are",
    "there",
    "said",
    "after",
    "not",
    "in",
    "went",
    "before",
    "say",
    "came",
    "know",
    "that",
    "has",
]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "sizes": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "sizes"],
}
KEYS = {"a": "key-of-a", "b": "key-of-b"}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Service of tenant b in one interval."""

    num_sent: int
    """Number of opened streams."""
    num_ended: int
    """Number of those that ended within the interval."""
    ttft_p50_s: float
    """Median seconds to the first event; a stream without any counts with its waiting time."""
    ttft_p99_s: float
    """Seconds to the first event, at p99."""
    job_steps_per_s: float
    """Optimizer steps per second of the job."""


def prompt(rng: Random, num_words: int) -> str:
    """Return a prompt that shares no beginning with any other."""
    return " ".join([str(rng.random()), *rng.choices(WORDS, k=num_words)])


async def post(
    url: str, tenant: str, body: Mapping[str, Any], on_event: Callable[[], object] | None = None
) -> bool:
    """Send one chat completion and read its answer; return whether it came to its end with status
    200.

    Args:
        on_event: Called for every piece of the answer's body.
    """
    host, port = url.removeprefix("http://").split(":")
    content = json.dumps({"model": "tiny", **body}).encode()
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 24)
    try:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
        head += f"Authorization: Bearer {KEYS[tenant]}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        is_right = (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        while await reader.read(1 << 20):
            if on_event is not None and is_right:
                on_event()
        return is_right
    finally:
        writer.close()


# -- tenant a ---------------------------------------------------------------------------------


def chat(text: str, **more: Any) -> dict[str, Any]:
    """Return the body of a chat with one message."""
    return {"messages": [{"role": "user", "content": text}], **more}


def samples(rng: Random, **more: Any) -> dict[str, Any]:
    """Return the body of a request for 128 answers with log-probabilities."""
    return chat(
        prompt(rng, 20),
        n=128,
        max_tokens=128,
        logprobs=True,
        top_logprobs=5,
        temperature=1.0,
        **more,
    )


def attack_bodies(tpot_ms: float) -> dict[str, tuple[int, Callable[[Random], dict[str, Any]]]]:
    """Return the attacks by name: how many clients there are, and what each sends."""
    schema = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    slo = {"tpot_ms": tpot_ms}
    return {
        "streams": (
            200,
            lambda rng: chat(prompt(rng, 1400), max_tokens=64, ignore_eos=True, stream=True),
        ),
        "samples": (8, lambda rng: samples(rng, ignore_eos=True)),
        "structured": (8, lambda rng: samples(rng, response_format=schema)),
        "slo": (
            NUM_SLO_STREAMS,
            lambda rng: chat(
                prompt(rng, 20), max_tokens=512, ignore_eos=True, stream=True, slo=slo
            ),
        ),
    }


async def send_until_killed(
    url: str, num_clients: int, body: Callable[[Random], dict[str, Any]]
) -> None:
    """Have every client send one request after the other."""

    async def client(number: int) -> None:
        rng = Random(number)
        while True:
            try:
                is_right = await post(url, "a", body(rng))
            except (OSError, asyncio.IncompleteReadError):
                is_right = False
            if not is_right:  # a client that is refused does not come back at once
                await asyncio.sleep(0.1)

    await asyncio.gather(*[client(number) for number in range(num_clients)])


def run_attack(url: str, name: str, tpot_ms: float) -> None:
    """Run one attack in this process until it is killed."""
    asyncio.run(send_until_killed(url, *attack_bodies(tpot_ms)[name]))


# -- tenant b ---------------------------------------------------------------------------------


async def open_streams(url: str, seconds: float) -> tuple[int, int, list[float]]:
    """Open a stream at every interval; return how many, how many ended in time, and their times to
    the first event.
    """
    rng, begin_s, ended, ttfts_s = Random(1), time.monotonic(), list[float](), dict[int, float]()

    async def stream(number: int) -> None:
        start_s = time.monotonic()
        body = chat(prompt(rng, 40), max_tokens=32, ignore_eos=True, stream=True, temperature=0.0)
        if await post(
            url, "b", body, lambda: ttfts_s.setdefault(number, time.monotonic() - start_s)
        ):
            ended.append(time.monotonic())

    num_sent = int(seconds / INTERVAL_S)
    streams: list[Awaitable[None]] = []
    for number in range(num_sent):
        await asyncio.sleep(max(0.0, begin_s + number * INTERVAL_S - time.monotonic()))
        streams.append(asyncio.ensure_future(stream(number)))
    end_s = begin_s + seconds
    await asyncio.sleep(max(0.0, end_s - time.monotonic()))
    num_ended = sum(each_s <= end_s for each_s in ended)
    waited_s = [
        ttfts_s.get(number, end_s - begin_s - number * INTERVAL_S) for number in range(num_sent)
    ]
    for each in streams:
        each.cancel()  # type: ignore[attr-defined]
    await asyncio.gather(*streams, return_exceptions=True)
    return num_sent, num_ended, waited_s


def measure(server: Server, job: str, seconds: float) -> Measured:
    """Return what tenant b gets in as many seconds."""
    first, start_s = server.step(job), time.monotonic()
    num_sent, num_ended, ttfts_s = asyncio.run(open_streams(server.url, seconds))
    last, end_s = server.step(job), time.monotonic()
    return Measured(
        num_sent=num_sent,
        num_ended=num_ended,
        ttft_p50_s=round(median(ttfts_s), 4),
        ttft_p99_s=round(quantiles(ttfts_s, n=100)[-1], 4),
        job_steps_per_s=round((last - first) / (end_s - start_s), 2),
    )


def measure_beside(server: Server, job: str, name: str, tpot_ms: float, seconds: float) -> Measured:
    """Return what tenant b gets beside an attack, which is over afterwards."""
    body = attack_bodies(tpot_ms)[name][1](Random(0)) | {"max_tokens": 1, "stream": False, "n": 1}
    answer = server.post("/v1/chat/completions", {"model": "tiny", **body})
    if answer.status != 200:
        raise SystemExit(f"the server refuses attack {name}: {answer.body}")
    attacker = multiprocessing.get_context("spawn").Process(
        target=run_attack, args=(server.url, name, tpot_ms)
    )
    attacker.start()
    try:
        time.sleep(WARM_UP_S)
        return measure(server, job, seconds)
    finally:
        attacker.kill()
        attacker.join()
        headers = {"Authorization": f"Bearer {KEYS['a']}"}
        until(
            lambda: not server.get("/v1/status", headers=headers).body["requests"]["running"],
            limit_s=ANSWER_LIMIT_S,
        )


def tight_tpot_ms(server: Server) -> float:
    """Return a TPOT SLO that 32 streams just hold while nothing else runs."""
    body = chat("What is a ship?", max_tokens=PACE_TOKENS, ignore_eos=True, stream=True)

    async def ask() -> None:
        if not all(
            await asyncio.gather(*[post(server.url, "b", body) for _ in range(NUM_SLO_STREAMS)])
        ):
            raise SystemExit("the server refuses a stream")

    asyncio.run(ask())  # to warm up
    start_s = time.monotonic()
    asyncio.run(ask())
    return round(TIGHT * 1e3 * (time.monotonic() - start_s) / PACE_TOKENS, 2)


def start_job(server: Server) -> str:
    """Return the id of a job of tenant b, which has begun and does not end."""
    lines = "".join(json.dumps(line) + "\n" for line in pirate(seed=0).train) * 20
    answer = server.job(n_epochs=50, file=server.upload(lines).body["id"])
    if answer.status != 200:
        raise SystemExit(f"the job is refused: {answer.body}")
    job = str(answer.body["id"])
    if until(lambda: server.step(job) > 20, limit_s=ANSWER_LIMIT_S) is None:
        raise SystemExit(f"the job does not begin: {server.status(job)}\n{server.log()}")
    return job


def print_row(name: str, tpot_ms: float, found: Measured, alone: Measured) -> None:
    """Print one row of the table."""
    words = f"{name} ({tpot_ms} ms)" if name == "slo" else name
    ended, ttft = found.num_ended / alone.num_ended, found.ttft_p50_s / alone.ttft_p50_s
    steps = found.job_steps_per_s / max(0.01, alone.job_steps_per_s)
    print(
        f"| {words} | {found.num_ended} of {found.num_sent} ({ended:.0%}) | "
        f"{1e3 * found.ttft_p50_s:.0f} ms "
        f"({ttft:.1f} ×) | {1e3 * found.ttft_p99_s:.0f} ms | {found.job_steps_per_s:.1f} "
        f"({steps:.0%}) |",
        flush=True,
    )


def main() -> None:
    """Measure, print, and end with a line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--attack", action="append", choices=list(attack_bodies(1.0)), help="only these"
    )
    parser.add_argument("--seconds", type=float, default=12.0, help="of each measurement")
    parser.add_argument("--policy", default="slack")
    parser.add_argument(
        "--code", type=Path, default=Path(__file__).parents[1], help="the checkout that is measured"
    )
    add_save_option(parser)
    given = parser.parse_args()
    print(f"{describe(torch.device('cpu'), 1)}; policy {given.policy}\n")
    print("| beside | streams of b that ended | TTFT p50 | TTFT p99 | job steps/s |")
    print("|---|---|---|---|---|", flush=True)
    with TemporaryDirectory(prefix="coserve-tenants-") as directory:
        place = Place(code=given.code, directory=Path(directory), measured=home_directory())
        place.adapters.mkdir()
        options: tuple[str, ...] = ("--policy", given.policy, "--memory", "512MiB")
        for tenant, key in KEYS.items():
            options += ("--api-key", f"{tenant}={key}")
        with place.start(*options) as server:
            server.headers = {"Authorization": f"Bearer {KEYS['b']}"}
            tpot_ms = tight_tpot_ms(server)
            job = start_job(server)
            results = {"alone": measure(server, job, given.seconds)}
            print_row("nothing", tpot_ms, results["alone"], results["alone"])
            for name in given.attack or attack_bodies(tpot_ms):
                results[name] = measure_beside(server, job, name, tpot_ms, given.seconds)
                print_row(name, tpot_ms, results[name], results["alone"])
    print_result(
        "tenants",
        {"policy": given.policy, "tpot_ms": tpot_ms}
        | {name: asdict(each) for name, each in results.items()},
        given.save,
    )


if __name__ == "__main__":
    main()

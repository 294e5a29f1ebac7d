"""Attacks that once broke a server, tried again: a number or word for each observation
(benchmarks/hardening.md).

    python -m experiments.hardening [--code CHECKOUT] [ROW ...]

Each row has servers of its own on the built-in model, of this checkout or of another one (such as a
git worktree of an older commit). The last line is JSON. Row 7 mounts a small disk, and row 8 needs
g++.
"""

import argparse
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from experiments.attacked_server import Answer, Place, Server, health, is_alive, memory_mb, until
from experiments.results import add_save_option, print_result

EVIL = "([a-z_.0-9]+)+X"
Figures = dict[str, Any]


def row_1(place: Place) -> Figures:
    """Try patterns that backtrack for ever, and a job that kills engines between its steps."""
    result: Figures = {}
    with place.start() as server, health(server) as taken:
        created = server.job(adapter={"target_modules": EVIL}, limit_s=15)
        result["a pattern in target_modules"] = str(created)
    result["/health meanwhile, s"] = max(taken)
    with place.aside("rank_pattern").start() as server:
        created = server.job(
            adapter={"target_modules": ["q_proj"], "rank_pattern": {EVIL: 2}}, limit_s=15
        )
        result["a pattern in rank_pattern"] = str(created)
        time.sleep(2)
        result["a completion after one in rank_pattern"] = str(server.complete(limit_s=15))
        if created.body:
            cancel = f"/v1/fine_tuning/jobs/{created.body['id']}/cancel"
            result["its job is cancelled"] = str(server.post(cancel, limit_s=15))
    with place.aside("deaths").start() as server:
        job = server.job(adapter={"r": 4}, checkpoint_every_steps=1).body["id"]

        def is_beyond(step: int) -> bool:
            return server.step(job) > step or server.status(job) == "failed"

        deaths = 0
        while deaths < 6:
            until(partial(is_beyond, server.step(job)), limit_s=60)
            if server.status(job) == "failed":
                break
            os.kill(server.engine_pid(), signal.SIGSEGV)  # a kill -9 would not be the job's fault
            deaths += 1
            until(
                lambda: server.get("/ready").status == 200 or server.status(job) == "failed",
                limit_s=60,
            )
        result["deaths with steps between"] = f"{server.status(job)} after {deaths}"
    return result


def row_2(place: Place) -> Figures:
    """Kill the server while its engine hangs (is stopped, which none of its threads notices)."""
    with place.start() as server:
        engine = server.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        server.kill()
        s = until(lambda: not is_alive(engine), limit_s=20)
        with suppress(ProcessLookupError):
            os.kill(engine, signal.SIGKILL)
    return {"the engine ends after, s": s}


def row_3(place: Place) -> Figures:
    """Stop the engine."""
    result: Figures = {}
    with place.start() as server:
        os.kill(server.engine_pid(), signal.SIGSTOP)
        stopped_s = time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(server.complete, limit_s=60)
            is_known = until(lambda: server.get("/ready", limit_s=10).status == 503, limit_s=51)
            result["/ready is 503 after, s"] = is_known
            result["a request meanwhile"] = str(waiting.result())
        is_back = until(lambda: server.complete(limit_s=5).status == 200, limit_s=10)
        result["answers again after, s"] = None if is_back is None else time.monotonic() - stopped_s
    with place.start() as server:
        os.kill(server.engine_pid(), signal.SIGSTOP)
        time.sleep(1)
        result["SIGTERM takes, s"] = server.kill(signal.SIGTERM)
    return result


def row_4(place: Place) -> Figures:
    """Send bodies of wrong types."""
    result: Figures = {}
    for num_mb in (1.6, 7.9):
        body = json.dumps({"model": "tiny", "prompt": [None] * int(num_mb * 1e6 / 6)}).encode()
        with place.start() as server:
            before = memory_mb(server.process.pid, "VmHWM")
            with health(server) as taken:
                answer = server.ask(
                    "POST",
                    "/v1/completions",
                    content=body,
                    headers={"Content-Type": "application/json"},
                )
            result[f"{num_mb} MB of them"] = (
                f"{answer}, and /health after at most {max(taken):.3g} s"
            )
            result[f"memory at most, of {num_mb} MB, MB"] = (
                memory_mb(server.process.pid, "VmHWM") - before
            )
    return result


def row_5(place: Place) -> Figures:
    """Open more idle connections than files may be open."""
    with place.start(max_files=256) as server, ExitStack() as stack:
        address = ("127.0.0.1", httpx.URL(server.url).port)
        with suppress(OSError):
            for _ in range(400):
                stack.enter_context(socket.create_connection(address, timeout=5))
        lines = len(server.log().splitlines())
        answers = [server.get("/health", limit_s=10) for _ in range(5)]
        time.sleep(10)
        more = len(server.log().splitlines()) - lines
    return {"/health": str(max(answers, key=lambda each: each.s)), "log lines in 10 s": more}


def row_6(place: Place) -> Figures:
    """Send a request whose SLO no device holds, beside chats and a job."""
    result: Figures = {}
    with place.start() as server:
        job = server.job(adapter={"r": 8}, n_epochs=50, batch_size=4).body["id"]
        until(lambda: server.step(job) > 3, limit_s=60)
        for name, slo in (("without", None), ("beside it", {"ttft_ms": 2000, "tpot_ms": 1e-6})):
            ended = threading.Event()

            def claim(slo: Any = slo, ended: threading.Event = ended) -> None:
                while not ended.is_set():
                    server.complete(max_tokens=400, ignore_eos=True, slo=slo, limit_s=60)

            thread = threading.Thread(target=claim)
            if slo:
                thread.start()
                time.sleep(1)
            steps, start_s, firsts = server.step(job), time.monotonic(), []
            for number in range(20):
                firsts.append(server.complete(prompt=f"{number} " * 20).s)
                time.sleep(0.4)
            rate = (server.step(job) - steps) / (time.monotonic() - start_s)
            result[name] = (
                f"first token {1e3 * statistics.median(firsts):.3g} ms, {rate:.3g} steps/s"
            )
            ended.set()
            if slo:
                thread.join()
    return result


def row_7(place: Place) -> Figures:
    """Fill the disk."""
    home = place.home
    home.mkdir(parents=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m,mode=700", "hardening", str(home)], check=True
    )
    result: Figures = {}
    try:
        with place.start() as server:
            job = server.job(adapter={"r": 4}, checkpoint_every_steps=5).body["id"]
            until(lambda: server.step(job) > 2, limit_s=60)
            with (home / "filling").open("ab", buffering=0) as filling, suppress(OSError):
                while filling.write(b"\0" * 4096):
                    pass
            time.sleep(3)
            result["an upload"] = str(server.upload(b"x" * (3 << 20), limit_s=20))
            result["a job is cancelled"] = str(
                server.post(f"/v1/fine_tuning/jobs/{job}/cancel", limit_s=20)
            )
            result["tracebacks in the log"] = server.log().count("Traceback")
            (home / "filling").unlink()
            result["with room again it is cancelled"] = str(
                server.post(f"/v1/fine_tuning/jobs/{job}/cancel", limit_s=20)
            )
    finally:
        subprocess.run(["umount", "-l", str(home)], check=True)
    return result


def row_8(place: Place) -> Figures:
    """Look for names of others in /metrics, and for a home, a database and kernels that others can
    read or write.
    """
    result: Figures = {}
    keys = ("--api-key", "ann=key-of-ann", "--api-key", "bob=key-of-bob")
    with place.start(*keys) as server:
        server.headers = {"Authorization": "Bearer key-of-bob"}
        job = server.job(n_epochs=1, batch_size=16, adapter={"r": 4}).body["id"]
        server.until_over(job)
        model = server.get(f"/v1/fine_tuning/jobs/{job}").body["fine_tuned_model"]
        server.complete(model=model)
        time.sleep(2)
        server.headers = {"Authorization": "Bearer key-of-ann"}
        metrics = server.get("/metrics").body
        result["lines of /metrics that name another's models"] = sum(
            model in line for line in metrics.splitlines()
        )
        for name in (".", "coserve.db"):
            result[f"mode of {name} in the home"] = oct((server.home / name).stat().st_mode & 0o777)
        kernels = [path for path in (server.home / "kernels").iterdir() if path.suffix == ".so"]
    for path in (*kernels, kernels[0].parent):
        path.chmod(0o777)
    before = {path.stat().st_ino for path in kernels}
    with place.start() as server:
        mapped = Path(f"/proc/{server.engine_pid()}/maps").read_text().splitlines()
        loaded = {int(line.split()[4]) for line in mapped if "/kernels/" in line}
    result["kernels that all could write are loaded"] = bool(before & loaded)
    return result


def row_9(place: Place) -> Figures:
    """Start sixty jobs of rank 64."""
    with place.start() as server:
        file = server.upload().body["id"]
        jobs = [
            server.job(file=file, adapter={"r": 64, "target_modules": "all-linear"})
            for _ in range(60)
        ]
        ids = [each.body["id"] for each in jobs if each.status == 200]
        before = memory_mb(server.engine_pid())
        time.sleep(30)
        running = sum(server.status(each) == "running" for each in ids)
        with_them = memory_mb(server.engine_pid())
        for each in ids:
            server.post(f"/v1/fine_tuning/jobs/{each}/cancel")
        time.sleep(10)
        after = memory_mb(server.engine_pid())
    memory = f"{before:.0f}, {with_them:.0f}, {after:.0f}"
    return {
        "running at once": running,
        "engine before, with them, after they were cancelled, MB": memory,
    }


def row_10(place: Place) -> Figures:
    """Load an adapter directory with an absurd rank (17.7 GB on this machine)."""
    with place.start() as server:
        path = server.finished_adapter("absurd") / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "r": 300_000}))
        pids = (server.engine_pid(), server.process.pid)
        before = sum(memory_mb(pid, "VmHWM") for pid in pids)
        answer = server.post(
            "/v1/load_lora_adapter", {"lora_name": "absurd", "lora_path": str(path.parent)}
        )
        growth_mb = sum(memory_mb(pid, "VmHWM") for pid in pids) - before
    return {"rank 300,000": str(answer), "memory at most, MB": growth_mb}


def row_11(place: Place) -> Figures:
    """Send an impossible path and an impossible number."""
    with place.start() as server:
        path = server.post(
            "/v1/load_lora_adapter",
            {"lora_name": "x", "lora_path": f"{place.adapters}/{'x' * 5000}"},
        )
        job = server.job(optimizer={"warmup_steps": 2**70})
        later = server.until_over(job.body["id"]) if job.status == 200 else "not made"
    return {
        "lora_path of 5,000 characters": str(path),
        "warmup_steps of 2**70": f"{job}; the job {later}",
    }


def row_12(place: Place) -> Figures:
    """Send prompts and lines that are far too long."""
    words = random.Random(0)
    text = " ".join("".join(words.choices("abcdefghij ", k=8)) for _ in range(900_000))
    result: Figures = {}
    with place.start() as server:
        result["1 MB of prompt"] = str(server.complete(prompt=text[:1_000_000]))
        with ThreadPoolExecutor(4) as pool:
            others = [pool.submit(server.complete, prompt=text[:1_000_000]) for _ in range(4)]
            time.sleep(0.2)
            result["one of 20 kB beside four such"] = str(server.complete(prompt=text[:20_000]))
            for other in others:
                other.result()
        file = server.upload(json.dumps({"text": text[:7_900_000]}) + "\n").body["id"]
        start_s = time.monotonic()
        ended = server.until_over(server.job(file=file).body["id"])
        result["a line of 7.9 MB"] = f"{ended} after {time.monotonic() - start_s:.3g} s"
    return result


def row_13(place: Place) -> Figures:
    """Kill both processes."""
    with place.start() as server:
        os.kill(server.engine_pid(), signal.SIGKILL)
        server.kill()
    with place.start() as server:
        server.kill(signal.SIGTERM)
    left = {path.name for path in (*place.temporary.iterdir(), *(place.home / "run").glob("*"))}
    # What PyTorch has there is its own cache, which all its processes use again.
    return {
        "left after the next start and end": sorted(
            each for each in left if not each.startswith("torchinductor_")
        )
    }


def row_14(place: Place) -> Figures:
    """Compare bit for bit: answers with a cached prefix, an adapter beside requests."""
    result: Figures = {}
    modes = [("as it is", ())] + (
        [("--deterministic", ("--deterministic",))] if place.has_option("--deterministic") else []
    )
    for name, options in modes:
        with place.start(*options, dtype="bfloat16") as server:
            words = random.Random(0)
            prompts = [
                " ".join(words.choices(("grass", "is", "a", "cat", "blue", "hot"), k=40))
                for _ in range(16)
            ]
            asked = {"max_tokens": 32, "temperature": 0, "logprobs": 1, "ignore_eos": True}
            both = [
                [_said(server.complete(prompt=each, **asked)) for each in prompts] for _ in range(2)
            ]
            result[f"answers that differ with a cached prefix, {name}"] = sum(map(_differ, *both))
            adapters = [_adapter(server)]
            ended = threading.Event()

            def chat(ended: threading.Event = ended, prompts: list[str] = prompts) -> None:
                for prompt in itertools.cycle(prompts):
                    if ended.is_set():
                        return
                    server.complete(prompt=prompt, max_tokens=16)

            threads = [threading.Thread(target=chat) for _ in range(4)]
            for thread in threads:
                thread.start()
            adapters.append(_adapter(server))
            ended.set()
            for thread in threads:
                thread.join()
            result[f"an adapter beside requests differs by, {name}"] = _distance(*adapters)
    return result


def _said(answer: Answer) -> Any:
    choice = answer.body["choices"][0]
    return choice["text"], choice["logprobs"]["token_logprobs"]


def _differ(one: Any, other: Any) -> bool:
    return bool(one != other)


def _adapter(server: Server) -> dict[str, Any]:
    from safetensors.torch import load_file

    job = server.job(
        n_epochs=2, batch_size=16, adapter={"r": 8}, optimizer={"learning_rate": 1e-3}
    ).body["id"]
    assert server.until_over(job) == "succeeded"
    files = server.home.glob(f"jobs/{job}/**/adapter_model.safetensors")
    return load_file(max(files, key=lambda path: path.stat().st_mtime))


def _distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the distance of all parameters together, relative to their norm."""
    apart = sum(float((one[name].double() - other[name].double()).square().sum()) for name in one)
    return float((apart / sum(float(each.double().square().sum()) for each in one.values())) ** 0.5)


def row_15(place: Place) -> Figures:
    """Look for what restarts and deletions leave."""
    result: Figures = {}
    with place.start() as server:
        directory = server.finished_adapter("kept")
        answer = server.post(
            "/v1/load_lora_adapter", {"lora_name": "kept", "lora_path": str(directory)}
        )
        assert answer.status == 200
        job = server.job(
            n_epochs=1, batch_size=16, adapter={"r": 4}, checkpoint_every_steps=4
        ).body["id"]
        server.until_over(job)
        model = server.get(f"/v1/fine_tuning/jobs/{job}").body["fine_tuned_model"]
        server.ask("DELETE", f"/v1/models/{model}")
        listed = server.get(f"/v1/fine_tuning/jobs/{job}/checkpoints").body["data"]
        result["checkpoints of a deleted model that are listed"] = len(listed)
        server.kill(signal.SIGTERM)
    with place.start() as server:
        names = [each["id"] for each in server.get("/v1/models").body["data"]]
        result["a loaded adapter is there after a restart"] = "kept" in names
    return result


ROWS = {
    name.removeprefix("row_"): row for name, row in globals().items() if name.startswith("row_")
}


def main() -> None:
    """Try the named rows, or all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", nargs="*", metavar="ROW")
    parser.add_argument("--code", type=Path, default=Path(__file__).parents[1])
    parser.add_argument(
        "--measured", type=Path, help="a home of that checkout, whose kernels and profile are used"
    )
    add_save_option(parser)
    asked = parser.parse_args()
    figures: dict[str, Figures] = {}
    with TemporaryDirectory(prefix="hardening-") as directory:
        measured, code = asked.measured, asked.code.absolute()
        if measured is None:
            warm = Place(code=code, directory=Path(directory) / "warm")
            measured = warm.home
            with warm.start():  # it compiles the kernels, and measures the machine
                pass
        for name in asked.rows or ROWS:
            try:
                figures[name] = ROWS[name](
                    Place(code=code, directory=Path(directory) / name, measured=measured)
                )
            except (
                Exception
            ) as error:  # of a server in distress anything may be; the other rows have their own
                figures[name] = {"ended with": repr(error)}
            print(name, json.dumps(figures[name], indent=1), flush=True)
    print_result("hardening", {"code": asked.code.name, "rows": figures}, asked.save)


if __name__ == "__main__":
    main()

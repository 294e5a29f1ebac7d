"""The first start on a machine: it tells what it does, serves at once, and what it lacks is
shown."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import model_directory

from coserve.client.ports import free_port
from coserve.kernels.cpu_library import find_library

ROOT = Path(__file__).parents[2]
LIMIT_S = 300.0


class FirstStart:
    """A `coserve up` without a terminal, with a home and a cache of its own."""

    def __init__(
        self,
        tmp_path: Path,
        *options: str,
        path: str = "",
        python: tuple[str, ...] = (),
        flags: str = "",
    ) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "COSERVE_HOME": str(tmp_path / "home"),
            "COSERVE_CACHE": str(tmp_path / "cache"),
            "PATH": path + os.environ["PATH"],
            "OMP_NUM_THREADS": "1",
            "COSERVE_CXXFLAGS": flags,
        }
        command = [
            sys.executable,
            *python,
            "-m",
            "coserve",
            "up",
            str(model_directory()),
            "--port",
            str(port),
        ]
        command += ["--memory", "16MB", "--dtype", "float32", *options]
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())

    def get(self, path: str) -> Any:
        """The JSON of an answer, whatever its status; None if nobody listens yet."""
        try:
            return httpx.get(self.url + path, timeout=30).json()
        except httpx.TransportError:
            return None

    def until(self, question: Any) -> Any:
        until_s = time.monotonic() + LIMIT_S
        while not (answer := question()):
            assert time.monotonic() < until_s and self.process.poll() is None, self.lines
            time.sleep(0.02)
        return answer

    def until_ready(self) -> None:
        self.until(lambda: (self.get("/ready") or {}).get("status") == "ready")

    def answer(self) -> str:
        body = {"model": "small", "prompt": "Hello", "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)
        return str(answer.raise_for_status().json()["choices"][0]["text"])

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)
        self._reading.join()
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    running: list[FirstStart] = []

    def start(*options: str, **settings: Any) -> FirstStart:
        running.append(FirstStart(tmp_path, *options, **settings))
        return running[-1]

    yield start
    for each in running:
        each.close()


def slow_compiler(directory: Path, work: str) -> str:
    """A g++ that does something first and then what g++ does, for the front of PATH."""
    real = subprocess.run(
        ["which", "g++"], capture_output=True, text=True, check=True
    ).stdout.strip()
    directory.mkdir()
    (directory / "g++").write_text(f'#!/bin/sh\n{work}\nexec {real} "$@"\n')
    (directory / "g++").chmod(0o755)
    return f"{directory}:"


def keep_kernels(tmp_path: Path) -> None:
    """Have this machine's kernels in the cache, as an earlier start leaves them."""
    kept = find_library().path
    (tmp_path / "cache" / "kernels").mkdir(parents=True, mode=0o700)
    (tmp_path / "cache" / "kernels" / kept.name).write_bytes(kept.read_bytes())
    (tmp_path / "cache" / "kernels" / kept.name).chmod(0o600)


def test_the_first_line_comes_before_pytorch_is_imported(started):
    start = started(python=("-X", "importtime"))
    start.until(lambda: any(line.endswith(" torch") for line in start.lines))
    lines = list(start.lines)
    first = next(
        index for index, line in enumerate(lines) if "coserve.start: loading libraries" in line
    )
    heavy = next(
        index for index, line in enumerate(lines) if re.search(r"\| +(torch|transformers)\b", line)
    )
    assert first < heavy


@pytest.mark.long
def test_a_start_tells_its_stages_on_stderr_and_over_http(started, tmp_path):
    start = started(path=slow_compiler(tmp_path / "bin", "sleep 0.5"), flags="-O0")
    health = start.until(
        lambda: (found := start.get("/health")) and found.get("starting") and found
    )
    assert health["status"] == "ok"
    compiling = start.until(lambda: _starting(start, "compiling kernels"))
    assert 0 <= compiling["done"] < compiling["total"]
    assert compiling["text"] == f"compiling kernels, {compiling['done']} of {compiling['total']}"
    refused = httpx.post(
        f"{start.url}/v1/completions", json={"model": "small", "prompt": "x"}, timeout=30
    )
    assert refused.status_code == 503
    start.until_ready()
    assert start.get("/health") == {"status": "ok"} and start.get("/v1/status")["starting"] is None
    stages = [
        line.partition("coserve.start: ")[2] for line in start.lines if "coserve.start: " in line
    ]
    order = [
        "loading libraries",
        "reading the conf",
        "compiling kernels",
        "loading weights",
        "measuring",
        "ready at",
    ]
    found = [
        next(index for index, stage in enumerate(stages) if stage.startswith(name))
        for name in order
    ]
    assert found == sorted(found), stages
    assert start.get("/v1/status")["kernels"] == {"backend": "CpuBackend -O0", "warning": None}


def _starting(start: FirstStart, stage: str) -> Any:
    starting = start.get("/v1/status")["starting"]
    return starting if starting and starting["stage"] == stage else None


@pytest.mark.long
def test_lines_of_a_start_are_json_where_logs_are(started, tmp_path):
    keep_kernels(tmp_path)
    start = started("--log-format", "json")
    start.until_ready()
    messages = [json.loads(line)["message"] for line in list(start.lines)]
    assert messages[0].startswith("loading libraries") and messages[-1].startswith(
        f"ready at {start.url}"
    )


@pytest.mark.long
def test_it_serves_on_a_cautious_profile_and_replaces_it_between_requests(started, tmp_path):
    keep_kernels(tmp_path)
    start = started()
    start.until_ready()
    first, states = start.answer(), []

    def is_measured() -> bool:
        assert start.answer() == first
        states.append(start.get("/v1/status")["profile"]["state"])
        time.sleep(0.5)  # pieces run while no request is there
        return states[-1] == "measured"

    assert not list((tmp_path / "cache" / "profiles").glob("*")), "a cautious profile is not kept"
    start.until(is_measured)
    assert states[0] == "provisional" and start.answer() == first
    assert len(list((tmp_path / "cache" / "profiles").glob("*.json"))) == 1
    start.close()
    again = started()
    again.until_ready()
    assert again.get("/v1/status")["profile"] == {"state": "measured", "measured_share": None}
    assert again.answer() == first
    assert not any("measuring" in line for line in again.lines)


@pytest.mark.long
def test_where_plain_kernels_serve_status_and_wait_say_why(started, tmp_path):
    start = started(
        path=slow_compiler(tmp_path / "bin", 'echo "rows.cpp:1: error: no room" >&2; exit 1')
    )
    waited = subprocess.run(
        [sys.executable, "-m", "coserve", "wait", "--url", start.url, "--timeout", "2min"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert waited.returncode == 0, waited.stderr
    assert waited.stdout == f"{start.url} is ready: it serves small\n"
    kernels = start.get("/v1/status")["kernels"]
    assert kernels["backend"] == "PlainBackend"
    assert kernels["warning"].startswith(
        "the CPU kernels could not be compiled, so the slower plain ones run: "
    )
    assert kernels["warning"].endswith("rows.cpp:1: error: no room")
    assert f"warning: {kernels['warning']}" in waited.stderr
    assert "coserve.start: waiting for the server" in waited.stderr


def test_wait_gives_up_in_time():
    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "coserve", "wait", "--url", url, "--timeout", "100ms"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == f"error: the server at {url} was not ready within 100ms: waiting for the server"

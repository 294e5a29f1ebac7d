"""A server on the built-in model that may be attacked, of this checkout or of an older one, for
hardening.py.
"""

import json
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from coserve.workloads.lessons import pirate

START_LIMIT_S = 300.0
END_LIMIT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Answer to a request."""

    status: int
    """HTTP status; 0 without an answer."""
    s: float
    """Seconds until the answer arrived, or was given up."""
    body: Any = None
    """Body, as JSON or text."""

    def __str__(self) -> str:
        return (
            f"{self.status} after {self.s:.3g} s" if self.status else f"no answer in {self.s:.3g} s"
        )


@dataclass(kw_only=True)
class Server:
    """A running server."""

    process: "subprocess.Popen[str]"
    """Process of the server."""
    url: str
    """URL of the server."""
    home: Path
    """Home of the server."""
    headers: dict[str, str] = field(default_factory=dict)
    """Headers of every request."""

    def ask(self, method: str, path: str, *, limit_s: float = 60.0, **more: Any) -> Answer:
        """Send a request, and return its answer, without raising if there is none."""
        start_s, status, body = time.monotonic(), 0, None
        with suppress(httpx.HTTPError):
            more = {"headers": self.headers, **more}
            answer = httpx.request(method, f"{self.url}{path}", timeout=limit_s, **more)
            status, body = answer.status_code, answer.text
            with suppress(ValueError):
                body = answer.json()
        return Answer(status=status, s=time.monotonic() - start_s, body=body)

    def get(self, path: str, **more: Any) -> Answer:
        return self.ask("GET", path, **more)

    def post(self, path: str, body: Any = None, **more: Any) -> Answer:
        return self.ask("POST", path, **({} if body is None else {"json": body}), **more)

    def complete(self, *, limit_s: float = 60.0, **body: Any) -> Answer:
        return self.post(
            "/v1/completions",
            {"model": "tiny", "prompt": "a", "max_tokens": 1} | body,
            limit_s=limit_s,
        )

    def upload(self, content: str | bytes | None = None, **more: Any) -> Answer:
        """Upload a file; by default, the examples that `job` trains on."""
        lines = (
            "".join(json.dumps(line) + "\n" for line in pirate(seed=0).train)
            if content is None
            else content
        )
        return self.ask(
            "POST",
            "/v1/files",
            files={"file": ("data.jsonl", lines)},
            data={"purpose": "fine-tune"},
            **more,
        )

    def job(
        self,
        *,
        n_epochs: int = 50,
        batch_size: int = 4,
        file: str | None = None,
        limit_s: float = 60.0,
        **own: Any,
    ) -> Answer:
        """Start a job with these `coserve` settings."""
        file = file or self.upload().body["id"]
        numbers = {"n_epochs": n_epochs, "batch_size": batch_size}
        body = {"model": "tiny", "training_file": file, "seed": 1, "coserve": own}
        body["method"] = {"type": "supervised", "supervised": {"hyperparameters": numbers}}
        return self.post("/v1/fine_tuning/jobs", body, limit_s=limit_s)

    def status(self, job: str) -> str:
        """Return the status of a job."""
        return str((self.get(f"/v1/fine_tuning/jobs/{job}").body or {}).get("status"))

    def step(self, job: str) -> int:
        """Return the number of optimizer steps of a job; -1: the server does not answer."""
        return int(
            ((self.get(f"/v1/fine_tuning/jobs/{job}").body or {}).get("coserve") or {}).get(
                "step", -1
            )
        )

    def until_over(self, job: str, *, limit_s: float = 120.0) -> str:
        """Wait until a job ends, and return its status."""
        ends = ("succeeded", "failed", "cancelled")
        until(lambda: self.status(job) in ends, limit_s=limit_s)
        return self.status(job)

    def finished_adapter(self, name: str) -> Path:
        """Return a copy of the directory of an adapter from a short job."""
        job = self.job(n_epochs=1, batch_size=16, adapter={"r": 4}).body["id"]
        assert self.until_over(job) == "succeeded"
        newest = max(
            self.home.glob(f"jobs/{job}/**/adapter_config.json"),
            key=lambda path: path.stat().st_mtime,
        )
        return Path(shutil.copytree(newest.parent, self.home.parent / "adapters" / name))

    def engine_pid(self) -> int:
        """Return the id of the engine's process, the lowest of all."""
        pid = self.process.pid
        while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            pid = int(children[-1])
        return pid

    def kill(self, number: int = signal.SIGKILL) -> float:
        """Send the server's own process a signal, and return the seconds until it has ended."""
        start_s = time.monotonic()
        self.process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_LIMIT_S)
        return time.monotonic() - start_s

    def log(self) -> str:
        """Return all output on stderr."""
        return (self.home.parent / "log").read_text("utf-8", "replace")


@dataclass(frozen=True, kw_only=True)
class Place:
    """A home in which servers of a checkout run one after the other."""

    code: Path
    """Checkout."""
    directory: Path
    """Directory of the home and of temporary files."""
    measured: Path | None = None
    """Home whose compiled kernels and measured profiles are copied."""

    @property
    def home(self) -> Path:
        return self.directory / "home"

    def aside(self, name: str) -> "Place":
        """Return another home, for servers that start from nothing."""
        return replace(self, directory=self.directory / name)

    @property
    def temporary(self) -> Path:
        """Return TMPDIR of the servers, where nobody else writes."""
        return self.directory / "tmp"

    @property
    def adapters(self) -> Path:
        """Return the directory below which clients may name directories."""
        return self.directory / "adapters"

    def has_option(self, name: str) -> bool:
        """Return whether `coserve up` has an option."""
        return any(
            f'"{name}"' in path.read_text()
            for path in (self.code / "coserve" / "server").rglob("*.py")
        )

    @contextmanager
    def start(
        self, *options: str, dtype: str = "float32", max_files: int | None = None
    ) -> Iterator[Server]:
        """Start a server and yield it; afterwards nothing of it is left, even if this process gets
        SIGTERM.

        Args:
            options: Further options of `coserve up`.
            dtype: Dtype of the model.
            max_files: Maximum number of open files of the server.
        """
        self.temporary.mkdir(parents=True, exist_ok=True)
        self.home.mkdir(mode=0o755, exist_ok=True)
        for name in ("kernels", "profiles"):
            if (
                self.measured
                and (self.measured / name).is_dir()
                and not (self.home / name).exists()
            ):
                shutil.copytree(self.measured / name, self.home / name)
        command = [
            sys.executable,
            "-m",
            "coserve",
            "up",
            "--port",
            "0",
            "--dtype",
            dtype,
            "--memory",
            "64MB",
        ]
        command += ["--allow-adapter-paths", str(self.adapters), "--home", str(self.home), *options]
        environment = {
            "PYTHONPATH": str(self.code),
            "TMPDIR": str(self.temporary),
            "OMP_NUM_THREADS": "1",
        }
        environment["COSERVE_CACHE"] = str(
            self.home
        )  # where versions that know no cache have kernels and profiles
        log, limit = self.directory / "log", (max_files or 0, max_files or 0)
        with log.open("a") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                cwd=self.directory,
                env=os.environ | environment,
                start_new_session=True,
                preexec_fn=(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limit))
                if max_files
                else None,
            )
        assert process.stdout is not None
        before = signal.signal(signal.SIGTERM, _exit)
        try:
            ready, _, _ = select.select([process.stdout], [], [], START_LIMIT_S)
            match = re.search(r"(http://\S+)/v1", process.stdout.readline() if ready else "")
            assert match, log.read_text()
            yield Server(process=process, url=match[1], home=self.home)
        finally:
            with suppress(ProcessLookupError):  # all that it has started is of its group
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
            signal.signal(signal.SIGTERM, before)


def _exit(number: int, frame: object) -> None:
    """End this process as an exception does, so that what it has started ends first."""
    raise SystemExit(128 + number)


def until(question: Callable[[], Any], *, limit_s: float) -> float | None:
    """Ask until the answer is true, and return the seconds; None beyond the limit."""
    start_s = time.monotonic()
    while time.monotonic() < start_s + limit_s:
        if question():
            return time.monotonic() - start_s
        time.sleep(0.05)
    return None


@contextmanager
def health(server: Server) -> Iterator[list[float]]:
    """Yield a list that gets the seconds of each `/health`, on connections of their own, until the
    last is answered (20 s).
    """
    taken: list[float] = []
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            taken.append(server.get("/health", limit_s=20).s)
            time.sleep(0.02)

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.3)
    try:
        yield taken
    finally:
        ended.set()
        thread.join()


def memory_mb(pid: int, what: str = "VmRSS") -> float:
    """Return the megabytes of a process: VmRSS, resident now, or VmHWM, the maximum so far."""
    match = re.search(rf"{what}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(match[1]) / 1000 if match else 0.0


def is_alive(pid: int) -> bool:
    """Return whether a process runs, and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False

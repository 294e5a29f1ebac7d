"""Functions and files that one chat and one fine-tuning job pass through, on a running server.

    python -m experiments.stations [--code CHECKOUT] [--list]

Starts `coserve up tiny` from a checkout, with a recorder in every process (`station_hook/`; the
package has no code for it). One chat and one job run first that are not counted: they import and
compile what later ones find. Then each is traced alone, from its POST until no function runs any
more that has not run before; and so are two seconds without requests, whose functions also run
beside the others. A job has two examples, one per step.

Functions are those with a name of their own, without bodies of modules and classes. A climb is a
pair of files of which the lower one calls the upper one: the upper one imports it, directly or
through others, and not the other way around. Prints tables, the counts of the checkout's source
(`source_counts.py`), and one line of JSON.
"""

import argparse
import ast
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from coserve.client.ports import free_port
from experiments.results import add_save_option, print_result
from experiments.source_counts import as_json, print_counts, read_source

_HOOK = Path(__file__).parent / "station_hook"
_START_LIMIT_S, _WINDOW_LIMIT_S = 300.0, 120.0
# Nothing new has run for as long: a window is over.
_QUIET_S, _POLL_S = 2.0, 0.1
_MODEL = "tiny"
_CHAT = {
    "model": _MODEL,
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 8,
    "temperature": 0,
}
_EXAMPLES = [
    {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "Aye."}]}
    for text in ("Are you there?", "Is this the sea?")
]
_ENDS = ("succeeded", "failed", "cancelled")
_WINDOWS = ("nothing", "chat", "job")


@dataclass(kw_only=True)
class Trace:
    """Functions that ran in one kind of process during a window."""

    functions: set[tuple[str, str, int]] = field(default_factory=set)
    """File, name and line."""
    calls: set[tuple[str, str]] = field(default_factory=set)
    """Files of which the first called the second."""

    @property
    def files(self) -> list[str]:
        """Return the files whose functions ran."""
        return sorted({function[0] for function in self.functions})


class Place:
    """A folder in which every process of a server records what it runs."""

    def __init__(self, folder: Path, package: Path) -> None:
        self._folder = folder
        window = folder / "window"
        window.write_bytes(b"\0")
        with window.open("r+b") as file:
            self._window = mmap.mmap(file.fileno(), 1)
        self.variables = {"STATIONS_PLACE": str(folder), "STATIONS_PACKAGE": str(package)}

    def during(self, window: int, act: Callable[[], object]) -> None:
        """Do something in a window, which ends when nothing new has run for a while."""
        self._window[0] = window
        try:
            act()
            self._until_quiet()
        finally:
            self._window[0] = 0

    def read(self, window: int) -> dict[int, Trace]:
        """Return what ran in a window, by process."""
        result: dict[int, Trace] = {}
        for path in self._folder.glob("*.jsonl"):
            trace = Trace()
            for number, kind, *what in map(json.loads, path.read_text().splitlines()):
                if number == window:
                    (trace.functions if kind == "function" else trace.calls).add(tuple(what))
            result[int(path.stem)] = trace
        return result

    def _until_quiet(self) -> None:
        since_s = time.monotonic()
        end_s, sizes = since_s + _WINDOW_LIMIT_S, dict[str, int]()
        while time.monotonic() - since_s < _QUIET_S:
            if time.monotonic() > end_s:
                raise SystemExit(f"new functions still run after {_WINDOW_LIMIT_S:.0f} s")
            time.sleep(_POLL_S)
            now = {path.name: path.stat().st_size for path in self._folder.glob("*.jsonl")}
            if now != sizes:
                sizes, since_s = now, time.monotonic()


class Server:
    """A server of a checkout that records."""

    def __init__(self, code: Path, folder: Path) -> None:
        self.place = Place(_made(folder / "place"), code / "coserve")
        port = free_port()
        environment = (
            os.environ
            | self.place.variables
            | {
                "COSERVE_HOME": str(folder / "home"),
                "PYTHONPATH": os.pathsep.join([str(_HOOK), str(code)]),
            }
        )
        command = [
            sys.executable,
            "-m",
            "coserve",
            "up",
            _MODEL,
            "--port",
            str(port),
            "--home",
            str(folder / "home"),
        ]
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=log, stderr=log
            )
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)

    def until_ready(self) -> None:
        """Wait until the server answers, and has measured its device."""
        end_s = time.monotonic() + _START_LIMIT_S
        while time.monotonic() < end_s and self.process.poll() is None:
            try:
                if self._client.get("/ready").status_code == 200 and not self._is_measuring():
                    return
            except httpx.TransportError:
                pass
            time.sleep(_POLL_S)
        raise SystemExit("the server did not start:\n" + self.log.read_text()[-2000:])

    def chat(self) -> None:
        """Ask for a few tokens."""
        self._client.post("/v1/chat/completions", json=_CHAT).raise_for_status()

    def upload(self) -> str:
        """Give the examples of a job, and return the file's id."""
        lines = "".join(json.dumps(example) + "\n" for example in _EXAMPLES).encode()
        files, data = {"file": ("examples.jsonl", lines)}, {"purpose": "fine-tune"}
        return str(
            self._client.post("/v1/files", files=files, data=data).raise_for_status().json()["id"]
        )

    def start_job(self, file: str) -> str:
        """Start a job, and return its id."""
        numbers = {"n_epochs": 1, "batch_size": 1}
        method = {"type": "supervised", "supervised": {"hyperparameters": numbers}}
        body = {"model": _MODEL, "training_file": file, "seed": 1, "method": method}
        return str(
            self._client.post("/v1/fine_tuning/jobs", json=body).raise_for_status().json()["id"]
        )

    def until_over(self, job: str) -> None:
        """Wait for a job's end, which must be a success."""
        while (state := self._client.get(f"/v1/fine_tuning/jobs/{job}").json())[
            "status"
        ] not in _ENDS:
            time.sleep(_POLL_S)
        if state["status"] != "succeeded":
            raise SystemExit(f"the job has {state['status']}: {state}")

    def end(self) -> None:
        """End the server and what it has started."""
        self._client.close()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def _is_measuring(self) -> bool:
        profile: dict[str, Any] | None = self._client.get("/v1/status").json().get("profile")
        return profile is not None and profile.get("state", "measured") != "measured"


def trace(code: Path) -> dict[str, dict[str, Trace]]:
    """Run a chat and a job, and return what ran in each window, by the kind of process."""
    with tempfile.TemporaryDirectory(prefix="stations-") as folder:
        server = Server(code, Path(folder))
        try:
            server.until_ready()
            server.chat()
            server.until_over(server.start_job(server.upload()))
            files, jobs = server.upload(), list[str]()
            time.sleep(_QUIET_S)
            acts: tuple[Callable[[], object], ...] = (
                lambda: None,
                server.chat,
                lambda: jobs.append(server.start_job(files)),
            )
            for window, act in enumerate(acts, 1):
                server.place.during(window, act)
            for job in jobs:
                server.until_over(job)
            return {
                name: _by_kind(server.place.read(window), server.process.pid)
                for window, name in enumerate(_WINDOWS, 1)
            }
        finally:
            server.end()


def _by_kind(traces: dict[int, Trace], server: int) -> dict[str, Trace]:
    """Return what the server's process, the engine's and others ran."""
    result: dict[str, Trace] = {}
    for pid, trace in traces.items():
        kind = "server" if pid == server else _kind(trace)
        into = result.setdefault(kind, Trace())
        into.functions |= trace.functions
        into.calls |= trace.calls
    return result


def _kind(trace: Trace) -> str:
    """Return the kind of a process: the engine's, or a device's apart from it."""
    rooms = {path.split("/")[0] for path in trace.files}
    return "engine" if "engine" in rooms else "device" if "devices" in rooms else "other"


# -- climbs -----------------------------------------------------------------------------------


def climbs(package: Path, calls: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the calls from a file to one above it."""
    above = _importers(package)
    return sorted(
        (lower, upper)
        for lower, upper in calls
        if upper in above(lower) and lower not in above(upper)
    )


def _importers(package: Path) -> Callable[[str], frozenset[str]]:
    """Return a function from a file to those that import it, directly or through others."""
    users: dict[str, set[str]] = {}
    for path in package.rglob("*.py"):
        own = str(path.relative_to(package))
        for used in _imported(package, path):
            users.setdefault(used, set()).add(own)

    @cache
    def above(path: str) -> frozenset[str]:
        found, rest = set[str](), [path]
        while rest:
            new = users.get(rest.pop(), set()) - found
            found |= new
            rest += new
        return frozenset(found)

    return above


def _imported(package: Path, path: Path) -> set[str]:
    """Return the files of the package that a file imports where it runs, functions included."""
    tree = ast.parse(path.read_text())
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    files = {f"{name.replace('.', '/')}{end}" for name in names for end in (".py", "/__init__.py")}
    ours = {
        each.removeprefix(f"{package.name}/")
        for each in files
        if each.startswith(f"{package.name}/")
    }
    return {each for each in ours if (package / each).exists()}


# -- what is printed --------------------------------------------------------------------------


def main() -> None:
    """Trace, count and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--code", type=Path, default=Path(__file__).parents[1], help="checkout that is traced"
    )
    parser.add_argument("--list", action="store_true", help="print every file and climb, too")
    add_save_option(parser)
    options = parser.parse_args()
    code = options.code.resolve()
    result: dict[str, Any] = {}
    print("| | process | files | functions | climbs |\n|---|---|---|---|---|")
    for name, by_kind in trace(code).items():
        for kind, found in sorted(by_kind.items(), reverse=True):
            upward = climbs(code / "coserve", found.calls)
            row = {
                "files": len(found.files),
                "functions": len(found.functions),
                "climbs": len(upward),
            }
            result.setdefault(name, {})[kind] = row | {"touched": found.files, "climbed": upward}
            if found.functions:
                print(
                    f"| {name} | {kind} | "
                    + " | ".join(f"{number:,}" for number in row.values())
                    + " |"
                )
    if options.list:
        for name, by_kind in result.items():
            for kind, row in by_kind.items():
                print(
                    f"\n{name}, {kind}:",
                    *row["touched"],
                    *(f"{a} -> {b}" for a, b in row["climbed"]),
                    sep="\n  ",
                )
    print()
    source = read_source(code / "coserve")
    print_counts(source)
    print_result(
        "stations", {"code": code.name, "passes": result, "source": as_json(source)}, options.save
    )


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


if __name__ == "__main__":
    main()

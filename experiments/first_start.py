"""Time of `coserve up` to its first answer, by what is already on the machine.

    python -m experiments.first_start [--code CHECKOUT] [--repeats 2] [CASE ...]

A case is a model with or without compiled kernels and a measured profile. Starts share a home and a
cache; without kernels, each has its own. Prints one row per start, and one line of JSON.
"""

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from coserve.client.ports import free_port
from experiments.results import add_save_option, print_result

_START_LIMIT_S, _POLL_S = 600.0, 0.02


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kind of start."""

    model: tuple[str, ...]
    """Arguments of `coserve up` that name the model."""
    has_kernels: bool = False
    """Whether an earlier start has left compiled kernels."""
    has_profile: bool = False
    """Whether an earlier start has left the model's profile."""


_TINY, _HALF_B = ("tiny",), ("dummy:qwen2.5-0.5b", "--dtype", "bfloat16")
CASES = {
    "tiny-empty": Case(model=_TINY),
    "tiny-kernels": Case(model=_TINY, has_kernels=True),
    "tiny-cached": Case(model=_TINY, has_kernels=True, has_profile=True),
    "0.5b-kernels": Case(model=_HALF_B, has_kernels=True),
    "0.5b-cached": Case(model=_HALF_B, has_kernels=True, has_profile=True),
}


@dataclass(kw_only=True)
class Start:
    """Times of a start in seconds after the command; None: not reached."""

    case: str
    """Name of the case."""
    first_line_s: float | None = None
    """First line of output."""
    health_s: float | None = None
    """First answer of `/health`."""
    ready_s: float | None = None
    """Readiness."""
    answer_s: float | None = None
    """First answer to a request."""
    lines: list[tuple[float, str]] = field(default_factory=list)
    """Lines of output with their times."""


class _Machine:
    """Directories that outlive a start: a home and a cache, used by one start after the other."""

    def __init__(self, root: Path, code: Path) -> None:
        self._root, self._code = root, code
        self.home, self.cache = root / "home", root / "cache"

    def start(self, name: str, case: Case, *, until_measured: bool = False) -> Start:
        """Run `coserve up` until its first answer.

        Args:
            name: Name of the case.
            case: The case.
            until_measured: Whether to wait until the profile is measured.
        """
        port = free_port()
        command = [
            sys.executable,
            "-m",
            "coserve",
            "up",
            *case.model,
            "--port",
            str(port),
            "--home",
            str(self.home),
        ]
        environment = os.environ | {
            "COSERVE_HOME": str(self.home),
            "XDG_CACHE_HOME": str(self.cache),
            "PYTHONPATH": str(self._code),
        }
        start_s = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=self._root,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        result = Start(case=name)
        reading = threading.Thread(target=_read_lines, args=(process, start_s, result))
        reading.start()
        try:
            _watch(
                f"http://127.0.0.1:{port}", process, start_s, result, until_measured=until_measured
            )
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            reading.join()
        return result

    def forget_profiles(self) -> None:
        """Remove measured profiles, wherever this version of the code keeps them."""
        for directory in [*self._root.rglob("profiles")]:
            shutil.rmtree(directory, ignore_errors=True)


def _read_lines(process: "subprocess.Popen[str]", start_s: float, found: Start) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        after_s = time.monotonic() - start_s
        found.first_line_s = after_s if found.first_line_s is None else found.first_line_s
        found.lines.append((round(after_s, 2), line.rstrip()))


def _watch(
    url: str,
    process: "subprocess.Popen[str]",
    start_s: float,
    found: Start,
    *,
    until_measured: bool,
) -> None:
    body = {"model": "", "prompt": "Hello", "max_tokens": 1}
    with httpx.Client(base_url=url, timeout=60) as client:
        while time.monotonic() - start_s < _START_LIMIT_S and process.poll() is None:
            try:
                if found.health_s is None and client.get("/health").status_code:
                    found.health_s = time.monotonic() - start_s
                if client.get("/ready").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(_POLL_S)
        found.ready_s = time.monotonic() - start_s
        body["model"] = client.get("/v1/models").json()["data"][0]["id"]
        if "0.5b" in str(body["model"]):
            body["prompt"] = [1, 2, 3]  # a shape without a tokenizer
        client.post("/v1/completions", json=body).raise_for_status()
        found.answer_s = time.monotonic() - start_s
        while (
            until_measured
            and _is_provisional(client)
            and time.monotonic() - start_s < _START_LIMIT_S
        ):
            time.sleep(0.5)


def _is_provisional(client: httpx.Client) -> bool:
    """Return whether the server still measures its device; older versions measure before they are
    ready.
    """
    profile: dict[str, Any] | None = client.get("/v1/status").json().get("profile")
    return profile is not None and profile["state"] != "measured"


def run_case(name: str, code: Path, repeats: int) -> list[Start]:
    """Run the starts of a case; those that leave kernels and a profile are not counted."""
    case, starts = CASES[name], []
    with TemporaryDirectory(prefix="coserve-first-start-") as place:
        machine = _Machine(Path(place), code)
        if case.has_kernels:
            machine.start(
                name,
                case if case.has_profile else CASES["tiny-empty"],
                until_measured=case.has_profile,
            )
        for number in range(repeats):
            if not case.has_profile:
                machine.forget_profiles()
            if not case.has_kernels:
                machine = _Machine(Path(place) / str(number), code)
                machine.home.parent.mkdir()
            starts.append(machine.start(name, case))
    return starts


def main() -> None:
    """Run the named cases, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "cases", nargs="*", default=list(CASES), metavar="CASE", help=", ".join(CASES)
    )
    parser.add_argument(
        "--code", type=Path, default=Path(__file__).parents[1], help="checkout that is measured"
    )
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--lines", action="store_true", help="print what each start wrote to stderr"
    )
    add_save_option(parser)
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"unknown cases: {', '.join(sorted(unknown))}; there are: {', '.join(CASES)}")
    starts: list[Start] = []
    print(f"{'case':<14}{'first line':>12}{'/health':>10}{'/ready':>10}{'answer':>10}  (seconds)")
    for name in options.cases:
        for start in run_case(name, options.code.absolute(), options.repeats):
            starts.append(start)
            times = (start.first_line_s, start.health_s, start.ready_s, start.answer_s)
            shown = ["-" if each is None else f"{each:.2f}" for each in times]
            print(f"{name:<14}{shown[0]:>12}{shown[1]:>10}{shown[2]:>10}{shown[3]:>10}", flush=True)
            for after_s, line in start.lines if options.lines else ():
                print(f"    {after_s:7.2f}  {line}")
    medians = {
        name: statistics.median(
            start.answer_s or _START_LIMIT_S for start in starts if start.case == name
        )
        for name in options.cases
    }
    print_result(
        "first_start",
        {"median_answer_s": medians, "starts": [asdict(start) for start in starts]},
        options.save,
    )


if __name__ == "__main__":
    main()

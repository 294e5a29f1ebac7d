"""Resident memory of an engine after many patterns, and at rest.

    python -m experiments.grammar_memory [NUMBER]

Starts a server of the built-in model on this machine, and prints one line of JSON.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from experiments.results import add_save_option, print_result


def engine_of(server: int) -> int:
    """Return the engine's process: the child of the server's child that forks engines."""
    for child in _children(server):
        if b"coserve.sandbox" not in Path(f"/proc/{child}/cmdline").read_bytes():
            return _children(child)[-1]
    raise AssertionError("there is no engine")


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def resident_mb(pid: int) -> int:
    """Return the resident megabytes of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1_000_000


def main() -> None:
    """Send requests with patterns, four at once, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("number", type=int, nargs="?", default=200, help="patterns [200]")
    add_save_option(parser)
    options = parser.parse_args()
    command = [
        sys.executable,
        "-m",
        "coserve",
        "up",
        "tiny",
        "--port",
        "0",
        "--home",
        tempfile.mkdtemp(),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        match = re.search(r"(https?://\S+)/v1", server.stdout.readline())
        assert match is not None
        engine = engine_of(server.pid)

        def ask(place: int) -> int:
            body = {
                "model": "tiny",
                "prompt": "Hello",
                "max_tokens": 64,
                "guided_regex": pattern(place),
            }
            return httpx.post(f"{match[1]}/v1/completions", json=body, timeout=300).status_code

        ask(0)
        before_mb = resident_mb(engine)
        since_s = time.monotonic()
        with ThreadPoolExecutor(4) as threads:
            statuses = list(threads.map(ask, range(1, options.number + 1)))
        seconds = time.monotonic() - since_s
        after_mb = resident_mb(engine)
        time.sleep(10)
        rest_mb = resident_mb(engine)
        server.terminate()
    told = {
        "patterns": options.number,
        "answered": statuses.count(200),
        "seconds": round(seconds, 1),
    }
    print_result(
        "grammar_memory",
        {**told, "before_mb": before_mb, "after_mb": after_mb, "at_rest_mb": rest_mb},
        options.save,
    )


def pattern(place: int) -> str:
    """Return a pattern of some thousand characters that takes megabytes when it is compiled."""
    return f"{place:04}" + "abcdefgh" * 640


if __name__ == "__main__":
    main()

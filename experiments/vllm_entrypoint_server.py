"""A pytest plugin for vLLM's entrypoint tests, in vLLM's environment: their server becomes a
running `coserve up`.

`experiments/vllm_entrypoint_tests.py` starts pytest with it. Environment: COSERVE_COMMAND, the
command that starts coserve, as a JSON list; COSERVE_DOES_NOT_APPLY, a JSON list of patterns of
tests that are not run; COSERVE_OUTCOMES, the file that gets a line of JSON for every test.
"""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from shutil import rmtree
from socket import socket
from tempfile import mkdtemp
from typing import Any

import pytest

# vLLM's options that coserve has under the same name, or under the other one; all others set up
# vLLM itself.
SAME = (
    "--max-model-len",
    "--lora-modules",
    "--root-path",
    "--served-model-name",
    "--chat-template",
)
OTHER = {"--tool-call-parser": "--tool-call-parser", "--max-num-seqs": "--max-requests"}
START_S = 120.0


def coserve_options(vllm_options: list[str]) -> list[str]:
    """Return the options that `coserve up` knows; one with several values is repeated for each."""
    options, name = [], ""
    for word in vllm_options:
        if word.startswith("--"):
            name = word if word in SAME else OTHER.get(word, "")
        elif name:
            options += [name, word]
    return options


def _free_port() -> int:
    with socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def coserve_server(base: type) -> type:
    """Return vLLM's class with its clients and URLs, in which only the process is another."""

    class CoserveServer(base):  # type: ignore[misc]
        def __init__(
            self,
            model: str,
            vllm_serve_args: list[str],
            *,
            env_dict: dict[str, str] | None = None,
            **_: Any,
        ) -> None:
            self.uds, self.host, self.port = None, "127.0.0.1", _free_port()
            self.show_hidden_metrics = False
            self.home = Path(mkdtemp(prefix="coserve-vllm-tests-"))
            command = [
                *json.loads(os.environ["COSERVE_COMMAND"]),
                "up",
                model,
                "--port",
                str(self.port),
            ]
            command += [
                "--dtype",
                "float32",
                "--memory",
                "256MB",
                "--home",
                str(self.home),
                "--allow-adapter-paths",
                "/",
            ]
            if key := (env_dict or {}).get("VLLM_API_KEY"):
                command += ["--api-key", key]
            environment = {
                name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
            }
            self.log = (self.home / "server.log").open("w")
            self.proc = subprocess.Popen(
                [*command, *coserve_options(vllm_serve_args)],
                env={
                    **environment,
                    "PYTHONPATH": str(Path(__file__).parents[1]),
                    "OMP_NUM_THREADS": "1",
                },
                stdout=self.log,
                stderr=self.log,
            )
            try:
                self._wait_for_server(url=self.url_for("ready"), timeout=START_S)
            except Exception:
                self._shutdown()
                raise

        def _shutdown(self) -> None:
            if self.proc.poll() is None:
                self.proc.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self.proc.wait(30)
            if self.proc.poll() is None:
                self.proc.kill()
                self.proc.wait()
            self.log.close()
            sys.stdout.write((self.home / "server.log").read_text()[-4000:])
            rmtree(self.home, ignore_errors=True)

    return CoserveServer


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Replace the class before a conftest or a test imports it."""
    server_classes: Any = import_module("tests.utils")
    server_classes.RemoteOpenAIServer = coserve_server(server_classes.RemoteOpenAIServer)


def _applies(test: str) -> bool:
    return not any(
        fnmatchcase(test, pattern) for pattern in json.loads(os.environ["COSERVE_DOES_NOT_APPLY"])
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Record and deselect the tests that do not apply."""
    for item in items:
        if not _applies(item.nodeid):
            _note(item.nodeid, "not run", "")
    items[:] = [item for item in items if _applies(item.nodeid)]


_failed: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record the outcome of a test once, by the first of its parts that failed."""
    if report.failed or report.skipped:
        if report.nodeid not in _failed:
            _note(
                report.nodeid,
                "failed" if report.failed else "skipped",
                str(report.longrepr)[-3000:],
            )
        _failed.add(report.nodeid)
    elif report.when == "call":
        _note(report.nodeid, "passed", f"{report.duration:.1f} s")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Record a file that cannot be imported here, as it needs another build of vLLM."""
    if report.failed:
        _note(
            report.nodeid,
            "failed" if _applies(report.nodeid) else "not run",
            str(report.longrepr)[-3000:],
        )


def _note(test: str, outcome: str, why: str) -> None:
    with open(os.environ["COSERVE_OUTCOMES"], "a") as lines:
        lines.write(
            json.dumps({"test": test, "outcome": outcome, "why": why, "at_s": time.time()}) + "\n"
        )

"""Commands of coserve, forked from a process that has imported everything: a test that starts a
server would wait for imports most of its time.
"""

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_MODULES = [
    *("coserve.cli.main", "coserve.cli.commands.up", "coserve.server.serve"),
    *(
        "transformers.models.auto.tokenization_auto",
        "transformers.models.llama.configuration_llama",
    ),
]
_CONTEXT.set_forkserver_preload(_MODULES)


def preload(*modules: str) -> None:
    """Have these imported, too, before the first command."""
    _CONTEXT.set_forkserver_preload([*_MODULES, *modules])


class ForkedCommand:
    """A command that runs, as `subprocess.Popen` has it."""

    def __init__(
        self,
        *arguments: str,
        environment: Mapping[str, str],
        stderr: Path,
        max_files: int | None = None,
        before: str = "",
    ) -> None:
        """environment: all of it. stderr: goes to this file. max_files: that it may have open.
        before: Python that it runs first.
        """
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        self._process = _CONTEXT.Process(
            target=_run,
            args=(arguments, dict(environment), theirs, stderr, max_files, before),
            daemon=True,
        )
        self._process.start()
        theirs.close()
        self.stdout = os.fdopen(os.dup(ours.fileno()), "r")
        ours.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("coserve", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with suppress(
                ProcessLookupError
            ):  # it has ended, which the fork server knows a moment earlier
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def failure(directory: Path, *arguments: str, before: str = "") -> str:
    """What a command says that ends at once: one line. before: see `ForkedCommand`."""
    stderr = directory / "stderr"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = ForkedCommand(*arguments, environment=environment, stderr=stderr, before=before)
    with command.stdout as stdout:
        assert command.wait(120) == 1
        assert stdout.read() == ""
    found = stderr.read_text()
    assert len(found.splitlines()) == 1, found
    return found


def _run(
    arguments: tuple[str, ...],
    environment: dict[str, str],
    stdout: Connection,
    stderr: Path,
    max_files: int | None,
    before: str,
) -> None:
    if max_files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # to be read from there
    os.dup2(stdout.fileno(), 1)
    stdout.close()
    with stderr.open("w") as file:
        os.dup2(file.fileno(), 2)
    exec(before, {})
    from coserve.cli.main import main

    sys.argv = ["coserve", *arguments]
    main()

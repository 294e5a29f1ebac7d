"""A server of vLLM for CPUs beside coserve's, from an environment of its own."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from coserve.client.http import Client
from coserve.client.ports import free_port
from coserve.errors import CoserveError, ServerError

_START_S, _END_S = 600.0, 60.0
_CONTEXT = 2048


def vllm_version(python: Path) -> str:
    """Return the version of vLLM in the environment of a Python.

    Raises:
        CoserveError: It has no vLLM that starts; the message has its last line of output.
    """
    ran = subprocess.run(
        [python, "-c", "import vllm; print(vllm.__version__)"], capture_output=True, text=True
    )
    if ran.returncode:
        raise CoserveError(
            f"vLLM does not start with {python}: {(ran.stderr.strip().splitlines() or ['?'])[-1]}"
        )
    return ran.stdout.splitlines()[-1]


@contextmanager
def vllm_server(
    python: Path, model: Path, *, dtype: str, log: Path, cores: Sequence[int]
) -> Iterator[str]:
    """Serve a directory without prefix caching, and yield the URL.

    Args:
        python: Python of an environment with vLLM.
        model: Directory of the model.
        dtype: Dtype of the model.
        log: File for the server's output.
        cores: Processor cores that it computes on.

    Raises:
        CoserveError: There is no vLLM, or it did not start; the message has its last line of
            output.
    """
    vllm_version(python)
    bound = ",".join(str(core) for core in cores)
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": bound}
    openmp = next(Path(python).parent.parent.glob("lib/**/libiomp5.so"), None)
    if openmp is not None:  # it waits for threads as vLLM's products expect
        environment["LD_PRELOAD"] = str(openmp)
    port = free_port()
    command = [
        *(
            str(python),
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(model),
            "--dtype",
            dtype,
        ),
        *("--port", str(port), "--max-model-len", str(_CONTEXT), "--no-enable-prefix-caching"),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(process, url, log)
        yield url
    finally:
        _end(process)


def _wait_until_ready(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    until_s = time.monotonic() + _START_S
    with Client(url) as client:
        while process.poll() is None and time.monotonic() < until_s:
            try:
                client.get("/v1/models")
            except ServerError:
                time.sleep(0.5)
            else:
                return
    raise CoserveError(f"vLLM did not start: {_last_words(log)}")


def check_answers(url: str, log: Path) -> None:
    """Check that a server still answers.

    Raises:
        CoserveError: It does not; the message has its last line of output.
    """
    try:
        with Client(url) as client:
            client.get("/v1/models")
    except ServerError:
        raise CoserveError(f"vLLM stopped answering: {_last_words(log)}") from None


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a server with the processes that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                continue

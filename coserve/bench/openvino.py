"""A decode step of OpenVINO beside coserve's, from an environment of its own."""

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from coserve.bench.model_directory import write_model
from coserve.errors import CoserveError

_PRECISIONS = {torch.bfloat16: "bf16", torch.float32: "f32", torch.float16: "f16"}
_WORKER = Path(__file__).with_name("openvino_worker.py")


class OpenVino:
    """A process that holds the model (`openvino_worker`), and works only when it is asked.

    `version` is OpenVINO's.
    """

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self._process, self._log = process, log
        self.version: str = self._answer()["version"]

    def step_s(self, prompts: Sequence[Sequence[int]], *, num_tokens: int) -> float:
        """Return the median seconds of the model's next steps after prompts of one length, without
        choosing tokens.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # its last line of output has the reason
            print(
                json.dumps({"prompts": prompts, "num_tokens": num_tokens}),
                file=self._process.stdin,
                flush=True,
            )
        return float(self._answer()["step_s"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            said = [
                each
                for each in self._log.read_text("utf-8", "replace").splitlines()
                if each.strip()
            ]
            raise CoserveError(
                f"OpenVINO did not answer: {said[-1] if said else 'it printed nothing'}"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def openvino_model(python: Path, model: str, *, dtype: torch.dtype) -> Iterator[OpenVino]:
    """Yield a model in OpenVINO, on as many threads as PyTorch has here; optimum-intel converts it
    in a minute or more.

    Args:
        python: Python of an environment with openvino and optimum-intel.
        model: Directory, hub id, or dummy:PRESET, which is written to a directory first.
        dtype: Dtype of the model.

    Raises:
        CoserveError: There is no OpenVINO, or it cannot run the model; the message has its last
            line of output.
    """
    with TemporaryDirectory() as place:
        log, directory = Path(place) / "log", model
        if model.startswith("dummy:"):
            directory = str(Path(place) / "model")
            write_model(model, Path(directory), dtype=str(dtype).removeprefix("torch."))
        # Isolated, since modules beside the file have the same names as others of that
        # environment.
        command = [
            str(python),
            "-I",
            str(_WORKER),
            directory,
            _PRECISIONS[dtype],
            str(torch.get_num_threads()),
        ]
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                start_new_session=True,
            )
        try:
            yield OpenVino(process, log)
        finally:
            process.kill()
            process.communicate()

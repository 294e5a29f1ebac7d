"""A process with OpenVINO's model, in an environment that has OpenVINO and not coserve:
`coserve.bench.openvino` runs this file.

It prints lines of JSON: its version once the model is ready, then the median seconds of a step for
each line on stdin.
"""

import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

# Of a prompt: its logits are made for every row.
_PIECE = 64


class _Decoder:
    """A model that returns logits, without choosing tokens."""

    def __init__(self, directory: Path, precision: str, num_threads: int) -> None:
        self._numpy: Any = import_module("numpy")
        core = import_module("openvino").Core()
        options = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": num_threads}
        self._request: Any = core.compile_model(
            directory / "openvino_model.xml", "CPU", options
        ).create_infer_request()

    def step_s(self, prompts: list[list[int]], num_tokens: int) -> float:
        """Return the median seconds of a step after prompts of one length; the next token is always
        0.
        """
        numpy, batch, length = self._numpy, len(prompts), len(prompts[0])
        tokens = numpy.array(prompts, dtype=numpy.int64)
        self._request.reset_state()
        for start in range(0, length, _PIECE):
            self._run(tokens[:, start : start + _PIECE], start)
        steps, last = [], numpy.zeros((batch, 1), dtype=numpy.int64)
        for index in range(num_tokens):
            start_s = time.perf_counter()
            self._run(last, length + index)
            steps.append(time.perf_counter() - start_s)
        return median(steps)

    def _run(self, tokens: Any, num_past: int) -> None:
        numpy, (batch, rows) = self._numpy, tokens.shape
        ones = numpy.ones((batch, num_past + rows), dtype=numpy.int64)
        positions = numpy.broadcast_to(
            numpy.arange(num_past, num_past + rows, dtype=numpy.int64), (batch, rows)
        )
        inputs = {
            "input_ids": numpy.ascontiguousarray(tokens),
            "attention_mask": ones,
            "position_ids": numpy.ascontiguousarray(positions),
            "beam_idx": numpy.arange(batch, dtype=numpy.int32),
        }
        self._request.infer(inputs, share_inputs=True, share_outputs=True)


def main(model: str, precision: str, num_threads: int) -> None:
    """Export the model, report that it is ready, and answer requests on stdin."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    with TemporaryDirectory() as place:
        exporter = import_module("optimum.intel").OVModelForCausalLM
        exporter.from_pretrained(
            model, export=True, compile=False, load_in_8bit=False
        ).save_pretrained(place)
        decoder = _Decoder(Path(place), precision, num_threads)
    print(json.dumps({"version": import_module("openvino").__version__}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(
            json.dumps({"step_s": decoder.step_s(asked["prompts"], asked["num_tokens"])}),
            file=answers,
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

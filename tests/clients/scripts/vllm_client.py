"""vLLM's load client (`vllm bench serve`): `python vllm_client.py URL MODEL`; a line for each thing
that works."""

import argparse
import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import mkdtemp

from vllm.benchmarks.serve import add_cli_args, main

URL, MODEL = sys.argv[1:]
NUM_REQUESTS = 10
output = Path(mkdtemp(prefix="vllm-"))
parser = argparse.ArgumentParser()
add_cli_args(parser)
for backend, endpoint in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
    options = [
        *(
            "--backend",
            backend,
            "--base-url",
            URL.removesuffix("/v1"),
            "--endpoint",
            endpoint,
            "--model",
            MODEL,
        ),
        *("--tokenizer", os.environ["COSERVE_MODEL_DIRECTORY"], "--dataset-name", "random"),
        *(
            "--random-input-len",
            "32",
            "--random-output-len",
            "16",
            "--num-prompts",
            str(NUM_REQUESTS),
        ),
        *("--max-concurrency", "2", "--ignore-eos", "--save-result", "--result-dir", str(output)),
        *("--result-filename", f"{backend}.json"),
    ]
    with redirect_stdout(sys.stderr):
        main(parser.parse_args(options))
    found = json.loads((output / f"{backend}.json").read_text())
    assert found["completed"] == NUM_REQUESTS and found["mean_ttft_ms"] > 0, found
    print(endpoint.removeprefix("/v1/").removesuffix("/completions"))

"""NVIDIA's aiperf: `python aiperf_client.py URL MODEL`; a line for each thing that works."""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp

URL, MODEL = sys.argv[1:]
NUM_REQUESTS = 10
output = Path(mkdtemp(prefix="aiperf-"))
for kind in ("chat", "completions"):
    command = [
        *(str(Path(sys.executable).parent / "aiperf"), "profile", "--model", MODEL),
        *("--url", URL.removesuffix("/v1"), "--endpoint-type", kind, "--streaming"),
        *("--tokenizer", os.environ["COSERVE_MODEL_DIRECTORY"], "--isl", "32", "--osl", "16"),
        *("--request-rate", "4", "--request-count", str(NUM_REQUESTS), "--ui", "none"),
        # It counts no request whose answer ends before any text.
        *("--extra-inputs", "ignore_eos:true"),
        *("--artifact-dir", str(output / kind)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    [path] = (output / kind).rglob("profile_export_aiperf.json")
    found = json.loads(path.read_text())
    assert found["request_count"]["avg"] == NUM_REQUESTS, found["request_count"]
    assert found["time_to_first_token"]["avg"] > 0 and found["inter_token_latency"]["avg"] > 0
    print(kind)

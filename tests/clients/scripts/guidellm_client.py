"""guidellm: `python guidellm_client.py URL MODEL`; a line for each thing that works."""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp

URL, MODEL = sys.argv[1:]
output = Path(mkdtemp(prefix="guidellm-"))
command = [
    *(str(Path(sys.executable).parent / "guidellm"), "run"),
    *("--backend", f"kind=openai_http,target={URL.removesuffix('/v1')},model={MODEL}"),
    *("--tokenizer", f"kind=huggingface_auto,model={os.environ['COSERVE_MODEL_DIRECTORY']}"),
    *("--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=8"),
    *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16"),
    *("--output", "kind=json"),
]
done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=output)
assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
[path] = output.rglob("*.json")
totals = json.loads(path.read_text())["benchmarks"][0]["metrics"]["request_totals"]
assert totals["successful"] and not totals["errored"], (
    totals
)  # its exit status says nothing of that
print("synchronous load")

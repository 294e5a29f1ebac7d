"""What a real server did, run again: `coserve up --record`, then `coserve replay`."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from job_data import DATA
from recordings import steps_in
from served import Served, serving

from coserve.engine.recorded_lines import read_recording

pytestmark = pytest.mark.long


def use(served: Served) -> None:
    """Requests with stop strings and of several tokens at once, and a job whose adapter is asked
    for."""
    client = served.client()
    data = client.files.create(file=("data.jsonl", DATA), purpose="fine-tune").id
    job = client.fine_tuning.jobs.create(model="small", training_file=data, suffix="mine")
    for number in range(3):
        client.completions.create(
            model="small", prompt="Hello", max_tokens=30, stop=["q"], seed=number, n=2
        )
    done = served.wait_until(
        lambda: (found := client.fine_tuning.jobs.retrieve(job.id)).status == "succeeded" and found
    )
    client.completions.create(
        model=done.fine_tuned_model, prompt="say ", max_tokens=10, temperature=0
    )


def run_again(file: Path, device: str) -> dict:
    command = [sys.executable, "-m", "coserve", "replay", str(file), "--device", device]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    return json.loads(result.stdout.splitlines()[-1])


def test_a_server_s_steps_can_be_run_again(tmp_path):
    file = tmp_path / "recording"
    with serving("--record", str(file)) as served:
        use(served)
        # An engine that is started again writes to another file.
        os.kill(served.engine_pid(), signal.SIGKILL)
        served.wait_until(
            lambda: served.get("/health").status_code == 200 and (tmp_path / "recording.1").exists()
        )
    _, lines = read_recording(file)
    num_steps = len(steps_in(lines))
    report = run_again(file, "torch")
    assert report == {
        "steps": num_steps,
        "plans_equal": True,
        "tokens_equal": True,
        "max_loss_difference": 0.0,
    }
    assert num_steps > 30
    report = run_again(file, "modelled")
    assert report == {
        "steps": num_steps,
        "plans_equal": True,
        "tokens_equal": None,
        "max_loss_difference": None,
    }

"""The scripts in examples/ that talk to a server."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from served import Served

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str) -> str:
    """What an example prints."""
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_serve_and_tune_learns_while_it_answers(served: Served):
    answers, before, after = run("serve_and_tune.py", served.url).splitlines()
    assert re.fullmatch(r"[1-9]\d* answers while it learned", answers)
    assert before.removeprefix("before: ") != after.removeprefix("after:  ")


def test_train_then_serve_serves_what_it_trained():
    losses, answer = run("train_then_serve.py").splitlines()
    first, last = re.findall(r"\d+\.\d+", losses)
    assert float(last) < 0.5 * float(first)
    assert "greeter" in answer

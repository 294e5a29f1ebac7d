"""The commands against a real server, as a user runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from served import serving

ROOT = str(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def server():
    with serving() as served:
        yield served


@pytest.fixture
def coserve(server):
    """Run a command to its end: status, stdout, stderr."""

    def run(*arguments: str, stdin: str = "", url: str | None = None) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "coserve", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "COSERVE_URL": url or server.url, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"},
        )
        return done.returncode, done.stdout, done.stderr

    return run


def test_models_are_listed(coserve):
    status, out, err = coserve("models")
    assert (status, err) == (0, "") and "small" in out and "base" in out
    assert json.loads(coserve("models", "--json")[1])["models"][0] == "small"


def test_a_conversation_in_a_pipe_is_answers_alone(coserve, server):
    status, out, err = coserve("chat", "--temperature", "0", "--max-tokens", "6", stdin="Hello world\n\nAnd you?\n")
    assert (status, err) == (0, "")
    messages = [{"role": "user", "content": "Hello world"}]
    first = _answer(server, messages)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "And you?"}]
    assert out == f"{first}\n{_answer(server, messages)}\n", "the second question was asked of the whole conversation"


def _answer(server, messages) -> str:
    answer = server.client().chat.completions.create(model="small", messages=messages, max_tokens=6, temperature=0)
    return answer.choices[0].message.content


def test_mistakes_are_one_line(coserve, tmp_path):
    for arguments, words in (
        (("chat", "--adapter", "pirate"), "no model 'pirate'; it has small"),
        (("models", "--url", "nowhere"), "must begin with http"),
        (("models", "--url", "http://127.0.0.1:9"), "start one with `coserve up`"),
        (("tune", str(tmp_path / "nothing.jsonl")), "cannot be read"),
    ):
        status, out, err = coserve(*arguments)
        assert status == 1 and out == "", arguments
        assert err.startswith("error: ") and words in err and err.count("\n") == 1, err

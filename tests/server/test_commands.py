"""The commands against a real server, as a user runs them."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from served import model_directory

from coserve.cli import tables
from coserve.cli.commands.tune import watch
from coserve.cli.connection import base_model, find_model, is_there, own_server
from coserve.client.http import Client
from coserve.errors import ServerError

ROOT = str(Path(__file__).parents[2])


@pytest.fixture
def coserve(served):
    """Run a command to its end: status, stdout, stderr."""

    def run(*arguments: str, stdin: str = "", url: str | None = None) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "coserve", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            errors="surrogateescape",  # bytes of stdin that are no UTF-8
            timeout=120,
            env={
                **os.environ,
                "COSERVE_URL": url or served.url,
                "PYTHONPATH": ROOT,
                "OMP_NUM_THREADS": "1",
            },
        )
        return done.returncode, done.stdout, done.stderr

    return run


def test_models_are_listed(coserve):
    status, out, err = coserve("models")
    assert (status, err) == (0, "") and "small" in out and "base" in out
    assert json.loads(coserve("models", "--json")[1])["models"][0] == "small"


def test_a_conversation_in_a_pipe_is_answers_alone(coserve, served):
    status, out, err = coserve(
        "chat", "--temperature", "0", "--max-tokens", "6", stdin="Hello world\n\nAnd you?\n"
    )
    assert (status, err) == (0, "")
    messages = [{"role": "user", "content": "Hello world"}]
    first = _answer(served, messages)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "And you?"}]
    assert out == f"{first}\n{_answer(served, messages)}\n", (
        "the second question was asked of the whole conversation"
    )


def test_a_question_that_is_no_text_is_said_in_one_line(coserve):
    status, out, err = coserve("chat", stdin="caf\udce9?\n")
    assert (status, out, err) == (1, "", "error: stdin is not UTF-8 text\n")


@pytest.mark.long
def test_a_short_context_has_room_for_answers(coserve):
    status, _, err = coserve("chat", stdin="Hello\n")
    assert (status, err) == (0, "")


def _answer(served, messages) -> str:
    answer = served.client().chat.completions.create(
        model="small", messages=messages, max_tokens=6, temperature=0
    )
    return answer.choices[0].message.content


def test_mistakes_are_one_line(coserve, tmp_path):
    for arguments, words in (
        (("chat", "--adapter", "pirate"), "no model 'pirate'; it has small"),
        (("models", "--url", "nowhere"), "must begin with http"),
        (("models", "--url", "http://127.0.0.1:9"), "start one with `coserve up`"),
        (("tune", str(tmp_path / "nothing.jsonl")), "cannot be read"),
        (("demo", "--trace", str(tmp_path / "nothing.csv")), "cannot be read"),
    ):
        status, out, err = coserve(*arguments)
        assert status == 1 and out == "", arguments
        assert err.startswith("error: ") and words in err and err.count("\n") == 1, err


def test_a_report_of_the_demo_that_cannot_be_written_is_said_before_anything_runs(
    coserve, tmp_path
):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "report"):
        status, told, err = coserve(
            "demo", "--out", str(out), "--trace", str(tmp_path / "nothing.csv")
        )
        assert (status, told, err.count("\n")) == (2, "", 1), err
        assert (
            f"{out} cannot be written (Not a directory): choose a writable directory" in err
            and "--out" in err
        )


def test_a_model_that_is_not_there_names_the_most_likely_and_says_what_it_leaves_out():
    names = [f"ft:small:org:{suffix}:{i}" for i, suffix in enumerate(("old", "mid", "new"))]
    models = [{"id": "small", "parent": None, "created": 9}]
    for i, name in enumerate(names):
        models += [
            {"id": f"{name}:ckpt-step-{step}", "parent": "small", "created": i}
            for step in range(1, 41)
        ]
        models.append({"id": name, "parent": "small", "created": i})

    class Listing(Client):
        def get(self, path: str, **params: Any) -> Any:
            return {"data": models}

    newest = ", ".join(f"{names[2]}:ckpt-step-{step}" for step in range(40, 34, -1))
    with pytest.raises(ServerError) as caught:
        find_model(Listing(), "nope")
    known = f"small, {names[2]}, {names[1]}, {names[0]}, {newest}, and 114 more: coserve models"
    assert str(caught.value) == f"the server has no model 'nope'; it has {known}"
    assert find_model(Listing(), "mid") == names[1] and find_model(
        Listing(), f"{names[0]}:ckpt-step-1"
    ).endswith("-1")
    del models[-1]
    assert find_model(Listing(), "new") == f"{names[2]}:ckpt-step-40", (
        "the newest of the same second"
    )


def write_examples(path: Path, num_lines: int) -> Path:
    lines = [{"prompt": f"{i} and one is", "completion": f" {i + 1}"} for i in range(num_lines)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def examples(tmp_path) -> Path:
    return write_examples(tmp_path / "examples.jsonl", 12)


@pytest.fixture
def many_examples(tmp_path) -> Path:
    """Fifty epochs of them take many minutes."""
    return write_examples(tmp_path / "many.jsonl", 4000)


def test_a_file_becomes_a_model_that_answers(coserve, examples):
    options = [
        "--suffix",
        "counts",
        "--epochs",
        "3",
        "--batch-size",
        "4",
        "--learning-rate",
        "1e-3",
        "--r",
        "4",
    ]
    options += [
        "--targets",
        "q_proj,v_proj",
        "--checkpoint-every",
        "3",
        "--validation",
        str(examples),
    ]
    status, out, err = coserve("tune", str(examples), *options, "--json")
    assert (status, err) == (0, "")
    ended = json.loads(out.splitlines()[-1])
    assert (ended["status"], ended["steps"]) == ("succeeded", 9) and ended["trained_tokens"] > 0
    assert ended["train_loss"] > 0 and ended["valid_loss"] > 0
    assert [f"Step {step}/9: validation" in out for step in (3, 6, 9)] == [True] * 3
    assert [f"Step {step}/9: training" in out for step in (1, 9)] == [True] * 2
    assert [f"Checkpoint created at step {step}:" in out for step in (3, 6, 9)] == [True] * 3
    assert "Step 9/9: validation" in coserve("jobs", "follow", "last")[1]
    assert f"coserve chat --adapter {ended['fine_tuned_model']}" in " ".join(out.split())
    assert coserve("chat", "--adapter", "counts", "--max-tokens", "3", stdin="hello\n")[0] == 0
    assert (
        "/adapter counts"
        not in coserve("chat", "--max-tokens", "2", stdin="/adapter counts\nhello\n/exit\n")[1]
    )
    assert ended["fine_tuned_model"] in json.loads(coserve("models", "--json")[1])["models"]
    assert "checkpoint" in coserve("models")[1]
    shown = json.loads(coserve("jobs", "show", ended["job"], "--json")[1])
    assert shown["hyperparameters"]["n_epochs"] == 3 and shown["coserve"]["total_steps"] == 9
    assert [checkpoint["step_number"] for checkpoint in shown["checkpoints"]] == [9, 6, 3]
    assert (
        "counts" in coserve("jobs")[1] and "training loss" in coserve("jobs", "events", "last")[1]
    )


@pytest.mark.long
def test_a_job_is_paused_resumed_and_cancelled(coserve, many_examples):
    out = coserve(
        "tune", str(many_examples), "--epochs", "50", "--batch-size", "1", "--no-follow", "--json"
    )[1]
    job = json.loads(out)["job"]
    states = []
    for verb in ("pause", "resume", "cancel"):
        status, out, err = coserve("jobs", verb, "last", "--json")
        assert (status, err) == (0, ""), verb
        states.append(json.loads(out)["status"])
    assert states[0] == "paused" and states[1] in ("queued", "running") and states[2] == "cancelled"
    status, out, _ = coserve("jobs", "follow", job, "--json")
    assert status == 0 and json.loads(out.splitlines()[-1])["status"] == "cancelled"
    status, out, err = coserve("jobs", "resume", job)
    assert status == 1 and err.startswith("error: ") and err.count("\n") == 1


def test_options_before_a_command_are_not_passed_over(coserve):
    for options in (["--url", "http://127.0.0.1:9"], ["--json"], ["--limit", "3"]):
        status, out, err = coserve("jobs", *options, "cancel", "last")
        assert (status, out) == (2, "") and err.count("\n") == 1, err
        assert f"{options[0]}: options of cancel follow it" in err


def test_a_job_that_no_server_can_have_is_said_in_one_line(coserve):
    for job in ("", "a/b?c", "../files"):
        words = f"error: {job!r} is not a job: use an id such as ftjob-…, or last\n"
        assert coserve("jobs", "show", job) == coserve("jobs", "cancel", job) == (1, "", words)


def test_a_job_that_is_refused_leaves_no_files(coserve, served, examples, tmp_path):
    def files() -> list[str]:
        with Client(served.url) as client:
            return [file["id"] for file in client.get("/v1/files")["data"]]

    before = files()
    for options, words in (
        (["--learning-rate", "0"], "learning_rate must be a number above 0"),
        (
            ["--learning-rate", "nan"],
            "coserve.optimizer.learning_rate must be a finite number, not nan",
        ),
        (["--validation", str(tmp_path / "nothing.jsonl")], "nothing.jsonl cannot be read"),
        (["--validation", str(examples), "--suffix", "a:b"], "'suffix' must be"),
    ):
        status, _, err = coserve("tune", str(examples), *options)
        assert status == 1 and words in err and err.count("\n") == 1, (options, err)
        assert files() == before, options


def test_bad_examples_are_named_and_a_job_that_is_not_there_is_said(coserve, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": 3}\n{"prompt": 4}\n')
    status, out, err = coserve("tune", str(path), "--json")
    assert (
        status == 1 and "lines 2 and 3: prompt must be a string" in err and err.count("\n") == 1
    ), err
    ended = json.loads(out.splitlines()[-1])
    assert ended["status"] == "failed"
    [listed] = [line for line in coserve("jobs")[1].splitlines() if ended["job"] in line]
    assert "lines 2 and 3: prompt must be a string" in listed, "one line, whatever went wrong"
    status, _, err = coserve("jobs", "show", "ftjob-nothing")
    assert status == 1 and "ftjob-nothing" in err and err.count("\n") == 1


# Who runs the tests in the background has SIGINT ignored, and so would a command. A program of its
# own, not something to be done between fork and exec: these tests' process may be too large to be
# forked.
HEEDING = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"


@pytest.mark.long
def test_ctrl_c_leaves_the_job_running_and_says_what_to_do(served, many_examples):
    environment = {
        **os.environ,
        "COSERVE_URL": served.url,
        "PYTHONPATH": ROOT,
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-m",
        "coserve",
        "tune",
        str(many_examples),
        "--epochs",
        "50",
        "--batch-size",
        "1",
    ]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(
        [sys.executable, "-c", HEEDING, *command], env=environment, **pipes
    ) as run:
        job = run.stdout.readline().split()[1]
        served.wait_until(lambda: "running" in served.get(f"/v1/fine_tuning/jobs/{job}").text)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=60)
    assert (run.returncode, err) == (0, "")
    assert all(f"coserve jobs {verb} {job}" in out for verb in ("follow", "pause", "cancel"))
    assert served.post(f"/v1/fine_tuning/jobs/{job}/cancel").json()["status"] == "cancelled", (
        "it was still there"
    )


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Also where the tests run in the background, and SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_as_soon_as_the_job_is_told_leaves_it_running_too(
    interruptible, monkeypatch, capsys
):
    class Interrupted(Console):
        def print(self, *told: Any, **settings: Any) -> None:
            super().print(*told, **settings)
            if "keeps running" not in str(told):
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(tables, "console", Interrupted)
    watch(
        Client("http://127.0.0.1:9"),
        {"id": "ftjob-1", "model": "small", "status": "running"},
        as_json=True,
    )
    out = capsys.readouterr().out
    assert (
        "coserve jobs follow ftjob-1" in out
        and json.loads(out.splitlines()[-1])["status"] == "left running"
    )


def test_ctrl_c_is_heeded_where_python_drops_an_exception(interruptible, capsys):
    class Fallible:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    class Answering(Client):
        asked = 0

        def get(self, path: str, **params: Any) -> Any:
            self.asked += 1
            if self.asked == 1:
                Fallible()
            return {"id": "ftjob-1", "status": "running", "data": [], "has_more": False}

    watch(
        Answering("http://127.0.0.1:9"),
        {"id": "ftjob-1", "model": "small", "status": "running"},
        as_json=True,
    )
    told = capsys.readouterr()
    assert json.loads(told.out.splitlines()[-1])["status"] == "left running" and told.err == ""


def test_a_second_ctrl_c_leaves_a_server_that_does_not_answer(interruptible, capsys):
    class Hanging(Client):
        def get(self, path: str, **params: Any) -> Any:
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
            raise AssertionError("nobody was interrupted")

    watch(
        Hanging("http://127.0.0.1:9"),
        {"id": "ftjob-1", "model": "small", "status": "running"},
        as_json=True,
    )
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["status"] == "left running"


@pytest.mark.long
def test_a_command_has_a_server_of_its_own_as_long_as_it_needs_one(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ROOT)
    log = tmp_path / "server.log"
    with own_server(
        str(model_directory()), "--memory", "16MB", home=tmp_path / "home", log=log
    ) as url:
        assert is_there(url)
        with Client(url) as client:
            assert base_model(client) == "small" and find_model(client, "small") == "small"
    assert not is_there(url)
    with (
        pytest.raises(ServerError, match=r"did not start: .*nowhere"),
        own_server(str(tmp_path / "nowhere"), log=log),
    ):
        pass

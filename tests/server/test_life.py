"""Starts, deaths and ends: of clients, of the engine, of the server."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from served import Served, expected, is_alive, model_directory, serving, tokenizer

from coserve.cli.commands.up import stop_line
from coserve.server.lifecycle.home_lock import lock_home

pytestmark = pytest.mark.long

LONG: dict[str, Any] = {
    "model": "small",
    "prompt": "x",
    "max_tokens": 500,
    "extra_body": {"ignore_eos": True},
}


@pytest.fixture(scope="module")
def own() -> Any:
    """A server whose engine may be killed."""
    with serving() as running:
        yield running


def running(served: Served) -> int:
    return int(served.get("/v1/status").json()["requests"]["running"])


def slow_stream(client: OpenAI) -> Any:
    """Many long streams in one, so that it lasts for a while."""
    stream = client.completions.create(**{**LONG, "n": 16}, stream=True)
    next(iter(stream))
    return stream


def test_the_start_line_says_it_all(own: Served):
    assert re.fullmatch(
        r"coserve serves small \(float32, cpu\): weights \S+ kB, pool 16 MB for [\d,]+ tokens; "
        r"SLOs TTFT 2 s, TPOT \S+ m?s; http://127\.0\.0\.1:\d+/v1\n",
        own.start_line,
    )


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_cancels_its_request(own: Served, stream: bool):
    client = own.client()
    if stream:
        with slow_stream(client):
            own.wait_until(lambda: running(own) == 16)
    else:
        with ThreadPoolExecutor(1) as pool:
            body = {**LONG, "n": 16, **LONG["extra_body"]}
            del body["extra_body"]
            with httpx.Client(timeout=60) as connection:
                waiting = pool.submit(connection.post, f"{own.url}/v1/completions", json=body)
                own.wait_until(lambda: running(own) == 16)
                for pooled in connection._transport._pool.connections:  # type: ignore[attr-defined]
                    pooled._connection._network_stream.get_extra_info("socket").shutdown(
                        socket.SHUT_RDWR
                    )
            with pytest.raises(httpx.HTTPError):
                waiting.result()
    steps = own.get("/v1/status/steps").json()["cursor"]
    own.wait_until(lambda: running(own) == 0)
    events = own.get(f"/v1/status/steps?after={steps}").json()
    assert events["requests"] == []  # cancelled, not finished


def stop_next_engine(served: Served, before: int) -> int:
    """Stop the engine that comes after another one as soon as there is a process of it, which it
    returns."""
    children = Path(f"/proc/{served.fork_server_pid()}/task/{served.fork_server_pid()}/children")
    while not (found := [int(pid) for pid in children.read_text().split() if int(pid) != before]):
        time.sleep(0.001)
    os.kill(found[0], signal.SIGSTOP)
    return found[0]


def test_an_engine_that_dies_ends_streams_clearly_and_is_started_again(own: Served):
    client = own.client()
    before = own.engine_pid()
    stream = slow_stream(client)
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(lambda: client.completions.create(**{**LONG, "n": 16}))
        own.wait_until(lambda: running(own) == 32)
        os.kill(before, signal.SIGKILL)
        after = stop_next_engine(own, before)  # or it would be ready within a moment
        with pytest.raises(openai.APIError, match="the engine died"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="the engine died") as raised:
            whole.result()
    assert raised.value.status_code == 503
    assert raised.value.response.headers["retry-after"] == "2"

    refused = own.post("/v1/completions", json={"model": "small", "prompt": "x"})
    assert refused.status_code == own.get("/ready").status_code == 503
    assert refused.headers["retry-after"] == "2"
    assert refused.json()["error"]["type"] == "server_error"
    assert own.get("/health").status_code == 200
    assert own.get("/v1/status").json()["ready"] is False

    os.kill(after, signal.SIGCONT)
    own.wait_until(lambda: own.get("/ready").status_code == 200)
    assert own.engine_pid() == after
    assert not is_alive(before)
    prompt = list(tokenizer()("Hello")["input_ids"])
    answer = client.completions.create(model="small", prompt="Hello", max_tokens=4, temperature=0)
    assert answer.choices[0].text == tokenizer().decode(
        expected(prompt, 4)[0], skip_special_tokens=True
    )
    assert "coserve_engine_deaths_total 1.0" in own.get("/metrics").text


def test_what_is_sent_to_an_engine_that_has_just_died_is_refused_without_a_traceback():
    body = json.dumps({"model": "small", "prompt": "x", "max_tokens": 2}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    with serving() as served, ExitStack() as stack:
        stream = slow_stream(served.client())
        # Connected before: they come between the engine's death and the moment when the server
        # knows of it.
        address = ("127.0.0.1", httpx.URL(served.url).port)
        waiting = [
            stack.enter_context(socket.create_connection(address, timeout=60)) for _ in range(20)
        ]
        os.kill(served.engine_pid(), signal.SIGKILL)
        for connection in waiting:
            connection.sendall(request)
            time.sleep(0.003)
        assert {connection.recv(12) for connection in waiting} == {b"HTTP/1.1 503"}
        with pytest.raises(openai.APIError, match="the engine died"):
            list(stream)
        served.wait_until(lambda: served.get("/ready").status_code == 200)
        # Without the process that forks engines there is none, until there is another such process.
        forks = served.fork_server_pid()
        os.kill(forks, signal.SIGKILL)
        for kill_next in (True, False):
            served.wait_until(lambda: served.get("/ready").status_code == 503)
            served.wait_until(lambda: served.get("/ready").status_code == 200)
            assert (
                served.client().completions.create(model="small", prompt="x", max_tokens=2).choices
            )
            assert served.fork_server_pid() != forks
            if kill_next:
                os.kill(served.engine_pid(), signal.SIGKILL)
    line = "ERROR coserve.engine_client.supervisor: the engine died; restarting it in 0.2 s"
    assert served.logged().splitlines() == [line] * 3


def left_over(served: Served) -> list[Path]:
    """Sockets between server and engine, and their directories."""
    return sorted([*(served.home / "run").iterdir(), *served.temporary.glob("coserve-*")])


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_server_that_is_killed_leaves_no_engine(is_stopped: bool):
    """Not even one that is stopped, as one that hangs without Python's lock would be."""
    served = Served()
    assert len(left_over(served)) == 1
    engine = served.engine_pid()
    stream = slow_stream(served.client())
    if is_stopped:
        os.kill(engine, signal.SIGSTOP)
    served.process.kill()
    served.process.wait()
    with pytest.raises((httpx.HTTPError, openai.APIError)):
        list(stream)
    served.wait_until(lambda: not is_alive(engine))
    served.stop()


def test_what_a_killed_server_left_over_is_removed_at_the_next_start(tmp_path: Path):
    with serving(home=tmp_path) as served:
        old = left_over(served)
        served.process.kill()
        served.process.wait()
    assert left_over(served) == old
    with serving(home=tmp_path) as served:
        assert len(left_over(served)) == 1
        assert set(left_over(served)).isdisjoint(old)
    assert left_over(served) == []


def test_a_long_path_of_the_home_is_no_hindrance(tmp_path: Path):
    home = tmp_path / ("long" * 30)
    home.mkdir()
    with serving(home=home) as served:
        assert (
            served.client()
            .completions.create(model="small", prompt="x", max_tokens=2)
            .choices[0]
            .text
        )
        [link] = (home / "run").iterdir()
        elsewhere = link.resolve()
        assert link.is_symlink() and elsewhere.is_dir()
        served.process.kill()
        served.process.wait()
    with serving(home=home) as served:
        assert not elsewhere.exists()
    assert left_over(served) == []


def test_an_engine_that_stands_still_is_not_ready_and_is_ended_and_started_again():
    with serving("--engine-timeout", "8s") as served:
        client, engine = served.client(), served.engine_pid()
        stream = slow_stream(client)
        os.kill(engine, signal.SIGSTOP)
        served.wait_until(lambda: served.get("/ready").status_code == 503)
        assert "has not answered" in served.get("/ready").json()["error"]["message"]
        assert served.get("/health").status_code == 200
        with pytest.raises(openai.APIError, match="has not answered for 8 s and was ended"):
            list(stream)
        assert not is_alive(engine)
        served.wait_until(lambda: served.get("/ready").status_code == 200)
        assert client.completions.create(model="small", prompt="x", max_tokens=2).choices[0].text


def test_a_signal_ends_a_server_whose_engine_stands_still():
    """Without the engine's time limit, and without waiting for its open requests and
    checkpoints."""
    with serving("--engine-timeout", "10min", "--drain", "10min") as served:
        engine, stream = served.engine_pid(), slow_stream(served.client())
        os.kill(engine, signal.SIGSTOP)
        served.wait_until(lambda: served.get("/ready").status_code == 503)
        os.kill(served.process.pid, signal.SIGTERM)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        assert served.process.wait(60) == 0
        assert not is_alive(engine)


def test_a_signal_lets_streams_end_and_refuses_new_requests():
    served = Served()
    client, engine = served.client(), served.engine_pid()
    stream = slow_stream(client)
    os.kill(served.process.pid, signal.SIGTERM)
    served.wait_until(lambda: served.get("/ready").status_code == 503)
    with pytest.raises(openai.InternalServerError, match="shutting down"):
        served.client().completions.create(model="small", prompt="x")
    reasons = [event.choices[0].finish_reason for event in stream if event.choices[0].finish_reason]
    assert reasons == ["length"] * 16
    assert served.stop() == 0
    assert not is_alive(engine)
    assert not left_over(served)
    assert served.logged() == ""


def test_a_server_that_waits_says_so_and_a_second_signal_ends_the_waiting():
    with serving() as served:
        stream = slow_stream(served.client())
        os.kill(served.process.pid, signal.SIGINT)
        assert served.process.stdout is not None
        line = served.process.stdout.readline()
        assert line.startswith(
            "coserve is shutting down: it waits up to 30 s for 1 open request (a second Ctrl-C ends the wait),"
        )
        assert served.process.poll() is None
        os.kill(served.process.pid, signal.SIGINT)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        assert served.process.wait(30) == 0
        assert served.process.stdout.read() == served.logged() == ""


def test_a_server_that_nobody_reads_any_more_ends_in_good_order():
    with serving() as served:
        assert served.process.stdout is not None
        os.dup2(
            os.open(os.devnull, os.O_RDONLY), served.process.stdout.fileno()
        )  # the pipe has no reader any more
        os.kill(served.process.pid, signal.SIGINT)
        assert served.process.wait(30) == 0
        assert served.logged() == ""


def test_the_line_at_the_end():
    assert stop_line(3, 0.5).startswith(
        "coserve is shutting down: it waits up to 500 ms for 3 open requests"
    )
    for nothing in (stop_line(0, 30.0), stop_line(3, 0.0)):
        assert (
            nothing
            == "coserve is shutting down: running jobs are checkpointed, and resume at the next start"
        )


def test_streams_that_last_too_long_are_ended():
    with serving("--drain", "0s") as served:
        stream = slow_stream(served.client())
        # What a terminal does: both processes get it.
        os.kill(served.engine_pid(), signal.SIGINT)
        os.kill(served.process.pid, signal.SIGINT)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        assert served.process.wait(30) == 0


def up(home: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "NO_COLOR": "1",
        "COSERVE_HOME": str(home),
    }
    command = [sys.executable, "-m", "coserve", "up", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


def test_mistakes_are_one_line(tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for options, words in (
            (
                (str(model_directory()), "--port", port),
                "Address already in use; choose another --port",
            ),
            (("/no/such/model", "--port", "0"), "'/no/such/model' is not a directory"),
            ((str(model_directory()), "--port", "0", "--memory", "1kB"), "the page pool needs"),
            (("--slo-tpot", "soon"), "is not a number with a unit"),
            (("--drain", "-1s"), "'-1s' is negative"),
            (("--database", "jobs.db"), "--database must be a URL of SQLAlchemy"),
            (
                ("--files-url", "bucket/prefix"),
                "--files-url must be a URL of fsspec's, such as s3://bucket/prefix",
            ),
            (
                ("--files-url", "memory://here"),
                "--files-url must be a URL that every machine reads, not memory://",
            ),
            (("--files-url", "gopher://here/x"), "cannot be used: Protocol not known: gopher"),
        ):
            result = up(tmp_path, *options)
            assert result.returncode != 0
            assert result.stdout == ""
            lines = [
                line for line in result.stderr.strip().splitlines() if "coserve.start: " not in line
            ]
            assert len(lines) == 1, result.stderr
            assert lines[0].startswith("error: ")
            assert words in lines[0]


def test_a_home_has_one_server(tmp_path: Path):
    (tmp_path / "file").touch()
    with lock_home(tmp_path / "home"):
        for home, words in (("home", "a server uses"), ("file", "cannot be written")):
            result = up(tmp_path / home, str(model_directory()), "--port", "0")
            assert result.returncode != 0
            assert words in result.stderr.strip().splitlines()[-1]
    with lock_home(tmp_path / "home"):  # when the other one has ended
        pass


def test_the_engine_ends_when_its_input_does():
    process = subprocess.Popen(
        [sys.executable, "-m", "coserve.worker.process"],
        stdin=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    time.sleep(0.1)
    process.communicate(timeout=60)
    assert process.returncode == 0

"""The edge of the server: names, ids, TLS, time limits and queues."""

import json
import socket
import ssl
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from certificates import make_certificate
from openai import DefaultHttpxClient, OpenAI
from served import Served, serving

from coserve.server.options.hosts import hosts_of

LONG: dict[str, Any] = {
    "model": "small",
    "prompt": "x",
    "max_tokens": 500,
    "extra_body": {"ignore_eos": True},
}


# -- hosts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "a.localhost", "127.0.0.1", "[::1]:8", "10.0.0.7:99"]
)
def test_hosts_that_only_this_machine_can_mean(served: Served, host: str):
    assert served.get("/health", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example:8000", "127.0.0.1.evil.example", "a b", "\xff"]
)
def test_hosts_that_a_page_could_have_led_here(served: Served, host: str):
    answer = served.get("/health", headers={"Host": host.encode("latin-1")})
    assert answer.status_code == 400
    assert (
        "--allowed-hosts" in answer.json()["error"]["message"]
        and answer.json()["error"]["code"] == "host_not_allowed"
    )


def test_which_hosts_are_allowed():
    assert (
        hosts_of((), "127.0.0.1")
        == hosts_of((), "::1")
        == hosts_of((), "localhost")
        == ("localhost", "*.localhost")
    )
    assert hosts_of((), "0.0.0.0") == ("*",)
    assert hosts_of(("a.example",), "127.0.0.1") == ("a.example",)


def test_hosts_that_were_named():
    with serving("--allowed-hosts", "api.example", "--allowed-hosts", "*.inner.example") as served:
        statuses = {
            host: served.get("/health", headers={"Host": host}).status_code
            for host in (
                "api.example",
                "a.inner.example",
                "inner.example",
                "example",
                "localhost",
                "127.0.0.1",
            )
        }
    assert statuses == {
        "api.example": 200,
        "a.inner.example": 200,
        "inner.example": 400,
        "example": 400,
        "localhost": 400,
        "127.0.0.1": 200,
    }


# -- addresses -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "status"),
    [
        *(
            ("/v1/models/" + "a" * 5000, 404),
            ("/v1/files/" + "a" * 5000, 404),
            ("/" + "a" * 5000, 404),
        ),
        *(
            ("/v1/models/" + "a" * 9000, 414),
            ("/v1/files?after=" + "a" * 9000, 414),
            ("/v1/files/%00", 400),
        ),
        *(("/v1/files?after=%00", 400), ("/v1/files/%ff", 404), ("/v1/files?after=%ff", 400)),
        *(("/v1/fine_tuning/jobs?limit=" + "9" * 5000, 400), ("/v1/files?limit=1&limit=2", 200)),
        ("/v1/status/steps?after=" + "9" * 5000, 400),
    ],
    ids=lambda value: str(value)[:30],
)
def test_addresses_that_nothing_is_at(served: Served, address: str, status: int):
    assert served.get(address).status_code == status


# -- ids -------------------------------------------------------------------------------------


def test_every_answer_has_an_id(served: Served):
    for path, status in (("/health", 200), ("/v1/nothing", 404), ("/v1/files/%00", 400)):
        made = served.get(path)
        assert made.status_code == status and made.headers["x-request-id"].startswith("req-")
        assert (
            served.get(path, headers={"x-request-id": "mine:1/2"}).headers["x-request-id"]
            == "mine:1/2"
        )
    for wrong in (b"a b", b"x" * 129, b"\xff", b'"', b""):
        assert (
            served.get("/health", headers={"x-request-id": wrong})
            .headers["x-request-id"]
            .startswith("req-")
        )


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_has_its_clients_id(served: Served, stream: bool):
    body = {"model": "small", "prompt": "x", "max_tokens": 1, "stream": stream}
    answer = served.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
    assert answer.status_code == 200 and answer.headers["x-request-id"] == "mine"


def test_log_lines_are_json_with_the_ids_of_requests():
    with serving("--log-format", "json", "--log-level", "info", "--api-key", "ann=key") as served:
        client = served.client("key")
        done = client.completions.create(
            model="small",
            prompt="x",
            max_tokens=1,
            extra_headers={"x-request-id": "of-a-completion"},
        )
        refused = served.get("/v1/models", headers={"x-request-id": "refused"})
        assert refused.status_code == 401
        log = served.log
    assert "Traceback" not in log.read_text()
    lines = {line.get("request_id"): line for line in map(json.loads, log.read_text().splitlines())}
    line = lines["of-a-completion"]
    assert (line["method"], line["path"], line["status"], line["tenant"]) == (
        "POST",
        "/v1/completions",
        200,
        "ann",
    )
    assert line["completion"] == done.id and line["duration_s"] > 0 and line["level"] == "info"
    assert lines["refused"]["status"] == 401
    assert "key" not in {line.get("tenant") for line in lines.values()}


# -- time and queues ---------------------------------------------------------------------------


def test_a_request_that_takes_too_long_ends_with_an_error():
    longer = {**LONG, "n": 128}  # no machine makes as many tokens in that time
    with serving("--request-timeout", "1500ms") as served:
        client = served.client()
        with pytest.raises(openai.APIStatusError) as whole:
            client.completions.create(**longer)
        assert (whole.value.status_code, whole.value.code) == (504, "request_timeout")
        assert "1500" not in str(whole.value) and "1.5 s" in str(whole.value)
        stream = client.completions.create(**longer, stream=True)
        assert next(iter(stream)).choices
        with pytest.raises(openai.APIError, match="--request-timeout"):
            list(stream)
        served.wait_until(lambda: served.get("/v1/status").json()["requests"]["running"] == 0)
        assert client.completions.create(model="small", prompt="x", max_tokens=1).choices
        assert "Traceback" not in served.log.read_text()


def test_more_requests_than_may_wait_are_refused():
    with serving("--max-queued-requests", "3", "--max-requests", "1") as served:
        client = served.client()
        with client.completions.create(**LONG, stream=True) as running:
            next(iter(running))
            waiting = [_post(served, LONG) for _ in range(3)]
            served.wait_until(lambda: served.get("/v1/status").json()["requests"]["waiting"] == 3)
            refused = served.post(
                "/v1/completions", json={"model": "small", "prompt": "x", "max_tokens": 1}
            )
            assert refused.status_code == 503 and refused.headers["retry-after"] == "2"
            assert refused.json()["error"]["code"] == "overloaded"
            for each in waiting:
                each.close()
        served.wait_until(lambda: served.get("/v1/status").json()["requests"]["running"] == 0)
        assert client.completions.create(model="small", prompt="x", max_tokens=1).choices


def _post(served: Served, settings: dict[str, Any]) -> socket.socket:
    """A request whose answer nobody waits for yet."""
    body = json.dumps({**settings, **settings["extra_body"], "extra_body": None} | {}).replace(
        ', "extra_body": null', ""
    )
    host, port = served.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    return connection


# -- prompts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [{"prompt": "x " * 10_000}, {"prompt": ["y", "x " * 10_000]}])
def test_a_prompt_that_must_be_too_long_is_refused_by_its_characters(
    served: Served, body: dict[str, Any]
):
    error = served.post("/v1/completions", json={"model": "small", **body}).json()["error"]
    assert "20000 characters" in error["message"] and "512 tokens" in error["message"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


def test_a_chat_that_must_be_too_long_is_refused_by_its_characters(client: OpenAI):
    with pytest.raises(openai.BadRequestError, match="characters") as raised:
        client.chat.completions.create(
            model="small", messages=[{"role": "user", "content": "x " * 10_000}]
        )
    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "messages")


# -- TLS -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


def test_tls(certificate: tuple[Path, Path]):
    cert, key = certificate
    with serving("--ssl-certfile", str(cert), "--ssl-keyfile", str(key)) as served:
        assert served.url.startswith("https://") and f"{served.url}/v1" in served.start_line
        trusting = ssl.create_default_context(cafile=str(cert))
        with httpx.Client(base_url=served.url, verify=trusting, timeout=60) as connection:
            assert connection.get("/health").json() == {"status": "ok"}
        with DefaultHttpxClient(verify=trusting) as pool:
            client = OpenAI(base_url=f"{served.url}/v1", api_key="none", http_client=pool)
            stream = client.completions.create(model="small", prompt="x", max_tokens=3, stream=True)
            assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{served.url}/health")
        with pytest.raises(httpx.TransportError):
            httpx.get(served.url.replace("https", "http") + "/health")


@pytest.mark.parametrize("which", ["not there", "no certificate", "of another key"])
def test_certificates_that_cannot_be_used_are_named(
    certificate: tuple[Path, Path], tmp_path: Path, which: str
):
    cert, _ = certificate
    if which == "not there":
        options = ["--ssl-certfile", str(tmp_path / "none.pem")]
    elif which == "no certificate":
        (tmp_path / "no.pem").write_text("no")
        options = ["--ssl-certfile", str(tmp_path / "no.pem")]
    else:
        options = ["--ssl-certfile", str(cert), "--ssl-keyfile", str(cert)]
    with (
        pytest.raises(AssertionError, match=r"error: --ssl-certfile .* cannot be used") as raised,
        serving(*options),
    ):
        pass
    assert "Traceback" not in str(raised.value)

"""Connections that clients hold without using them keep nobody out."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from served import Served, serving

MOST = 24


def connect(served: Served) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


@contextmanager
def held(served: Served, number: int, sent: bytes = b"") -> Iterator[list[socket.socket]]:
    """Connections that say this, and nothing more."""
    with ExitStack() as stack:
        found = [stack.enter_context(connect(served)) for _ in range(number)]
        for each in found:
            each.sendall(sent)
        yield found


def read_to_end(connection: socket.socket) -> bytes:
    said = b""
    try:
        while more := connection.recv(65536):
            said += more
    except ConnectionResetError:
        pass
    return said


@pytest.fixture(scope="module")
def own() -> Iterator[Served]:
    with serving(
        "--max-connections", str(MOST), "--timeout-headers", "2s", "--timeout-keep-alive", "1s"
    ) as running:
        yield running


HELD = {
    "idle": b"",
    "half of a line": b"GET /hea",
    "half of the headers": b"GET /health HTTP/1.1\r\nHost: localhost\r\n",
    "half of a body": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{",
    "answered": b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "answered before its body": b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{",
}


@pytest.mark.parametrize("sent", HELD.values(), ids=HELD.keys())
def test_the_idlest_make_room(own: Served, sent: bytes):
    with held(own, 4 * MOST, sent):
        for path in ("/health", "/ready", "/v1/models"):
            assert own.get(path).status_code == 200
        assert own.client().completions.create(model="small", prompt="x", max_tokens=1).choices


def test_who_is_being_answered_is_not_ended(own: Served):
    body = (
        b'{"model": "small", "prompt": "x", "stream": true, "ignore_eos": true, "max_tokens": 300}'
    )
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nConnection: close\r\n"
    )
    request = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with held(own, MOST, request) as busy:
        begun = [each.recv(1) for each in busy]
        assert begun == [b"H"] * MOST
        with held(own, 4 * MOST):
            pass
        assert all(b"[DONE]" in read_to_end(each) for each in busy)


def test_where_all_are_busy_probes_are_answered_and_others_told_so(own: Served):
    body = b'{"model": "small", "prompt": "x", "n": 8, "ignore_eos": true, "max_tokens": 500}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with held(own, MOST - 1, request):
        own.wait_until(lambda: own.get("/v1/status").json()["requests"]["running"] > 0)
        with held(own, 4, request):  # of which the first may be taken for idle before it is read
            own.wait_until(lambda: own.get("/v1/models").status_code == 503)
            refused = own.get("/v1/models")
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "overloaded"
            assert refused.headers["retry-after"] == "1"
            assert own.get("/health").status_code == own.get("/ready").status_code == 200
    own.wait_until(lambda: own.get("/v1/models").status_code == 200)


def test_headers_that_do_not_come_are_not_waited_for(own: Served):
    with held(own, 2) as silent, held(own, 2, b"GET /health HTTP/1.1\r\nX-") as slow:
        assert all(b" 408 " in read_to_end(each).split(b"\r\n")[0] for each in slow)
        assert [read_to_end(each) for each in silent] == [b"", b""]


def test_headers_that_drip_are_not_waited_for(own: Served):
    with connect(own) as dripping:
        dripping.sendall(b"GET /health HTTP/1.1\r\n")
        said = b""
        dripping.settimeout(0.1)
        for number in range(600):
            try:
                dripping.sendall(b"X-%d: 1\r\n" % number)
                said = dripping.recv(65536)
                break
            except TimeoutError:
                pass
            except OSError:
                break
        assert said == b"" or b" 408 " in said


def test_an_idle_connection_ends_after_a_while(own: Served):
    with connect(own) as connection:
        connection.sendall(HELD["answered"])
        assert read_to_end(connection).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "sent",
    [b"nonsense\r\n\r\n", b"GET /" + b"a" * 100_000, b"GET /\xff HTTP/1.1\r\n\r\n", b"\0" * 100],
    ids=["no HTTP", "a long line", "bytes", "NULs"],
)
def test_what_is_no_http_gets_an_error_in_openais_form(own: Served, sent: bytes):
    with connect(own) as connection:
        connection.sendall(sent)
        head, _, body = read_to_end(connection).partition(b"\r\n\r\n")
        assert b" 400 " in head.split(b"\r\n")[0] and b'{"error": {"message":' in body


@pytest.mark.long
def test_the_server_keeps_as_many_as_it_may_have_files_open_and_does_not_fill_its_log():
    with serving("--max-connections", "100000", max_files=400) as served, held(served, 450):
        for _ in range(20):
            assert served.get("/health").status_code == 200
            time.sleep(0.1)
        assert (
            "instead of 100000: the process may have only 400 open files" in served.log.read_text()
        )
        assert len(served.log.read_text().splitlines()) < 50

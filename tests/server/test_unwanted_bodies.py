"""A body that nobody wants is not read to its end: the client gets its answer, and the connection
ends."""

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from lengths import long_but
from served import Served, keys_file, serving

from coserve.server.http.connections import _MAX_UNWANTED_BYTES

MEBI = 1 << 20
WHOLE = 400 * MEBI
# What both ends of a connection hold in the system's buffers at most, and what the server reads.
MAX_SENT = 24 * MEBI
KEY = "Authorization: Bearer key-of-ann\r\n"
REFUSED = {
    "an unknown route": ("POST /v1/nowhere", KEY, 404),
    "a wrong key": ("POST /v1/files", "Authorization: Bearer wrong\r\n", 401),
    "no key": ("POST /v1/chat/completions", "", 401),
    "a wrong method": ("PUT /v1/files", KEY, 405),
    "too long": ("POST /v1/chat/completions", KEY, 413),
    "compressed": ("POST /v1/files", f"{KEY}Content-Encoding: gzip\r\n", 415),
    "no body is expected": ("GET /health", "", 200),
}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path: Path = keys_file(tmp_path_factory.mktemp("keys"), "", ann="key-of-ann")
    with serving("--api-keys-file", str(path)) as running:
        yield running


def send(served: Served, head: str, *, is_chunked: bool = False) -> tuple[bytes, int]:
    """Send a body of hundreds of megabytes, whatever the server says; the answer, and how many
    bytes it took."""
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        length = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {WHOLE}"
        connection.sendall(f"{head}Host: localhost\r\n{length}\r\n\r\n".encode())
        piece = bytes(MEBI)
        if is_chunked:
            piece = f"{MEBI:x}\r\n".encode() + piece + b"\r\n"
        num_sent = 0
        try:
            while num_sent < WHOLE:
                num_sent += connection.send(piece)
        except (BrokenPipeError, ConnectionResetError):
            pass
        said = b""
        try:
            while more := connection.recv(65536):
                said += more
        except ConnectionResetError:
            pass
        return said, num_sent


@pytest.mark.parametrize("is_chunked", long_but(False, of=[False, True]))
@pytest.mark.parametrize("name", long_but("a wrong key", "too long", of=REFUSED))
def test_it_is_not_read_on(own: Served, name: str, is_chunked: bool):
    line, headers, status = REFUSED[name]
    said, num_sent = send(own, f"{line} HTTP/1.1\r\n{headers}", is_chunked=is_chunked)
    statuses = (
        (status,) if is_chunked else (status, 413)
    )  # a length that is too large is known before the route
    assert said.startswith(tuple(f"HTTP/1.1 {each} ".encode() for each in statuses)), said[:200]
    assert said.count(b"HTTP/1.1") == 1
    assert num_sent < MAX_SENT, f"{num_sent:,} bytes were taken"
    assert own.get("/health").status_code == 200


@pytest.mark.parametrize("size", long_but(1000, of=[1000, 20 * MEBI]))
def test_clients_read_the_answer(own: Served, size: int):
    with httpx.Client(timeout=60) as client:
        for _ in range(3):
            pieces = (bytes(min(size, MEBI)) for _ in range(-(-size // MEBI)))
            refused = client.post(f"{own.url}/v1/nowhere", content=pieces)
            assert refused.status_code == 401 and refused.json()["error"]["message"]


def test_a_client_is_told_that_its_connection_ends_where_much_of_a_body_is_not_read(own: Served):
    """Else it would send its next request there, which nobody reads."""
    host, port = own.url.removeprefix("http://").split(":")
    with (
        socket.create_connection((host, int(port)), timeout=60) as connection,
        connection.makefile("rb") as answers,
    ):
        head = f"POST /v1/nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: {3 * MEBI}\r\n\r\n"
        connection.sendall(head.encode())
        lines = list(iter(answers.readline, b"\r\n"))
        assert lines[0].startswith(b"HTTP/1.1 401") and b"connection: close\r\n" in [
            line.lower() for line in lines
        ]
        connection.sendall(
            bytes(MEBI // 2)
        )  # the connection lasts for a moment, in which the answer can be read
        assert b"error" in answers.read()


def test_a_connection_is_used_again_after_a_small_body_that_nobody_read(own: Served):
    host, port = own.url.removeprefix("http://").split(":")
    head = b"POST /v1/nowhere HTTP/1.1\r\nHost: localhost\r\n"
    with (
        socket.create_connection((host, int(port)), timeout=60) as connection,
        connection.makefile("rb") as answers,
    ):
        for _ in range(3):
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % (_MAX_UNWANTED_BYTES // 2))
            assert answers.readline().startswith(b"HTTP/1.1 401")
            length = next(
                int(line.split(b":")[1])
                for line in answers
                if line.lower().startswith(b"content-length")
            )
            for line in answers:
                if line == b"\r\n":
                    break
            assert len(answers.read(length)) == length
            connection.sendall(bytes(_MAX_UNWANTED_BYTES // 2))

"""The HTTP client of the commands: what cannot be sent is said in one line, and nothing is
asked."""

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from urllib.parse import parse_qs, urlsplit

import pytest

from coserve.client.http import Client
from coserve.errors import RequestError, ServerError

NOBODY = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (
            "127.0.0.1:8000",
            "'127.0.0.1:8000' is not a URL of a server: it must begin with http:// or https://",
        ),
        (
            "http://127.0.0.1:port",
            "'http://127.0.0.1:port' is not a URL of a server: Invalid port: 'port'",
        ),
        ("http://", "'http://' is not a URL of a server: it must have a host"),
        ("https:///v1", "'https:///v1' is not a URL of a server: it must have a host"),
    ],
)
def test_an_address_that_is_none(url, words):
    with pytest.raises(ServerError) as caught:
        Client(url)
    assert words in str(caught.value)


def test_an_address_in_capitals_is_one():
    with Client("HTTP://127.0.0.1:9/v1") as client:
        assert client.url == "HTTP://127.0.0.1:9"


@pytest.mark.parametrize("key", ["schlüssel", "two\nlines"])
def test_a_key_that_no_header_holds_is_not_shown(key):
    with pytest.raises(ServerError, match="the API key is invalid: a key must be ASCII") as caught:
        Client(NOBODY, key)
    assert key not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), "a.b[1] must be a finite number, not nan"),
        (float("-inf"), "a.b[1] must be a finite number, not -inf"),
        ("caf\udce9", "a.b[1] must be UTF-8, not 'caf\\udce9'"),
    ],
)
def test_what_json_cannot_hold_is_named(value, words):
    body = {"model": "tiny", "a": {"b": [1.0, value]}}
    with Client(NOBODY) as client:
        for ask in (client.post, lambda *asked: next(client.stream(*asked))):
            with pytest.raises(RequestError) as caught:
                ask("/v1/chat/completions", body)
            assert str(caught.value) == words


class _List(BaseHTTPRequestHandler):
    """Items 249 to 0, in pages as the API has them."""

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        first = 250 if "after" not in query else int(query["after"][0])
        last = max(0, first - int(query["limit"][0]))
        data = [{"id": str(number)} for number in range(first - 1, last - 1, -1)]
        body = json.dumps({"data": data, "has_more": last > 0}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_list_is_read_to_its_end_page_by_page():
    with HTTPServer(("127.0.0.1", 0), _List) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            with Client(f"http://127.0.0.1:{server.server_port}") as client:
                assert [each["id"] for each in client.each("/v1/list")] == [
                    str(number) for number in range(249, -1, -1)
                ]
        finally:
            server.shutdown()
            thread.join()

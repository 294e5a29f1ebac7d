"""The HTTP client of the commands: what cannot be sent is said in one line, and nothing is asked."""

import pytest

from coserve.client.http import Client
from coserve.errors import RequestError, ServerError

NOBODY = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("127.0.0.1:8000", "'127.0.0.1:8000' is no address of a server: it must begin with http:// or https://"),
        ("http://127.0.0.1:port", "'http://127.0.0.1:port' is no address of a server: Invalid port: 'port'"),
        ("http://", "'http://' is no address of a server: it must have a host"),
        ("https:///v1", "'https:///v1' is no address of a server: it must have a host"),
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
    with pytest.raises(ServerError, match="the API key is none: a key has no line ends, and no letters") as caught:
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

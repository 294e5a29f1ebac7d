"""Which origins of pages are the server's own."""

import pytest

from coserve.server.http.cross_site import is_own_origin


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://192.168.1.5:8000", "192.168.1.5:8000"),
        ("http://gpu-box:8000", "gpu-box:8000"),
        ("HTTP://GPU-Box:8000", "gpu-box:8000"),
        ("http://gpu-box", "gpu-box"),
        ("http://gpu-box:80", "gpu-box"),
        ("http://gpu-box", "gpu-box:80"),
        ("https://chat.example.com", "chat.example.com"),
        ("https://chat.example.com", "chat.example.com:443"),
        ("http://[::1]:8000", "[::1]:8000"),
        ("http://[fe80::1]:8000", "[fe80:0:0::1]:8000"),
        ("http://[FE80::1]", "[fe80::1]:80"),
    ],
)
def test_the_server_s_own(origin, host):
    assert is_own_origin(origin, host)


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://evil.example", "192.168.1.5:8000"),
        ("http://192.168.1.5:9000", "192.168.1.5:8000"),
        ("http://192.168.1.5", "192.168.1.5:8000"),
        ("http://192.168.1.50:8000", "192.168.1.5:8000"),
        ("https://gpu-box", "gpu-box:80"),
        ("null", "192.168.1.5:8000"),
        ("null", "null"),
        ("", "192.168.1.5:8000"),
        ("file://", "192.168.1.5:8000"),
        ("chrome-extension://gpu-box:8000", "gpu-box:8000"),
        ("http://gpu-box:8000.evil.example", "gpu-box:8000"),
        ("http://gpu-box:8000@evil.example", "gpu-box:8000"),
        ("http://evil.example/gpu-box:8000", "gpu-box:8000"),
        ("http://gpu-box:8000/", "gpu-box:8000"),
        ("http://gpu-box:8000 http://evil.example", "gpu-box:8000"),
        ("http://gpu-box:port", "gpu-box:8000"),
        ("http://[::1", "[::1]"),
        ("http://gpu-box:8000", ""),
        ("http://", ""),
        ("http://:8000", ":8000"),
    ],
)
def test_others(origin, host):
    assert not is_own_origin(origin, host)

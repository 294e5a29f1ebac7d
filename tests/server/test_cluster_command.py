"""`coserve cluster`: mistakes are one line, and start nothing."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install 'coserve[cluster]'")
# Python that hides Ray, as if it were not installed.
WITHOUT_RAY = (
    "import importlib.util, sys; find = importlib.util.find_spec; "
    "importlib.util.find_spec = lambda name, *more: None if name == 'ray' else find(name, *more); "
    "from coserve.cli.main import main; sys.argv = ['coserve', *sys.argv[1:]]; main()"
)


def fails(*arguments: str, code: str | None = None) -> str:
    command = [sys.executable, *(("-m", "coserve") if code is None else ("-c", code)), "cluster", *arguments]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.returncode == 1
    assert len(found.stderr.splitlines()) == 1, found.stderr
    assert found.stdout == ""
    return found.stderr


@pytest.mark.parametrize("command", ["up", "status"])
def test_without_ray_it_says_how_to_get_it(command: str):
    assert "pip install 'coserve[cluster]'" in fails(command, code=WITHOUT_RAY)


@pytest.mark.cluster
@needs_ray
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("up", "--address", "127.0.0.1:1"), "there is no Ray cluster at 127.0.0.1:1: Connection refused"),
        (("up", "--address", "nowhere"), "--address must be HOST:PORT"),
        (("up", "--placement", "best"), "placement 'best' is not one of "),
        (("up", "--ssl-certfile", "a.pem"), "--ssl-certfile a.pem cannot be used: No such file or directory"),
        (("up", "--record", "a.rec"), "--record is for coserve up"),
        (("up", "--files-url", "ftp://127.0.0.1:1/x"), "the files at ftp://127.0.0.1:1/x cannot be used: [Errno 111]"),
        (("up", "--files-url", "gopher://here/x"), "cannot be used: Protocol not known: gopher"),
        (("status", "--address", "127.0.0.1:1"), "there is no Ray cluster at 127.0.0.1:1"),
    ],
)
def test_what_is_wrong_is_one_line(arguments: tuple[str, ...], message: str):
    assert message in fails(*arguments)

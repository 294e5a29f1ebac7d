"""`coserve cluster`: mistakes are one line, and start nothing."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from forked import failure

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install 'coserve[cluster]'")
# Python that hides Ray, as if it were not installed.
WITHOUT_RAY = (
    "import coserve.cli.commands.cluster as command; find = command.find_spec; "
    "command.find_spec = lambda name: None if name == 'ray' else find(name)"
)


@pytest.mark.parametrize("command", ["up", "status"])
def test_without_ray_it_says_how_to_get_it(tmp_path: Path, command: str):
    assert "pip install 'coserve[cluster]'" in failure(tmp_path, "cluster", command, before=WITHOUT_RAY)


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
def test_what_is_wrong_is_one_line(tmp_path: Path, arguments: tuple[str, ...], message: str):
    assert message in failure(tmp_path, "cluster", *arguments)

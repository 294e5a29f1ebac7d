"""A command that SIGTERM ends."""

import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest

from coserve.cli import main
from coserve.errors import CoserveError


@pytest.fixture(autouse=True)
def _signals_are_as_they_were() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    "error", [CoserveError("a request failed"), RuntimeError("the loop is closed")]
)
def test_its_status_says_so_whatever_fails_because_of_that(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def command(**_: object) -> None:
        with suppress(SystemExit):
            signal.raise_signal(signal.SIGTERM)
        raise error

    monkeypatch.setattr(main, "app", command)
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 128 + signal.SIGTERM
    (line,) = capsys.readouterr().err.splitlines()
    assert str(error) in line

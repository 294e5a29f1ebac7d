"""One server for all tests that do not need one of their own."""

from collections.abc import Iterator

import fuzzing
import pytest
from front_server import AS_FRONT
from lengths import long_but
from openai import OpenAI
from served import Served, adapter_root, serving


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if fuzzing.NUM_CALLS:
        terminalreporter.write_line(fuzzing.summary())


@pytest.fixture(scope="session")
def device_server() -> Iterator[Served]:
    with serving("--allow-adapter-paths", str(adapter_root())) as running:
        yield running


@pytest.fixture(scope="session")
def front_server() -> Iterator[Served]:
    """The same of a cluster."""
    with serving("--allow-adapter-paths", str(adapter_root()), before=AS_FRONT) as running:
        yield running


@pytest.fixture(scope="session")
def served(device_server: Served) -> Served:
    return device_server


@pytest.fixture(params=long_but("device_server", of=["device_server", "front_server"]))
def either_server(request: pytest.FixtureRequest) -> Served:
    found: Served = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def client(served: Served) -> OpenAI:
    return served.client()

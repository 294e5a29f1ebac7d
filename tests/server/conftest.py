"""One server for all tests that do not need one of their own."""

from collections.abc import Iterator

import pytest
from openai import OpenAI
from served import Served, adapter_root, serving


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    with serving("--allow-adapter-paths", str(adapter_root())) as running:
        yield running


@pytest.fixture
def client(served: Served) -> OpenAI:
    return served.client()

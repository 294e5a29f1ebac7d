"""Real clients against a running server: each in an environment of its own, by a script of its own.

What works with which version is kept beside the environments; `scripts/clients_table.py` makes
docs/clients.md of it.
"""

import json
import os
import subprocess
from collections.abc import Iterator

import pytest
from clients.clients import CLIENTS, Client, environments, make
from served import Served, serving
from tool_model import tool_model

pytestmark = pytest.mark.clients
_TIMEOUT_S = 300


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A model that has learned to greet, and to call tools."""
    with serving(model=str(tool_model())) as running:
        yield running


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.slug)
def test_a_client_works(served: Served, client: Client):
    if client.is_heavy and not os.environ.get("COSERVE_ALL_CLIENTS"):
        pytest.skip("takes minutes: make test-clients ALL=1")
    if reason := make(client):
        pytest.skip(reason)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
    }
    done = subprocess.run(
        [*client.command(), f"{served.url}/v1", "caller"],
        env={**environment, "COSERVE_MODEL_DIRECTORY": str(tool_model())},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    works = done.stdout.splitlines()
    assert done.returncode == 0, f"after {works}: {done.stdout[-2000:]}{done.stderr[-6000:]}"
    results = environments() / "results"
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{client.slug}.json").write_text(
        json.dumps({"version": client.version(), "works": works})
    )

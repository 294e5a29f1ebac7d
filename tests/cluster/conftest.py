"""One cluster for all tests that repair what they harm, or that run last."""

from collections.abc import Iterator
from typing import Any

import pytest
from cluster.ray_world import RayWorld, ray_head, ray_world


@pytest.fixture(scope="package")
def head() -> Iterator[Any]:
    """Start a cluster of Ray without machines; these come and go."""
    with ray_head() as found:
        yield found


@pytest.fixture(scope="package")
def world(tmp_path_factory: pytest.TempPathFactory, head: Any, engine: Any) -> Iterator[RayWorld]:
    """Start a front and nodes. engine: has measured the machine, which else each node does."""
    with ray_world(head, tmp_path_factory.mktemp("home")) as found:
        yield found


@pytest.fixture(scope="package")
def engine() -> Any:
    from coserve import Engine
    from coserve.engine.config import EngineConfig

    return Engine.load("tiny", EngineConfig(memory_bytes=16_000_000), dtype="float32", device="cpu")

"""A node by itself, with a real engine: what it says of itself to a front."""

import asyncio
import shutil
from pathlib import Path

import pytest

from coserve import Engine
from coserve.cluster.nodes.messages import (
    NodeSettings,
    NodeStatus,
    decode_node_report,
    settings_digest,
)
from coserve.cluster.nodes.node import NodeServer
from coserve.cluster.nodes.shared_paths import ExpectedFiles, SharedPaths, sampled_digest
from coserve.engine.config import EngineConfig
from coserve.engine_client.launch import program
from coserve.models.source import find_model
from coserve.protocol.messages import EngineSettings, Ready

CONFIG = EngineConfig(memory_bytes=16_000_000)


@pytest.mark.long
def test_an_engine_that_lacks_its_model_starts_when_it_comes(tmp_path: Path):
    directory = tmp_path / "model"
    directory.mkdir()
    asked = EngineSettings(
        address="", model=str(directory), dtype="float32", device="cpu", threads=1, engine=CONFIG
    )
    settings = NodeSettings(engine=asked, timeout_s=60.0, home=str(tmp_path))

    async def until(node: NodeServer, state: str) -> NodeStatus:
        while (status := await node.describe()).state != state:
            await asyncio.sleep(0.1)
        return status

    async def test() -> None:
        node = NodeServer(settings, launch=program())
        try:
            failed = await until(node, "failed")
            assert failed.error is not None and "config.json" in failed.error
            tiny = find_model("tiny").directory
            assert tiny is not None
            shutil.copytree(tiny, directory, dirs_exist_ok=True)
            ready = await until(node, "ready")
            assert ready.error is None and ready.model == str(directory)
        finally:
            await node.stop()

    asyncio.run(asyncio.wait_for(test(), 240))


def test_it_tells_its_settings_what_it_sees_and_the_fingerprint_of_its_weights(tmp_path: Path):
    asked = EngineSettings(
        address="", model="tiny", dtype="float32", device="cpu", threads=1, engine=CONFIG
    )
    settings = NodeSettings(engine=asked, timeout_s=60.0, home=str(tmp_path))

    async def test() -> Ready:
        node = NodeServer(settings, launch=program())
        try:
            status = await node.describe()
            assert status.settings == settings_digest(settings)
            file = tmp_path / "file"
            file.write_text("a")
            seen = ExpectedFiles(
                what="a file", paths=(str(file),), digest=sampled_digest([file]), advice="look"
            )
            assert await node.compare_files(SharedPaths(files=(seen,), home=str(tmp_path))) is None
            file.write_text("b")
            why = await node.compare_files(SharedPaths(files=(seen,), home=str(tmp_path)))
            assert why == "it does not see a file as the front does (there are others here): look"
            await node.attach("session")
            last = 0
            while True:
                said = await node.reports("session", last, 1.0)
                last = said.last
                for each in map(decode_node_report, said.reports):
                    if isinstance(each, Ready):
                        return each
        finally:
            await node.stop()

    ready = asyncio.run(asyncio.wait_for(test(), 240))
    here = Engine.load("tiny", CONFIG, dtype="float32", device="cpu")
    assert ready.fingerprint and ready.fingerprint == here.device.info.fingerprint

"""A node by itself, with a real engine: what it says of itself to a front."""

import asyncio
from pathlib import Path

from coserve import Engine
from coserve.cluster.messages import NodeSettings, decode_node_report, settings_digest
from coserve.cluster.node import Node
from coserve.cluster.shared_paths import SeenFiles, SharedPaths, sampled_digest
from coserve.engine.config import EngineConfig
from coserve.worker.launch import program
from coserve.worker.protocol import EngineSettings, Ready

CONFIG = EngineConfig(memory_bytes=16_000_000)


def test_it_tells_its_settings_what_it_sees_and_the_fingerprint_of_its_weights(tmp_path: Path):
    asked = EngineSettings(address="", model="tiny", dtype="float32", device="cpu", threads=1, engine=CONFIG)
    settings = NodeSettings(engine=asked, timeout_s=60.0, home=str(tmp_path))

    async def test() -> Ready:
        node = Node(settings, launch=program())
        try:
            status = await node.describe()
            assert status.settings == settings_digest(settings)
            file = tmp_path / "file"
            file.write_text("a")
            seen = SeenFiles(what="a file", paths=(str(file),), digest=sampled_digest([file]), advice="look")
            assert await node.look_at(SharedPaths(files=(seen,), home=str(tmp_path))) is None
            file.write_text("b")
            why = await node.look_at(SharedPaths(files=(seen,), home=str(tmp_path)))
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

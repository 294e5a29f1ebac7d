"""The end of an engine that is used as a library."""

import pytest
from engines import greedy, make_engine, prompts_of, watched
from rank_devices import are_gone

from coserve import Engine, EngineConfig
from coserve.devices.ranks.group_device import GroupDevice
from coserve.devices.ranks.places import num_usable_cores


def test_an_engine_lets_go_of_its_device_at_the_end_of_its_block(monkeypatch):
    ends = []
    with make_engine() as engine:
        monkeypatch.setattr(watched(engine).inner, "close", lambda: ends.append(True))
        assert len(engine.generate(prompts_of((3,)), greedy(2))[0].tokens) == 2
        assert not ends
    assert ends == [True]


def test_an_engine_is_closed_twice_without_an_error():
    engine = make_engine()
    engine.close()
    engine.close()


@pytest.mark.long
@pytest.mark.skipif(num_usable_cores() < 2, reason="each rank needs a core")
def test_ranks_end_with_the_block_of_their_engine():
    config = EngineConfig(tensor_parallel=2, memory_bytes=16 << 20)
    with Engine.load("tiny", config, dtype="float32") as engine:
        assert isinstance(engine.device, GroupDevice)
        pids = engine.device.pids
    assert len(pids) == 2 and are_gone(pids)

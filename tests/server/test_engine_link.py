"""The server's end of the engine: queues between its reports and answers, and what becomes of it."""

import asyncio
import gc

import pytest
import zmq
import zmq.asyncio

from coserve.devices.sampling_params import SamplingParams
from coserve.engine.config import EngineConfig
from coserve.engine.request import Chunk
from coserve.errors import EngineGoneError, ModelError
from coserve.worker.link import EngineLink
from coserve.worker.protocol import AddRequest, CancelRequest, EngineSettings
from coserve.worker.streams import RequestStream


def make_stream(n: int = 1) -> RequestStream:
    return RequestStream([AddRequest(id="r", prompt=[1], params=SamplingParams(n=n), arrival_s=0.0)])


def test_what_comes_while_a_batch_is_sent_is_not_lost():
    async def read() -> list[str]:
        stream, texts = make_stream(), []
        assert not stream.put(Chunk(request="r", text="a"))
        async for batch in stream.batches():
            texts += [chunk.text for chunk in batch]
            if texts == ["a"]:  # the reader is slow
                stream.put(Chunk(request="r", text="b"))
                assert stream.put(Chunk(request="r", text="c", finish_reason="length"))
        return texts

    assert asyncio.run(read()) == ["a", "b", "c"]


def test_an_error_comes_behind_what_was_there():
    async def read(texts: list[str]) -> None:
        stream = make_stream(n=2)
        stream.put(Chunk(request="r", text="a", finish_reason="stop"))
        async for batch in stream.batches():
            texts += [chunk.text for chunk in batch]
            if texts == ["a"]:
                stream.put(Chunk(request="r", index=1, text="b"))
                stream.fail(EngineGoneError("gone"))

    texts: list[str] = []
    with pytest.raises(EngineGoneError, match="gone"):
        asyncio.run(read(texts))
    assert texts == ["a", "b"]


SETTINGS = EngineSettings(address="", model="none", dtype="auto", device="cpu", engine=EngineConfig())


def test_an_engine_that_cannot_be_understood_is_ended():
    async def listen() -> int:
        link, context = EngineLink(SETTINGS), zmq.asyncio.Context()
        here, there = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        here.bind("inproc://engine")
        there.connect("inproc://engine")
        process = await asyncio.create_subprocess_exec("sleep", "60")
        for _ in range(2):
            await there.send(b"no report")
        receiving = asyncio.create_task(link._receive(here, process))
        await asyncio.wait_for(receiving, 30)
        await asyncio.wait_for(link._take_last_words(here, receiving), 30)
        context.destroy(linger=0)
        link._context.destroy()
        return await process.wait()

    assert asyncio.run(listen()) < 0


def test_a_command_to_nobody_is_no_error():
    async def send() -> list[str]:
        link, unheard = EngineLink(SETTINGS), []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context["message"]))
        link._socket = link._context.socket(zmq.PAIR)
        link._socket.bind("inproc://nobody")
        link._send(CancelRequest("r"))
        gc.collect()
        await asyncio.sleep(0)
        link._context.destroy(linger=0)
        return unheard

    assert asyncio.run(send()) == []


@pytest.mark.parametrize("was_ready", [False, True])
def test_only_the_first_start_must_succeed(was_ready: bool):
    class Failing(EngineLink):
        num_lives = 0

        async def _live(self) -> None:
            self.num_lives += 1
            self._was_ready = was_ready
            self._failed = ModelError("no memory")
            self._closing = self.num_lives == 2

    async def run() -> int:
        link = Failing(SETTINGS)
        if was_ready:
            await link.run()
        else:
            with pytest.raises(ModelError, match="no memory"):
                await link.run()
        link._context.destroy()
        return link.num_lives

    assert asyncio.run(run()) == 1 + was_ready

"""The queue between the engine's reports and one request's answer."""

import asyncio

import pytest

from coserve.engine.request import Chunk
from coserve.engine.sampling import SamplingParams
from coserve.errors import EngineGoneError
from coserve.server.engine_link import RequestStream
from coserve.server.protocol import AddRequest


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

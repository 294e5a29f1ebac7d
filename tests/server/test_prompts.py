"""Text to tokens, beside whatever else the server does."""

import asyncio
import threading

import pytest
from served import model_directory

from coserve.engine.prompts import tokens_of
from coserve.server.text.prompts import Prompts


@pytest.mark.parametrize("long", ["x" * 200_000, [{"role": "user", "content": "x" * 200_000}]])
def test_a_long_prompt_holds_up_no_other(long, monkeypatch: pytest.MonkeyPatch):
    resume = threading.Event()

    def slow(prompt, *arguments):
        if prompt is long:
            assert resume.wait(60)
        return tokens_of(prompt, *arguments)

    monkeypatch.setattr("coserve.server.text.prompts.tokens_of", slow)

    async def ask() -> tuple[list[int], list[int], list[int]]:
        prompts = Prompts(str(model_directory()))
        await prompts.load()
        waiting = asyncio.create_task(prompts.tokens(long))
        await asyncio.sleep(0)
        short = await asyncio.wait_for(prompts.tokens("hello"), 30)
        other = await asyncio.wait_for(prompts.tokens("y" * 200_000), 30)
        resume.set()
        try:
            return short, other, await waiting
        finally:
            prompts.close()

    short, other, found = asyncio.run(ask())
    assert 0 < len(short) < min(len(other), len(found))

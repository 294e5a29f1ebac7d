"""What comes of requests: their chunks as they come, with the text that the engine's tokens stand
for.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec import structs

from coserve.engine.commands import AddRequest, StopSequence
from coserve.engine.request import Chunk
from coserve.engine.text import TextStream
from coserve.errors import CoserveError, RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SequenceText:
    """The text of one sequence, chunk by chunk."""

    def __init__(self, text: TextStream, *, min_tokens: int) -> None:
        """min_tokens: a stop string that is complete within these does not count."""
        self._text, self._min_tokens = text, min_tokens
        self.num_tokens = 0

    def read(self, chunk: Chunk) -> Chunk:
        """The chunk with its text. With a stop string, it is the last, whatever the engine
        thinks.
        """
        text = ""
        for place, token in enumerate(chunk.tokens):
            self.num_tokens += 1
            is_last = place == len(chunk.tokens) - 1
            if (
                is_last and chunk.finish_reason == "stop"
            ):  # this token ends it, and is not part of the text
                break
            text += self._text.push(token, may_stop=self.num_tokens > self._min_tokens)
            if self._text.stopped is not None:
                return structs.replace(
                    chunk,
                    tokens=chunk.tokens[: place + 1],
                    logprobs=chunk.logprobs[: place + 1],
                    text=text,
                    finish_reason="stop",
                    stop_reason=self._text.stopped,
                )
        if chunk.finish_reason is not None:
            text += self._text.finish()
        return structs.replace(chunk, text=text)


class RequestStream:
    """The chunks of requests that belong together, as they come."""

    def __init__(
        self,
        requests: list[AddRequest],
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        shown_tokens: tuple[str, ...] = (),
    ) -> None:
        """tokenizer: to make text of tokens; without it there is none. shown_tokens: see
        `TextStream`.

        Raises:
            RequestError: stop strings without a tokenizer.
        """
        self.requests = requests
        self._waiting: list[Chunk] = []
        self._changed = asyncio.Event()
        self._num_open = {request.id: request.params.n for request in requests}
        self._error: CoserveError | None = None
        self._texts: dict[tuple[str, int], SequenceText] = {}
        for request in requests:
            if tokenizer is None and request.params.stop:
                raise RequestError("stop strings need a tokenizer, and this model has none")
            for index in range(request.params.n if tokenizer is not None else 0):
                text = TextStream(
                    tokenizer,
                    request.prompt,
                    request.params.stop,
                    request.params.skip_special_tokens,
                    shown_tokens,
                    include_stop=request.params.include_stop_str_in_output,
                )
                self._texts[request.id, index] = SequenceText(
                    text, min_tokens=request.params.min_tokens
                )

    def for_engine(self) -> list[AddRequest]:
        """The requests as the engine needs to know them: it sees tokens only, so stop strings are
        not its own.
        """
        return [
            structs.replace(request, params=replace(request.params, stop=()))
            if request.params.stop
            else request
            for request in self.requests
        ]

    def read(self, chunk: Chunk) -> tuple[Chunk, StopSequence | None]:
        """A chunk of the engine's with its text; and what the engine is to be told, if that ends
        with a stop string that it does not know of.
        """
        text = self._texts.get((chunk.request, chunk.index))
        if text is None:
            return chunk, None
        found = text.read(chunk)
        if found.finish_reason is None or chunk.finish_reason is not None:
            return found, None
        return found, StopSequence(chunk.request, chunk.index, text.num_tokens)

    def put(self, chunk: Chunk) -> bool:
        """The next chunk for the reader; whether its request is over with it."""
        self._waiting.append(chunk)
        self._changed.set()
        if chunk.finish_reason is None:
            return False
        self._num_open[chunk.request] -= 1
        return self._num_open[chunk.request] == 0

    def fail(self, error: CoserveError) -> None:
        """No more chunks will come."""
        self._error = error
        self._changed.set()

    async def batches(self) -> AsyncIterator[list[Chunk]]:
        """All chunks that are there, again and again to the end; CoserveError if there is no good
        end.
        """
        while True:
            await self._changed.wait()
            # More may come while one batch is being sent: the end is only where none is left.
            while self._waiting:
                batch, self._waiting = self._waiting, []
                yield batch
            if self._error is not None:
                raise self._error
            if not any(self._num_open.values()):
                return
            self._changed.clear()

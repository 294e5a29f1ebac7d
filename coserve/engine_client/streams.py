"""Streams of requests: their chunks as they arrive, with the text of the engine's tokens."""

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
    """Text of one sequence, chunk by chunk."""

    def __init__(self, text: TextStream, *, min_tokens: int) -> None:
        """Start a sequence; a stop string that is complete within `min_tokens` does not count."""
        self._text, self._min_tokens = text, min_tokens
        self.num_tokens = 0

    def read(self, chunk: Chunk) -> Chunk:
        """Return a chunk with its text. A chunk with a stop string is the last, even if the engine
        continues.
        """
        text = ""
        for place, token in enumerate(chunk.tokens):
            self.num_tokens += 1
            is_last = place == len(chunk.tokens) - 1
            # An end token is not part of the text.
            if is_last and chunk.finish_reason == "stop":
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
    """Chunks of requests that belong together, as they arrive."""

    def __init__(
        self,
        requests: list[AddRequest],
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        shown_tokens: tuple[str, ...] = (),
    ) -> None:
        """Open a stream.

        Args:
            requests: The requests.
            tokenizer: Makes text of tokens; None: there is no text.
            shown_tokens: See `TextStream`.

        Raises:
            RequestError: There are stop strings and no tokenizer.
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
        """Return the requests in the form that the engine needs: without stop strings, since it
        sees only tokens.
        """
        return [
            structs.replace(request, params=replace(request.params, stop=()))
            if request.params.stop
            else request
            for request in self.requests
        ]

    def read(self, chunk: Chunk) -> tuple[Chunk, StopSequence | None]:
        """Return a chunk with its text, and the command that stops its sequence if it ends with a
        stop string.
        """
        text = self._texts.get((chunk.request, chunk.index))
        if text is None:
            return chunk, None
        shown = text.read(chunk)
        if shown.finish_reason is None or chunk.finish_reason is not None:
            return shown, None
        return shown, StopSequence(chunk.request, chunk.index, text.num_tokens)

    def put(self, chunk: Chunk) -> bool:
        """Append a chunk; return whether its request is over with it."""
        self._waiting.append(chunk)
        self._changed.set()
        if chunk.finish_reason is None:
            return False
        self._num_open[chunk.request] -= 1
        return self._num_open[chunk.request] == 0

    def fail(self, error: CoserveError) -> None:
        """End the stream with an error."""
        self._error = error
        self._changed.set()

    async def batches(self) -> AsyncIterator[list[Chunk]]:
        """Yield all chunks that have arrived, again and again until the end.

        Raises:
            CoserveError: The stream ended with an error.
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

"""Decode instance's end of the handover: it requests prompts, and resumes requests with the
computed blocks.

Clients are connected to the decode instance, which does everything for their requests except the
full blocks of long prompts. A request with such a prompt is held in the engine until its blocks
have arrived. Whatever fails (there is no prefill instance, it dies, it is slow, it has another
model or cannot load an adapter), the rest is computed here.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from coserve.engine.outbox import Event
from coserve.engine.records import HandoverStats
from coserve.engine.request import Request
from coserve.engine.request_queue import ImportedBlocks
from coserve.engine.token_engine import TokenEngine
from coserve.errors import CoserveError
from coserve.handover.adapter_files import WrittenAdapters
from coserve.handover.messages import (
    Computed,
    ComputePrompt,
    ForgetPrompt,
    Hello,
    PromptRefused,
    Rejected,
    Welcome,
    identity_of,
)
from coserve.handover.transport import Transport

_log = logging.getLogger(__name__)

# Seconds between attempts to connect; the second after a rejection.
_RETRY_S, _REJECTED_RETRY_S = 1.0, 10.0


class _RemotePrefill:
    """A prompt that is being computed by the prefill instance. `num_blocks` is how many of its
    first blocks have arrived.
    """

    def __init__(self, id: int, path: Path, blocks: range, until_s: float) -> None:
        """Note a prompt.

        Args:
            id: Id of the prompt.
            path: Page file.
            blocks: Blocks that are copied to the file.
            until_s: Time until which the prompt is awaited.
        """
        self.id, self.path, self.blocks, self.until_s = id, path, blocks, until_s
        self.num_blocks = 0

    def handed(self) -> ImportedBlocks | None:
        """Return the blocks that can be imported; None if there are none."""
        number = self.num_blocks - self.blocks.start
        return ImportedBlocks(str(self.path), self.blocks.start, number) if number > 0 else None


class DecodeEnd:
    """The decode instance's `HandoverEnd`."""

    def __init__(
        self,
        engine: TokenEngine,
        connect: Callable[[], Transport],
        directory: Path,
        *,
        min_tokens: int | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connect an engine with a prefill instance.

        Args:
            engine: Engine of this instance.
            connect: Connects; raises OSError if there is no prefill instance now.
            directory: Directory of page files and adapters, preferably in memory.
            min_tokens: Prompts with fewer tokens to compute are computed here; None: those for
                which copying pages is predicted to take as long.
            now: Returns seconds of a monotonic clock.
        """
        self._engine, self._connect, self._directory = engine, connect, directory
        self._min_tokens, self._now = min_tokens, now
        self._adapters = WrittenAdapters(engine, directory)
        self._transport: Transport | None = None
        self._is_welcome = self._is_silent = False
        self._complaint = ""  # last logged reason, so that it is logged once
        self._connect_s = now()
        self._asked: dict[str, _RemotePrefill] = {}
        self._files: dict[str, _RemotePrefill] = {}  # of requests that wait for admission
        self._numbers = count()
        self._num_handed_over = self._num_not_handed_over = self._num_pages = 0

    def added(self, request: str) -> None:
        blocks = self._engine.requests.unknown_blocks(request)
        if not self._pays(blocks):
            return
        first = self._engine.requests.first(request)
        # The connection may have come or gone since the last step.
        self.poll()
        if first is None or self._transport is None or not self._is_welcome or self._is_silent:
            self._num_not_handed_over += 1
            return
        try:
            self._ask(self._transport, request, first, blocks)
        except ConnectionError as error:
            self._num_not_handed_over += 1
            self._lose(str(error))
        except (CoserveError, OSError) as error:
            self._num_not_handed_over += 1
            _log.warning("the prompt of %s is computed here: %s", request, error)

    def poll(self) -> None:
        self._clean_up()
        if self._transport is None and self._now() >= self._connect_s:
            self._try_to_connect()
        if self._transport is not None:
            try:
                for message in self._transport.receive():
                    self._take_message(message)
            except ConnectionError as error:
                self._lose(str(error))
        self._give_up()

    def take(self, events: list[Event]) -> list[Event]:
        self._clean_up()
        return events

    def waits_on(self) -> Sequence[int]:
        end = None if self._transport is None else self._transport.waits_on
        return () if end is None else (end,)

    def stats(self) -> HandoverStats | None:
        return HandoverStats(
            role="decode",
            num_partners=int(self._is_welcome),
            num_handed_over=self._num_handed_over,
            num_not_handed_over=self._num_not_handed_over,
            num_pages=self._num_pages,
        )

    def close(self) -> None:
        self._close_transport()
        for asked in (*self._asked.values(), *self._files.values()):
            asked.path.unlink(missing_ok=True)

    # -- asking -----------------------------------------------------------------------

    def _pays(self, blocks: range) -> bool:
        info, latency = self._engine.device.info, self._engine.latency
        num_tokens = len(blocks) * info.block_tokens
        if not num_tokens or self._min_tokens is not None:
            # A set minimum decides alone; otherwise copying is weighed against computing below.
            return num_tokens > 0 and num_tokens >= (self._min_tokens or 0)
        past = blocks.start * info.block_tokens
        return latency.copy_s(len(blocks) * info.page_bytes) < latency.prompt_s(num_tokens, past)

    def _ask(self, transport: Transport, name: str, request: Request, blocks: range) -> None:
        info, id = self._engine.device.info, next(self._numbers)
        num_pages = sum(len(each.blocks) for each in (*self._asked.values(), *self._files.values()))
        if num_pages + len(blocks) > info.num_pages:  # more could not be admitted
            raise CoserveError("as many pages as the pool has are being handed over already")
        adapter = None if request.version is None else self._adapters.files_of(request.version)
        num_tokens, slo = len(blocks) * info.block_tokens, request.slo
        alone_s = self._engine.latency.prompt_s(num_tokens, blocks.start * info.block_tokens)
        # Leaves time to compute the prompt here within its TTFT, but waits half of it at least.
        limit_s = max(slo.ttft_s / 2, slo.ttft_s - alone_s)
        asked = _RemotePrefill(id, self._directory / f"pages-{id}", blocks, self._now() + limit_s)
        try:
            _make_file(asked.path, len(blocks) * info.place_bytes)
            transport.send(
                ComputePrompt(
                    id=id,
                    tokens=tuple(request.prompt[: blocks.stop * info.block_tokens]),
                    path=str(asked.path),
                    first_block=blocks.start,
                    ttft_s=limit_s,
                    adapter=adapter,
                    tenant=request.info.tenant,
                    num_public_tokens=request.params.num_public_tokens,
                )
            )
        except BaseException:
            asked.path.unlink(missing_ok=True)
            raise
        # Held only now: a prompt that could not be sent is computed here at once.
        self._engine.hold(name)
        self._asked[name] = asked

    # -- answers ----------------------------------------------------------------------

    def _take_message(self, message: Any) -> None:
        if isinstance(message, Welcome):
            self._is_welcome, self._is_silent, self._complaint = True, False, ""
            _log.info("connected to the prefill instance")
        elif isinstance(message, Rejected):
            self._lose(message.reason, retry_s=_REJECTED_RETRY_S)
        elif isinstance(message, Computed | PromptRefused):
            self._is_silent = False
            request = next(
                (name for name, asked in self._asked.items() if asked.id == message.id), None
            )
            if request is None:  # it is not wanted any more
                return
            if isinstance(message, PromptRefused):
                _log.warning(
                    "the prompt of %s is computed here: the prefill instance refused it: %s",
                    request,
                    message.reason,
                )
                self._end(request, is_whole=False)
                return
            asked = self._asked[request]
            # Blocks arrive in order: if the prompt is given up, the first ones are still used.
            asked.num_blocks = message.num_blocks
            if asked.num_blocks == asked.blocks.stop:
                self._end(request, is_whole=True)
        else:
            raise ConnectionError(f"it sent {type(message).__name__} out of turn")

    def _end(self, name: str, *, is_whole: bool) -> None:
        """Resume a request with the blocks that have arrived; no more will."""
        asked = self._asked.pop(name)
        handed = asked.handed()
        self._engine.arrive(name, handed)
        self._num_handed_over += is_whole
        self._num_not_handed_over += not is_whole
        self._num_pages += handed.num_blocks if handed is not None else 0
        # The engine reads the file when the request is admitted; `_clean_up` removes it after that.
        self._files[name] = asked
        self._clean_up()

    def _give_up(self) -> None:
        """Stop waiting for late prompts. The instance is sent no further prompts until its next
        message.
        """
        now_s = self._now()
        late = [name for name, asked in self._asked.items() if asked.until_s < now_s]
        if not late:
            return
        _log.warning(
            "the prefill instance is slow: the prompts of %s are computed here", ", ".join(late)
        )
        self._is_silent = True
        for name in late:
            self._forget(self._asked[name])
            self._end(name, is_whole=False)

    def _clean_up(self) -> None:
        """Drop requests that have ended, and remove files that have been read."""
        for name in [name for name in self._asked if self._engine.requests.first(name) is None]:
            asked = self._asked.pop(name)
            self._forget(asked)
            asked.path.unlink(missing_ok=True)
        for name in [name for name in self._files if self._engine.requests.first(name) is None]:
            self._files.pop(name).path.unlink(missing_ok=True)

    def _forget(self, asked: _RemotePrefill) -> None:
        if self._transport is not None:
            with suppress(ConnectionError):  # `receive` reports it
                self._transport.send(ForgetPrompt(asked.id))

    # -- the connection -----------------------------------------------------------------

    def _try_to_connect(self) -> None:
        try:
            self._transport = self._connect()
            self._transport.send(Hello(identity_of(self._engine.device.info)))
        except OSError as error:
            self._lose(error.strerror or str(error))

    def _lose(self, reason: str, *, retry_s: float = _RETRY_S) -> None:
        """Compute prompts here until the prefill instance can be connected to again."""
        self._close_transport()
        self._connect_s = self._now() + retry_s
        waiting = list(self._asked)
        if reason != self._complaint or waiting:
            _log.warning(
                "no prefill instance (%s): prompts are computed here, %d that it had",
                reason,
                len(waiting),
            )
        self._complaint = reason
        for name in waiting:
            self._end(name, is_whole=False)

    def _close_transport(self) -> None:
        if self._transport is not None:
            self._transport.close()
        self._transport, self._is_welcome, self._is_silent = None, False, False


def _make_file(path: Path, num_bytes: int) -> None:
    """Create a file with all of its memory, since writing to a mapped file without memory left
    would end the process.

    Raises:
        OSError: There is no room for it.
    """
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, num_bytes)
        else:  # macOS
            os.truncate(file, num_bytes)
    finally:
        os.close(file)

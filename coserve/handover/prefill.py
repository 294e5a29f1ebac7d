"""Prefill instance's end of the handover: it computes prompts of decode instances, and copies their
pages to page files as they become ready.

In the engine, a prompt is a request for one token, which is discarded. After each step, blocks that
are new among the known prefixes are copied; so a prompt whose beginning another prompt has computed
costs only the copy.
"""

import logging
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from coserve.devices.messages.commands import ExportPages
from coserve.devices.sampling_params import SamplingParams
from coserve.engine.outbox import Event
from coserve.engine.records import HandoverStats
from coserve.engine.request import Chunk
from coserve.engine.token_engine import TokenEngine
from coserve.errors import AdapterError, CoserveError
from coserve.handover.adapter_files import digest_of
from coserve.handover.messages import (
    AdapterFiles,
    Computed,
    ComputePrompt,
    ForgetPrompt,
    Hello,
    PromptRefused,
    Rejected,
    Welcome,
    difference,
    identity_of,
)
from coserve.handover.transport import Transport
from coserve.memory.pages.prefix_index import PrefixOwner
from coserve.scheduling.slo import Slo

_log = logging.getLogger(__name__)

# Prefix of requests and adapters that serve decode instances; clients' names do not have it.
_NAME = "handover/"
_MIN_TTFT_S = 1e-3


class _Prompt:
    """A prompt that is being computed, by the name `request` in the engine.

    `num_blocks` of it are computed, and copied as far as they were requested.
    """

    def __init__(self, command: ComputePrompt, request: str, keys: list[bytes]) -> None:
        self.command, self.request, self.keys, self.num_blocks = command, request, keys, 0


class _Partner:
    """A decode instance, with its prompts by their ids."""

    def __init__(self, transport: Transport) -> None:
        self.transport, self.is_known = transport, False
        self.prompts: dict[int, _Prompt] = {}


class PrefillEnd:
    """The prefill instance's `HandoverEnd`."""

    def __init__(
        self,
        engine: TokenEngine,
        accept: Callable[[], list[Transport]],
        *,
        listens_on: Sequence[int] = (),
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """Connect an engine with decode instances.

        Args:
            engine: Engine of this instance.
            accept: Returns new connections.
            listens_on: File descriptors that are readable when there are new connections.
            close: Stops listening.
        """
        self._engine, self._accept, self._listens_on, self._close = (
            engine,
            accept,
            listens_on,
            close,
        )
        self._partners: list[_Partner] = []
        self._numbers = count()
        self._num_handed_over = self._num_refused = self._num_pages = 0

    def added(self, request: str) -> None:
        pass

    def poll(self) -> None:
        self._partners += [_Partner(transport) for transport in self._accept()]
        for partner in list(self._partners):
            try:
                for message in partner.transport.receive():
                    self._take_message(partner, message)
            except ConnectionError as error:
                self._lose(partner, error)

    def take(self, events: list[Event]) -> list[Event]:
        mine = {
            prompt.request: prompt
            for partner in self._partners
            for prompt in partner.prompts.values()
        }
        ended: dict[str, str] = {}
        others: list[Event] = []
        for event in events:
            if not isinstance(event, Chunk) or not event.request.startswith(_NAME):
                others.append(event)
            elif event.finish_reason is not None and event.request in mine:
                ended[event.request] = event.error or "its pages were needed for other requests"
        for partner in list(self._partners):
            try:
                for prompt in list(partner.prompts.values()):
                    self._copy(partner, prompt)
                    # An end with blocks missing: `_copy` has removed prompts that are complete.
                    if prompt.request in ended and prompt.command.id in partner.prompts:
                        self._refuse(partner, prompt.command.id, ended[prompt.request])
            except ConnectionError as error:
                self._lose(partner, error)
        return others

    def waits_on(self) -> Sequence[int]:
        ends = [partner.transport.waits_on for partner in self._partners]
        return [*self._listens_on, *(end for end in ends if end is not None)]

    def stats(self) -> HandoverStats | None:
        return HandoverStats(
            role="prefill",
            num_partners=sum(partner.is_known for partner in self._partners),
            num_handed_over=self._num_handed_over,
            num_not_handed_over=self._num_refused,
            num_pages=self._num_pages,
        )

    def close(self) -> None:
        for partner in list(self._partners):
            self._forget_all(partner)
        self._close()

    # -- messages -------------------------------------------------------------------

    def _take_message(self, partner: _Partner, message: Any) -> None:
        if isinstance(message, Hello):
            if (
                reason := difference(identity_of(self._engine.device.info), message.identity)
            ) is not None:
                partner.transport.send(Rejected(reason))
                _log.warning("rejected a decode instance: %s", reason)
                return
            partner.is_known = True
            partner.transport.send(Welcome())
        elif isinstance(message, ComputePrompt) and partner.is_known:
            try:
                self._begin(partner, message)
            except (CoserveError, OSError) as error:
                self._refuse(partner, message.id, str(error))
        elif isinstance(message, ForgetPrompt):
            if (prompt := partner.prompts.pop(message.id, None)) is not None:
                self._engine.cancel(prompt.request)
        else:
            raise ConnectionError(f"it sent {type(message).__name__} out of turn")

    def _begin(self, partner: _Partner, command: ComputePrompt) -> None:
        adapter = None if command.adapter is None else self._loaded(command.adapter)
        version = "" if adapter is None else self._engine.versions.resolve(adapter).key
        # Keys as the engine makes them, so that its cached blocks are found.
        tenant = "" if self._engine.config.share_prefixes else command.tenant
        owner = PrefixOwner(version, tenant, 0 if version else command.num_public_tokens)
        keys = self._engine.cache.prefixes.keys(owner, command.tokens)
        prompt = _Prompt(command, f"{_NAME}{next(self._numbers)}", keys)
        partner.prompts[command.id] = prompt
        # Blocks that are cached are handed over at once.
        self._copy(partner, prompt)
        if command.id not in partner.prompts:  # all of its blocks were cached
            return
        self._engine.add_tokens(
            command.tokens,
            SamplingParams(
                max_tokens=1,
                temperature=0.0,
                ignore_eos=True,
                num_public_tokens=command.num_public_tokens,
            ),
            adapter=adapter,
            # Nothing may be left of the time, but an SLO must be above 0.
            slo=Slo(ttft_s=max(_MIN_TTFT_S, command.ttft_s), tpot_s=self._engine.slo.tpot_s),
            request_id=prompt.request,
            tenant=command.tenant,
        )

    def _loaded(self, files: AdapterFiles) -> str:
        """Return the name under which the engine serves exactly these files.

        Raises:
            AdapterError, OSError: They cannot be loaded.
        """
        name = f"{_NAME}{files.digest}"
        if name not in self._engine.versions and digest_of(Path(files.directory)) != files.digest:
            raise AdapterError("the adapter's files are not those of its version")
        self._engine.ensure_adapter(name, files.directory)
        return name

    # -- pages ----------------------------------------------------------------------

    def _copy(self, partner: _Partner, prompt: _Prompt) -> None:
        """Copy newly computed blocks of a prompt to its file, and notify the decode instance."""
        command, known = prompt.command, prompt.num_blocks
        # One token more than the prompt: `find` leaves the last token of a prompt to be computed.
        pages = self._engine.cache.prefixes.find(prompt.keys, len(command.tokens) + 1)
        if len(pages) <= known:
            return
        blocks = range(max(known, command.first_block), len(pages))
        places = tuple(block - command.first_block for block in blocks)
        if blocks:
            # Recorded here, since recordings leave the next command out.
            self._engine.flush_commands()
        try:
            if blocks:
                self._engine.log.execute(
                    ExportPages(command.path, tuple(pages[block] for block in blocks), places)
                )
        except (OSError, ValueError, RuntimeError) as error:
            # The file is gone: the prompt is not wanted any more.
            self._engine.cancel(prompt.request)
            self._refuse(partner, command.id, f"its pages cannot be copied: {error}")
            return
        prompt.num_blocks = len(pages)
        self._num_pages += len(blocks)
        if prompt.num_blocks == len(prompt.keys):
            self._num_handed_over += 1
            del partner.prompts[command.id]
        partner.transport.send(Computed(command.id, prompt.num_blocks))

    def _refuse(self, partner: _Partner, id: int, reason: str) -> None:
        self._num_refused += 1
        partner.prompts.pop(id, None)
        partner.transport.send(PromptRefused(id, " ".join(reason.split())))

    def _lose(self, partner: _Partner, error: ConnectionError) -> None:
        # Connections that never sent a proper Hello are not worth a warning.
        if partner.is_known:
            _log.warning("a decode instance has disconnected: %s", error)
        self._forget_all(partner)

    def _forget_all(self, partner: _Partner) -> None:
        self._partners.remove(partner)
        partner.transport.close()
        for prompt in partner.prompts.values():
            self._engine.cancel(prompt.request)

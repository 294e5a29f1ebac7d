"""What the routes share: one object, at `app.state.context`."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, cast

from fastapi import Depends, Request
from msgspec import structs

from coserve.engine.commands import AddRequest
from coserve.engine_client.access import EngineAccess
from coserve.engine_client.streams import RequestStream
from coserve.errors import EngineGoneError
from coserve.jobs.manager import JobManager
from coserve.jobs.metrics.trackers import Trackers
from coserve.jobs.records import AdapterRecord
from coserve.protocol.messages import Ready
from coserve.scheduling.slo import Slo
from coserve.server.adapters.catalogue import AdapterCatalogue, LoadedAdapters, find_adapter
from coserve.server.batches.runner import BatchRunner
from coserve.server.bodies.other_fields import FieldPolicy
from coserve.server.bodies.reader import BodyReader
from coserve.server.config import ServerConfig
from coserve.server.fine_tuning.archives import Merging
from coserve.server.generation.grammar_checks import GrammarChecks
from coserve.server.observability.metrics import Metrics
from coserve.server.observability.readiness import Readiness
from coserve.server.observability.status import StatusBoard
from coserve.server.observability.storage import Storage
from coserve.server.observability.tracing import Tracing
from coserve.server.page.examples import Previews
from coserve.server.responses.background import BackgroundRuns
from coserve.server.tenancy.admission import Admission
from coserve.server.tenancy.keys_file import Keys
from coserve.server.tenancy.ledger import Entry, Ledger
from coserve.server.tenancy.limits import Limits
from coserve.server.tenancy.waiting import WaitingRequests
from coserve.server.text.adapter_readers import AdapterReaders
from coserve.server.text.prompts import Prompts
from coserve.server.text.public_prefixes import PublicPrefixes
from coserve.server.tool_parsers import ToolParser, parser_class, parser_of_template
from coserve.version import VERSION


@dataclass(kw_only=True)
class ServerContext:
    """A running server. catalogues: where adapters are looked up, in this order; more may be added
    at the start.
    """

    config: ServerConfig
    link: EngineAccess
    prompts: Prompts
    loaded: LoadedAdapters = field(default_factory=LoadedAdapters)
    catalogues: list[AdapterCatalogue] = field(default_factory=list)
    job_manager: JobManager | None = None
    ledger: Ledger = field(default_factory=Ledger)
    runs: BackgroundRuns = field(default_factory=BackgroundRuns)
    merging: Merging = field(default_factory=Merging)
    tracing: Tracing | None = None
    batch_runner: BatchRunner | None = None
    trackers: Trackers | None = None
    storage: Storage | None = None
    ending: asyncio.Task[None] | None = None
    """Writes down that responses have failed which the process before this one was at; may wait for
    room."""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.catalogues.insert(0, self.loaded)
        self.fields = FieldPolicy(self.config.unknown_fields)
        self.bodies = BodyReader(self.fields)
        self.keys = Keys(self.config)
        self.admission = Admission(self.keys, self.ledger)
        self.board, self.metrics = (
            StatusBoard(self.ledger),
            Metrics(self.ledger, lambda: self.model_name),
        )
        self.waiting = WaitingRequests(self.config.max_queued_requests)
        self.public_prefixes = PublicPrefixes(self.config.public_prefixes)
        self.readiness = Readiness(self.link)
        self.grammar_checks = GrammarChecks(self.prompts, self.link)
        self.previews = Previews(self.prompts)
        self._readers = AdapterReaders(self.prompts)
        for listener in (self.board, self.metrics, self.waiting, self.admission, self.readiness):
            self.link.listen(listener)
        if self.tracing is not None:
            self.link.listen(self.tracing)

    @property
    def jobs(self) -> JobManager:
        """Files and jobs."""
        if self.job_manager is None:
            raise EngineGoneError("the server is starting; try again in a few seconds")
        return self.job_manager

    @property
    def batches(self) -> BatchRunner:
        """Those that are under way."""
        if self.batch_runner is None:
            raise EngineGoneError("the server is starting; try again in a few seconds")
        return self.batch_runner

    @property
    def model_name(self) -> str:
        """Of the base, as /v1/models lists it: as it is to be called, or a directory by its own
        name.
        """
        if self.config.served_model_names:
            return self.config.served_model_names[0]
        path = Path(self.config.model)
        return path.resolve().name if path.is_dir() else self.config.model

    @property
    def tool_parser(self) -> type[ToolParser] | None:
        """Finds tool calls in answers: the one that was asked for, or that of the model's chat
        template.
        """
        name = self.config.tool_call_parser
        return (
            parser_of_template(self.prompts.chat_template) if name == "auto" else parser_class(name)
        )

    @property
    def base_names(self) -> tuple[str, ...]:
        """What requests may call the base."""
        return self.config.served_model_names or (self.model_name, self.config.model)

    @property
    def fingerprint(self) -> str:
        """OpenAI's system_fingerprint: what could change the answer to a seeded request."""
        return f"coserve-{VERSION}"

    def require_ready(self) -> Ready:
        """The engine, as it said of itself; EngineGoneError if requests cannot be answered now."""
        ready = self.link.require_ready()
        if not self.prompts.is_loaded or self.job_manager is None:
            raise EngineGoneError("the server is starting; try again in a few seconds")
        return ready

    def admit(self, tenant: str) -> Ready:
        """Return the engine for a request of a tenant; ApiError if too many wait for their first
        token.
        """
        ready = self.require_ready()
        self.waiting.check(tenant)
        return ready

    def limits_of(self, tenant: str) -> Limits:
        """As the keys that are in force now say."""
        return self.keys.ring.limits_of(tenant)

    def find_adapter(self, tenant: str, name: str) -> AdapterRecord | None:
        """By a name that the tenant knows. Blocks."""
        return find_adapter(self.catalogues, tenant, name)

    async def look_up(self, tenant: str, name: str) -> AdapterRecord | None:
        """`find_adapter` without holding up other requests."""
        return self.loaded.find(tenant, name) or await asyncio.to_thread(
            self.find_adapter, tenant, name
        )

    async def reader_of(self, adapter: AdapterRecord | None, ready: Ready) -> tuple[Prompts, Ready]:
        """Return what reads and writes an adapter's texts, and the engine with the adapter's
        vocabulary.
        """
        if adapter is None or adapter.directory is None:
            return self.prompts, ready
        prompts, vocab_size = await asyncio.to_thread(self._readers.of, adapter.directory)
        return prompts, ready if vocab_size == ready.vocab_size else structs.replace(
            ready, vocab_size=vocab_size
        )

    def only_trained(self, tenant: str, name: str) -> str | None:
        """Which of `trainable_models` a name stands for, or an adapter's does; None: none of them.
        Blocks.
        """
        if self.job_manager is None:
            return None
        others = self.job_manager.models.others
        found = self.job_manager.adapters.find_on_any(tenant, name)
        model = name if found is None else found.base
        return model if model in others else None

    async def adapters(self, tenant: str) -> list[AdapterRecord]:
        """All that it can name, the oldest first: of one second, those that the server was started
        with.
        """

        def listed() -> list[AdapterRecord]:
            found = [known for each in reversed(self.catalogues) for known in each.list(tenant)]
            return sorted(found, key=lambda known: known.created_at)

        return await asyncio.to_thread(listed)

    def open(
        self,
        requests: list[AddRequest],
        *,
        tenant: str,
        adapter: str | None,
        slo: Slo,
        reader: Prompts,
        shown_tokens: tuple[str, ...] = (),
    ) -> RequestStream:
        """Send requests of one tenant to the engine; to be closed in any case. adapter: as the
        tenant calls it. reader: see `reader_of`. shown_tokens: see `TextStream`. Batch work is no
        request under way, and waits as long as it must.

        Raises:
            ApiError: too many wait. LimitError: the tenant has too many under way, or has used its
                tokens.
            EngineGoneError: there is no engine now. RequestError: stop strings without a tokenizer.
        """
        is_batch = requests[0].batch_due_s is not None
        number = 0 if is_batch else _num_sequences(requests)
        if not is_batch:
            self.waiting.check(tenant)
            self.admission.begin(
                tenant,
                num_sequences=number,
                num_prompt_tokens=sum(len(request.prompt) for request in requests),
            )
        requests = [self._with_public_tokens(request) for request in requests]
        try:
            stream = self.link.open(requests, reader.text_tokenizer, shown_tokens)
        except BaseException:
            self.admission.end(tenant, num_sequences=number)
            raise
        for request in requests:
            if not is_batch:
                self.waiting.begin(request.id, tenant)
            entry = Entry(
                tenant=tenant,
                adapter=adapter,
                num_prompt_tokens=len(request.prompt),
                slo=slo,
                is_batch=is_batch,
            )
            self.ledger.begin(request.id, entry)
        return stream

    def _with_public_tokens(self, request: AddRequest) -> AddRequest:
        """Return a request that says how much of its prompt's beginning is public."""
        number = self.public_prefixes.num_tokens(request.prompt)
        if not number:
            return request
        return structs.replace(request, params=replace(request.params, num_public_tokens=number))

    def close(self, stream: RequestStream) -> None:
        """Its chunks are no longer wanted."""
        self.link.close(stream)
        if (entry := self.ledger.find(stream.requests[0].id)) is not None:
            number = 0 if entry.is_batch else _num_sequences(stream.requests)
            self.admission.end(entry.tenant, num_sequences=number)
        for request in stream.requests:
            self.ledger.end(request.id)
            self.waiting.end(request.id)


def _num_sequences(requests: Sequence[AddRequest]) -> int:
    return sum(request.params.n for request in requests)


def _context(request: Request) -> ServerContext:
    return cast(ServerContext, request.app.state.context)


def _tenant(request: Request) -> str:
    return cast(str, request.state.tenant)


def _is_operator(request: Request) -> bool:
    return cast(bool, request.state.is_operator)


# Parameters of routes.
Context = Annotated[ServerContext, Depends(_context)]
Tenant = Annotated[str, Depends(_tenant)]
IsOperator = Annotated[bool, Depends(_is_operator)]

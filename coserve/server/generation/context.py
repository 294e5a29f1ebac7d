"""Parts of the server that requests for tokens need, and their admission to the engine."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from coserve.engine.commands import AddRequest
from coserve.engine_client.access import EngineAccess
from coserve.engine_client.streams import RequestStream
from coserve.errors import EngineGoneError
from coserve.jobs.manager import JobManager
from coserve.protocol.messages import Ready
from coserve.scheduling.slo import Slo
from coserve.server.adapters.served import ServedModels
from coserve.server.generation.grammar_checks import GrammarChecks
from coserve.server.observability.tracing import Tracing
from coserve.server.stored.opened import Opened
from coserve.server.tenancy.admission import Admission
from coserve.server.tenancy.keys_file import Keys
from coserve.server.tenancy.ledger import RequestEntry, RequestLedger
from coserve.server.tenancy.waiting import WaitingRequests
from coserve.server.text.prompts import Prompts
from coserve.server.text.public_prefixes import PublicPrefixes
from coserve.version import VERSION


@dataclass(frozen=True, kw_only=True)
class GenerationContext:
    """Parts of the server that requests for tokens need."""

    engine: EngineAccess
    """The engine."""
    prompts: Prompts
    """Tokenizer of the base model."""
    models: ServedModels
    """Models that requests can name."""
    jobs: Opened[JobManager]
    """Job manager; requests are refused until it is there."""
    keys: Keys
    """Keys in force, which say who is an operator."""
    ledger: RequestLedger
    """Tenant and adapter of each request."""
    admission: Admission
    """Limits of tenants on requests and tokens."""
    waiting: WaitingRequests
    """Bound on requests that wait for their first token."""
    public_prefixes: PublicPrefixes
    """Prompt prefixes whose KV cache all tenants share."""
    grammar_checks: GrammarChecks
    """Trial of grammars in a sandbox."""
    tracing: Tracing | None
    """Exporter of OpenTelemetry traces; None: off."""
    tool_call_parser: str
    """Name of the parser of tool calls; "auto": the one that fits the model's chat template."""

    @property
    def fingerprint(self) -> str:
        """OpenAI's system_fingerprint: identifies what could change the answer to a seeded
        request.
        """
        return f"coserve-{VERSION}"

    def require_ready(self) -> Ready:
        """Return the engine's description of itself.

        Raises:
            EngineGoneError: Requests cannot be answered now.
        """
        ready = self.engine.require_ready()
        if not self.prompts.is_loaded:
            raise EngineGoneError("the server is starting; try again in a few seconds")
        self.jobs.require()
        return ready

    def admit(self, tenant: str) -> Ready:
        """Return the engine's description of itself for a request of a tenant.

        Raises:
            ApiError: Too many requests wait for their first token.
            EngineGoneError: Requests cannot be answered now.
        """
        ready = self.require_ready()
        self.waiting.check(tenant)
        return ready

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
        """Send requests of one tenant to the engine; `close` must be called in any case.

        Batch work does not count as requests under way, and waits as long as it must.

        Args:
            requests: The requests, all batch work or none.
            tenant: Tenant that sends them.
            adapter: The tenant's name for the adapter; None: the base model.
            slo: SLO by which they are judged.
            reader: Tokenizer of the adapter; see `ServedModels.reader_of`.
            shown_tokens: Special tokens that the text keeps; see `TextStream`.

        Raises:
            ApiError: Too many requests wait.
            LimitError: The tenant has too many requests under way, or has used its tokens.
            EngineGoneError: There is no engine now.
            RequestError: There are stop strings, but no tokenizer.
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
            stream = self.engine.open(requests, reader.text_tokenizer, shown_tokens)
        except BaseException:
            # The stream never began; otherwise `close` gives its place back.
            self.admission.end(tenant, num_sequences=number)
            raise
        for request in requests:
            if not is_batch:
                self.waiting.begin(request.id, tenant)
            entry = RequestEntry(
                tenant=tenant,
                adapter=adapter,
                num_prompt_tokens=len(request.prompt),
                slo=slo,
                is_batch=is_batch,
            )
            self.ledger.begin(request.id, entry)
        return stream

    def _with_public_tokens(self, request: AddRequest) -> AddRequest:
        """Return a request with the length of the public prefix of its prompt."""
        number = self.public_prefixes.num_tokens(request.prompt)
        if not number:
            return request
        return structs.replace(request, params=replace(request.params, num_public_tokens=number))

    def close(self, stream: RequestStream) -> None:
        """End a stream; the engine cancels requests of it that are still running."""
        self.engine.close(stream)
        if (entry := self.ledger.find(stream.requests[0].id)) is not None:
            number = 0 if entry.is_batch else _num_sequences(stream.requests)
            self.admission.end(entry.tenant, num_sequences=number)
        for request in stream.requests:
            self.ledger.end(request.id)
            self.waiting.end(request.id)


def _num_sequences(requests: Sequence[AddRequest]) -> int:
    return sum(request.params.n for request in requests)

"""A running server as one object, and the parts of it that routes take as parameters."""

import asyncio
from dataclasses import dataclass, field
from typing import Annotated, Any, cast

from fastapi import Depends, Request

from coserve.engine_client.access import EngineAccess
from coserve.jobs.manager import JobManager
from coserve.jobs.metrics.trackers import Trackers
from coserve.server.adapters.served import ServedModels
from coserve.server.batches.runner import BatchRunner
from coserve.server.bodies.other_fields import FieldPolicy
from coserve.server.bodies.reader import BodyReader
from coserve.server.config import ServerConfig
from coserve.server.fine_tuning.archives import Merging
from coserve.server.generation.context import GenerationContext
from coserve.server.generation.grammar_checks import GrammarChecks
from coserve.server.observability.metrics import Metrics
from coserve.server.observability.readiness import Readiness
from coserve.server.observability.status import StatusBoard
from coserve.server.observability.storage import Storage
from coserve.server.observability.tracing import Tracing
from coserve.server.page.context import PageContext
from coserve.server.page.examples import Previews
from coserve.server.responses.background import BackgroundRuns
from coserve.server.responses.context import ResponsesContext
from coserve.server.stored.opened import Opened
from coserve.server.tenancy.admission import Admission
from coserve.server.tenancy.keys_file import Keys
from coserve.server.tenancy.ledger import RequestLedger
from coserve.server.tenancy.limits import TenantLimits
from coserve.server.tenancy.waiting import WaitingRequests
from coserve.server.text.prompts import Prompts
from coserve.server.text.public_prefixes import PublicPrefixes


@dataclass(kw_only=True)
class ServerContext:
    """All parts of a running server.

    Only the server's start and end use it whole. Each route takes the parts that it needs, by the
    annotations below.
    """

    config: ServerConfig
    """Options of the server."""
    link: EngineAccess
    """The engine."""
    prompts: Prompts
    """Tokenizer of the model."""
    tracing: Tracing | None = None
    """Exporter of OpenTelemetry traces; None: off."""
    trackers: Trackers | None = None
    """Writer of TensorBoard and wandb logs; None until the store is open."""
    storage: Storage | None = None
    """State of the disk and the database; None until the store is open."""
    merging: Merging = field(default_factory=Merging)
    """Merger of adapters into their model for archives."""
    ending: asyncio.Task[None] | None = None
    """Task that marks responses as failed that an earlier process left unfinished; it may wait for
    room on the disk."""

    def __post_init__(self) -> None:
        config, jobs = self.config, Opened[JobManager]()
        self.opened_jobs, self.opened_batches = jobs, Opened[BatchRunner]()
        self.fields = FieldPolicy(config.unknown_fields)
        self.bodies = BodyReader(self.fields)
        self.keys = Keys(config)
        self.ledger = RequestLedger()
        self.admission = Admission(self.keys, self.ledger)
        self.models = ServedModels(
            config.model, config.served_model_names, prompts=self.prompts, jobs=jobs
        )
        self.board = StatusBoard(self.ledger)
        self.metrics = Metrics(self.ledger, lambda: self.models.name)
        self.readiness = Readiness(self.link)
        self.generation = GenerationContext(
            engine=self.link,
            prompts=self.prompts,
            models=self.models,
            jobs=jobs,
            keys=self.keys,
            ledger=self.ledger,
            admission=self.admission,
            waiting=WaitingRequests(config.max_queued_requests),
            public_prefixes=PublicPrefixes(config.public_prefixes),
            grammar_checks=GrammarChecks(self.prompts, self.link),
            tracing=self.tracing,
            tool_call_parser=config.tool_call_parser,
        )
        self.responses = ResponsesContext(
            opened=jobs, max_bytes=config.max_response_bytes, runs=BackgroundRuns()
        )
        self.page = PageContext(
            engine=self.link,
            models=self.models,
            prompts=self.prompts,
            board=self.board,
            jobs=jobs,
            previews=Previews(self.prompts),
        )
        for listener in (
            self.board,
            self.metrics,
            self.generation.waiting,
            self.admission,
            self.readiness,
        ):
            self.link.listen(listener)
        if self.tracing is not None:
            self.link.listen(self.tracing)

    @property
    def jobs(self) -> JobManager:
        """Manager of files and jobs; EngineGoneError until the store is open."""
        return self.opened_jobs.require()

    @property
    def batches(self) -> BatchRunner:
        """Runner of batches; EngineGoneError until the store is open."""
        return self.opened_batches.require()


def part(name: str) -> Any:
    """Return the dependency of a route on the part of its server with this name."""

    # Not a plain function: FastAPI calls those in a thread of its pool.
    async def read(request: Request) -> Any:
        return getattr(request.app.state.context, name)

    return Depends(read)


async def _tenant(request: Request) -> str:
    return cast(str, request.state.tenant)


async def _is_operator(request: Request) -> bool:
    return cast(bool, request.state.is_operator)


async def _limits(request: Request) -> TenantLimits:
    context: ServerContext = request.app.state.context
    return context.keys.ring.limits_of(request.state.tenant)


# Parameters of routes: who asks, and the parts of the server that they use.
Tenant = Annotated[str, Depends(_tenant)]
IsOperator = Annotated[bool, Depends(_is_operator)]
LimitsPart = Annotated[TenantLimits, Depends(_limits)]
ConfigPart = Annotated[ServerConfig, part("config")]
EnginePart = Annotated[EngineAccess, part("link")]
KeysPart = Annotated[Keys, part("keys")]
LedgerPart = Annotated[RequestLedger, part("ledger")]
ModelsPart = Annotated[ServedModels, part("models")]
GenerationPart = Annotated[GenerationContext, part("generation")]
ResponsesPart = Annotated[ResponsesContext, part("responses")]
JobsPart = Annotated[JobManager, part("jobs")]
BatchesPart = Annotated[BatchRunner, part("batches")]
MergingPart = Annotated[Merging, part("merging")]
BoardPart = Annotated[StatusBoard, part("board")]
MetricsPart = Annotated[Metrics, part("metrics")]
ReadinessPart = Annotated[Readiness, part("readiness")]
StoragePart = Annotated[Storage | None, part("storage")]
PagePart = Annotated[PageContext, part("page")]

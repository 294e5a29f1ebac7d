"""OpenTelemetry traces of requests and optimizer steps, if an endpoint is set.

Requests follow OpenTelemetry's conventions for generative AI. A request's span has children for its
queueing, its prefill and its decoding, from the engine's records. An optimizer step's span has the
durations of its parts, not their times. Without an endpoint, no package is imported for this.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coserve.engine.commands import AddRequest
from coserve.engine.jobs.events import JobEvent
from coserve.engine.records import RequestRecord
from coserve.engine.request import Chunk
from coserve.errors import CoserveError
from coserve.protocol.messages import Ready, StepReport
from coserve.version import VERSION

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
# Operation by path, in OpenTelemetry's terms.
_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
# Fields of SamplingParams that the convention has, too.
_SAME = (
    "temperature",
    "top_p",
    "top_k",
    "max_tokens",
    "seed",
    "frequency_penalty",
    "presence_penalty",
)
_INPUT_TOKENS, _OUTPUT_TOKENS = "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"
# Milliseconds for sending the last spans at the end.
_FLUSH_MS = 3000
# Seconds for which an ended request is known.
_KEPT_S = 30.0
# The span of the request that is being answered.
_current: "ContextVar[Span | None]" = ContextVar("span", default=None)


def open_tracing(endpoint: str | None) -> "Tracing | None":
    """Return an exporter to a collector that takes OTLP over HTTP; None if there is no endpoint.

    Args:
        endpoint: URL of the collector (default: that of the environment).

    Raises:
        CoserveError: The packages for it are not installed.
    """
    endpoint = endpoint or os.environ.get(ENDPOINT_VARIABLE)
    if not endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise CoserveError(
            f"traces need OpenTelemetry: pip install 'coserve[otel]' ({error})"
        ) from None
    attributes = {"service.version": VERSION}
    if "OTEL_SERVICE_NAME" not in os.environ:
        attributes["service.name"] = "coserve"
    # `close` shuts the provider down, within a limited time.
    provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
    provider.add_span_processor(
        BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces"))
    )
    return Tracing(provider)


class Tracing:
    """Maker of spans; an `EngineListener` for the times in them."""

    def __init__(self, provider: "TracerProvider") -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("coserve", VERSION)
        self._spans: dict[str, Span] = {}  # by the engine's name of the request
        self._ended: deque[tuple[float, Sequence[str]]] = deque()

    def begin(self, path: str, headers: Mapping[str, str]) -> "Span":
        """Return the span of a new request, in the trace that its headers name."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(headers)
        attributes = {
            "http.request.method": "POST",
            "url.path": path,
            "gen_ai.provider.name": "coserve",
        }
        attributes["gen_ai.operation.name"] = _OPERATIONS[path]
        return self._tracer.start_span(
            _OPERATIONS[path],
            context=parent,
            kind=SpanKind.SERVER,
            attributes=attributes,
            record_exception=False,
        )

    def end(self, span: "Span", status: int) -> None:
        """End the span of a request.

        Args:
            span: The span.
            status: HTTP status; 0: the client left before its answer began.
        """
        from opentelemetry.trace import Status, StatusCode

        if status:
            span.set_attribute("http.response.status_code", status)
        if status >= 400:
            span.set_attribute("error.type", str(status))
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end()

    def open(self, id: str, model: str, requests: Sequence[AddRequest]) -> "TracedAnswer | None":
        """Return the recorder of a completion that is being made; None if it has no span.

        Args:
            id: Id of the answer.
            model: Model that the answer names.
            requests: Requests to the engine.
        """
        span = _current.get()
        if span is None:
            return None
        names = [request.id for request in requests]
        self._spans.update(dict.fromkeys(names, span))
        return TracedAnswer(span, id, model, requests, forget=lambda: self._forget(names))

    def _forget(self, names: Sequence[str]) -> None:
        """Forget requests after a while: the engine's records arrive a little after their ends."""
        now_s = time.monotonic()
        self._ended.append((now_s, names))
        while self._ended[0][0] < now_s - _KEPT_S:
            for name in self._ended.popleft()[1]:
                self._spans.pop(name, None)

    def close(self) -> None:
        """Send the remaining spans, within a short time."""
        self._provider.force_flush(_FLUSH_MS)
        self._provider.shutdown()

    # -- reports of the engine (EngineListener) ------------------------------------------

    def engine_ready(self, ready: Ready) -> None:
        pass

    def engine_gone(self) -> None:
        pass

    def engine_reported(self, report: StepReport) -> None:
        for record in report.records:
            if (span := self._spans.get(record.request)) is not None:
                self._take_record(record, span)
        for event in report.job_events:
            if event.kind == "step":
                self._take_step(event)

    def _take_record(self, record: RequestRecord, parent: "Span") -> None:
        """Add the three parts of a finished sequence, one after the other."""
        started_s, first_s = record.arrival_s + record.queue_s, record.arrival_s + record.ttft_s
        last_s = first_s + (record.tpot_s or 0.0) * (record.num_output_tokens - 1)
        index = {"coserve.sequence.index": record.index}
        self._add("queue", record.arrival_s, started_s, index, parent)
        self._add(
            "prefill",
            started_s,
            first_s,
            {**index, _INPUT_TOKENS: record.num_prompt_tokens},
            parent,
        )
        if record.tpot_s is not None:
            self._add(
                "decode",
                first_s,
                last_s,
                {**index, _OUTPUT_TOKENS: record.num_output_tokens},
                parent,
            )

    def _take_step(self, event: JobEvent) -> None:
        attributes: dict[str, Any] = {
            "coserve.job.id": event.job,
            "coserve.job.step": event.step,
            "coserve.job.num_tokens": event.num_tokens,
            "coserve.job.forward_s": event.seconds.forward_s,
            "coserve.job.loss_s": event.seconds.loss_s,
            "coserve.job.backward_s": event.seconds.backward_s,
            "coserve.job.update_s": event.seconds.update_s,
            "coserve.job.skipped": event.norm is None,
        }
        for name, value in (
            ("loss", event.loss),
            ("norm", event.norm),
            ("learning_rate", event.learning_rate),
        ):
            if value is not None:
                attributes[f"coserve.job.{name}"] = value
        started_s = event.now_s if event.seconds.started_s is None else event.seconds.started_s
        self._add("optimizer_step", started_s, event.now_s, attributes)

    def _add(
        self,
        name: str,
        start_s: float,
        end_s: float,
        attributes: Mapping[str, Any],
        parent: "Span | None" = None,
    ) -> None:
        """Add a span with times of the monotonic clock; without a parent, in a trace of its own."""
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        # Empty otherwise: the span of the request that is being answered is not the parent.
        context = Context() if parent is None else set_span_in_context(parent, Context())
        to_unix_ns = time.time_ns() - time.monotonic_ns()
        start_ns, end_ns = (round(seconds * 1e9) + to_unix_ns for seconds in (start_s, end_s))
        self._tracer.start_span(
            name, context=context, start_time=start_ns, attributes=attributes
        ).end(end_ns)


class TracedAnswer:
    """Recorder of a completion's attributes; `close` must be called when the answer is over."""

    def __init__(
        self,
        span: "Span",
        id: str,
        model: str,
        requests: Sequence[AddRequest],
        *,
        forget: Callable[[], None],
    ) -> None:
        self._span, self._forget = span, forget
        self._num_output = 0
        self._reasons: dict[tuple[int, int], str] = {}
        params = requests[0].params
        operation = "chat" if id.startswith("chat") else "text_completion"
        span.update_name(f"{operation} {model}")
        span.set_attributes(
            {
                "gen_ai.request.model": model,
                "gen_ai.response.model": model,
                "gen_ai.response.id": id,
                _INPUT_TOKENS: sum(len(request.prompt) for request in requests),
                **{
                    f"gen_ai.request.{name}": value
                    for name in _SAME
                    if (value := getattr(params, name)) is not None
                },
            }
        )
        if params.n > 1:
            span.set_attribute("gen_ai.request.choice.count", params.n)

    def take(self, place: int, chunks: Sequence[Chunk]) -> None:
        """Record chunks of one of its prompts."""
        for chunk in chunks:
            self._num_output += len(chunk.tokens)
            if chunk.finish_reason is not None:
                self._reasons[place, chunk.index] = chunk.finish_reason

    def close(self) -> None:
        """Write the attributes that are known at the end."""
        self._span.set_attribute(_OUTPUT_TOKENS, self._num_output)
        self._span.set_attribute(
            "gen_ai.response.finish_reasons", [self._reasons[key] for key in sorted(self._reasons)]
        )
        self._forget()


class TracingMiddleware:
    """Middleware that makes a span of each completion, from its headers to its last byte."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app, self._tracing = app, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in _OPERATIONS:
            await self._app(scope, receive, send)
            return
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        span, status = self._tracing.begin(scope["path"], headers), 0
        token = _current.set(span)

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except Exception:
            status = status or 500
            raise
        finally:
            _current.reset(token)
            self._tracing.end(span, status)

"""Traces of a real server, as a collector gets them: by the real exporter, over a socket, in OTLP's
own format."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from served import serving

from coserve.errors import CoserveError
from coserve.server.config import ServerConfig
from coserve.server.observability.tracing import open_tracing

TRACE, CLIENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACED = {"traceparent": f"00-{TRACE}-{CLIENT}-01"}
LINES = [{"prompt": f"What is {n}? ", "completion": f"It is {n}."} for n in range(4)]


class Collector:
    """What takes OTLP over HTTP, and keeps the spans."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                collector.take(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.services.add(attributes(resource.resource)["service.name"])
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: value(each.value) for each in span.attributes}


def value(given: Any) -> Any:
    kind = given.WhichOneof("value")
    return (
        [value(each) for each in given.array_value.values]
        if kind == "array_value"
        else getattr(given, kind)
    )


@pytest.fixture(scope="module")
def traced() -> Iterator[tuple[Collector, dict[str, str]]]:
    """What a server sent until it had ended, and the ids of its answers."""
    collector = Collector()
    chat = {"model": "small", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
    with serving("--otlp-endpoint", collector.url) as served:
        client = served.client()
        ids = {"whole": served.post("/v1/chat/completions", json=chat, headers=TRACED).json()["id"]}
        stream = client.completions.create(
            model="small", prompt="One", max_tokens=4, n=2, stream=True, seed=3
        )
        ids["stream"] = {chunk.id for chunk in stream}.pop()
        assert (
            served.post("/v1/chat/completions", json={**chat, "model": "nobody"}).status_code == 404
        )
        data = "".join(json.dumps(line) + "\n" for line in LINES).encode()
        job = client.fine_tuning.jobs.create(
            model="small",
            training_file=client.files.create(file=("data.jsonl", data), purpose="fine-tune").id,
            method={
                "type": "supervised",
                "supervised": {"hyperparameters": {"n_epochs": 1, "batch_size": 2}},
            },
        )
        ids["job"] = job.id
        served.wait_until(lambda: client.fine_tuning.jobs.retrieve(job.id).status == "succeeded")
    yield collector, ids
    collector.close()


def one(collector: Collector, id: str) -> Any:
    (span,) = [span for span in collector.spans if attributes(span).get("gen_ai.response.id") == id]
    return span


def children(collector: Collector, parent: Any) -> list[Any]:
    found = [span for span in collector.spans if span.parent_span_id == parent.span_id]
    assert all(span.trace_id == parent.trace_id for span in found)
    return found


def test_a_completion_joins_its_clients_trace_and_says_what_it_was(traced):
    collector, ids = traced
    span = one(collector, ids["whole"])
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, CLIENT)
    assert span.name == "chat small" and span.kind == span.SPAN_KIND_SERVER
    said = attributes(span)
    assert said["gen_ai.operation.name"] == "chat" and said["gen_ai.request.model"] == "small"
    assert said["gen_ai.request.max_tokens"] == 5 and said["http.response.status_code"] == 200
    assert said["gen_ai.usage.input_tokens"] > 0 and 1 <= said["gen_ai.usage.output_tokens"] <= 5
    assert said["gen_ai.response.finish_reasons"] in (["length"], ["stop"])
    assert collector.services == {"coserve"}
    queue, prefill, decode = sorted(
        children(collector, span), key=lambda each: each.start_time_unix_nano
    )
    assert [each.name for each in (queue, prefill, decode)] == ["queue", "prefill", "decode"]
    moments = [span.start_time_unix_nano, queue.start_time_unix_nano, prefill.start_time_unix_nano]
    moments += [decode.start_time_unix_nano, decode.end_time_unix_nano]
    assert moments == sorted(moments), "one after the other"
    assert queue.end_time_unix_nano == pytest.approx(prefill.start_time_unix_nano, abs=1e6)
    assert attributes(prefill)["gen_ai.usage.input_tokens"] == said["gen_ai.usage.input_tokens"]
    assert attributes(decode)["gen_ai.usage.output_tokens"] == said["gen_ai.usage.output_tokens"]


def test_a_stream_has_the_pieces_of_all_its_sequences(traced):
    collector, ids = traced
    span = one(collector, ids["stream"])
    said = attributes(span)
    assert span.name == "text_completion small" and not span.parent_span_id
    assert said["gen_ai.request.choice.count"] == 2 and said["gen_ai.request.seed"] == 3
    assert len(said["gen_ai.response.finish_reasons"]) == 2
    prompts = [each for each in children(collector, span) if each.name == "prefill"]
    assert sorted(attributes(each)["coserve.sequence.index"] for each in prompts) == [0, 1]


def test_an_error_is_said(traced):
    collector, _ = traced
    (span,) = [
        each for each in collector.spans if attributes(each).get("http.response.status_code") == 404
    ]
    assert attributes(span)["error.type"] == "404"


def test_optimizer_steps_say_what_their_pieces_took(traced):
    collector, ids = traced
    steps = [each for each in collector.spans if each.name == "optimizer_step"]
    assert [attributes(each)["coserve.job.step"] for each in steps] == [1, 2]
    for span in steps:
        said = attributes(span)
        assert said["coserve.job.id"] == ids["job"] and not said["coserve.job.skipped"]
        pieces_s = [
            said[f"coserve.job.{name}_s"] for name in ("forward", "loss", "backward", "update")
        ]
        assert all(seconds > 0 for seconds in pieces_s)
        assert sum(pieces_s) <= (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 + 1e-3
        assert said["coserve.job.loss"] > 0 and said["coserve.job.num_tokens"] > 0
    assert steps[0].end_time_unix_nano <= steps[1].start_time_unix_nano + 1e6


@pytest.mark.long
def test_without_an_endpoint_nothing_of_it_is_imported(monkeypatch):
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert open_tracing(None) is None
    code = (
        "import coserve.server.serve, coserve.server.observability.tracing as tracing, sys\n"
        "assert tracing.open_tracing(None) is None\n"
        "assert not [name for name in sys.modules if name.startswith(('opentelemetry.sdk', "
        "'opentelemetry.exporter'))]"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_the_environment_names_an_endpoint_too(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(CoserveError, match=r"pip install 'coserve\[otel\]'"):
        open_tracing(None)


def test_an_endpoint_is_a_url():
    with pytest.raises(ValueError, match="otlp_endpoint must be a URL"):
        ServerConfig(otlp_endpoint="localhost:4318")

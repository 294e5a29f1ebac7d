"""Prometheus metrics of the server at `/metrics`; docs/grafana-dashboard.json shows them."""

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.registry import Collector

from coserve.engine.records import EngineStats, RequestRecord
from coserve.engine.request import Chunk
from coserve.protocol.messages import Ready, StepReport
from coserve.server.observability.vllm_metrics import VllmMetrics
from coserve.server.tenancy.ledger import RequestLedger

_STEPS = (1, 2, 3, 5, 7.5)
# From half a millisecond, which a small model's step takes, to a minute.
_BUCKETS = (5e-4, *(step * 10**power for power in range(-3, 2) for step in _STEPS))
_SHARES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)
_LENGTHS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
_WHO = ("adapter", "tenant")


class Metrics:
    """An `EngineListener` that keeps the metrics."""

    def __init__(self, ledger: RequestLedger, model: Callable[[], str] = lambda: "") -> None:
        """Create the metrics.

        Args:
            ledger: Tenant and adapter of each request.
            model: Function that returns the name of the served model.
        """
        self._ledger = ledger
        self._last_s: dict[tuple[str, int], float] = {}  # when each sequence had its last token
        self._num_tuned = 0  # by the current engine
        self.registry = registry = CollectorRegistry()

        def histogram(
            name: str,
            help: str,
            labels: tuple[str, ...] = (),
            buckets: tuple[float, ...] = _BUCKETS,
        ) -> Histogram:
            return Histogram(f"coserve_{name}", help, labels, registry=registry, buckets=buckets)

        def counter(name: str, help: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"coserve_{name}", help, labels, registry=registry)

        def gauge(name: str, help: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"coserve_{name}", help, labels, registry=registry)

        self._ttft = histogram(
            "ttft_seconds", "Time from a request's arrival to its first token.", _WHO
        )
        self._tpot = histogram("tpot_seconds", "Mean time per later token of a request.", _WHO)
        self._gap = histogram("token_gap_seconds", "Time between two tokens of a request.", _WHO)
        self._finished = counter("requests_finished", "Number of finished sequences.", _WHO)
        self._attained = counter(
            "requests_attained", "Number of finished sequences that met both SLOs.", _WHO
        )
        self._ended = counter(
            "sequences_ended",
            "Number of ended sequences by reason: stop, length, cancelled, error.",
            ("reason",),
        )
        self._whole = histogram(
            "request_seconds", "Time from a request's arrival to its last token."
        )
        self._queue = histogram(
            "request_queue_seconds", "Time from a request's arrival to its first step."
        )
        self._prefill = histogram(
            "request_prefill_seconds", "Time from a request's first step to its first token."
        )
        self._decode = histogram(
            "request_decode_seconds", "Time from a request's first token to its last."
        )
        self._prompt_tokens = histogram(
            "request_prompt_tokens", "Number of prompt tokens per request.", (), _LENGTHS
        )
        self._generated_tokens = histogram(
            "request_generated_tokens", "Number of generated tokens per sequence.", (), _LENGTHS
        )
        self._tokens = counter(
            "tokens",
            "Number of tokens by kind: prompt, cached (part of prompt), generated.",
            ("kind", *_WHO),
        )
        self._tuned = counter("tuned_tokens", "Number of tokens processed by fine-tuning.")
        self._job_tokens = counter(
            "job_trained_tokens",
            "Number of tokens with a loss that a job has trained on.",
            ("job",),
        )
        self._job_loss = gauge("job_loss", "Mean loss of a job's last optimizer step.", ("job",))
        self._job_step = gauge(
            "job_step", "Number of optimizer steps that a job has made.", ("job",)
        )
        self._running = gauge("requests_running", "Number of running sequences.")
        self._waiting = gauge("requests_waiting", "Number of sequences that wait for memory.")
        self._batch = gauge(
            "batch_requests",
            "Number of sequences of batches by state: running, waiting.",
            ("state",),
        )
        self._jobs = gauge(
            "jobs", "Number of unfinished jobs in the engine, including paused ones."
        )
        self._company = gauge(
            "job_company",
            "Number of other jobs whose last tasklets shared a batch with the job's. The group is "
            "named after its first job.",
            ("job", "group"),
        )
        self._pages = gauge("pages", "Number of pages in the pool by owner.", ("owner",))
        self._preemptions = gauge(
            "preemptions", "Number of preempted requests since the engine started."
        )
        self._swapped = gauge(
            "swapped_pages",
            "Number of pages swapped to the host (out) and back (in) since the engine started.",
            ("direction",),
        )
        self._moved = gauge(
            "moved_pages",
            "Number of pages of requests that were copied elsewhere to give jobs contiguous pages.",
        )
        self._host_pages = gauge(
            "host_pages_used", "Number of pages on the host in use by preempted requests and jobs."
        )
        self._grammars = gauge(
            "grammar_bytes",
            "Bytes of compiled grammars and their growth, by the tenant that used each last.",
            ("tenant",),
        )
        self._give_back = gauge(
            "give_back_seconds",
            "Longest recent wait of a step for pages to be freed: pages swapped to the host, or "
            "weights of --trainable-model.",
        )
        self._handed = gauge(
            "handover_prompts",
            "Number of prompts since the engine started whose KV cache came from a prefill "
            "instance (whole), or was computed by the decode instance after all (not).",
            ("outcome",),
        )
        self._handed_pages = gauge(
            "handover_pages", "Number of pages handed over since the engine started."
        )
        self._partners = gauge(
            "handover_partners", "Number of connected prefill or decode instances."
        )
        self._weight_bytes = gauge(
            "weight_window_copied_bytes",
            "Bytes of weights of --trainable-model copied into their window since the engine "
            "started.",
        )
        self._weights_wait = gauge(
            "weight_window_wait_seconds",
            "Time that steps have waited for weights of --trainable-model since the engine "
            "started.",
        )
        self._slos_clamped = gauge(
            "slos_clamped",
            "Number of requests since the engine started whose SLO was relaxed because the device "
            "cannot meet it.",
        )
        self._packs_dropped = gauge(
            "packs_dropped",
            "Number of packs of jobs discarded to free memory since the engine started.",
        )
        self._margin = gauge(
            "prediction_margin",
            "Relative margin by which most recent steps stayed within their predicted time.",
        )
        self._step = histogram("step_seconds", "Duration of an engine step.")
        self._error = histogram(
            "step_prediction_error",
            "Relative error of the predicted duration of a step.",
            (),
            _SHARES,
        )
        self._rows = counter("step_rows", "Number of rows in steps by kind.", ("kind",))
        self._by_vllms_names = CollectorRegistry()
        self._by_vllms_names.register(VllmMetrics(registry, model))
        self._ranks = gauge("ranks", "Number of ranks, the processes that share the model.")
        self._rank_memory = gauge(
            "rank_memory_bytes",
            "Bytes that a rank holds on its device; on a CPU, its resident memory.",
            ("rank",),
        )
        self._rank_wait = gauge(
            "rank_wait_seconds",
            "Time that a rank has waited for others in collective operations since the engine "
            "started.",
            ("rank",),
        )
        self._ready = gauge("engine_ready", "1 if the engine takes requests, else 0.")
        self._deaths = counter(
            "engine_deaths", "Number of times that the engine died and was restarted."
        )

    def text(self, tenant: str | None = None) -> bytes:
        """Return the metrics in Prometheus's text format.

        Args:
            tenant: Tenant whose samples are returned; None: all.
        """
        if tenant is not None:
            return generate_latest(_of_tenant(self.registry, tenant))
        return generate_latest(self.registry) + generate_latest(self._by_vllms_names)

    # -- reports of the engine (EngineListener) ------------------------------------------

    def engine_ready(self, ready: Ready) -> None:
        self._ready.set(1)
        self._ranks.set(ready.num_ranks)

    def engine_gone(self) -> None:
        self._ready.set(0)
        self._deaths.inc()
        self._last_s.clear()
        self._num_tuned = 0
        for each in (self._running, self._waiting, self._jobs, self._partners):
            each.set(0)
        self._batch.clear()
        self._company.clear()
        self._ranks.set(0)
        self._rank_memory.clear()
        self._rank_wait.clear()

    def engine_reported(self, report: StepReport) -> None:
        now_s = time.monotonic()
        for chunk in report.chunks:
            self._take_chunk(chunk, now_s)
        for record in report.records:
            self._take_record(record)
        for step in report.steps:
            self._step.observe(step.step_s)
            if step.step_s:
                self._error.observe(abs(step.predicted_s - step.step_s) / step.step_s)
            for kind in ("decode", "prefill", "window", "backward"):
                self._rows.labels(kind).inc(getattr(step, f"{kind}_rows"))
        for event in report.job_events:
            if event.kind == "step":
                self._job_tokens.labels(event.job).inc(event.num_trained)
                self._job_loss.labels(event.job).set(
                    event.loss if event.loss is not None else float("nan")
                )
                self._job_step.labels(event.job).set(event.step)
        if report.stats is not None:
            self._take_stats(report.stats)

    def _take_chunk(self, chunk: Chunk, now_s: float) -> None:
        who = self._who(chunk.request)
        key = (chunk.request, chunk.index)
        last_s = self._last_s.pop(key, None)
        if chunk.tokens:
            self._tokens.labels("generated", *who).inc(len(chunk.tokens))
            # Nobody waits for the tokens of batch work.
            if last_s is not None and not self._is_batch(chunk.request):
                self._gap.labels(*who).observe(now_s - last_s)
        if chunk.finish_reason is None:
            self._last_s[key] = now_s
            return
        self._ended.labels(chunk.finish_reason).inc()
        if chunk.index == 0:
            self._tokens.labels("cached", *who).inc(chunk.num_cached_tokens)
            if (entry := self._ledger.find(chunk.request)) is not None:
                self._tokens.labels("prompt", *who).inc(entry.num_prompt_tokens)

    def _take_record(self, record: RequestRecord) -> None:
        who = self._who(record.request)
        self._ttft.labels(*who).observe(record.ttft_s)
        if record.tpot_s is not None:
            self._tpot.labels(*who).observe(record.tpot_s)
        decode_s = 0.0 if record.tpot_s is None else record.tpot_s * (record.num_output_tokens - 1)
        self._whole.observe(record.ttft_s + decode_s)
        self._queue.observe(record.queue_s)
        self._prefill.observe(max(0.0, record.ttft_s - record.queue_s))
        self._decode.observe(decode_s)
        self._prompt_tokens.observe(record.num_prompt_tokens)
        self._generated_tokens.observe(record.num_output_tokens)
        self._finished.labels(*who).inc()
        self._attained.labels(*who).inc(record.attained)

    def _take_stats(self, stats: EngineStats) -> None:
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._batch.labels("running").set(stats.num_batch_running)
        self._batch.labels("waiting").set(stats.num_batch_waiting)
        self._jobs.set(stats.num_jobs)
        self._preemptions.set(stats.num_preemptions)
        self._swapped.labels("out").set(stats.num_swapped_out)
        self._swapped.labels("in").set(stats.num_swapped_in)
        self._moved.set(stats.num_pages_moved)
        self._host_pages.set(stats.num_host_pages_used)
        self._give_back.set(stats.give_back_s)
        self._grammars.clear()  # drops tenants that have none now
        for tenant, num_bytes in stats.grammar_bytes_by_tenant.items():
            self._grammars.labels(tenant).set(num_bytes)
        if stats.handover is not None:
            self._handed.labels("whole").set(stats.handover.num_handed_over)
            self._handed.labels("not").set(stats.handover.num_not_handed_over)
            self._handed_pages.set(stats.handover.num_pages)
            self._partners.set(stats.handover.num_partners)
        self._weight_bytes.set(stats.num_weight_bytes_copied)
        self._weights_wait.set(stats.weights_wait_s)
        self._slos_clamped.set(stats.num_slos_clamped)
        self._packs_dropped.set(stats.num_packs_dropped)
        self._margin.set(stats.margin)
        for rank, state in enumerate(stats.ranks):
            self._rank_memory.labels(str(rank)).set(state.memory_bytes)
            self._rank_wait.labels(str(rank)).set(state.waited_s)
        # The engine counts from its own start, with which `_num_tuned` is set back.
        self._tuned.inc(max(0, stats.num_tokens_trained - self._num_tuned))
        self._num_tuned = stats.num_tokens_trained
        self._company.clear()  # drops jobs that have none now
        for group in stats.joined_jobs:
            for job in group:
                self._company.labels(job, group[0]).set(len(group) - 1)
        self._pages.clear()  # drops owners that have none now
        for owner, number in {**stats.num_pages_by_owner, "free": stats.num_pages_free}.items():
            self._pages.labels(owner).set(number)

    def _is_batch(self, request: str) -> bool:
        """Return whether a request is batch work."""
        entry = self._ledger.find(request)
        return entry is not None and entry.is_batch

    def _who(self, request: str) -> tuple[str, str]:
        """Return adapter and tenant of a request, the values of the labels `_WHO`."""
        entry = self._ledger.find(request)
        return (entry.adapter or "", entry.tenant) if entry is not None else ("", "")


class _Own(Collector):
    """Collector of the samples of another registry that have a tenant's label."""

    def __init__(self, registry: CollectorRegistry, tenant: str) -> None:
        self._registry, self._tenant = registry, tenant

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            own = [
                sample for sample in metric.samples if sample.labels.get("tenant") == self._tenant
            ]
            if own:
                metric.samples = own
                yield metric


def _of_tenant(registry: CollectorRegistry, tenant: str) -> CollectorRegistry:
    own = CollectorRegistry()
    own.register(_Own(registry, tenant))
    return own

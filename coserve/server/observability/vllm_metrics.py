"""Metrics under vLLM's names, so that its dashboards show this server, too.

Nothing is measured twice: at each scrape, `coserve_…` metrics are summed over tenants and adapters,
and given under these names (https://docs.vllm.ai/en/stable/design/metrics/).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Sample

_LABELS = ("model_name", "engine")
_HISTOGRAMS = {
    "time_to_first_token_seconds": "coserve_ttft_seconds",
    "time_per_output_token_seconds": "coserve_token_gap_seconds",
    "inter_token_latency_seconds": "coserve_token_gap_seconds",
    "request_time_per_output_token_seconds": "coserve_tpot_seconds",
    "e2e_request_latency_seconds": "coserve_request_seconds",
    "request_queue_time_seconds": "coserve_request_queue_seconds",
    "request_prefill_time_seconds": "coserve_request_prefill_seconds",
    "request_decode_time_seconds": "coserve_request_decode_seconds",
    "request_prompt_tokens": "coserve_request_prompt_tokens",
    "request_generation_tokens": "coserve_request_generated_tokens",
}
_GAUGES = {
    "num_requests_running": "coserve_requests_running",
    "num_requests_waiting": "coserve_requests_waiting",
}
# vLLM's counters of tokens, with the value of the label `kind`.
_TOKENS = {
    "prompt_tokens": "prompt",
    "generation_tokens": "generated",
    "prefix_cache_queries": "prompt",
    "prefix_cache_hits": "cached",
}
_REASONS = {"cancelled": "abort"}


class VllmMetrics(Collector):
    """Collector that translates another registry."""

    def __init__(self, registry: CollectorRegistry, model: Callable[[], str]) -> None:
        """Translate a registry.

        Args:
            registry: Registry of `coserve_…` metrics.
            model: Function that returns the value of the label `model_name`.
        """
        self._registry, self._model = registry, model

    def collect(self) -> Iterator[Metric]:
        samples: dict[str, list[Sample]] = defaultdict(list)
        for metric in self._registry.collect():
            for sample in metric.samples:
                samples[sample.name].append(sample)
        who = [self._model(), "0"]
        for name, own in _HISTOGRAMS.items():
            yield _histogram(name, own, samples, who)
        for name, own in _GAUGES.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", f"{own}.", labels=_LABELS)
            gauge.add_metric(who, sum(sample.value for sample in samples[own]))
            yield gauge
        usage = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc", "Share of the pages that are taken.", labels=_LABELS
        )
        usage.add_metric(who, _share_taken(samples["coserve_pages"]))
        yield usage
        for name, kind in _TOKENS.items():
            tokens = CounterMetricFamily(
                f"vllm:{name}", f"coserve_tokens of kind {kind}.", labels=_LABELS
            )
            own_tokens = samples["coserve_tokens_total"]
            tokens.add_metric(
                who, sum(sample.value for sample in own_tokens if sample.labels["kind"] == kind)
            )
            yield tokens
        preemptions = CounterMetricFamily(
            "vllm:num_preemptions", "coserve_preemptions.", labels=_LABELS
        )
        preemptions.add_metric(who, sum(sample.value for sample in samples["coserve_preemptions"]))
        yield preemptions
        ended = CounterMetricFamily(
            "vllm:request_success", "coserve_sequences_ended.", labels=(*_LABELS, "finished_reason")
        )
        for sample in samples["coserve_sequences_ended_total"]:
            reason = sample.labels["reason"]
            ended.add_metric([*who, _REASONS.get(reason, reason)], sample.value)
        yield ended


def _histogram(name: str, own: str, samples: dict[str, list[Sample]], who: list[str]) -> Metric:
    buckets: dict[str, float] = defaultdict(float)
    for sample in samples[f"{own}_bucket"]:
        buckets[sample.labels["le"]] += sample.value
    family = HistogramMetricFamily(f"vllm:{name}", f"{own}.", labels=_LABELS)
    if buckets:
        total = sum(sample.value for sample in samples[f"{own}_sum"])
        family.add_metric(who, sorted(buckets.items(), key=lambda each: float(each[0])), total)
    return family


def _share_taken(pages: list[Sample]) -> float:
    by_owner = {sample.labels["owner"]: sample.value for sample in pages}
    total = sum(by_owner.values())
    return 1 - by_owner.get("free", 0.0) / total if total else 0.0

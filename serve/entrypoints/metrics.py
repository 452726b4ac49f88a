"""GET /metrics: Prometheus text from engine.stats and the HTTP counters. No label value comes from a client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from serve.config import CacheConfig, field_names
from serve.engine.stats import EngineStats
from serve.entrypoints.app_state import AppState
from serve.entrypoints.gate import DURATION_BUCKETS
from serve.wire.frontend import Ready

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
ENGINE: Final = "0"
_LABELS: Final = ("model_name", "engine")
_REQUEST_TYPES: Final = ("chat_completions", "responses", "other")
_HELP: Final = {
    "request_prompt_tokens": "Prompt tokens of finished requests.",
    "request_generation_tokens": "Generated tokens of finished requests.",
    "request_max_num_generation_tokens": "Most generated tokens over the choices of a request.",
    "request_params_max_tokens": "max_tokens of finished requests.",
    "request_prefill_kv_computed_tokens": "Prompt tokens computed, not taken from the prefix cache.",
    "iteration_tokens_total": "Tokens computed in a step, prompt and generated.",
    "request_params_n": "n of finished requests.",
    "time_to_first_token_seconds": "Seconds from arrival to the first token.",
    "inter_token_latency_seconds": "Seconds between outputs of a request.",
    "request_time_per_output_token_seconds": "Mean seconds per output token after the first.",
    "e2e_request_latency_seconds": "Seconds from arrival to the end.",
    "request_queue_time_seconds": "Seconds waiting for the first schedule.",
    "request_inference_time_seconds": "Seconds from the first schedule to the last token.",
    "request_prefill_time_seconds": "Seconds from the first schedule to the first token.",
    "request_decode_time_seconds": "Seconds from the first to the last token.",
}


class ServerCollector:
    """Reads the live numbers whenever a scrape asks."""

    def __init__(self, state: AppState) -> None:
        self._state = state
        self._prefix = state.config.server.metrics_prefix
        self._labels = (state.model_names[0], ENGINE)

    def collect(self) -> Iterator[Metric]:
        """Give all metric families."""
        services = self._state.services
        if services is not None and not self._state.config.server.disable_log_stats:
            yield from self._engine(services.llm.stats)
            yield self._cache_config(services.ready)
            yield self._tool_parsers()
        yield from self._http()

    def _engine(self, stats: EngineStats) -> Iterator[Metric]:
        gauges, counters = stats.gauges, stats.counters
        yield self._gauge("num_requests_running", "Requests in the running batch.", gauges.num_requests_running)
        yield self._gauge("num_requests_waiting", "Requests waiting.", gauges.num_requests_waiting)
        by_reason = {"capacity": gauges.waiting_capacity, "deferred": gauges.waiting_deferred}
        yield self._labelled_gauge(
            "num_requests_waiting_by_reason", "Requests waiting, by reason.", "reason", by_reason
        )
        yield self._gauge("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", gauges.kv_cache_usage_perc)
        for name, text, value in (
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", counters.prefix_cache_queries),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", counters.prefix_cache_hits),
            ("num_preemptions", "Preemptions.", counters.num_preemptions),
            ("prompt_tokens", "Prompt tokens.", counters.prompt_tokens),
            ("prompt_tokens_cached", "Prompt tokens from the prefix cache.", counters.prompt_tokens_cached),
            ("generation_tokens", "Generated tokens.", counters.generation_tokens),
        ):
            yield self._counter(name, text, value)
        yield self._labelled_counter(
            "prompt_tokens_by_source", "Prompt tokens by source.", "source", stats.prompt_tokens_by_source
        )
        yield self._labelled_counter(
            "request_success", "Finished requests by reason.", "finished_reason", counters.request_success
        )
        for name, histogram in stats.histograms.items():
            yield self._histogram(name, histogram.buckets, histogram.counts, histogram.sum)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(self._prefix + name, text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _labelled_gauge(self, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        family = GaugeMetricFamily(self._prefix + name, text, labels=(*_LABELS, label))
        for key, value in values.items():
            family.add_metric((*self._labels, key), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(self._prefix + name, text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _labelled_counter(self, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        family = CounterMetricFamily(self._prefix + name, text, labels=(*_LABELS, label))
        for key, value in values.items():
            family.add_metric((*self._labels, key), value)
        return family

    def _histogram(self, name: str, buckets: Sequence[float], counts: Sequence[int], total: float) -> Metric:
        family = HistogramMetricFamily(self._prefix + name, _HELP[name], labels=_LABELS)
        family.add_metric(self._labels, _cumulative(buckets, counts), sum_value=total)
        return family

    def _cache_config(self, ready: Ready) -> Metric:
        cache = self._state.config.engine.cache
        values = {name: str(getattr(cache, name)) for name in field_names(CacheConfig) if name != "prefix_cache_seed"}
        values["num_gpu_blocks"] = str(ready.num_gpu_blocks)
        family = GaugeMetricFamily(self._prefix + "cache_config_info", "KV cache settings.", labels=(*_LABELS, *values))
        family.add_metric((*self._labels, *values.values()), 1)
        return family

    def _http(self) -> Iterator[Metric]:
        stats = self._state.http
        requests = CounterMetricFamily("http_requests", "HTTP requests.", labels=("handler", "method", "status"))
        for key, count in stats.requests.items():
            requests.add_metric(key, count)
        yield requests
        durations = HistogramMetricFamily(
            "http_request_duration_seconds", "Seconds from request to the end of its answer.", labels=("handler",)
        )
        for route, counts in stats.durations.items():
            durations.add_metric((route,), _cumulative(DURATION_BUCKETS, counts), sum_value=stats.duration_sums[route])
        yield durations

    def _tool_parsers(self) -> Metric:
        """Give how many answers were searched for tool calls; every combination is there from the start."""
        family = CounterMetricFamily(
            self._prefix + "tool_call_parser_invocations",
            "Answers searched for tool calls.",
            labels=("model_name", "mode", "outcome", "request_type"),
        )
        counts = self._state.http.tool_parsers
        for key in product(("streaming", "non_streaming"), ("tool_call", "no_tool_call"), _REQUEST_TYPES):
            family.add_metric((self._labels[0], *key), counts.get(key, 0))
        return family


def _cumulative(buckets: Sequence[float], counts: Iterable[int]) -> list[tuple[str, float]]:
    """Give Prometheus buckets: upper bound as text and the count up to it, +Inf last."""
    rows: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip((*(str(bucket) for bucket in buckets), "+Inf"), counts, strict=True):
        total += count
        rows.append((bound, total))
    return rows


def render(state: AppState) -> bytes:
    """Give the text of a scrape."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ServerCollector(state))
    return generate_latest(registry)

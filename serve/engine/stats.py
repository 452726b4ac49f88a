"""Iteration and request statistics of one replica, as plain numbers; entrypoints/metrics.py turns them into text."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from serve.wire.frontend import EngineCoreEvent, EventType, FinishReason, PrefillStats, SchedulerStats

log = logging.getLogger(__name__)

LOG_PERIOD: Final = 10.0  # seconds between two rate lines
_HIT_RATE_WINDOW: Final = 6  # periods

# fmt: off
_TTFT_BUCKETS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)
_TOKEN_TIME_BUCKETS: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
_LATENCY_BUCKETS: Final = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)
# fmt: on
_ITERATION_BUCKETS: Final = (1.0, *(float(2**power) for power in range(3, 15)))
_N_BUCKETS: Final = (1.0, 2.0, 5.0, 10.0, 20.0)


def length_buckets(max_model_len: int) -> tuple[float, ...]:
    """Give 1, 2, 5, 10, 20, 50, ... up to the longest sequence."""
    buckets: list[float] = []
    scale = 1
    while scale <= max_model_len:
        buckets.extend(float(step * scale) for step in (1, 2, 5) if step * scale <= max_model_len)
        scale *= 10
    return tuple(buckets)


class Histogram:
    """Counts per bucket: counts[i] holds values <= buckets[i] and above the bucket before; the last is unbounded."""

    __slots__ = ("buckets", "counts", "sum")

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self.buckets = buckets
        self.counts = [0] * (len(buckets) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.buckets, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(slots=True)
class RequestTimes:
    """Moments of one engine request. arrival is this process's monotonic time, the others the engine's; 0 = not yet."""

    arrival: float
    num_prompt_tokens: int
    max_tokens: int
    num_generated: int = 0
    queued: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0


@dataclass(slots=True)
class Counters:
    """Monotonic counts; names are the metric names."""

    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    generation_tokens: int = 0
    request_success: dict[str, int] = field(default_factory=lambda: {str(reason): 0 for reason in FinishReason})


@dataclass(slots=True)
class Gauges:
    """Values of now; num_requests_waiting is the sum of the two reasons."""

    num_requests_running: int = 0
    waiting_capacity: int = 0
    waiting_deferred: int = 0
    kv_cache_usage_perc: float = 0.0

    @property
    def num_requests_waiting(self) -> int:
        return self.waiting_capacity + self.waiting_deferred


class EngineStats:
    """Everything /metrics and the rate line show. Belongs to the event loop's thread."""

    def __init__(self, max_model_len: int) -> None:
        lengths = length_buckets(max_model_len)
        self.counters = Counters()
        self.gauges = Gauges()
        self.histograms = {
            "request_prompt_tokens": Histogram(lengths),
            "request_generation_tokens": Histogram(lengths),
            "request_max_num_generation_tokens": Histogram(lengths),
            "request_params_max_tokens": Histogram(lengths),
            "request_prefill_kv_computed_tokens": Histogram(lengths),
            "iteration_tokens_total": Histogram(_ITERATION_BUCKETS),
            "request_params_n": Histogram(_N_BUCKETS),
            "time_to_first_token_seconds": Histogram(_TTFT_BUCKETS),
            "inter_token_latency_seconds": Histogram(_TOKEN_TIME_BUCKETS),
            "request_time_per_output_token_seconds": Histogram(_TOKEN_TIME_BUCKETS),
            "e2e_request_latency_seconds": Histogram(_LATENCY_BUCKETS),
            "request_queue_time_seconds": Histogram(_LATENCY_BUCKETS),
            "request_inference_time_seconds": Histogram(_LATENCY_BUCKETS),
            "request_prefill_time_seconds": Histogram(_LATENCY_BUCKETS),
            "request_decode_time_seconds": Histogram(_LATENCY_BUCKETS),
        }
        self._inter_token = self.histograms["inter_token_latency_seconds"]
        self._iteration_tokens = 0

    @property
    def prompt_tokens_by_source(self) -> dict[str, int]:
        """Prompt tokens by where their keys and values came from."""
        cached = self.counters.prompt_tokens_cached
        return {
            "local_compute": self.counters.prompt_tokens - cached,
            "local_cache_hit": cached,
            "external_kv_transfer": 0,
        }

    def on_scheduler_stats(self, stats: SchedulerStats) -> None:
        """Take over the engine's gauges and add its increments."""
        gauges, counters = self.gauges, self.counters
        gauges.num_requests_running = stats.num_running_reqs
        gauges.waiting_capacity = stats.num_waiting_reqs
        gauges.waiting_deferred = stats.num_deferred_reqs
        gauges.kv_cache_usage_perc = stats.kv_cache_usage
        counters.prefix_cache_queries += stats.prefix_cache_queries
        counters.prefix_cache_hits += stats.prefix_cache_hits
        counters.num_preemptions += stats.num_preemptions

    def on_engine_gone(self) -> None:
        """Nothing runs any more."""
        self.gauges = Gauges()

    def on_events(self, times: RequestTimes, events: list[EngineCoreEvent]) -> None:
        """Note when a request was queued and first scheduled."""
        for event in events:
            if event.type == EventType.QUEUED:
                times.queued = event.timestamp
            elif event.type == EventType.SCHEDULED and not times.scheduled:
                times.scheduled = event.timestamp

    def on_prefill(self, prefill: PrefillStats) -> None:
        """Count a prompt; called with its first output."""
        computed = prefill.num_prompt_tokens - prefill.num_cached_tokens
        self.counters.prompt_tokens += prefill.num_prompt_tokens
        self.counters.prompt_tokens_cached += prefill.num_cached_tokens
        self.histograms["request_prefill_kv_computed_tokens"].observe(computed)
        self._iteration_tokens += computed

    def on_tokens(self, times: RequestTimes, num_tokens: int, timestamp: float) -> None:
        """Count the new tokens of one output; timestamp is the engine's."""
        times.num_generated += num_tokens
        self.counters.generation_tokens += num_tokens
        self._iteration_tokens += num_tokens
        if times.last_token:
            self._inter_token.observe(timestamp - times.last_token)
        else:
            times.first_token = timestamp
            self.histograms["time_to_first_token_seconds"].observe(time.monotonic() - times.arrival)
        times.last_token = timestamp

    def on_iteration_end(self) -> None:
        """Close one message's sum of computed prompt and generated tokens."""
        if self._iteration_tokens:
            self.histograms["iteration_tokens_total"].observe(self._iteration_tokens)
            self._iteration_tokens = 0

    def on_finished(self, times: RequestTimes, reason: FinishReason) -> None:
        """Count an engine request that ended, for whatever reason."""
        self.counters.request_success[str(reason)] += 1
        observe = self.histograms
        observe["request_prompt_tokens"].observe(times.num_prompt_tokens)
        observe["request_generation_tokens"].observe(times.num_generated)
        observe["request_params_max_tokens"].observe(times.max_tokens)
        observe["e2e_request_latency_seconds"].observe(time.monotonic() - times.arrival)
        if times.queued and times.scheduled:
            observe["request_queue_time_seconds"].observe(times.scheduled - times.queued)
        if not times.first_token:
            return
        decode = times.last_token - times.first_token
        observe["request_decode_time_seconds"].observe(decode)
        if times.scheduled:
            observe["request_prefill_time_seconds"].observe(times.first_token - times.scheduled)
            observe["request_inference_time_seconds"].observe(times.last_token - times.scheduled)
        if times.num_generated > 1:
            observe["request_time_per_output_token_seconds"].observe(decode / (times.num_generated - 1))

    def on_client_request_finished(self, n: int, max_num_generated: int) -> None:
        """Count a client's request, whatever its number of choices."""
        self.histograms["request_params_n"].observe(n)
        self.histograms["request_max_num_generation_tokens"].observe(max_num_generated)


class RateLine:
    """The line each LOG_PERIOD: throughput, queue, cache. One more at info after work stops, then debug."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats
        self._last_time = time.monotonic()
        self._last_prompt = 0
        self._last_generation = 0
        self._last_preemptions = 0
        self._was_idle = True
        self._hits: deque[tuple[int, int]] = deque([(0, 0)], maxlen=_HIT_RATE_WINDOW + 1)

    def write(self, now: float) -> None:
        """Log what happened since the last call; now is monotonic."""
        counters, gauges = self._stats.counters, self._stats.gauges
        elapsed = max(now - self._last_time, 1e-6)
        prompt = (counters.prompt_tokens - self._last_prompt) / elapsed
        generation = (counters.generation_tokens - self._last_generation) / elapsed
        is_idle = not (prompt or generation or gauges.num_requests_running or gauges.num_requests_waiting)
        parts = [
            f"prompt={prompt:.1f} tok/s generation={generation:.1f} tok/s running={gauges.num_requests_running}",
            f"waiting={gauges.num_requests_waiting} kv_cache={gauges.kv_cache_usage_perc:.1%}",
            f"prefix_hits={self._hit_rate():.1%}",
        ]
        if gauges.waiting_deferred:
            parts.append(f"deferred={gauges.waiting_deferred}")
        if counters.num_preemptions > self._last_preemptions:
            parts.append(f"preemptions={counters.num_preemptions - self._last_preemptions}")
        log.log(logging.DEBUG if is_idle and self._was_idle else logging.INFO, "%s", " ".join(parts))
        self._last_time, self._was_idle = now, is_idle
        self._last_prompt, self._last_generation = counters.prompt_tokens, counters.generation_tokens
        self._last_preemptions = counters.num_preemptions

    def _hit_rate(self) -> float:
        counters = self._stats.counters
        self._hits.append((counters.prefix_cache_queries, counters.prefix_cache_hits))
        queries = self._hits[-1][0] - self._hits[0][0]
        return (self._hits[-1][1] - self._hits[0][1]) / queries if queries else 0.0

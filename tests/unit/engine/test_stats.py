"""Buckets, counters and the rate line."""

from __future__ import annotations

import logging

import pytest

from serve.engine.stats import EngineStats, Histogram, RateLine, length_buckets
from serve.wire.frontend import PrefillStats, SchedulerStats


def test_a_value_on_a_bound_counts_in_that_bucket() -> None:
    histogram = Histogram((1.0, 2.0, 5.0))
    for value in (0.5, 1.0, 1.5, 5.0, 6.0):
        histogram.observe(value)
    assert histogram.counts == [2, 1, 1, 1]
    assert histogram.sum == 14.0
    assert histogram.count == 5


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(1, (1,)), (7, (1, 2, 5)), (100, (1, 2, 5, 10, 20, 50, 100)), (199, (1, 2, 5, 10, 20, 50, 100))],
)
def test_length_buckets_are_1_2_5_up_to_the_context(limit: int, expected: tuple[float, ...]) -> None:
    assert length_buckets(limit) == expected


def test_the_published_bucket_lists() -> None:
    histograms = EngineStats(128).histograms
    assert histograms["iteration_tokens_total"].buckets == (
        *(1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    )
    assert histograms["request_params_n"].buckets == (1, 2, 5, 10, 20)
    assert len(histograms["time_to_first_token_seconds"].buckets) == 22
    assert histograms["time_to_first_token_seconds"].buckets[-1] == 2560
    assert len(histograms["inter_token_latency_seconds"].buckets) == 19
    assert len(histograms["e2e_request_latency_seconds"].buckets) == 21


def test_scheduler_gauges_replace_and_counters_add_up() -> None:
    stats = EngineStats(128)
    for _ in range(2):
        stats.on_scheduler_stats(SchedulerStats(1, 2, 3, 0.25, 40, 30, 5))
    assert (stats.gauges.num_requests_running, stats.gauges.num_requests_waiting) == (1, 5)
    assert stats.gauges.kv_cache_usage_perc == 0.25
    assert (stats.counters.prefix_cache_queries, stats.counters.prefix_cache_hits) == (80, 60)
    assert stats.counters.num_preemptions == 10
    stats.on_engine_gone()
    assert stats.gauges.num_requests_running == 0


def test_an_iteration_counts_computed_prompt_and_generated_tokens() -> None:
    stats = EngineStats(128)
    stats.on_prefill(PrefillStats(48, 32))
    stats.on_iteration_end()
    stats.on_iteration_end()
    histogram = stats.histograms["iteration_tokens_total"]
    assert (histogram.count, histogram.sum) == (1, 16)


def test_the_rate_line_shows_throughput_and_is_quiet_when_idle(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="serve.engine.stats")
    stats = EngineStats(128)
    line = RateLine(stats)
    start = line._last_time
    stats.on_prefill(PrefillStats(100, 50))
    stats.counters.generation_tokens += 200
    stats.on_scheduler_stats(SchedulerStats(num_running_reqs=3, prefix_cache_queries=100, prefix_cache_hits=50))
    line.write(start + 10)
    stats.on_scheduler_stats(SchedulerStats(num_preemptions=2))
    line.write(start + 20)
    line.write(start + 30)
    assert [r.levelno for r in caplog.records] == [logging.INFO, logging.INFO, logging.DEBUG]
    first, second, _ = (r.getMessage() for r in caplog.records)
    assert first.startswith("prompt=10.0 tok/s generation=20.0 tok/s running=3 waiting=0")
    assert "prefix_hits=50.0%" in first
    assert "preemptions=2" in second

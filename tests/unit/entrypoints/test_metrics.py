"""GET /metrics: names, values and closed labels, read back with Prometheus' own parser."""

from __future__ import annotations

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from serve.wire.frontend import FinishReason, PrefillStats, SchedulerStats
from tests.unit.entrypoints.app_client import App, chat, make_app

NAMES = (
    *("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total"),
    *("prompt_tokens_by_source_total", "prompt_tokens_cached_total", "generation_tokens_total"),
    *("request_success_total", "request_prompt_tokens_bucket", "request_generation_tokens_bucket"),
    *("request_max_num_generation_tokens_count", "request_params_max_tokens_sum", "request_params_n_bucket"),
    *("request_prefill_kv_computed_tokens_bucket", "iteration_tokens_total_bucket"),
    *("time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket"),
    *("request_time_per_output_token_seconds_bucket", "e2e_request_latency_seconds_bucket"),
    *("request_queue_time_seconds_bucket", "request_inference_time_seconds_bucket"),
    *("request_prefill_time_seconds_bucket", "request_decode_time_seconds_bucket", "cache_config_info"),
)


async def samples(app: App) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    reply = await app.get("/metrics")
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(reply.body.decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def names_of(found: dict[tuple[str, tuple[tuple[str, str], ...]], float]) -> set[str]:
    return {name for name, _ in found}


def test_all_names_are_there_from_the_start_with_the_chosen_prefix() -> None:
    assert {f"serve:{name}" for name in NAMES} <= names_of(asyncio.run(samples(make_app())))
    assert {f"vllm:{name}" for name in NAMES} <= names_of(asyncio.run(samples(make_app(metrics_prefix="vllm:"))))


def test_values_are_the_engines_numbers() -> None:
    app = make_app()
    stats = app.llm.stats
    stats.on_scheduler_stats(SchedulerStats(2, 3, 1, 0.25, prefix_cache_queries=64, prefix_cache_hits=48))
    stats.on_prefill(PrefillStats(20, 16))
    stats.counters.request_success[str(FinishReason.ABORT)] = 5
    stats.histograms["time_to_first_token_seconds"].observe(0.03)
    found = asyncio.run(samples(app))
    own = (("engine", "0"), ("model_name", "m"))
    assert found["serve:num_requests_running", own] == 2
    assert found["serve:num_requests_waiting", own] == 4
    assert found["serve:num_requests_waiting_by_reason", (*own, ("reason", "deferred"))] == 1
    assert found["serve:kv_cache_usage_perc", own] == 0.25
    assert found["serve:prefix_cache_hits_total", own] == 48
    assert found["serve:prompt_tokens_by_source_total", (*own, ("source", "local_compute"))] == 4
    success = (("engine", "0"), ("finished_reason", "abort"), ("model_name", "m"))
    assert found["serve:request_success_total", success] == 5
    bucket = "serve:time_to_first_token_seconds_bucket"
    assert found[bucket, (own[0], ("le", "0.02"), own[1])] == 0
    assert found[bucket, (own[0], ("le", "0.04"), own[1])] == 1
    assert found[bucket, (own[0], ("le", "+Inf"), own[1])] == 1
    assert found["serve:time_to_first_token_seconds_sum", own] == 0.03


def test_engine_metrics_are_absent_when_statistics_are_off() -> None:
    names = names_of(asyncio.run(samples(make_app(disable_log_stats=True))))
    assert not any(name.startswith("serve:") for name in names)


def test_what_clients_make_up_adds_no_series() -> None:
    async def work() -> tuple[set, set]:
        app = make_app()
        await app.get("/nothing")
        await app.open("BREW", "/v1/models").reply()
        await app.get("/v1/models/x")
        before = set(await samples(app))
        for i in range(200):
            await app.get(f"/made/up/{i}", headers={"x-request-id": f"id-{i}"})
            await app.open(f"M{i}", "/v1/models").reply()
            await app.get(f"/v1/models/x{i}")
        return before, set(await samples(app))

    before, after = asyncio.run(work())
    assert before == after


def test_http_requests_are_counted_by_route_method_and_status() -> None:
    async def work() -> dict:
        app = make_app()
        for _ in range(3):
            await app.post("/v1/chat/completions", chat())
        await app.post("/v1/chat/completions", chat(n=0))
        await app.get("/health")
        return await samples(app)

    found = asyncio.run(work())
    route = ("handler", "/v1/chat/completions")
    assert found["http_requests_total", (route, ("method", "POST"), ("status", "200"))] == 3
    assert found["http_requests_total", (route, ("method", "POST"), ("status", "400"))] == 1
    assert found["http_request_duration_seconds_count", (route,)] == 4
    assert not any(dict(labels).get("handler") == "/health" for _, labels in found)

"""The HTTP surface: stream framing, usage, errors, keys, metrics (H1 to H10)."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.client import (
    chat,
    complete,
    expect_refusal,
    messages,
    post,
    read_stream,
    stream_chat,
    stream_complete,
    text_of,
    tokenize,
    usage_of,
)
from tests.e2e.server import Server, running

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
KEY = "first-key"

METRIC_TAILS = re.findall(
    r"\S+",
    """
    num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc
    prefix_cache_queries_total prefix_cache_hits_total num_preemptions_total prompt_tokens_total
    prompt_tokens_by_source_total prompt_tokens_cached_total generation_tokens_total request_success_total
    request_prompt_tokens_count request_generation_tokens_count request_max_num_generation_tokens_count
    request_params_max_tokens_count request_prefill_kv_computed_tokens_count iteration_tokens_total_count
    request_params_n_count time_to_first_token_seconds_count inter_token_latency_seconds_count
    request_time_per_output_token_seconds_count e2e_request_latency_seconds_count
    request_queue_time_seconds_count request_inference_time_seconds_count request_prefill_time_seconds_count
    request_decode_time_seconds_count cache_config_info
    """,
)


def test_h1_chat_stream_opens_with_roles_and_ends_with_one_finish_each(server: Server) -> None:
    stream = stream_chat(server, "Name a fish.", max_tokens=6, n=2, temperature=1.0, seed=1)
    first = [chunk["choices"][0] for chunk in stream.chunks[:2]]  # type: ignore[index]
    assert sorted(c["index"] for c in first) == [0, 1]
    for choice in first:
        assert choice["delta"] == {"role": "assistant", "content": ""}
        assert choice["finish_reason"] is None
    for index in (0, 1):
        choices = stream.choices(index)
        assert stream.finish_reason(index) in ("stop", "length")
        assert choices[-1]["finish_reason"] is not None
    assert stream.done
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in stream.chunks}) == 1
    assert stream.chunks[0]["object"] == "chat.completion.chunk"


def test_h2_usage_comes_once_before_done_and_only_when_asked(server: Server) -> None:
    asked = stream_chat(server, "Hi", max_tokens=4, stream_options={"include_usage": True})
    assert asked.chunks[-1]["choices"] == []
    usage = asked.chunks[-1]["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]  # type: ignore[index]
    assert all(c.get("usage") is None for c in asked.chunks[:-1])
    silent = stream_chat(server, "Hi", max_tokens=4)
    assert not [c for c in silent.chunks if "usage" in c or not c["choices"]]


def test_h3_continuous_usage_counts_up_and_needs_include_usage(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = stream_complete(server, "One, two,", max_tokens=6, ignore_eos=True, stream_options=options)
    counts = [c["usage"]["completion_tokens"] for c in stream.chunks]  # type: ignore[index]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    alone = stream_complete(server, "One, two,", max_tokens=6, stream_options={"continuous_usage_stats": True})
    assert not [c for c in alone.chunks if "usage" in c]


def test_h4_stream_options_need_a_stream(server: Server) -> None:
    body = {"messages": messages("x"), "stream_options": {"include_usage": True}}
    expect_refusal(post(server, CHAT, body), 400, "stream_options")


def test_h5_unknown_model_is_404_with_the_valid_names(server: Server) -> None:
    error = expect_refusal(post(server, CHAT, {"model": "nope", "messages": messages("x")}), 404, "model")
    assert error["type"] == "NotFoundError"
    assert error["code"] == "model_not_found"
    assert "nope" in str(error["message"])
    assert "smollm2-135m-instruct" in str(error["message"])


@pytest.mark.parametrize("content", [b"{", b"[1]", b'{"prompt": "\xff"}', b'{"prompt": NaN}', b"", b"null"])
def test_h6_broken_bodies_are_400(server: Server, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    expect_refusal(server.client.post(COMPLETIONS, content=content, headers=headers), 400)


def test_h6_a_form_is_refused(server: Server) -> None:
    response = server.client.post(COMPLETIONS, data={"prompt": "x"})
    assert response.status_code in (400, 415)
    assert response.json()["error"]["message"]


def test_h6_deep_nesting_is_refused_quickly(server: Server) -> None:
    content = b'{"prompt": "x", "extra": ' + b"[" * 5000 + b"]" * 5000 + b"}"
    expect_refusal(server.client.post(COMPLETIONS, content=content, headers={"content-type": "application/json"}), 400)


@pytest.fixture(scope="module")
def keyed(built_in_model: str) -> Iterator[Server]:
    """A server with two keys, two names, another metric prefix and a path prefix for proxies."""
    flags = (
        *("--api-key", KEY, "second-key", "--served-model-name", "front", "back", "--metrics-prefix", "vllm:"),
        *("--max-model-len", "512", "--kv-cache-memory", "128MiB", "--allowed-origins", "https://app.example"),
        *("--enable-log-requests", "--max-logprobs", "-1"),
    )
    with running(*flags, model=built_in_model) as started:
        yield started


BEARER = {"authorization": f"Bearer {KEY}"}


@pytest.mark.parametrize("path", ["/v1/models", "/v1/nothing", "/tokenize", "/v1//models", "/%761/models", "/load"])
@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer no"}, {"authorization": KEY}])
def test_h7_without_a_right_key_every_path_but_the_probes_is_401(
    keyed: Server, path: str, headers: dict[str, str]
) -> None:
    response = keyed.client.get(path, headers=headers)
    assert expect_refusal(response, 401)["type"] == "AuthenticationError"
    assert response.headers["www-authenticate"] == "Bearer"


def test_h7_probes_are_open_and_right_keys_work(keyed: Server) -> None:
    for path in ("/live", "/health", "/ready", "/ping", "/version", "/metrics"):
        assert keyed.client.get(path).status_code == 200, path
    for key in (KEY, "second-key"):
        assert keyed.client.get("/v1/models", headers={"authorization": f"bearer {key}"}).status_code == 200
    answer = post(keyed, CHAT, {"messages": messages("Hi"), "max_tokens": 2, "model": "back"}, **BEARER).json()
    assert answer["model"] == "front"
    assert [m["id"] for m in keyed.client.get("/v1/models", headers=BEARER).json()["data"]] == ["front", "back"]
    assert KEY not in keyed.log()


def test_metrics_prefix_renames_all_engine_metrics(keyed: Server) -> None:
    names = keyed.metrics()
    assert "vllm:num_requests_running" in names
    assert not [n for n in names if n.startswith("serve:")]


def test_cors_answers_the_named_origin_only(keyed: Server, server: Server) -> None:
    ask = {"access-control-request-method": "POST"}
    allowed = keyed.client.options(CHAT, headers={**ask, "origin": "https://app.example"})
    assert allowed.headers["access-control-allow-origin"] == "https://app.example"
    other = keyed.client.options(CHAT, headers={**ask, "origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers
    default = server.client.get("/v1/models", headers={"origin": "https://app.example"})
    assert "access-control-allow-origin" not in default.headers


def test_foreign_host_header_is_refused_on_loopback(server: Server) -> None:
    assert server.client.get("/v1/models", headers={"host": "rebound.example"}).status_code == 421


def test_h8_request_ids_are_echoed_or_made(server: Server) -> None:
    own = f"own-{uuid.uuid4().hex}"
    response = post(server, COMPLETIONS, {"prompt": "x", "max_tokens": 1}, **{"X-Request-Id": own})
    assert response.headers["x-request-id"] == own
    assert response.json()["id"] == f"cmpl-{own}"
    made = [server.client.get("/health").headers["x-request-id"] for _ in range(2)]
    assert len(set(made)) == 2
    odd = post(server, COMPLETIONS, {"prompt": "x", "max_tokens": 1}, **{"X-Request-Id": "a b<script>"})
    assert "script" not in odd.text


def test_h9_metrics_count_what_was_served(server: Server) -> None:
    def success() -> dict[str, float]:
        return {labels["finished_reason"]: v for labels, v in server.samples("serve:request_success_total")}

    names, before = server.metrics(), success()
    total = sum(before.values())
    answers = [
        complete(server, "One, two,", max_tokens=5, ignore_eos=True),
        complete(server, "1, 2, 3,", max_tokens=20, stop=" 5"),
        chat(server, "Hi", max_tokens=3, ignore_eos=True),
    ]
    after = server.metrics()
    assert sum(success().values()) == total + 3
    assert success()["length"] == before.get("length", 0) + 2
    assert success()["stop"] == before.get("stop", 0) + 1

    def grown(tail: str) -> float:
        return after[f"serve:{tail}"] - names.get(f"serve:{tail}", 0)

    assert grown("prompt_tokens_total") == sum(usage_of(a)["prompt_tokens"] for a in answers)
    for tail in ("time_to_first_token_seconds_count", "e2e_request_latency_seconds_count", "request_params_n_count"):
        assert grown(tail) == 3
    assert grown("request_prompt_tokens_sum") == grown("prompt_tokens_total")
    # Stop strings end in the API server: the engine core may have made a token or two more.
    assert 0 <= grown("generation_tokens_total") - sum(usage_of(a)["completion_tokens"] for a in answers) <= 3


def test_h9_all_metric_names_are_there(server: Server) -> None:
    complete(server, "x", max_tokens=2)
    names = server.metrics()
    assert [t for t in METRIC_TAILS if f"serve:{t}" not in names] == []
    assert "http_requests_total" in names
    assert "http_request_duration_seconds_count" in names


def test_metric_labels_are_a_closed_set(server: Server) -> None:
    def series() -> int:
        return server.client.get("/metrics").text.count("\n")

    server.client.get("/warm/up")
    before = series()
    for i in range(20):
        server.client.get(f"/random/{i}")
        server.client.request(f"ODD{i}", "/v1/models")
        post(server, CHAT, {"model": f"m{i}", "messages": messages("x")})
    assert series() <= before + 6


LEAKS = re.compile(
    r"0x[0-9a-f]{6,}|Traceback|File \"|\.py\b|/(?:usr|home|root|tmp|opt|var|lib)/|site-packages|errors\.pydantic"
)


def test_h10_error_messages_hold_no_paths_or_addresses(server: Server) -> None:
    bodies: list[dict[str, object]] = [
        {"messages": "x"},
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
        {"messages": messages("x"), "temperature": "hot"},
        {"messages": messages("x"), "max_tokens": 2.5},
        {"messages": messages("x"), "logit_bias": {"a": 1}},
        {"messages": messages("x"), "chat_template_kwargs": {"messages": 1}},
        {"messages": messages("x"), "response_format": {"type": "yaml"}},
        {"messages": messages("x"), "stop": [""]},
    ]
    for body in bodies:
        error = expect_refusal(post(server, CHAT, body), 400)
        assert not LEAKS.search(str(error["message"])), error
    for response in (server.client.get("/nowhere"), server.client.get(CHAT), server.client.post("/health")):
        assert not LEAKS.search(response.text), response.text


def test_unknown_path_and_wrong_method_have_the_normal_error_shape(server: Server) -> None:
    assert expect_refusal(server.client.get("/nowhere"), 404)["type"] == "NotFoundError"
    wrong = server.client.get(CHAT)
    assert expect_refusal(wrong, 405)["type"] == "MethodNotAllowedError"
    assert wrong.headers["allow"] == "POST"


def test_too_large_a_body_is_413(server: Server) -> None:
    content = b'{"prompt": "' + b"x" * (33 << 20) + b'"}'
    response = server.client.post(COMPLETIONS, content=content, headers={"content-type": "application/json"})
    expect_refusal(response, 413)


def test_models_version_load_and_description(server: Server) -> None:
    listed = server.client.get("/v1/models").json()
    (model,) = listed["data"]
    assert (listed["object"], model["object"], model["max_model_len"]) == ("list", "model", 8192)
    assert server.client.get(f"/v1/models/{model['id']}").json() == model
    expect_refusal(server.client.get("/v1/models/a/b"), 404)
    assert re.fullmatch(r"\d+\.\d+\.\d+", server.client.get("/version").json()["version"])
    assert server.client.get("/load").json() == {"server_load": 0}
    assert server.client.get("/health").content == b""
    assert CHAT in server.client.get("/openapi.json").json()["paths"]
    assert server.client.get("/docs").status_code == 200


def test_tokenize_and_detokenize_are_inverse(server: Server) -> None:
    for text in (
        "Hello  world\n\n",
        " leading",
        "caf\u00e9 \U0001f600 \u65e5\u672c\u8a9e",
        "\tx = {1: 'a'}",
        "<|im_start|>",
    ):
        ids = tokenize(server, text)
        assert post(server, "/detokenize", {"tokens": ids}).json() == {"prompt": text}
    expect_refusal(post(server, "/detokenize", {"tokens": [49152]}), 400)
    strings = post(server, "/tokenize", {"prompt": "Hello world", "return_token_strs": True}).json()
    assert len(strings["token_strs"]) == strings["count"] == 2


def test_a_stream_has_the_headers_of_one(server: Server) -> None:
    body = {"prompt": "x", "max_tokens": 2, "stream": True}
    with server.client.stream("POST", COMPLETIONS, json=body) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        assert read_stream(response).done


def test_token_ids_are_returned_on_request(server: Server) -> None:
    ids = tokenize(server, "Hello world")
    stream = stream_complete(server, "Hello world", max_tokens=5, return_token_ids=True)
    assert [c["prompt_token_ids"] for c in stream.choices() if c.get("prompt_token_ids")] == [ids]
    text = post(server, "/detokenize", {"tokens": stream.token_ids()}).json()["prompt"]
    assert text == stream.text() == text_of(complete(server, "Hello world", max_tokens=5))
    talk = stream_chat(server, "Hi", max_tokens=5, return_token_ids=True)
    assert [bool(c.get("prompt_token_ids")) for c in talk.chunks] == [True] + [False] * (len(talk.chunks) - 1)


def test_admin_routes_do_not_exist_by_default(server: Server) -> None:
    for path in ("/pause", "/resume", "/reset_prefix_cache"):
        expect_refusal(server.client.post(path), 404)


def test_a_slash_in_front_of_the_port_is_not_a_way_around(keyed: Server) -> None:
    with httpx.Client(base_url=keyed.base_url) as client:
        assert client.get("/v1/models/", headers={"x-forwarded-for": "127.0.0.1"}).status_code == 401

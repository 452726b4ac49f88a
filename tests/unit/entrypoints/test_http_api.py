"""Statuses and bodies of the HTTP layer: errors in one shape, keys, hosts, limits, phases of the server."""

from __future__ import annotations

import asyncio

import pytest
from pydantic import ValidationError

from serve.entrypoints.app_state import Phase
from serve.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    parse_request,
)
from serve.errors import EngineDead, InvalidRequest, RequestFailed
from serve.wire.frontend import FinishReason
from tests.fakes import hand_over
from tests.unit.entrypoints.app_client import Reply, chat, make_app
from tests.waiting import async_wait_until

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
OPEN = ("/live", "/health", "/ready", "/ping", "/version")
ERROR_SCHEMA = "#/components/schemas/ErrorBody"
ANTHROPIC_ERROR_SCHEMA = "#/components/schemas/AnthropicErrorBody"
CLOSED = ("/v1/models", "/load", "/openapi.json", "/docs", "/v1/nothing", "/nothing", "//health", "/health/", "/Health")


def run(work):
    return asyncio.run(work)


def expect_error(reply: Reply, status: int, kind: str) -> dict:
    assert reply.status == status, reply.body
    error = reply.error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"] == kind
    return error


def test_unknown_path_is_404_in_the_error_shape() -> None:
    async def work() -> None:
        app = make_app()
        for method in ("GET", "POST"):
            error = expect_error(await app.open(method, "/v1/no-such").reply(), 404, "NotFoundError")
            assert error["code"] == 404

    run(work())


def test_wrong_method_is_405_and_names_the_allowed_ones() -> None:
    async def work() -> None:
        reply = await make_app().get(CHAT)
        expect_error(reply, 405, "MethodNotAllowedError")
        assert reply.headers["allow"] == "POST"

    run(work())


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model": ',
        b"[]",
        b"null",
        b'{"prompt": "\xff"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "top_p": 1e400}',
        b'{"prompt": "a", "logit_bias": {"1": Infinity}}',
        b'{"prompt": "a", "x": ' + b"[" * 300 + b"]" * 300 + b"}",
        b'{"prompt": "a", "x": ' + b"[" * 100000 + b"]" * 100000 + b"}",
        b'{"prompt": "a", "seed": 99999999999999999999999999}',
        b'{"prompt": "\\ud800", "max_tokens": 1}',
    ],
)
def test_bodies_that_are_no_proper_json_object_are_400(raw: bytes) -> None:
    async def work() -> None:
        expect_error(await make_app().post(COMPLETIONS, raw=raw), 400, "BadRequestError")

    run(work())


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt": "a", "x": [' + b"[]," * 300_000 + b"1]}",
        b'{"prompt": "a", "x": [' + b'"a",' * 600_000 + b"1]}",
        b"{" + b",".join(b'"k%d": 1' % i for i in range(2000)) + b', "prompt": "a"}',
    ],
)
def test_bodies_of_very_many_small_values_are_400(raw: bytes) -> None:
    async def work() -> None:
        error = expect_error(await make_app().post(COMPLETIONS, raw=raw), 400, "BadRequestError")
        assert "the limit is" in error["message"]

    run(work())


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (DetokenizeRequest, "tokens", [True] * 10_000),
        (DetokenizeRequest, "tokens", ["x"] * 10_000),
        (DetokenizeRequest, "tokens", [1] * (1 << 20) + [2]),
        (CompletionRequest, "stop", [1] * 10_000),
        (CompletionRequest, "bad_words", [1] * 10_000),
        (CompletionRequest, "stop_token_ids", ["x"] * 10_000),
        (CompletionRequest, "allowed_token_ids", [-1] * 10_000),
        (CompletionRequest, "logit_bias", {str(i): "x" for i in range(10_000)}),
        (CompletionRequest, "vllm_xargs", {"x": [None] * 1000}),
        (CompletionRequest, "vllm_xargs", {str(i): None for i in range(10_000)}),
        (ChatCompletionRequest, "messages", [1] * 10_000),
        (ChatCompletionRequest, "tools", [1] * 10_000),
        (ChatCompletionRequest, "documents", [1] * 10_000),
        (ChatCompletionRequest, "chat_template_kwargs", {str(i): 1 for i in range(10_000)}),
    ],
)
def test_a_list_full_of_mistakes_is_refused_with_the_first_of_them(kind: type, field: str, value: object) -> None:
    """A report of every mistake takes seconds when there are millions; other requests would wait for that."""
    body = {"prompt": "a", **chat(), field: value}
    with pytest.raises(InvalidRequest) as caught:
        parse_request(kind, body)
    assert (caught.value.param or "").split(".")[0] == field
    reported = caught.value.__context__
    assert isinstance(reported, ValidationError)
    assert reported.error_count() < 10


def test_other_content_types_are_400_and_parameters_after_the_type_are_fine() -> None:
    async def work() -> None:
        app = make_app()
        form = {"content-type": "application/x-www-form-urlencoded"}
        expect_error(await app.post(CHAT, raw=b"a=1", headers=form), 400, "BadRequestError")
        good = await app.post(CHAT, chat(), headers={"content-type": "application/json; charset=utf-8"})
        assert good.status == 200

    run(work())


def test_body_over_the_limit_is_413_declared_or_not() -> None:
    async def work() -> None:
        app = make_app(max_body_bytes=100)
        big = chat(x="y" * 200)
        expect_error(await app.post(CHAT, big), 413, "RequestTooLargeError")
        expect_error(await app.post(CHAT, raw=b"{}", headers={"content-length": "999"}), 413, "RequestTooLargeError")

    run(work())


def test_compressed_body_is_415() -> None:
    async def work() -> None:
        reply = await make_app().post(CHAT, chat(), headers={"content-encoding": "gzip"})
        expect_error(reply, 415, "UnsupportedMediaTypeError")

    run(work())


def test_header_flood_is_431() -> None:
    async def work() -> None:
        many = {f"x-{i}": "v" for i in range(300)}
        expect_error(await make_app().get("/health", headers=many), 431, "HeaderTooLargeError")
        expect_error(await make_app().get("/health", headers={"x-a": "v" * 70000}), 431, "HeaderTooLargeError")

    run(work())


def test_with_keys_only_the_open_paths_answer_without_one() -> None:
    async def work() -> None:
        app = make_app(api_key=("k1", "k2"))
        for path in OPEN:
            assert (await app.get(path)).status == 200
        assert (await app.get("/metrics")).status == 200
        for path in CLOSED:
            reply = await app.get(path)
            expect_error(reply, 401, "AuthenticationError")
            assert reply.headers["www-authenticate"] == "Bearer"
        for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize"):
            expect_error(await app.post(path, chat()), 401, "AuthenticationError")

    run(work())


@pytest.mark.parametrize(
    ("value", "status"),
    [
        ("Bearer k1", 200),
        ("bearer k2", 200),
        ("BEARER  k2", 200),
        ("Bearer k3", 401),
        ("Bearer", 401),
        ("Basic k1", 401),
        ("k1", 401),
        ("Bearer k1 k2", 401),
    ],
)
def test_bearer_key_is_compared_whole_and_its_scheme_without_regard_to_case(value: str, status: int) -> None:
    async def work() -> None:
        reply = await make_app(api_key=("k1", "k2")).get("/v1/models", headers={"authorization": value})
        assert reply.status == status

    run(work())


def test_metrics_need_the_key_when_asked_to() -> None:
    async def work() -> None:
        app = make_app(api_key=("k",), metrics_need_key=True)
        expect_error(await app.get("/metrics"), 401, "AuthenticationError")

    run(work())


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:8000", 200),
        ("mine.example", 200),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
        ("127.0.0.1.evil.example:8000", 421),
    ],
)
def test_bound_to_loopback_only_local_host_names_are_answered(host: str, status: int) -> None:
    async def work() -> None:
        app = make_app(allowed_host=("mine.example",))
        assert (await app.get("/v1/models", headers={"host": host})).status == status
        outside = make_app(host="0.0.0.0", allow_unauthenticated=True)
        assert (await outside.get("/v1/models", headers={"host": host})).status == 200

    run(work())


def test_cors_headers_come_only_when_origins_are_allowed() -> None:
    async def work() -> None:
        asked = {"origin": "https://a.example"}
        assert "access-control-allow-origin" not in (await make_app().get("/v1/models", headers=asked)).headers
        app = make_app(allowed_origins=("https://a.example",), api_key=("k",))
        refused = await app.get("/v1/models", headers=asked)
        assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, "https://a.example")
        preflight = {**asked, "access-control-request-method": "POST"}
        assert (await app.open("OPTIONS", CHAT, headers=preflight).reply()).status == 200

    run(work())


def test_while_loading_only_live_and_version_are_200() -> None:
    async def work() -> None:
        app = make_app()
        app.state.phase, app.state.services = Phase.LOADING, None
        assert (await app.get("/live")).status == 200
        assert (await app.get("/version")).status == 200
        assert (await app.get("/metrics")).status == 200
        for reply in (
            await app.get("/health"),
            await app.get("/ready"),
            await app.get("/v1/models"),
            await app.post(CHAT, chat()),
            await app.post("/tokenize", {"prompt": "a"}),
        ):
            error = expect_error(reply, 503, "ServiceUnavailableError")
            assert error["code"] == "loading"
            assert int(reply.headers["retry-after"]) >= 1

    run(work())


def test_while_draining_new_work_is_refused_and_health_stays() -> None:
    async def work() -> None:
        app = make_app()
        app.state.phase = Phase.DRAINING
        error = expect_error(await app.post(CHAT, chat()), 503, "ServiceUnavailableError")
        assert error["code"] == "draining"
        assert (await app.get("/ready")).status == 503
        assert (await app.get("/health")).status == 200

    run(work())


def test_dead_engine_is_503_for_new_requests() -> None:
    async def work() -> None:
        app = make_app()
        app.state.phase = Phase.DEAD
        for reply in (await app.post(CHAT, chat()), await app.get("/v1/models")):
            assert expect_error(reply, 503, "ServiceUnavailableError")["code"] == "engine_dead"
        assert (await app.get("/health")).status == 503

    run(work())


def test_silent_engine_turns_health_503() -> None:
    async def work() -> None:
        app = make_app()
        app.llm.silence = 11.0
        assert expect_error(await app.get("/health"), 503, "ServiceUnavailableError")["code"] == "engine_stuck"

    run(work())


def test_errors_of_a_running_request_are_500_without_internals() -> None:
    async def work() -> None:
        dead = make_app(lambda params: [EngineDead()])
        assert expect_error(await dead.post(CHAT, chat()), 500, "InternalServerError")["code"] == "engine_dead"
        failed = make_app(lambda params: [RequestFailed("/root/x.py line 3", cause="nan_logits")])
        message = expect_error(await failed.post(CHAT, chat()), 500, "InternalServerError")["message"]
        assert message.startswith("nan_logits")
        assert "/root" not in message

    run(work())


def test_a_bug_is_an_opaque_500(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        app = make_app(lambda params: [KeyError("secret")])
        message = expect_error(await app.post(CHAT, chat()), 500, "InternalServerError")["message"]
        assert "secret" not in message
        reference = message.split("reference ")[1].rstrip(")")
        assert reference in caplog.text
        assert "KeyError" in caplog.text

    run(work())


def test_error_in_mid_stream_is_the_last_event_and_no_done_follows() -> None:
    async def work() -> None:
        app = make_app(lambda params: [hand_over("a"), EngineDead()])
        reply = await app.post(CHAT, chat(stream=True))
        assert reply.status == 200
        assert reply.chunks[-1]["error"]["code"] == "engine_dead"
        assert "[DONE]" not in reply.events

    run(work())


def test_error_before_the_first_output_of_a_stream_is_a_plain_answer() -> None:
    async def work() -> None:
        app = make_app(lambda params: [EngineDead()])
        expect_error(await app.post(CHAT, chat(stream=True)), 500, "InternalServerError")
        expect_error(await app.post(CHAT, chat(stream=True, max_tokens=-1)), 400, "BadRequestError")

    run(work())


def test_request_id_is_echoed_when_well_formed_and_replaced_when_not() -> None:
    async def work() -> None:
        app = make_app()
        good = await app.post(CHAT, chat(), headers={"x-request-id": "trace-42"})
        assert (good.headers["x-request-id"], good.json["id"]) == ("trace-42", "chatcmpl-trace-42")
        bad = await app.post(CHAT, chat(), headers={"x-request-id": "a b\u00e9"})
        assert len(bad.headers["x-request-id"]) == 32
        refused = await app.get("/v1/no-such", headers={"x-request-id": "r"})
        assert refused.headers["x-request-id"] == "r"
        in_body = await app.post(COMPLETIONS, {"prompt": "a", "request_id": "mine"})
        assert in_body.json["id"] == "cmpl-mine"
        expect_error(await app.post(COMPLETIONS, {"prompt": "a", "request_id": "a b"}), 400, "BadRequestError")

    run(work())


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_ends_its_request(stream: bool) -> None:
    async def work() -> None:
        never = asyncio.Event()
        app = make_app(lambda params: [never])
        exchange = app.open("POST", CHAT, chat(stream=stream))
        await async_wait_until(lambda: app.llm.requests, 5, "the request is submitted")
        exchange.disconnect()
        await asyncio.wait_for(exchange.task, 5)
        assert app.llm.closed == [app.llm.requests[0][2]]
        assert exchange.sent == []
        assert app.state.num_open_requests == 0

    run(work())


def test_client_that_leaves_in_mid_stream_ends_its_request() -> None:
    async def work() -> None:
        never = asyncio.Event()
        app = make_app(lambda params: [hand_over("a"), never])
        exchange = app.open("POST", CHAT, chat(stream=True))
        await async_wait_until(lambda: b'"a"' in exchange.body, 5, "the first text arrives")
        exchange.disconnect()
        await asyncio.wait_for(exchange.task, 5)
        assert app.llm.closed == [app.llm.requests[0][2]]

    run(work())


def test_load_counts_requests_being_answered() -> None:
    async def work() -> None:
        go = asyncio.Event()
        app = make_app(lambda params: [go, hand_over("a", finish=FinishReason.STOP)])
        exchange = app.open("POST", CHAT, chat())
        await async_wait_until(lambda: app.llm.requests, 5, "the request is submitted")
        assert (await app.get("/load")).json == {"server_load": 1}
        go.set()
        assert (await exchange.reply()).status == 200
        assert (await app.get("/load")).json == {"server_load": 0}

    run(work())


def test_models_lists_every_served_name_and_answers_each() -> None:
    async def work() -> None:
        app = make_app()
        listed = (await app.get("/v1/models")).json
        assert [card["id"] for card in listed["data"]] == ["m", "alias"]
        assert listed["data"][0]["max_model_len"] == 128
        assert (await app.get("/v1/models/alias")).json["id"] == "alias"
        assert expect_error(await app.get("/v1/models/a/b"), 404, "NotFoundError")["code"] == "model_not_found"

    run(work())


def test_unknown_model_is_404_and_names_the_valid_ones() -> None:
    async def work() -> None:
        app = make_app()
        for path, body in ((CHAT, chat(model="no-such")), (COMPLETIONS, {"prompt": "a", "model": "no-such"})):
            error = expect_error(await app.post(path, body), 404, "NotFoundError")
            assert error["param"] == "model"
            assert "no-such" in error["message"]
            assert "alias" in error["message"]
        assert (await app.post(CHAT, chat(model="alias"))).json["model"] == "m"
        assert (await app.post(CHAT, chat(model=""))).json["model"] == "m"

    run(work())


def test_tokenize_and_detokenize_are_inverse_and_check_their_input() -> None:
    async def work() -> None:
        app = make_app()
        reply = (await app.post("/tokenize", {"prompt": "h\u00e9", "add_special_tokens": False})).json
        assert reply == {"count": 3, "max_model_len": 128, "tokens": [104, 195, 169], "token_strs": None}
        assert (await app.post("/detokenize", {"tokens": reply["tokens"]})).json == {"prompt": "h\u00e9"}
        strs = (await app.post("/tokenize", {"prompt": "ab", "return_token_strs": True})).json
        assert strs["token_strs"] == ["<bos>", "a", "b"]
        as_chat = (await app.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]})).json
        assert bytes(as_chat["tokens"]) == b"<user>hi<a>"
        for tokens in ([-1], [260], [2**70], ["a"]):
            expect_error(await app.post("/detokenize", {"tokens": tokens}), 400, "BadRequestError")
        expect_error(await app.post("/tokenize", {}), 400, "BadRequestError")

    run(work())


def test_dev_routes_exist_only_in_dev_mode() -> None:
    async def work() -> None:
        plain = make_app()
        assert (await plain.post("/pause")).status == 404
        app = make_app(dev_mode=True)
        assert (await app.post("/pause?mode=keep")).status == 200
        assert (await app.get("/is_paused")).json == {"is_paused": True}
        assert (await app.post("/resume")).status == 200
        assert (await app.post("/reset_prefix_cache")).json == {"success": False}
        assert (await app.post("/reset_prefix_cache?reset_running_requests=true")).json == {"success": True}
        expect_error(await app.post("/pause?mode=never"), 400, "BadRequestError")

    run(work())


def test_description_lists_the_fields_of_the_bodies() -> None:
    async def work() -> None:
        described = (await make_app().get("/openapi.json")).json
        body = described["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert {"messages", "temperature", "stop_token_ids"} <= set(body["properties"])
        hidden = make_app(disable_fastapi_docs=True)
        assert (await hidden.get("/openapi.json")).status == 404

    run(work())


def test_description_declares_what_each_route_answers() -> None:
    async def work() -> None:
        described = (await make_app(dev_mode=True).get("/openapi.json")).json
        error = described["components"]["schemas"]["ErrorObject"]
        assert set(error["required"]) == {"message", "type", "param", "code"}
        for path, operations in described["paths"].items():
            schema = ANTHROPIC_ERROR_SCHEMA if path.startswith("/v1/messages") else ERROR_SCHEMA
            for operation in operations.values():
                assert operation["summary"]
                answers = operation["responses"]
                assert "200" in answers
                assert "422" not in answers
                refusals = [answer["content"] for status, answer in answers.items() if status != "200"]
                assert all(r["application/json"]["schema"] == {"$ref": schema} for r in refusals)
        for path in (CHAT, "/v1/completions"):
            answers = described["paths"][path]["post"]["responses"]
            assert {"400", "401", "404", "413", "429", "500", "503"} <= answers.keys()
            assert set(answers["200"]["content"]) == {"application/json", "text/event-stream"}
        for path in ("/health", "/ready"):
            answers = described["paths"][path]["get"]["responses"]
            assert "content" not in answers["200"]
            assert "503" in answers
        assert set(described["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == {"text/plain"}
        (parameter,) = described["paths"]["/v1/models/{model_id}"]["get"]["parameters"]
        assert (parameter["name"], parameter["in"], parameter["required"]) == ("model_id", "path", True)

    run(work())


def test_unknown_path_points_to_the_docs_only_where_there_are_some() -> None:
    async def work() -> None:
        assert "see /docs" in (await make_app().get("/nothing")).error["message"]
        hidden = (await make_app(disable_fastapi_docs=True).get("/nothing")).error
        assert (hidden["message"], hidden["code"]) == ("there is nothing at this path", 404)

    run(work())


def test_behind_a_proxy_prefix_routes_and_keys_work_the_same() -> None:
    async def work() -> None:
        app = make_app(root_path="/api", api_key=("k",))
        assert (await app.get("/health")).status == 200
        expect_error(await app.get("/v1/models"), 401, "AuthenticationError")
        assert (await app.get("/v1/models", headers={"authorization": "Bearer k"})).status == 200
        described = (await app.get("/openapi.json", headers={"authorization": "Bearer k"})).json
        assert described["servers"] == [{"url": "/api"}]

    run(work())

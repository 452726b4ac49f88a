"""POST /v1/messages and its count_tokens over a scripted engine: answers, streams, errors and keys."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from serve.engine.outputs import RequestOutput
from serve.entrypoints.app_state import Phase
from serve.errors import EngineDead, Overloaded, RequestFailed
from serve.sampling_params import OutputKind
from serve.wire.frontend import FinishReason
from tests.fakes import hand_over
from tests.unit.entrypoints.anthropic.test_stream import read_events
from tests.unit.entrypoints.app_client import Reply, answer, make_app

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
TOOL = {"name": "get_time", "input_schema": {"type": "object", "properties": {"zone": {"type": "string"}}}}
CONTEXT = 2048
COUNTS = {
    "input_tokens": 11,  # "<user>hi<a>"
    "output_tokens": 2,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 0,
    "output_tokens_details": {"thinking_tokens": 0},
}


def body(**fields: object) -> dict:
    return {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}], **fields}


def post(sent: object, script=None, path: str = MESSAGES, headers: dict[str, str] = {}, **server: object) -> Reply:  # noqa: B006
    app = make_app(script, **server)
    app.llm.max_model_len = CONTEXT
    return asyncio.run(app.post(path, sent, headers=headers))


def ends_with(*outputs: RequestOutput | Exception):
    """Script: these hand-overs when streamed, their sum when not."""

    def script(params) -> Sequence[RequestOutput | Exception]:
        if params.output_kind is OutputKind.DELTA:
            return outputs
        parts = [output.outputs[0] for output in outputs if isinstance(output, RequestOutput)]
        last = parts[-1]
        text = "".join(part.text for part in parts)
        return [hand_over(text, finish=last.finish_reason, stop_reason=last.stop_reason)]

    return script


def expect_error(reply: Reply, status: int, kind: str) -> str:
    assert reply.status == status, reply.body
    assert reply.json["type"] == "error"
    assert reply.json["request_id"] == reply.headers["request-id"]
    assert reply.error["type"] == kind
    assert set(reply.error) == {"type", "message"}
    return reply.error["message"]


def test_plain_answer_has_every_field_a_client_reads() -> None:
    reply = post(body(), answer("ok", STOP), headers={"x-request-id": "r1"})
    assert reply.json == {
        "id": "msg_r1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "ok"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": COUNTS,
    }
    assert reply.headers["request-id"] == "r1"


def test_stream_has_no_done_and_its_events_make_the_plain_answer() -> None:
    reply = post(body(stream=True), answer("ok", LENGTH))
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert b"[DONE]" not in reply.body
    events = read_events(reply.body)
    assert [event["type"] for event in events] == [
        *("message_start", "content_block_start", "content_block_delta", "content_block_delta"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert "".join(event["delta"]["text"] for event in events[2:4]) == "ok"
    assert events[0]["message"]["usage"] == {**COUNTS, "output_tokens": 0}
    assert events[-2] == {
        "type": "message_delta",
        "delta": {"stop_reason": "max_tokens", "stop_sequence": None},
        "usage": COUNTS,
    }


@pytest.mark.parametrize("stream", [False, True])
def test_stop_sequence_that_was_hit_is_named(stream: bool) -> None:
    script = ends_with(hand_over("a"), hand_over("b", finish=STOP, stop_reason="END"))
    reply = post(body(stop_sequences=["END"], stream=stream), script)
    end = read_events(reply.body)[-2]["delta"] if stream else reply.json
    assert (end["stop_reason"], end["stop_sequence"]) == ("stop_sequence", "END")


def test_values_reach_the_engine() -> None:
    async def work() -> tuple:
        app = make_app()
        await app.post(MESSAGES, body(stop_sequences=["END"], temperature=0.5, top_k=7, top_p=0.5))
        return app.llm.requests[0]

    token_ids, params, request_id, _ = asyncio.run(work())
    assert bytes(token_ids) == b"<user>hi<a>"
    assert request_id.startswith("msg_")
    assert (params.stop, params.temperature, params.top_k, params.top_p) == (("END",), 0.5, 7, 0.5)
    assert params.max_tokens == 4


def test_thoughts_and_calls_come_as_blocks_plain_and_streamed() -> None:
    text = '<think>hm</think>Let me look.<tool_call>{"name": "get_time", "arguments": {"zone": "UTC"}}</tool_call>'
    pieces = [hand_over(part) for part in (text[:3], text[3:40], text[40:77], text[77:])]
    pieces[-1].outputs[0].finish_reason = STOP
    settings = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    plain = post(body(tools=[TOOL]), ends_with(*pieces), **settings).json
    thinking, said, call = plain["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "hm")
    assert (said["type"], said["text"]) == ("text", "Let me look.")
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "get_time", {"zone": "UTC"})
    assert plain["stop_reason"] == "tool_use"
    events = read_events(post(body(tools=[TOOL], stream=True), ends_with(*pieces), **settings).body)
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [start["type"] for start in starts] == ["thinking", "text", "tool_use"]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    arguments = "".join(delta.get("partial_json", "") for delta in deltas)
    assert arguments == '{"zone": "UTC"}'
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_tokens_are_counted_as_usage_reports_them_also_beyond_the_context() -> None:
    fields = {"system": "Be brief.", "messages": [{"role": "user", "content": "hi"}]}
    counted = post({"model": "m", **fields}, path=COUNT)
    assert counted.json == {"input_tokens": len("<system>Be brief.<user>hi<a>")}
    assert post(body(**fields)).json["usage"]["input_tokens"] == counted.json["input_tokens"]
    long = [{"role": "user", "content": "x" * 5000}]
    assert post({"model": "m", "messages": long}, path=COUNT).json == {"input_tokens": 5000 + len("<user><a>")}
    assert "max_model_len" in expect_error(post(body(messages=long)), 400, "invalid_request_error")


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
@pytest.mark.parametrize(
    ("sent", "status", "kind"),
    [
        ({"model": "m", "max_tokens": 4}, 400, "invalid_request_error"),
        (body(model="other"), 404, "not_found_error"),
        ([], 400, "invalid_request_error"),
    ],
)
def test_refusals_have_the_shape_of_the_messages_api(path: str, sent: object, status: int, kind: str) -> None:
    expect_error(post(sent, path=path), status, kind)


def test_unknown_paths_and_methods_below_messages_have_it_too() -> None:
    async def work() -> None:
        app = make_app()
        expect_error(await app.post("/v1/messages/batches", {}), 404, "not_found_error")
        reply = await app.get(MESSAGES)
        expect_error(reply, 405, "invalid_request_error")
        assert reply.headers["allow"] == "POST"
        assert "type" not in (await app.post("/v1/messages-of-others", {})).json

    asyncio.run(work())


def test_body_over_the_limit_is_request_too_large() -> None:
    expect_error(post(body(system="x" * 2000), max_body_bytes=1000), 413, "request_too_large")


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Overloaded("overloaded: queue full", retry_after=3), 429, "rate_limit_error"),
        (RequestFailed("failed", cause="nan_logits"), 500, "api_error"),
        (EngineDead(), 500, "api_error"),
    ],
)
def test_failures_before_the_first_token_are_ordinary_errors(error: Exception, status: int, kind: str) -> None:
    for stream in (False, True):
        expect_error(post(body(stream=stream), lambda params: [error]), status, kind)


def test_failure_in_the_middle_is_an_error_event() -> None:
    script = ends_with(hand_over("a"), RequestFailed("failed", cause="nan_logits"))
    events = read_events(post(body(stream=True), script).body)
    assert [event["type"] for event in events] == [
        *("message_start", "content_block_start", "content_block_delta", "error")
    ]
    assert events[-1]["error"]["type"] == "api_error"
    assert events[-1]["request_id"]


@pytest.mark.parametrize(("phase", "code"), [(Phase.LOADING, "loading"), (Phase.DRAINING, "draining")])
def test_server_that_takes_no_work_is_overloaded(phase: Phase, code: str) -> None:
    async def work() -> None:
        app = make_app()
        app.state.phase = phase
        if phase is Phase.LOADING:
            app.state.services = None
        for path in (MESSAGES, COUNT):
            reply = await app.post(path, body())
            assert code in expect_error(reply, 503, "overloaded_error")
            assert int(reply.headers["retry-after"]) >= 1

    asyncio.run(work())


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "k2"}, 200),
        ({"authorization": "Bearer k1"}, 200),
        ({"x-api-key": "k1", "authorization": "Bearer wrong"}, 200),
        ({"x-api-key": "k"}, 401),
        ({"x-api-key": ""}, 401),
        ({}, 401),
    ],
)
def test_key_may_come_in_the_header_of_the_messages_api(headers: dict[str, str], status: int) -> None:
    reply = post(body(), headers=headers, api_key=("k1", "k2"))
    assert reply.status == status
    if status == 401:
        expect_error(reply, 401, "authentication_error")


def test_other_paths_take_the_key_as_a_bearer_only() -> None:
    headers = {"x-api-key": "k1"}
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    assert post(chat, path="/v1/chat/completions", headers=headers, api_key=("k1",)).status == 401


def test_client_that_leaves_aborts_its_message() -> None:
    async def work() -> list[str]:
        never = asyncio.Event()
        app = make_app(lambda params: [hand_over("a"), never])
        exchange = app.open("POST", MESSAGES, body(stream=True))
        while not exchange.sent:
            exchange.arrived.clear()
            await asyncio.wait_for(exchange.arrived.wait(), 5)
        exchange.disconnect()
        await asyncio.wait_for(exchange.task, 5)
        return app.llm.closed

    assert len(asyncio.run(work())) == 1

"""POST /v1/responses and what can be done with a stored response, over a scripted engine client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import cache

import pytest

from serve.entrypoints.openai.protocol import ChatCompletionRequest
from serve.entrypoints.openai.responses_protocol import ResponsesRequest
from serve.errors import RequestFailed
from serve.wire.frontend import FinishReason
from tests.fakes import hand_over
from tests.unit.entrypoints.app_client import App, Reply, answer, make_app
from tests.unit.entrypoints.responses_client import check_response, names, read_events
from tests.waiting import async_wait_until

PATH = "/v1/responses"
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
TOOL = {"type": "function", "name": "get_time", "parameters": {"type": "object"}, "strict": True}
TEXT_EVENTS = [
    *("created", "in_progress", "output_item.added", "content_part.added"),
    *("output_text.delta", "output_text.delta", "output_text.done", "content_part.done", "output_item.done"),
]
LIMIT_S = 10
OK = answer("ok", STOP)


def new_app(script=OK, **server: object) -> App:
    return make_app(script, **{"max_model_len": 512, **server})  # type: ignore[arg-type]


@cache
def plain_app() -> App:
    """The application that says "ok", for tests that need no state of their own: building one takes a while."""
    return new_app()


def run(work: Callable[[App], Awaitable[object]], script=OK, **server: object) -> object:
    async def main() -> object:
        return await work(new_app(script, **server))

    return asyncio.run(main())


def post(body: dict, script=OK, **server: object) -> Reply:
    app = plain_app() if script is OK and not server else new_app(script, **server)
    return asyncio.run(app.post(PATH, {"input": "hi", **body}))


def prompt(app: App, index: int = -1) -> str:
    return bytes(app.llm.requests[index][0]).decode()


def test_plain_answer_has_every_field_a_client_reads() -> None:
    body = check_response(post({"metadata": {"a": "b"}, "user": "me"}).json)
    assert body["id"].startswith("resp_")
    assert body["object"] == "response"
    assert body["status"] == "completed"
    assert body["model"] == "m"
    assert body["error"] is None
    assert body["incomplete_details"] is None
    (item,) = body["output"]
    assert item["id"].startswith("msg_")
    assert item | {"id": ""} == {
        "id": "",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "ok", "annotations": [], "logprobs": []}],
    }
    assert body["usage"] == {
        "input_tokens": 11,  # "<user>hi<a>"
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 13,
    }
    assert (body["metadata"], body["user"]) == ({"a": "b"}, "me")


def test_whole_blocks_of_a_prompt_count_as_written_to_the_cache() -> None:
    details = post({"input": "x" * 30}).json["usage"]["input_tokens_details"]
    assert details == {"cached_tokens": 0, "cache_write_tokens": 32}  # 39 tokens, blocks of 16
    details = post({"input": "x" * 30}, enable_prompt_tokens_details=False).json["usage"]["input_tokens_details"]
    assert details == {"cached_tokens": 0, "cache_write_tokens": 0}


def test_parameters_are_repeated_as_sent_or_as_the_default_that_was_used() -> None:
    plain = post({}).json
    assert plain["temperature"] == 1.0
    assert plain["top_p"] == 1.0
    assert plain["tool_choice"] == "auto"
    assert plain["tools"] == []
    assert plain["text"] == {"format": {"type": "text"}, "verbosity": "medium"}
    assert plain["truncation"] == "disabled"
    sent = {
        "temperature": 0.5,
        "top_p": 0.9,
        "max_output_tokens": 7,
        "instructions": "Be brief.",
        "tools": [TOOL],
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low", "summary": "auto"},
        "top_logprobs": 0,
        "store": False,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "max_tool_calls": 3,
    }
    body = check_response(post(sent).json)
    assert {name: body[name] for name in sent} == {**sent, "tools": [{**TOOL, "description": None}]}


def test_stream_has_named_events_in_order_and_no_done() -> None:
    reply = post({"stream": True})
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = read_events(reply.body)
    assert names(events) == [*TEXT_EVENTS, "completed"]
    assert b"[DONE]" not in reply.body
    assert {event["response"]["id"] for event in events if "response" in event} == {events[0]["response"]["id"]}
    assert events[-1]["response"]["usage"]["output_tokens"] == 2


def test_streamed_response_equals_the_plain_one_but_for_ids_and_times() -> None:
    plain = post({}).json
    streamed = read_events(post({"stream": True}).body)[-1]["response"]
    for body in (plain, streamed):
        body["output"][0]["id"] = ""
        body |= {"id": "", "created_at": 0, "completed_at": 0}
    assert streamed == plain


def test_a_cut_answer_is_incomplete_in_both_forms() -> None:
    plain = post({"max_output_tokens": 2}, answer("ok", LENGTH)).json
    assert plain["status"] == "incomplete"
    assert plain["incomplete_details"] == {"reason": "max_output_tokens"}
    assert plain["output"][0]["status"] == "incomplete"
    events = read_events(post({"stream": True}, answer("ok", LENGTH)).body)
    assert names(events)[-1] == "incomplete"
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_sampling_goes_to_the_engine_with_extra_parameters() -> None:
    async def work(app: App) -> object:
        extra = {"top_k": 5, "seed": 3, "stop": ["x"], "ignore_eos": True, "min_tokens": 1, "repetition_penalty": 1.1}
        reply = await app.post(PATH, {"input": "hi", "max_output_tokens": 9, "temperature": 0.3, **extra})
        assert reply.status == 200
        return app.llm.requests[-1][1]

    params = run(work)
    assert (params.max_tokens, params.temperature, params.top_k, params.seed) == (9, 0.3, 5, 3)  # type: ignore[attr-defined]
    assert (params.stop, params.ignore_eos, params.min_tokens) == (("x",), True, 1)  # type: ignore[attr-defined]
    assert params.repetition_penalty == 1.1  # type: ignore[attr-defined]


def test_previous_response_is_gone_on_from_without_its_instructions() -> None:
    async def work(app: App) -> None:
        first = (await app.post(PATH, {"input": "hi", "instructions": "one"})).json
        assert prompt(app) == "<system>one<user>hi<a>"
        second = (await app.post(PATH, {"input": "more", "previous_response_id": first["id"]})).json
        assert prompt(app) == "<user>hi<assistant>ok<user>more<a>"
        assert second["previous_response_id"] == first["id"]
        await app.post(PATH, {"input": "on", "previous_response_id": second["id"], "instructions": "two"})
        assert prompt(app) == "<system>two<user>hi<assistant>ok<user>more<assistant>ok<user>on<a>"
        reference = {"type": "item_reference", "id": first["output"][0]["id"]}
        await app.post(PATH, {"input": [{"role": "user", "content": "hi"}, reference]})
        assert prompt(app) == "<user>hi<assistant>ok<a>"

    run(work)


def test_a_response_that_is_not_stored_or_not_known_is_404() -> None:
    async def work(app: App) -> None:
        kept_not = (await app.post(PATH, {"input": "hi", "store": False})).json["id"]
        for response_id in (kept_not, "resp_unknown"):
            reply = await app.post(PATH, {"input": "hi", "previous_response_id": response_id})
            assert (reply.status, reply.error["param"]) == (404, "previous_response_id")
            assert response_id in reply.error["message"]
            assert (await app.get(f"{PATH}/{response_id}")).status == 404
            assert (await app.get(f"{PATH}/{response_id}/input_items")).status == 404
            assert (await app.post(f"{PATH}/{response_id}/cancel", {})).status == 404
            assert (await app.open("DELETE", f"{PATH}/{response_id}").reply()).status == 404

    run(work)


def test_a_stored_response_is_given_again_until_it_is_deleted() -> None:
    async def work(app: App) -> None:
        streamed = read_events((await app.post(PATH, {"input": "hi", "stream": True})).body)[-1]["response"]
        path = f"{PATH}/{streamed['id']}"
        assert (await app.get(path)).json == streamed
        gone = await app.open("DELETE", path).reply()
        assert gone.json == {"id": streamed["id"], "object": "response", "deleted": True}
        assert (await app.get(path)).status == 404

    run(work)


def test_two_responses_with_one_request_id_are_both_kept() -> None:
    async def work(app: App) -> None:
        headers = {"x-request-id": "mine"}
        first = (await app.post(PATH, {"input": "a"}, headers=headers)).json["id"]
        second = (await app.post(PATH, {"input": "b"}, headers=headers)).json["id"]
        assert first == "resp_mine"
        assert second != first
        for response_id in (first, second):
            assert (await app.get(f"{PATH}/{response_id}")).json["id"] == response_id

    run(work)


def test_input_items_are_listed_newest_first_in_pages() -> None:
    async def work(app: App) -> None:
        items = [{"role": "user", "content": text, "id": f"msg_{text}"} for text in "abc"]
        response_id = (await app.post(PATH, {"input": items})).json["id"]

        async def page(query: str = "") -> tuple[list[str], bool]:
            reply = (await app.get(f"{PATH}/{response_id}/input_items{query}")).json
            ids = [item["id"] for item in reply["data"]]
            assert reply["object"] == "list"
            assert (reply["first_id"], reply["last_id"]) == (ids[0], ids[-1])
            return ids, reply["has_more"]

        assert await page() == (["msg_c", "msg_b", "msg_a"], False)
        assert await page("?order=asc&limit=2") == (["msg_a", "msg_b"], True)
        assert await page("?order=asc&limit=2&after=msg_b") == (["msg_c"], False)
        for query in ("?order=up", "?limit=0", "?limit=x", "?after=msg_z"):
            assert (await app.get(f"{PATH}/{response_id}/input_items{query}")).status == 400

    run(work)


def test_background_response_is_queued_then_runs_then_can_be_fetched() -> None:
    go, end = asyncio.Event(), asyncio.Event()

    async def work(app: App) -> None:
        reply = await app.post(PATH, {"input": "hi", "background": True})
        queued = check_response(reply.json)
        assert (queued["status"], queued["output"], queued["background"]) == ("queued", [], True)
        path = f"{PATH}/{queued['id']}"
        assert (await app.get(path)).json["status"] == "queued"
        busy = await app.post(PATH, {"input": "hi", "previous_response_id": queued["id"]})
        assert busy.status == 400
        assert "still running" in busy.error["message"]

        async def status() -> dict:
            return check_response((await app.get(path)).json)

        go.set()
        await async_wait_until(lambda: bool(app.state.responses.get(queued["id"]).body().count(b'"ok"')), LIMIT_S, "")
        running = await status()
        assert running["status"] == "in_progress"
        assert running["output"][0]["content"][0]["text"] == "ok"
        end.set()
        await asyncio.wait_for(app.state.responses.get(queued["id"]).has_ended.wait(), LIMIT_S)
        assert (await status())["status"] == "completed"
        assert (await app.get(path + "?stream=true")).status == 400

    run(work, lambda params: [go, hand_over("ok"), end, hand_over("!", finish=STOP)])


def test_background_stream_can_be_left_and_read_again_from_any_event() -> None:
    end = asyncio.Event()

    async def work(app: App) -> None:
        exchange = app.open("POST", PATH, {"input": "hi", "background": True, "stream": True})
        await async_wait_until(lambda: b"output_text.delta" in exchange.body, LIMIT_S, "the first text")
        response_id = read_events(exchange.body)[0]["response"]["id"]
        exchange.disconnect()
        await asyncio.wait_for(exchange.task, LIMIT_S)
        again = app.open("GET", f"{PATH}/{response_id}?stream=true")
        end.set()
        events = read_events((await again.reply()).body)
        lifecycle = ["created", "queued", *TEXT_EVENTS[1:]]
        assert names(events) == [*lifecycle, "completed"]
        later = await app.get(f"{PATH}/{response_id}?stream=true&starting_after=4")
        numbers = [line for line in later.body.decode().split("\n") if line.startswith("data: ")]
        assert len(numbers) == len(events) - 5
        assert '"sequence_number":5,' in numbers[0]
        assert (await app.get(f"{PATH}/{response_id}?stream=true&starting_after=99")).body == b""
        assert (await app.get(f"{PATH}/{response_id}?stream=true&starting_after=x")).status == 400
        assert (await app.get(f"{PATH}/{response_id}")).json == events[-1]["response"]

    run(work, lambda params: [hand_over("o"), end, hand_over("k", finish=STOP)])


def test_cancelling_a_background_response_aborts_it_and_may_be_repeated() -> None:
    async def work(app: App) -> None:
        response_id = (await app.post(PATH, {"input": "hi", "background": True})).json["id"]
        for _ in range(2):
            cancelled = check_response((await app.post(f"{PATH}/{response_id}/cancel", {})).json)
            assert (cancelled["id"], cancelled["status"]) == (response_id, "cancelled")
        assert app.llm.closed == [response_id]
        done = (await app.post(PATH, {"input": "hi", "stream": True, "max_output_tokens": 1})).status
        assert done == 200

    waits = [[asyncio.Event()], [hand_over("x", finish=STOP)]]
    run(work, lambda params: waits.pop(0))


def test_only_background_responses_can_be_cancelled() -> None:
    async def work(app: App) -> Reply:
        response_id = (await app.post(PATH, {"input": "hi"})).json["id"]
        return await app.post(f"{PATH}/{response_id}/cancel", {})

    reply = run(work)
    assert reply.status == 400  # type: ignore[attr-defined]


def test_deleting_a_running_response_aborts_it() -> None:
    async def work(app: App) -> None:
        response_id = (await app.post(PATH, {"input": "hi", "background": True})).json["id"]
        assert (await app.open("DELETE", f"{PATH}/{response_id}").reply()).json["deleted"] is True
        assert app.llm.closed == [response_id]
        assert (await app.get(f"{PATH}/{response_id}")).status == 404
        assert app.state.responses.num_bytes == 0

    run(work, lambda params: [asyncio.Event()])


def test_a_background_response_that_fails_says_why() -> None:
    async def work(app: App) -> dict:
        body = {"input": "hi", "background": True, "stream": True}
        events = read_events((await app.post(PATH, body)).body)
        assert names(events)[-2:] == ["error", "failed"]
        return (await app.get(f"{PATH}/{events[0]['response']['id']}")).json

    failed = run(work, lambda params: [hand_over("o"), RequestFailed("nan", cause="nan_logits")])
    assert failed["status"] == "failed"  # type: ignore[index]
    assert failed["error"]["code"] == "server_error"  # type: ignore[index]
    assert "nan_logits" in failed["error"]["message"]  # type: ignore[index]


def test_background_needs_a_store() -> None:
    assert post({"background": True, "store": False}).error["param"] == "background"
    assert post({"background": True}, max_stored_responses=0).error["param"] == "background"


def test_a_failure_in_the_middle_of_a_stream_ends_it_with_response_failed() -> None:
    async def work(app: App) -> None:
        reply = await app.post(PATH, {"input": "hi", "stream": True})
        events = read_events(reply.body)
        assert names(events)[-2:] == ["error", "failed"]
        assert events[-1]["response"]["error"]["code"] == "server_error"
        assert b"[DONE]" not in reply.body
        kept = (await app.get(f"{PATH}/{events[0]['response']['id']}")).json
        assert kept == events[-1]["response"]

    run(work, lambda params: [hand_over("o"), RequestFailed("nan", cause="nan_logits")])


def test_a_failure_before_the_first_output_is_an_ordinary_error() -> None:
    reply = post({"stream": True}, lambda params: [RequestFailed("nan", cause="nan_logits")])
    assert reply.status == 500
    assert reply.error["message"].startswith("nan_logits")


def test_a_client_that_leaves_aborts_the_request() -> None:
    async def work(app: App) -> None:
        for stream in (True, False):
            exchange = app.open("POST", PATH, {"input": "hi", "stream": stream})
            count = 1 + len(app.llm.closed)
            await async_wait_until(lambda count=count: len(app.llm.requests) == count, LIMIT_S, "the request")
            exchange.disconnect()
            await asyncio.wait_for(exchange.task, LIMIT_S)
            assert len(app.llm.closed) == count
        assert len(app.state.responses) == 0

    run(work, lambda params: [hand_over("o"), asyncio.Event()])


def test_truncation_auto_drops_the_oldest_turns_and_keeps_instructions() -> None:
    async def work(app: App) -> None:
        turns = [{"role": role, "content": text * 30} for text in "abcd" for role in ("user", "assistant")]
        body = {"input": [*turns, {"role": "user", "content": "now"}], "instructions": "sys"}
        refused = await app.post(PATH, body)
        assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
        assert refused.error["param"] == "input"
        assert "truncation" in refused.error["message"]
        kept = await app.post(PATH, {**body, "truncation": "auto", "max_output_tokens": 4})
        assert kept.status == 200
        # 77 bytes a turn and 23 of the rest: one turn fits into 160 - 4, two do not.
        shown = "".join(f"<user>{text * 30}<assistant>{text * 30}" for text in "d")
        assert prompt(app) == f"<system>sys{shown}<user>now<a>"
        whole = await app.post(PATH, {"input": "short", "truncation": "auto"})
        assert (whole.status, prompt(app)) == (200, "<user>short<a>")

    run(work, max_model_len=160)


def test_truncation_auto_keeps_the_end_of_a_turn_that_is_too_long_by_itself() -> None:
    async def work(app: App) -> None:
        body = {"input": "x" * 500 + "end", "truncation": "auto", "max_output_tokens": 10}
        assert (await app.post(PATH, body)).status == 200
        assert prompt(app).endswith("xxend<a>")
        assert len(prompt(app)) == 118

    run(work, max_model_len=128)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": None}, "input", "required"),
        ({"model": 7}, "model", "string"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"max_output_tokens": 9000}, "max_output_tokens", "max_output_tokens=9000 exceeds max_model_len=512"),
        ({"temperature": 3}, "temperature", "2"),
        ({"truncation": "sometimes"}, "truncation", "'auto' or 'disabled'"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "'low'"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "'json_schema'"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format", "text.format.schema is missing"),
        ({"include": ["everything"]}, "include.0", "message.output_text.logprobs"),
        ({"top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "'web_search'; this server runs no built-in tools"),
        ({"tools": [{"type": "function"}]}, "tools.0.name", "name of a function"),
        ({"tools": [{**TOOL, "name": "no blanks"}]}, "tools.0.name", "letters"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice", "'other'"),
        ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, "tool_choice", "'file_search'"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice", "must be"),
        ({"tools": [TOOL], "tool_choice": 7}, "tool_choice", "a word or an object"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "templates"),
        ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
        ({"messages": []}, "messages", "here it is input"),
        ({"max_tokens": 4}, "max_tokens", "here it is max_output_tokens"),
        ({"response_format": {"type": "text"}}, "response_format", "text.format"),
        ({"n": 2}, "n", "one answer"),
        ({"guided_regex": "a"}, "guided_regex", "structured_outputs.regex"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "at most 16"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content.0.type", "input_file"),
    ],
)
def test_a_refusal_names_the_field_in_the_words_of_this_api(body: dict, param: str, words: str) -> None:
    reply = post(body)
    assert reply.status == 400, reply.json
    assert reply.error["param"] == param
    assert words in reply.error["message"]
    assert "max_tokens" not in reply.error["message"] or "max_tokens" in body


def test_an_unknown_model_is_404() -> None:
    assert post({"model": "nope"}).status == 404
    assert post({"model": "alias"}).json["model"] == "m"


def chat_of(**fields: object) -> ChatCompletionRequest:
    body = ResponsesRequest.model_validate({"input": "hi", **fields})
    return body.chat_request([{"role": "user", "content": "hi"}])


def test_tools_and_choices_become_the_chat_apis() -> None:
    other = {"type": "function", "name": "other", "parameters": None}
    nested = {"type": "function", "function": {key: TOOL[key] for key in ("name", "parameters", "strict")}}
    assert chat_of(tools=[]).tools is None
    assert chat_of(tools=[], tool_choice="none").tool_choice is None
    both = chat_of(tools=[TOOL, other])
    assert both.tools == [nested, {"type": "function", "function": {"name": "other"}}]
    assert both.tool_choice is None
    named = chat_of(tools=[TOOL], tool_choice={"type": "function", "name": "get_time"})
    assert named.tool_choice == {"type": "function", "function": {"name": "get_time"}}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_time"}]}
    chosen = chat_of(tools=[TOOL, other], tool_choice=allowed)
    assert (chosen.tools, chosen.tool_choice) == ([nested], "required")


def test_the_form_of_the_text_becomes_a_response_format() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    sent = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    response_format = chat_of(text=sent).response_format
    assert response_format is not None
    assert response_format.json_schema is not None
    assert (response_format.json_schema.name, response_format.json_schema.schema_) == ("n", schema)
    free = chat_of(text={"format": {"type": "json_object"}}).response_format
    assert free is not None
    assert free.type == "json_object"


def test_logprobs_are_asked_for_by_include_or_by_a_number() -> None:
    assert chat_of().num_logprobs() is None
    assert chat_of(include=["message.output_text.logprobs"]).num_logprobs() == 0
    assert chat_of(top_logprobs=3).num_logprobs() == 3
    assert chat_of(reasoning={"effort": "high"}).reasoning_effort == "high"


def scripted(text: str, finish: FinishReason = STOP) -> Callable[[object], list]:
    """Script: the text in pieces of three characters, or at once when it is not streamed."""

    def script(params) -> list:
        size = len(text) if params.output_kind == 2 else 3
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        last = pieces.pop()
        return [*map(hand_over, pieces), hand_over(last, finish=finish)]

    return script


@pytest.mark.parametrize("stream", [False, True])
def test_forced_calls_are_function_call_items(stream: bool) -> None:
    text = '[{"name": "get_time", "parameters": {"zone": "UTC"}}, {"name": "get_time", "parameters": {}}]'
    reply = post({"tools": [TOOL], "tool_choice": "required", "stream": stream}, scripted(text))
    body = read_events(reply.body)[-1]["response"] if stream else reply.json
    calls = check_response(body)["output"]
    assert [(item["type"], item["name"], item["status"]) for item in calls] == [
        ("function_call", "get_time", "completed"),
        ("function_call", "get_time", "completed"),
    ]
    assert [json.loads(item["arguments"]) for item in calls] == [{"zone": "UTC"}, {}]
    assert len({item["call_id"] for item in calls} | {item["id"] for item in calls}) == 4


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_are_a_reasoning_item_and_are_counted(stream: bool) -> None:
    script = scripted("<think>Hm.</think>Yes.")
    reply = post({"stream": stream}, script, reasoning_parser="qwen3")
    body = check_response(read_events(reply.body)[-1]["response"] if stream else reply.json)
    thoughts, message = body["output"]
    assert (thoughts["type"], thoughts["id"][:3], thoughts["summary"]) == ("reasoning", "rs_", [])
    assert thoughts["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"][0]["text"] == "Yes."
    # One token a byte here; the marks count.
    assert body["usage"]["output_tokens_details"] == {"reasoning_tokens": len("<think>Hm.</think>")}
    assert body["usage"]["output_tokens"] == len("<think>Hm.</think>Yes.")


def test_thoughts_cut_by_length_are_an_incomplete_item() -> None:
    reply = post({}, scripted("<think>Hm, let", LENGTH), reasoning_parser="qwen3")
    (item,) = reply.json["output"]
    assert (item["type"], item["status"]) == ("reasoning", "incomplete")
    assert item["content"][0]["text"] == "Hm, let"

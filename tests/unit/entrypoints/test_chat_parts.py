"""Chat answers that hold thoughts and calls: shapes, chunk order, finish reasons, and which tokens are shown."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest

from serve.engine.outputs import Logprob, RequestOutput
from serve.sampling_params import SamplingParams
from serve.wire.frontend import FinishReason
from tests.fakes import hand_over
from tests.unit.entrypoints.app_client import TEMPLATE, Reply, chat, make_app

CHAT = "/v1/chat/completions"
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
WITH_TOOLS = "{% if tools %}{{ tools | length }}{% endif %}" + TEMPLATE
TOOL = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}
OTHER = {"type": "function", "function": {"name": "other"}}
NAMED = {"type": "function", "function": {"name": "get_time"}}
CALL = '<tool_call>\n{"name": "get_time", "arguments": {"zone": "UTC"}}\n</tool_call>'
HERMES = {"tool_call_parser": "hermes"}
QWEN = {"reasoning_parser": "qwen3"}
DEEPSEEK = {"reasoning_parser": "deepseek_r1"}


def post(
    body: dict, pieces: Sequence[str], finish: FinishReason = STOP, **server: object
) -> tuple[Reply, SamplingParams]:
    """Post a chat whose answer comes in these pieces, one hand-over each when it is streamed."""

    def script(params: SamplingParams) -> list[RequestOutput]:
        if params.output_kind == 2:
            outputs = [whole("".join(pieces), i, finish, params) for i in range(params.n)]
            return [RequestOutput("id", [], outputs, finished=True)]
        steps = []
        for position, piece in enumerate(pieces):
            is_last = position == len(pieces) - 1
            for i in range(params.n):
                output = whole(piece, i, finish if is_last else None, params)
                steps.append(RequestOutput("id", [], [output], finished=is_last and i == params.n - 1))
        return steps

    async def work() -> tuple[Reply, SamplingParams]:
        app = make_app(script, template=WITH_TOOLS, max_model_len=4096, disable_fastapi_docs=True, **server)
        reply = await app.post(CHAT, body)
        assert reply.status == 200, reply.body
        return reply, app.llm.requests[0][1]

    return asyncio.run(work())


def whole(text: str, index: int, finish: FinishReason | None, params: SamplingParams):
    output = hand_over(text, index=index, finish=finish).outputs[0]
    if params.logprobs is not None:
        output.logprobs = [{i: Logprob(-1.0, 1, chr(i), bytes([i]))} for i in output.token_ids]
    return output


def message(body: dict, text: str, finish: FinishReason = STOP, **server: object) -> dict:
    choice = post(body, [text], finish, **server)[0].json["choices"][0]
    return {**choice["message"], "finish": choice["finish_reason"]}


def calls_of(message: dict) -> list[tuple[str, dict]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]


def joined(reply: Reply, index: int = 0) -> dict:
    """Put the deltas of a choice together as clients do, checking what the API promises about them."""
    result: dict = {"content": "", "reasoning": "", "calls": [], "finish": None}
    for chunk in reply.chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            assert result["finish"] is None, "nothing follows the finish reason"
            delta = choice["delta"]
            result["content"] += delta.get("content") or ""
            result["reasoning"] += delta.get("reasoning") or ""
            for call in delta.get("tool_calls", []):
                assert len(delta["tool_calls"]) == 1
                if call["index"] == len(result["calls"]):
                    assert call["function"]["arguments"] == ""
                    assert call["type"] == "function"
                    result["calls"].append([call["id"], call["function"]["name"], ""])
                else:
                    assert call.keys() == {"index", "function"}
                    assert call["function"].keys() == {"arguments"}
                    result["calls"][call["index"]][2] += call["function"]["arguments"]
            result["finish"] = choice["finish_reason"]
    return result


def pieces_of(text: str, size: int = 3) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


def test_call_of_the_models_own_choice() -> None:
    found = message(chat(tools=[TOOL]), "Let me see. " + CALL, **HERMES)
    assert found["content"] == "Let me see."
    assert calls_of(found) == [("get_time", {"zone": "UTC"})]
    assert found["tool_calls"][0]["type"] == "function"
    assert found["tool_calls"][0]["id"].startswith("call_")
    assert found["finish"] == "tool_calls"


def test_content_is_null_only_beside_calls_or_when_nothing_but_thoughts_came() -> None:
    assert message(chat(tools=[TOOL]), CALL, **HERMES)["content"] is None
    assert message(chat(), "<think>hm", LENGTH, **QWEN)["content"] is None
    assert message(chat(), "<think>hm</think>", **QWEN)["content"] is None
    assert message(chat(), "", **QWEN)["content"] == ""
    assert message(chat(tools=[TOOL]), "no", **HERMES)["content"] == "no"


def test_answer_without_calls_has_no_tool_calls_field() -> None:
    found = message(chat(tools=[TOOL]), "no", **HERMES)
    assert found == {"role": "assistant", "content": "no", "refusal": None, "finish": "stop"}


def test_choice_none_leaves_markup_in_the_text() -> None:
    found = message(chat(tools=[TOOL], tool_choice="none"), CALL, **HERMES)
    assert (found["content"], found["finish"]) == (CALL, "stop")
    assert "tool_calls" not in found


def test_stream_of_a_call_follows_the_documented_chunks() -> None:
    body = chat(tools=[TOOL], stream=True)
    start, rest = '<tool_call>{"name": "get_time", "arguments": {', '"zone": "UTC"}}</tool_call>'
    reply, _ = post(body, [start, rest], **HERMES)
    deltas = [(c["choices"][0]["delta"], c["choices"][0]["finish_reason"]) for c in reply.chunks]
    assert deltas[0] == ({"role": "assistant", "content": ""}, None)
    call = deltas[1][0]["tool_calls"][0]
    assert call.keys() == {"index", "id", "type", "function"}
    assert (call["index"], call["type"], call["function"]) == (0, "function", {"name": "get_time", "arguments": ""})
    assert deltas[-1] == ({}, "tool_calls")
    assert reply.events[-1] == "[DONE]"
    assert json.loads(joined(reply)["calls"][0][2]) == {"zone": "UTC"}


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_stream_says_what_the_plain_answer_says_however_it_is_cut(size: int) -> None:
    text = "<think>What time?\n</think>Two calls: " + CALL + CALL + " done"
    settings = {**HERMES, **QWEN}
    plain = message(chat(tools=[TOOL]), text, **settings)
    reply, _ = post(chat(tools=[TOOL], stream=True), pieces_of(text, size), **settings)
    streamed = joined(reply)
    assert streamed["content"] == plain["content"]
    assert streamed["reasoning"] == plain["reasoning"]
    assert [(name, json.loads(arguments)) for _, name, arguments in streamed["calls"]] == calls_of(plain)
    assert streamed["finish"] == plain["finish"] == "tool_calls"
    assert len({call_id for call_id, _, _ in streamed["calls"]}) == 2


def test_each_choice_has_calls_of_its_own() -> None:
    reply, _ = post(chat(tools=[TOOL], stream=True, n=2), pieces_of(CALL), **HERMES)
    first, second = joined(reply, 0), joined(reply, 1)
    assert first["calls"][0][1:] == second["calls"][0][1:]
    assert first["calls"][0][0] != second["calls"][0][0]


def test_parallel_off_drops_later_calls() -> None:
    found = message(chat(tools=[TOOL], parallel_tool_calls=False), CALL + CALL, **HERMES)
    assert len(found["tool_calls"]) == 1


def test_call_cut_by_length_keeps_what_was_written() -> None:
    found = message(chat(tools=[TOOL]), CALL[:60], LENGTH, **HERMES)
    assert found["finish"] == "length"
    assert found["tool_calls"][0]["function"]["name"] == "get_time"
    assert '{"zone": "UTC"}'.startswith(found["tool_calls"][0]["function"]["arguments"])


def test_required_calls_are_read_from_the_forced_list_without_a_parser() -> None:
    text = '[{"name": "get_time", "parameters": {"zone": "UTC"}}, {"name": "other", "parameters": {}}]'
    body = chat(tools=[TOOL, OTHER], tool_choice="required")
    found = message(body, text)
    assert calls_of(found) == [("get_time", {"zone": "UTC"}), ("other", {})]
    assert (found["content"], found["finish"]) == (None, "tool_calls")
    reply, params = post({**body, "stream": True}, pieces_of(text))
    assert [call[1:] for call in joined(reply)["calls"]] == [["get_time", '{"zone": "UTC"}'], ["other", "{}"]]
    assert params.structured_outputs is not None


def test_named_call_is_the_forced_object_and_finishes_with_stop() -> None:
    body = chat(tools=[OTHER, TOOL], tool_choice=NAMED)
    found = message(body, '{"zone": "UTC"}')
    assert calls_of(found) == [("get_time", {"zone": "UTC"})]
    assert (found["content"], found["finish"]) == (None, "stop")
    reply, _ = post({**body, "stream": True}, pieces_of('{"zone": "UTC"}'))
    assert joined(reply)["finish"] == "stop"
    assert message(body, '{"zone"', LENGTH)["finish"] == "length"


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("text", "shown"), [("{\n }", "{}"), ("{}", "{}"), ('{ \n"a": {}}', '{ \n"a": {}}'), ("{ \n", "{ \n")]
)
def test_no_arguments_are_an_empty_object_however_they_were_written(text: str, shown: str, size: int) -> None:
    body = chat(tools=[TOOL], tool_choice=NAMED)
    assert message(body, text)["tool_calls"][0]["function"]["arguments"] == shown
    reply, _ = post({**body, "stream": True}, pieces_of(text, size))
    assert joined(reply)["calls"][0][2] == shown


def test_answer_that_must_be_json_holds_no_calls() -> None:
    text = json.dumps({"a": CALL})
    found = message(chat(tools=[TOOL], response_format={"type": "json_object"}), text, **HERMES)
    assert (found["content"], found["finish"]) == (text, "stop")


def test_answer_of_another_form_may_hold_calls() -> None:
    found = message(chat(tools=[TOOL], structured_outputs={"choice": [CALL, "no"]}), CALL, **HERMES)
    assert calls_of(found) == [("get_time", {"zone": "UTC"})]


def test_thoughts_go_to_their_own_field_and_are_counted() -> None:
    text = "<think>hm, hm</think>Yes."
    reply, _ = post(chat(), [text], **QWEN)
    body = reply.json
    assert body["choices"][0]["message"]["reasoning"] == "hm, hm"
    assert body["choices"][0]["message"]["content"] == "Yes."
    assert "reasoning_content" not in body["choices"][0]["message"]
    assert body["usage"]["completion_tokens"] == len(text)
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("<think>hm, hm</think>")}


def test_thoughts_are_streamed_and_counted() -> None:
    text = "<think>hm, hm</think>Yes."
    reply, _ = post(chat(stream=True, stream_options={"include_usage": True}), pieces_of(text), **QWEN)
    found = joined(reply)
    assert (found["reasoning"], found["content"], found["finish"]) == ("hm, hm", "Yes.", "stop")
    assert reply.chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 21}


def test_end_of_thoughts_inside_a_hand_over_fills_both_fields_of_one_chunk() -> None:
    reply, _ = post(chat(stream=True), ["<think>a", "b</think>c", "d"], **QWEN)
    deltas = [chunk["choices"][0]["delta"] for chunk in reply.chunks[1:]]
    assert deltas == [{"reasoning": "a"}, {"content": "c", "reasoning": "b"}, {"content": "d"}]


def test_old_name_of_thoughts_is_sent_when_the_operator_asks() -> None:
    settings = {**QWEN, "enable_reasoning_content": True}
    assert message(chat(), "<think>a</think>b", **settings)["reasoning_content"] == "a"
    reply, _ = post(chat(stream=True), ["<think>a</think>b"], **settings)
    assert reply.chunks[1]["choices"][0]["delta"] == {"content": "b", "reasoning": "a", "reasoning_content": "a"}


HIDDEN = {"include_reasoning": False, "logprobs": True, "return_token_ids": True}


def test_hidden_thoughts_leave_no_text_no_logprobs_and_no_ids() -> None:
    text = "<think>secret</think>Yes."
    reply, _ = post(chat(**HIDDEN), [text], **QWEN)
    choice = reply.json["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}
    assert bytes(choice["token_ids"]) == b"Yes."
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == "Yes."
    assert reply.json["usage"]["completion_tokens"] == len(text)
    assert reply.json["usage"]["completion_tokens_details"] == {"reasoning_tokens": 21}


@pytest.mark.parametrize("size", [1, 4, 7, 100])
def test_hidden_thoughts_leave_nothing_in_a_stream(size: int) -> None:
    text = "<think>secret</think>Yes."
    reply, _ = post(chat(stream=True, **HIDDEN), pieces_of(text, size), **QWEN)
    choices = [choice for chunk in reply.chunks for choice in chunk["choices"]]
    assert bytes(i for choice in choices for i in choice.get("token_ids") or []) == b"Yes."
    entries = [entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
    assert "".join(entry["token"] for entry in entries) == "Yes."
    assert joined(reply)["content"] == "Yes."
    assert b"secret" not in reply.body
    assert all(choice["delta"] for choice in choices if choice["finish_reason"] is None)


def test_answer_of_hidden_thoughts_only_has_no_content() -> None:
    reply, _ = post(chat(**HIDDEN), ["<think>secret"], LENGTH, **QWEN)
    choice = reply.json["choices"][0]
    assert (choice["message"]["content"], choice["token_ids"], choice["finish_reason"]) == (None, [], "length")
    assert b"secret" not in reply.body


def test_answer_without_thoughts_is_shown_whole_when_thoughts_are_hidden() -> None:
    reply, _ = post(chat(stream=True, **HIDDEN), pieces_of("Just so."), **QWEN)
    choices = [choice for chunk in reply.chunks for choice in chunk["choices"]]
    assert bytes(i for choice in choices for i in choice.get("token_ids") or []) == b"Just so."


@pytest.mark.parametrize(
    "fields",
    [{"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}],
)
def test_thinking_switched_off_means_all_content(fields: dict) -> None:
    assert message(chat(**fields), "<think>a</think>b", **QWEN)["content"] == "<think>a</think>b"


def test_call_after_thoughts_counts_and_markup_inside_them_does_not() -> None:
    text = f"<think>{CALL}</think>{CALL}"
    found = message(chat(tools=[TOOL]), text, **HERMES, **QWEN)
    assert len(found["tool_calls"]) == 1
    assert found["reasoning"] == CALL
    assert found["content"] is None


def test_constraint_waits_for_the_end_of_the_thoughts() -> None:
    _, params = post(chat(response_format={"type": "json_object"}), ["a</think>{}"], **DEEPSEEK)
    assert params.reasoning is not None
    assert params.reasoning.end_text == "</think>"
    assert params.reasoning.max_tokens is None
    assert post(chat(), ["b"], **DEEPSEEK)[1].reasoning is None


def test_thinking_budget_reaches_the_engine() -> None:
    _, params = post(chat(thinking_token_budget=5), ["b"], **DEEPSEEK)
    assert params.reasoning is not None
    assert params.reasoning.max_tokens == 5
    assert post(chat(thinking_token_budget=-1), ["b"], **DEEPSEEK)[1].reasoning is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice"),
        ({"include_reasoning": "maybe"}, "include_reasoning"),
    ],
)
def test_what_this_server_cannot_read_is_refused(fields: dict, param: str) -> None:
    async def work() -> Reply:
        app = make_app(template=WITH_TOOLS, max_model_len=4096, enable_auto_tool_choice=True)
        return await app.post(CHAT, chat(**fields))

    reply = asyncio.run(work())
    assert (reply.status, reply.error["param"]) == (400, param)


def test_auto_can_be_switched_off_by_the_operator() -> None:
    app = make_app(template=WITH_TOOLS, max_model_len=4096, enable_auto_tool_choice=False, **HERMES)
    reply = asyncio.run(app.post(CHAT, chat(tools=[TOOL])))
    assert (reply.status, reply.error["param"]) == (400, "tools")


def test_answers_searched_for_calls_are_counted_by_outcome() -> None:
    async def work() -> list[str]:
        app = make_app(lambda params: [hand_over(CALL, finish=STOP)], template=WITH_TOOLS, max_model_len=4096, **HERMES)
        await app.post(CHAT, chat(tools=[TOOL]))
        await app.post(CHAT, chat(tools=[TOOL], stream=True))
        await app.post(CHAT, chat(tools=[TOOL], tool_choice="none"))
        return (await app.get("/metrics")).body.decode().splitlines()

    lines = [line for line in asyncio.run(work()) if "tool_call_parser_invocations_total{" in line]
    assert len(lines) == 2 * 2 * 3
    counted = [line for line in lines if not line.endswith(" 0.0")]
    assert len(counted) == 2
    for mode in ("streaming", "non_streaming"):
        labels = f'mode="{mode}",model_name="m",outcome="tool_call",request_type="chat_completions"'
        assert f"serve:tool_call_parser_invocations_total{{{labels}}} 1.0" in counted

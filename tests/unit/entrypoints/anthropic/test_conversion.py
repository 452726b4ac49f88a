"""Bodies of the Messages API as chat requests: turns, blocks, tools and thinking, by hand from the API's reference."""

from __future__ import annotations

import json

import pytest

from serve.entrypoints.anthropic.conversion import to_chat
from serve.entrypoints.anthropic.protocol import MessagesRequest, PromptRequest
from serve.entrypoints.openai.protocol import ChatCompletionRequest, parse_request
from serve.errors import InvalidRequest

ASK = [{"role": "user", "content": "hi"}]
TOOL = {"name": "get_time", "description": "Tell the time.", "input_schema": {"type": "object", "properties": {}}}


def convert(*, can_think: bool = True, **fields: object) -> ChatCompletionRequest:
    body = {"model": "m", "max_tokens": 16, "messages": ASK, **fields}
    return to_chat(parse_request(MessagesRequest, body), can_think=can_think)


def messages_of(*messages: dict, **fields: object) -> list[dict]:
    return convert(messages=list(messages), **fields).messages


def user(*blocks: dict) -> dict:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: dict) -> dict:
    return {"role": "assistant", "content": list(blocks)}


def text(value: str) -> dict:
    return {"type": "text", "text": value}


def test_limits_and_sampling_values_arrive_under_the_names_of_chat() -> None:
    chat = convert(stop_sequences=["END"], temperature=0.5, top_p=0.9, top_k=7, stream=True, seed=3, metadata={"a": 1})
    assert (chat.max_output_tokens, chat.stop, chat.stream) == (16, ["END"], True)
    assert (chat.temperature, chat.top_p, chat.top_k, chat.seed) == (0.5, 0.9, 7, 3)
    assert (chat.add_generation_prompt, chat.continue_final_message) == (True, False)


def test_system_as_a_string_equals_system_as_one_block() -> None:
    expected = [{"role": "system", "content": "Be brief."}, *ASK]
    assert convert(system="Be brief.").messages == expected
    assert convert(system=[{**text("Be brief."), "cache_control": {"type": "ephemeral"}}]).messages == expected


def test_several_system_blocks_stay_parts_of_one_message() -> None:
    assert convert(system=[text("a"), text("b")]).messages[0] == {"role": "system", "content": [text("a"), text("b")]}


def test_billing_line_that_changes_with_every_request_is_left_out() -> None:
    system = [text("x-anthropic-billing-header: cc_version=2.1; cch=00f3a"), text("Be brief.")]
    assert convert(system=system).messages[0] == {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("system", ["", [], None, [text("")]])
def test_empty_system_text_adds_no_message(system: object) -> None:
    assert convert(system=system).messages == ASK


def test_a_call_and_its_result_become_a_tool_call_and_a_tool_message() -> None:
    call = {"type": "tool_use", "id": "call_1", "name": "get_time", "input": {"zone": "UTC"}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "noon"}
    _, made, answered, asked = messages_of(*ASK, assistant(text("Let me look."), call), user(result, text("Well?")))
    assert made["content"] == "Let me look."
    [made_call] = made["tool_calls"]
    assert (made_call["id"], made_call["type"], made_call["function"]["name"]) == ("call_1", "function", "get_time")
    assert json.loads(made_call["function"]["arguments"]) == {"zone": "UTC"}
    assert answered == {"role": "tool", "tool_call_id": "call_1", "content": "noon", "name": "get_time"}
    assert asked == {"role": "user", "content": "Well?"}


@pytest.mark.parametrize(
    ("content", "expected"),
    [(None, ""), ("noon", "noon"), ([text("noon")], "noon"), ([text("noon"), text("UTC")], "noon\nUTC"), ([], "")],
)
def test_content_of_a_result_may_be_absent_a_string_or_blocks(content: object, expected: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": content}
    assert messages_of(user(result))[0]["content"] == expected


def test_failed_call_says_so_to_the_model() -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": "no such zone", "is_error": True}
    assert messages_of(user(result))[0]["content"] == "Error: no such zone"


def test_results_come_before_the_text_of_the_same_turn() -> None:
    turn = user(text("And?"), {"type": "tool_result", "tool_use_id": "a", "content": "noon"})
    assert [message["role"] for message in messages_of(turn)] == ["tool", "user"]


def test_turns_in_a_row_by_one_side_are_one_message() -> None:
    merged = messages_of({"role": "user", "content": "a"}, {"role": "user", "content": "b"}, *[assistant(text("c"))])
    assert [(message["role"], message["content"]) for message in merged] == [
        ("user", [text("a"), text("b")]),
        ("assistant", "c"),
    ]


def test_thoughts_of_earlier_turns_are_kept_apart_from_the_text() -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}
    hidden = {"type": "redacted_thinking", "data": "xx"}
    turn = messages_of(*ASK, assistant(thinking, hidden, text("Hello")), *ASK)[1]
    assert turn == {"role": "assistant", "content": "Hello", "reasoning": "hm"}


def test_last_turn_of_the_assistant_is_gone_on_from() -> None:
    chat = convert(messages=[*ASK, {"role": "assistant", "content": "The best is ("}])
    assert (chat.add_generation_prompt, chat.continue_final_message) == (False, True)
    assert chat.messages[-1] == {"role": "assistant", "content": "The best is ("}


def test_empty_last_turn_of_the_assistant_is_dropped() -> None:
    chat = convert(messages=[*ASK, {"role": "assistant", "content": ""}])
    assert chat.messages == ASK
    assert chat.add_generation_prompt


def test_tools_become_functions() -> None:
    chat = convert(tools=[{**TOOL, "strict": True, "cache_control": {"type": "ephemeral"}}])
    function = {
        "name": "get_time",
        "description": "Tell the time.",
        "parameters": {"type": "object", "properties": {}},
        "strict": True,
    }
    assert chat.tools == [{"type": "function", "function": function}]
    assert (chat.tool_choice, chat.parallel_tool_calls) == ("auto", True)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "get_time"}, {"type": "function", "function": {"name": "get_time"}}),
    ],
)
def test_tool_choice_is_translated(choice: dict, expected: object) -> None:
    assert convert(tools=[TOOL], tool_choice=choice).tool_choice == expected


def test_parallel_calls_can_be_switched_off() -> None:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    assert convert(tools=[TOOL], tool_choice=choice).parallel_tool_calls is False


def test_empty_tool_list_means_no_tools() -> None:
    chat = convert(tools=[], tool_choice={"type": "auto"})
    assert (chat.tools, chat.tool_choice) == (None, None)


def test_thinking_is_switched_in_the_template_and_bounded_by_its_budget() -> None:
    on = convert(thinking={"type": "enabled", "budget_tokens": 1024})
    assert (on.chat_template_kwargs, on.thinking_token_budget) == ({"enable_thinking": True}, 1024)
    off = convert(thinking={"type": "disabled"})
    assert (off.chat_template_kwargs, off.thinking_token_budget) == ({"enable_thinking": False}, None)
    free = convert(thinking={"type": "adaptive"}, output_config={"effort": "low"})
    assert (free.chat_template_kwargs, free.reasoning_effort) == ({"enable_thinking": True}, "low")


def test_budget_means_nothing_to_a_model_that_does_not_think() -> None:
    assert convert(thinking={"type": "enabled", "budget_tokens": 1024}, can_think=False).thinking_token_budget is None


def test_what_the_client_tells_the_template_itself_wins() -> None:
    chat = convert(thinking={"type": "enabled"}, chat_template_kwargs={"enable_thinking": False, "style": "x"})
    assert chat.chat_template_kwargs == {"enable_thinking": False, "style": "x"}


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_schema_of_the_answer_becomes_the_response_format(field: str) -> None:
    wanted = {"type": "json_schema", "schema": {"type": "object"}}
    chat = convert(**{field: {"format": wanted} if field == "output_config" else wanted})
    assert chat.response_format is not None
    assert chat.response_format.type == "json_schema"
    assert chat.response_format.json_schema is not None
    assert chat.response_format.json_schema.schema_ == {"type": "object"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content.0"),
        ({"messages": [user({"type": "image", "source": {}})]}, "messages.0.content.0.type"),
        ({"messages": [user({"type": "document", "source": {}})]}, "messages.0.content.0.type"),
        ({"messages": [user({"type": "text"})]}, "messages.0.content.0.text"),
        ({"messages": [user({"text": "x"})]}, "messages.0.content.0.type"),
        ({"messages": [user({"type": "tool_result"})]}, "messages.0.content.0.tool_use_id"),
        (
            {"messages": [user({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]})]},
            "messages.0.content.0.content.0.type",
        ),
        ({"messages": [assistant({"type": "tool_use", "id": "a", "name": "f"})]}, "messages.0.content.0.input"),
        ({"messages": [assistant({"type": "tool_use", "id": "a", "input": {}})]}, "messages.0.content.0.name"),
        ({"system": 3}, "system"),
        ({"system": ["x"]}, "system"),
        ({"system": [{"type": "image"}]}, "system.0.type"),
        ({"stop_sequences": [""]}, "stop_sequences.0"),
        ({"stop_sequences": "END"}, "stop_sequences"),
        ({"temperature": 2.5}, "temperature"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "all"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"guided_json": {}}, "guided_json"),
    ],
)
def test_what_is_wrong_is_named(fields: dict, param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        convert(**fields)
    assert refusal.value.param == param


def test_counting_needs_no_limit() -> None:
    body = parse_request(PromptRequest, {"model": "m", "messages": ASK})
    assert to_chat(body, can_think=False).messages == ASK

"""Items of the Responses API and the chat messages they stand for."""

from __future__ import annotations

import pytest

from serve.entrypoints.openai.responses_input import chat_messages, read_input, turn_starts, without_oldest
from serve.errors import InvalidRequest

CALL = {"type": "function_call", "call_id": "call_1", "name": "get_time", "arguments": '{"zone": "UTC"}'}
CHAT_CALL = {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": '{"zone": "UTC"}'}}
THOUGHTS = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}


def nothing(item_id: str) -> None:
    return None


def messages(items: object, instructions: str | None = None) -> list[dict]:
    return chat_messages(read_input(items, nothing), instructions)


def user(text: str) -> dict:
    return {"role": "user", "content": [{"type": "text", "text": text}]}


def test_a_string_is_one_message_of_the_user() -> None:
    assert messages("hi") == [user("hi")]


def test_instructions_come_first_as_the_system_message() -> None:
    assert messages("hi", "Be brief.") == [{"role": "system", "content": "Be brief."}, user("hi")]


def test_messages_keep_their_roles_and_all_kinds_of_text_parts() -> None:
    items = [
        {"role": "developer", "content": "rules"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "b"}, {"type": "refusal", "refusal": "c"}]},
        {"role": "user", "content": [{"type": "text", "text": "d"}, {"type": "input_text", "text": "e"}]},
    ]
    assert messages(items) == [
        {"role": "developer", "content": [{"type": "text", "text": "rules"}]},
        user("a"),
        {"role": "assistant", "content": "bc"},
        {"role": "user", "content": [{"type": "text", "text": "d"}, {"type": "text", "text": "e"}]},
    ]


def test_thoughts_text_and_calls_in_a_row_are_one_assistant_message() -> None:
    second = {**CALL, "call_id": "call_2"}
    items = [user("?"), THOUGHTS, {"role": "assistant", "content": "Wait."}, CALL, second]
    assert messages(items) == [
        user("?"),
        {
            "role": "assistant",
            "reasoning": "Hm.",
            "content": "Wait.",
            "tool_calls": [CHAT_CALL, {**CHAT_CALL, "id": "call_2"}],
        },
    ]


def test_an_output_answers_its_call_and_ends_the_assistant_message() -> None:
    output = {"type": "function_call_output", "call_id": "call_1", "output": "12:00"}
    listed = {**output, "output": [{"type": "input_text", "text": "12:00"}]}
    answer = {"role": "tool", "tool_call_id": "call_1", "name": "get_time"}
    assert messages([CALL, output, THOUGHTS, CALL, listed]) == [
        {"role": "assistant", "tool_calls": [CHAT_CALL]},
        {**answer, "content": "12:00"},
        {"role": "assistant", "reasoning": "Hm.", "tool_calls": [CHAT_CALL]},
        {**answer, "content": [{"type": "text", "text": "12:00"}]},
    ]


def test_text_after_a_call_begins_a_new_message() -> None:
    assert messages([CALL, {"role": "assistant", "content": "Done."}]) == [
        {"role": "assistant", "tool_calls": [CHAT_CALL]},
        {"role": "assistant", "content": "Done."},
    ]


def test_a_summary_stands_for_thoughts_without_content_and_encrypted_ones_are_left_out() -> None:
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": "xyz"}
    assert messages([summary]) == [{"role": "assistant", "reasoning": "s"}]
    assert messages([user("a"), sealed, user("b")]) == [user("a"), user("b")]


def test_a_reference_stands_for_the_item_it_names() -> None:
    kept = {"id": "msg_1", "type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "old"}]}
    items = read_input([{"type": "item_reference", "id": "msg_1"}], lambda item_id: {"msg_1": kept}.get(item_id))
    assert items == [kept]
    with pytest.raises(InvalidRequest, match="refers to the item 'msg_2'"):
        read_input([{"type": "item_reference", "id": "msg_2"}], nothing)


def test_every_item_has_an_id_and_keeps_the_one_it_came_with() -> None:
    items = read_input([{"role": "user", "content": "a"}, {**CALL, "id": "fc_7"}, THOUGHTS], nothing)
    assert str(items[0]["id"]).startswith("msg_")
    assert items[1]["id"] == "fc_7"
    assert str(items[2]["id"]).startswith("rs_")


@pytest.mark.parametrize(
    ("items", "param", "words"),
    [
        (7, "input", "string or a list"),
        ([], "input", "input is empty"),
        (["hi"], "input.0", "must be an object"),
        ([{"type": "computer_call"}], "input.0.type", "'computer_call'; this server takes: message, function_call"),
        ([{}], "input.0.type", "missing"),
        ([{"role": "robot", "content": "a"}], "input.0.role", "the roles are user, assistant, system, developer"),
        ([{"role": "user"}], "input.0.content", "missing"),
        ([{"role": "user", "content": 1}], "input.0.content", "string or a list"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "input.0.content.0.type", "'input_image'"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input.0.content.0.text", "must be a string"),
        ([{**CALL, "arguments": {}}], "input.0.arguments", "must be a string"),
        ([{**CALL, "call_id": None}], "input.0.call_id", "must be a string"),
        ([{"type": "function_call_output", "call_id": "c"}], "input.0.output", "missing"),
        ([{"type": "function_call_output", "call_id": "c", "output": "x"}], "input", "answers no function_call"),
        ([{"type": "reasoning", "summary": [{"type": "x"}]}], "input.0.summary.0.type", "summary_text"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(items: object, param: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        messages(items)
    assert refused.value.param == param


def test_a_conversation_is_cut_before_a_message_of_the_user_and_keeps_its_instructions() -> None:
    roles = ("system", "user", "assistant", "tool", "developer", "user", "assistant", "user")
    conversation = [{"role": role, "content": str(place)} for place, role in enumerate(roles)]
    assert turn_starts(conversation) == [5, 7]
    assert [m["content"] for m in without_oldest(conversation, 5)] == ["0", "4", "5", "6", "7"]

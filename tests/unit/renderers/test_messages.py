"""Messages as clients send them, messages as templates see them."""

from __future__ import annotations

import copy

import pytest

from serve.errors import InvalidRequest
from serve.renderers.messages import content_chars, count_chars, normalize_messages


def normalized(
    *messages: object, content_format: str = "string", knows_developer: bool = False, **template: bool
) -> list[dict[str, object]]:
    format_ = "openai" if content_format == "openai" else "string"
    return normalize_messages(messages, format_, knows_developer=knows_developer, **template)


def part(text: str) -> dict[str, object]:
    return {"type": "text", "text": text}


def call(arguments: object) -> dict[str, object]:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}


def test_parts_are_joined_with_newlines_for_string_templates() -> None:
    message = {"role": "user", "content": [part("a"), "b", {"type": "input_text", "text": "c"}]}
    assert normalized(message) == [{"role": "user", "content": "a\nb\nc"}]


def test_string_is_wrapped_for_templates_that_loop_over_parts() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": ["x", part("y")]}]
    result = normalized(*messages, content_format="openai")
    assert [m["content"] for m in result] == [[part("a")], [part("x"), part("y")]]


def test_tool_content_is_a_string_in_both_formats() -> None:
    message = {"role": "tool", "tool_call_id": "c", "content": [part("a"), part("b")]}
    for content_format in ("string", "openai"):
        assert normalized(message, content_format=content_format)[0]["content"] == "a\nb"


@pytest.mark.parametrize(("content_format", "expected"), [("string", ""), ("openai", [])])
def test_assistant_without_content_has_empty_content(content_format: str, expected: object) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [call("{}")]}
    assert normalized(message, content_format=content_format)[0]["content"] == expected


def test_extra_keys_pass_and_null_ones_do_not() -> None:
    message = {"role": "user", "content": "a", "name": "Ann", "weight": None, "custom": {"k": [1]}}
    assert normalized(message) == [{"role": "user", "content": "a", "name": "Ann", "custom": {"k": [1]}}]


def test_empty_tool_call_list_is_dropped() -> None:
    assert normalized({"role": "assistant", "content": "a", "tool_calls": []}) == [
        {"role": "assistant", "content": "a"}
    ]


@pytest.mark.parametrize(
    ("sent", "seen"),
    [
        ('{"city": "Z\u00fcrich", "n": [1]}', {"city": "Z\u00fcrich", "n": [1]}),
        ("", {}),
        ("  ", {}),
        (None, {}),
        ({"a": 1}, {"a": 1}),
        ("not json", "not json"),
        ("[1, 2]", "[1, 2]"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_tool_call_arguments_become_an_object(sent: object, seen: object) -> None:
    result = normalized({"role": "assistant", "content": None, "tool_calls": [call(sent)]})
    assert result[0]["tool_calls"] == [call(seen)]


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_reasoning_is_seen_under_both_names(key: str) -> None:
    message = normalized({"role": "assistant", "content": "a", key: "because"})[0]
    assert (message["reasoning"], message["reasoning_content"]) == ("because", "because")


def test_given_messages_stay_untouched() -> None:
    messages = [
        {"role": "developer", "content": [part("a")]},
        {"role": "assistant", "content": None, "tool_calls": [call('{"a": 1}')]},
    ]
    before = copy.deepcopy(messages)
    normalized(*messages)
    assert messages == before


def test_developer_becomes_the_system_message_in_front() -> None:
    user = {"role": "user", "content": "hi"}
    developer = {"role": "developer", "content": "be kind"}
    system = {"role": "system", "content": "be brief"}
    assert normalized(developer, user) == [{"role": "system", "content": "be kind"}, user]
    merged = {"role": "system", "content": "be brief\n\nbe kind"}
    assert normalized(system, user, developer) == [merged, user]


def test_developer_parts_are_merged_into_one_part() -> None:
    alone = {"role": "developer", "content": [part("a"), part("b")]}
    assert normalized(alone, content_format="openai") == [{"role": "system", "content": [part("a"), part("b")]}]
    messages = [{"role": "system", "content": "a"}, {"role": "developer", "content": [part("b"), part("c")]}]
    assert normalized(*messages, content_format="openai") == [{"role": "system", "content": [part("a\n\nb\nc")]}]


def test_reasoning_has_every_name_that_templates_read() -> None:
    for name in ("reasoning", "reasoning_content", "thinking"):
        (message,) = normalized({"role": "assistant", "content": "a", name: "hm"})
        assert {message["reasoning"], message["reasoning_content"], message["thinking"]} == {"hm"}


def test_template_that_asks_for_null_content_gets_it_from_messages_that_only_call() -> None:
    calling = {"role": "assistant", "content": None, "tool_calls": [call('{"a": 1}')]}
    (message,) = normalized(calling, knows_null_content=True)
    assert message["content"] is None
    (silent,) = normalized({"role": "assistant", "content": None}, knows_null_content=True)
    assert silent["content"] == ""


@pytest.mark.parametrize(
    ("sent", "text"), [('{"a":  1}', '{"a":  1}'), ({"a": "\u00e9"}, '{"a": "\u00e9"}'), ("", "{}"), (None, "{}")]
)
def test_template_that_wants_text_gets_arguments_as_text(sent: object, text: str) -> None:
    calling = {"role": "assistant", "content": None, "tool_calls": [call(sent)]}
    (message,) = normalized(calling, wants_text_arguments=True)
    assert message["tool_calls"][0]["function"]["arguments"] == text


def test_template_that_knows_developer_keeps_it() -> None:
    message = {"role": "developer", "content": "a"}
    assert normalized(message, knows_developer=True) == [message]


def test_several_system_messages_stay_where_they_are_without_a_developer() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
    assert normalized(*messages) == messages


@pytest.mark.parametrize(
    ("message", "param", "match"),
    [
        ({"role": "assistant", "content": "a", "reasoning": {}}, "messages.0.reasoning", "must be a string"),
        ({"role": "wizard", "content": "a"}, "messages.0.role", "'wizard'; the roles are system, developer, user"),
        ({"content": "a"}, "messages.0.role", "missing"),
        ({"role": 3, "content": "a"}, "messages.0.role", "not a string"),
        ("hi", "messages.0", "must be an object"),
        ({"role": "user"}, "messages.0.content", "only assistant"),
        ({"role": "user", "content": None}, "messages.0.content", "only assistant"),
        ({"role": "user", "content": 5}, "messages.0.content", "a string or a list"),
        ({"role": "user", "content": {"type": "text", "text": "a"}}, "messages.0.content", "a string or a list"),
        ({"role": "user", "content": [5]}, "messages.0.content.0", "a string or an object"),
        (
            {"role": "user", "content": [part("a"), {"type": "image_url", "image_url": {"url": "data:x"}}]},
            "messages.0.content.1.type",
            "'image_url'; this model accepts: text",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "messages.0.content.0.text", "must be a string"),
        ({"role": "user", "content": [{"type": ["text"], "text": "a"}]}, "messages.0.content.0.type", "not a string"),
        ({"role": "tool", "content": "a"}, "messages.0.tool_call_id", "is missing"),
        ({"role": "assistant", "content": "a", "tool_calls": {}}, "messages.0.tool_calls", "must be a list"),
        ({"role": "assistant", "tool_calls": [{"type": "custom"}]}, "messages.0.tool_calls.0", "of type function"),
        ({"role": "assistant", "tool_calls": ["f"]}, "messages.0.tool_calls.0", "of type function"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]},
            "messages.0.tool_calls.0.function.name",
            "must be a string",
        ),
    ],
)
def test_wrong_message_is_refused_with_its_path(message: object, param: str, match: str) -> None:
    with pytest.raises(InvalidRequest, match=match) as caught:
        normalized(message)
    assert caught.value.param == param


def test_no_messages_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least one") as caught:
        normalized()
    assert caught.value.param == "messages"


def test_characters_are_counted_at_any_depth() -> None:
    assert count_chars([{"ab": ["cde", None, 12]}, "f"]) == 2 + 3 + 4 + 2 + 1
    assert content_chars([{"content": "abc"}, {"content": [part("de"), "f", 5]}, {"content": None}, "x"]) == 6

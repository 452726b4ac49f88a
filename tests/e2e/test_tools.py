"""Tool calls of the real model: forced by grammar, written in the model's own markup, streamed, and as history."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from tests.e2e.client import chat, choice_of, messages, open_stream, post, read_stream, usage_of
from tests.e2e.server import Server

CHAT = "/v1/chat/completions"
QUESTION = "What is the weather in Rome?"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": CITY}}
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
# What the constraint makes the model write: a sentence, then one call.
MARKUP = r'Let me look\.<tool_call>\{"name": "get_weather", "arguments": \{"city": "(Rome|Paris)"\}\}</tool_call>'


def called(answer: dict) -> list[tuple[str, object]]:
    """Give name and arguments of the calls of the first choice."""
    calls = choice_of(answer)["message"]["tool_calls"]
    assert all(call["type"] == "function" for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def streamed_calls(server: Server, body: dict) -> tuple[list[list[str]], object, str]:
    """Give [name, arguments] of the streamed calls, the finish reason and the content."""
    calls: list[list[str]] = []
    with open_stream(server, CHAT, {"messages": messages(QUESTION), **body}) as response:
        stream = read_stream(response)
    assert stream.done
    for choice in stream.choices():
        for call in choice["delta"].get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(calls)
                assert call["function"]["arguments"] == ""
                calls.append([call["function"]["name"], ""])
            else:
                calls[call["index"]][1] += call["function"]["arguments"]
    return calls, stream.finish_reason(), stream.text()


def test_required_calls_obey_the_schema_of_their_tool(parts: Server) -> None:
    body = {"tools": [WEATHER, NOW], "tool_choice": "required", "max_tokens": 120, "parallel_tool_calls": False}
    answer = chat(parts, QUESTION, **body)
    [(name, arguments)] = called(answer)
    jsonschema.validate(arguments, CITY if name == "get_weather" else {"type": "object", "maxProperties": 0})
    assert choice_of(answer)["finish_reason"] == "tool_calls"
    assert choice_of(answer)["message"]["content"] is None


def test_required_needs_no_parser(server: Server) -> None:
    body = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 120, "parallel_tool_calls": False}
    [(name, arguments)] = called(chat(server, QUESTION, **body))
    assert name == "get_weather"
    jsonschema.validate(arguments, CITY)


def test_auto_without_a_parser_is_refused(server: Server) -> None:
    for choice in ({}, {"tool_choice": "auto"}):
        response = post(server, CHAT, {"messages": messages("a"), "tools": [WEATHER], **choice})
        assert response.status_code == 400
        assert "--tool-call-parser" in response.json()["error"]["message"]


def test_named_tool_is_called_once_and_finishes_with_stop(parts: Server) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    answer = chat(parts, QUESTION, tools=[NOW, WEATHER], tool_choice=named, max_tokens=60)
    [(name, arguments)] = called(answer)
    assert name == "get_weather"
    jsonschema.validate(arguments, CITY)
    assert choice_of(answer)["finish_reason"] == "stop"


def test_tool_without_parameters_gets_an_empty_object(parts: Server) -> None:
    named = {"type": "function", "function": {"name": "now"}}
    answer = chat(parts, "What time is it?", tools=[NOW], tool_choice=named, max_tokens=30)
    [call] = choice_of(answer)["message"]["tool_calls"]
    assert call["function"] == {"name": "now", "arguments": "{}"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_streamed_forced_calls_are_the_plain_ones(parts: Server, choice: object) -> None:
    body = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 80, "parallel_tool_calls": False}
    calls, finish, content = streamed_calls(parts, body)
    plain = chat(parts, QUESTION, **body)
    assert [(name, json.loads(arguments)) for name, arguments in calls] == called(plain)
    assert finish == choice_of(plain)["finish_reason"]
    assert content == ""


def test_calls_in_the_models_own_markup_are_read(parts: Server) -> None:
    body = {"tools": [WEATHER], "structured_outputs": {"regex": MARKUP}, "max_tokens": 80}
    answer = chat(parts, QUESTION, **body)
    [(name, arguments)] = called(answer)
    assert name == "get_weather"
    jsonschema.validate(arguments, CITY)
    assert choice_of(answer)["message"]["content"] == "Let me look."
    assert choice_of(answer)["finish_reason"] == "tool_calls"
    calls, finish, content = streamed_calls(parts, body)
    assert [(n, json.loads(a)) for n, a in calls] == [(name, arguments)]
    assert (finish, content) == ("tool_calls", "Let me look.")


def test_markup_is_text_when_calls_are_not_wanted(parts: Server) -> None:
    body = {"tools": [WEATHER], "tool_choice": "none", "structured_outputs": {"regex": MARKUP}, "max_tokens": 80}
    choice = choice_of(chat(parts, QUESTION, **body))
    assert re.fullmatch(MARKUP, choice["message"]["content"])
    assert choice["finish_reason"] == "stop"
    assert "tool_calls" not in choice["message"]


def test_call_cut_by_length_keeps_its_name_and_says_length(parts: Server) -> None:
    body = {"tools": [WEATHER], "structured_outputs": {"regex": MARKUP}, "max_tokens": 28}
    choice = choice_of(chat(parts, QUESTION, **body))
    assert choice["finish_reason"] == "length"
    assert "<tool_call>" not in (choice["message"]["content"] or "")


def test_tools_change_the_prompt_and_tokenize_counts_the_same(parts: Server) -> None:
    plain = usage_of(chat(parts, QUESTION, max_tokens=1))["prompt_tokens"]
    body = {"tools": [WEATHER], "tool_choice": "none", "max_tokens": 1}
    described = usage_of(chat(parts, QUESTION, **body))["prompt_tokens"]
    assert described > plain
    tokenized = post(parts, "/tokenize", {"messages": messages(QUESTION), "tools": [WEATHER]}).json()
    assert tokenized["count"] == described


def test_conversation_with_calls_and_results_goes_on(parts: Server) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    history = [
        *messages(QUESTION),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny, 31 degrees"},
    ]
    ids = post(parts, "/tokenize", {"messages": history, "tools": [WEATHER]}).json()["tokens"]
    prompt = post(parts, "/detokenize", {"tokens": ids}).json()["prompt"]
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>' in prompt
    assert "<tool_response>\nSunny, 31 degrees\n</tool_response>" in prompt
    body = {"messages": history, "tools": [WEATHER], "temperature": 0, "max_tokens": 8}
    response = post(parts, CHAT, body)
    assert response.status_code == 200
    assert response.json()["usage"]["prompt_tokens"] == len(ids)


def test_bad_schema_of_a_forced_tool_is_refused_and_the_server_goes_on(parts: Server) -> None:
    bad = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "strng"}}}},
    }
    response = post(parts, CHAT, {"messages": messages("a"), "tools": [bad], "tool_choice": "required"})
    assert response.status_code == 400
    assert choice_of(chat(parts, "Hi", max_tokens=2))["finish_reason"] == "length"

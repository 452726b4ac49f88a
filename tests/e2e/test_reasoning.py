"""Thoughts of the real model, which a constraint makes it write: fields, streams, counts, hidden thoughts, budgets."""

from __future__ import annotations

import json

import pytest

from tests.e2e.client import chat, choice_of, messages, open_stream, post, read_stream, text_of, usage_of
from tests.e2e.server import Server

CHAT = "/v1/chat/completions"
QUESTION = "Is water wet?"
# The built-in model has no token for the marks, so the constraint binds from the start and writes them.
THOUGHTS = r"<think>\nWater is (a liquid|wet)\.\n</think>\n\n(Yes|No)\."


def body(**fields: object) -> dict:
    return {"structured_outputs": {"regex": THOUGHTS}, "max_tokens": 60, **fields}


def test_thoughts_and_answer_have_fields_of_their_own(parts: Server) -> None:
    answer = chat(parts, QUESTION, **body())
    message = choice_of(answer)["message"]
    assert message["reasoning"].strip() in ("Water is a liquid.", "Water is wet.")
    assert message["content"].strip() in ("Yes.", "No.")
    assert "think" not in message["content"]
    assert choice_of(answer)["finish_reason"] == "stop"


def test_reasoning_tokens_are_the_tokens_up_to_the_end_mark(parts: Server) -> None:
    answer = chat(parts, QUESTION, **body(return_token_ids=True))
    token_ids = choice_of(answer)["token_ids"]
    num_thoughts = usage_of(answer)["completion_tokens_details"]["reasoning_tokens"]
    texts = [
        post(parts, "/detokenize", {"tokens": ids}).json()["prompt"]
        for ids in (token_ids[: num_thoughts - 1], token_ids[:num_thoughts])
    ]
    assert "</think>" not in texts[0]
    assert "</think>" in texts[1]


def test_stream_says_what_the_plain_answer_says(parts: Server) -> None:
    plain = choice_of(chat(parts, QUESTION, **body()))["message"]
    with open_stream(parts, CHAT, {"messages": messages(QUESTION), **body()}) as response:
        stream = read_stream(response)
    deltas = [choice["delta"] for choice in stream.choices()]
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == plain["reasoning"]
    assert stream.text() == plain["content"]
    assert stream.finish_reason() == "stop"
    kinds = ["reasoning" in delta for delta in deltas if delta.get("reasoning") or delta.get("content")]
    assert kinds == sorted(kinds, reverse=True), "thoughts come first"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_hidden_thoughts_leave_no_text_ids_or_logprobs(parts: Server, is_streamed: bool) -> None:
    fields = body(include_reasoning=False, return_token_ids=True, logprobs=True)
    if is_streamed:
        with open_stream(parts, CHAT, {"messages": messages(QUESTION), **fields}) as response:
            stream = read_stream(response)
        token_ids, content = stream.token_ids(), stream.text()
        entries = [e for c in stream.choices() for e in (c["logprobs"] or {"content": []})["content"]]
        assert not any("reasoning" in choice["delta"] for choice in stream.choices())
    else:
        choice = choice_of(chat(parts, QUESTION, **fields))
        token_ids, content, entries = choice["token_ids"], choice["message"]["content"], choice["logprobs"]["content"]
        assert "reasoning" not in choice["message"]
    shown = post(parts, "/detokenize", {"tokens": token_ids}).json()["prompt"]
    assert content.strip() in ("Yes.", "No.")
    assert "Water" not in shown
    assert content.strip() in shown
    assert len(entries) == len(token_ids)
    assert "".join(entry["token"] for entry in entries) == shown


def test_answer_cut_inside_the_thoughts_has_no_content(parts: Server) -> None:
    choice = choice_of(chat(parts, QUESTION, **body(max_tokens=8)))
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning"].strip().startswith("Water")
    assert choice["finish_reason"] == "length"


def test_without_a_reasoning_parser_all_is_content(server: Server) -> None:
    text = text_of(chat(server, QUESTION, **body()))
    assert text.startswith("<think>\nWater is")


def test_thinking_switched_off_is_all_content(parts: Server) -> None:
    text = text_of(chat(parts, QUESTION, **body(reasoning_effort="none")))
    assert text.startswith("<think>\nWater is")


def test_json_is_answered_without_thoughts_around_it(parts: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"wet": {"type": "boolean"}},
        "required": ["wet"],
        "additionalProperties": False,
    }
    fields = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    answer = chat(parts, QUESTION, max_tokens=60, **fields)
    assert isinstance(json.loads(text_of(answer))["wet"], bool)

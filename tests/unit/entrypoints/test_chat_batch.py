"""POST /v1/chat/completions/batch: many conversations, one answer."""

from __future__ import annotations

import asyncio

import pytest

from serve.wire.frontend import FinishReason
from tests.unit.entrypoints.app_client import Reply, answer, make_app

BATCH = "/v1/chat/completions/batch"
FIRST, SECOND = [{"role": "user", "content": "hi"}], [{"role": "user", "content": "hello"}]


def post(fields: dict, script=None, **server: object) -> tuple[Reply, list, list]:
    async def work() -> tuple[Reply, list, list]:
        app = make_app(script, **server)
        reply = await app.post(BATCH, {"messages": [FIRST, SECOND], "max_tokens": 4, **fields})
        return reply, app.llm.requests, app.llm.closed

    return asyncio.run(work())


def test_each_conversation_has_one_choice_in_order_and_usage_sums_them() -> None:
    reply, requests, _ = post({"temperature": 0}, answer("ok", FinishReason.STOP))
    assert reply.status == 200
    assert reply.json["object"] == "chat.completion"
    assert [(c["index"], c["message"]["content"], c["finish_reason"]) for c in reply.json["choices"]] == [
        (0, "ok", "stop"),
        (1, "ok", "stop"),
    ]
    num_prompt_tokens = len("<user>hi<a>") + len("<user>hello<a>")
    assert reply.json["usage"] == {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": 4,
        "total_tokens": num_prompt_tokens + 4,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert [bytes(token_ids) for token_ids, _, _, _ in requests] == [b"<user>hi<a>", b"<user>hello<a>"]
    assert [params.temperature for _, params, _, _ in requests] == [0, 0]
    assert len({request_id for _, _, request_id, _ in requests}) == 2


def test_ids_of_each_prompt_are_in_its_choice() -> None:
    reply, _, _ = post({"return_token_ids": True})
    assert [bytes(c["prompt_token_ids"]) for c in reply.json["choices"]] == [b"<user>hi<a>", b"<user>hello<a>"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"stream": True}, "stream"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"messages": []}, "messages"),
        ({"messages": FIRST}, "messages.0"),
        ({"messages": [FIRST, []]}, "messages.1"),
        ({"messages": [FIRST, ["hi"]]}, "messages.1.0"),
        ({"messages": [FIRST, [{"role": "nobody", "content": "x"}]]}, "messages.1.0.role"),
        ({"temperature": 9}, "temperature"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"messages": [FIRST] * 4}, "messages"),
    ],
)
def test_what_is_wrong_is_named(fields: dict, param: str) -> None:
    reply, _, _ = post(fields, max_num_prompts=3)
    assert (reply.status, reply.error["param"]) == (400, param)


def test_one_refused_conversation_aborts_those_before_it() -> None:
    reply, requests, closed = post({"messages": [FIRST, SECOND, [{"role": "user", "content": "x" * 500}]]})
    assert reply.status == 400
    assert "conversation 2" in reply.error["message"]
    assert sorted(closed) == sorted(request_id for _, _, request_id, _ in requests)
    assert len(closed) == 2

"""POST /invocations answers as the endpoint that its body is meant for."""

from __future__ import annotations

import asyncio

import pytest

from serve.checkpoint import PoolerConfig
from tests.unit.entrypoints.app_client import Reply, answer, chat, make_app


def post(body: object = None, **options: object) -> Reply:
    return asyncio.run(make_app(answer("ok")).post("/invocations", body, **options))  # type: ignore[arg-type]


def test_messages_are_a_chat() -> None:
    reply = post(chat())
    assert (reply.status, reply.json["object"]) == (200, "chat.completion")
    assert reply.json["choices"][0]["message"]["content"] == "ok"


def test_prompt_is_a_completion() -> None:
    reply = post({"prompt": "a", "max_tokens": 2})
    assert (reply.status, reply.json["object"]) == (200, "text_completion")


def test_streams_are_those_of_the_endpoint() -> None:
    reply = post(chat(stream=True))
    assert reply.events[-1] == "[DONE]"
    assert "".join(c["choices"][0]["delta"]["content"] for c in reply.chunks) == "ok"


def test_refusals_of_the_endpoint_come_through() -> None:
    reply = post(chat(temperature=9))
    assert (reply.status, reply.error["param"]) == (400, "temperature")


def test_body_without_a_telling_field_is_refused() -> None:
    reply = post({"max_tokens": 2, "prompt": None})
    assert reply.status == 400
    assert "messages" in reply.error["message"]
    assert post(raw=b"[]").status == 400


def test_client_that_leaves_aborts_the_request() -> None:
    async def work() -> list[str]:
        app = make_app(lambda params: [asyncio.Event()])
        exchange = app.open("POST", "/invocations", chat())
        while not app.llm.requests:
            await asyncio.sleep(0)
        exchange.disconnect()
        await asyncio.wait_for(exchange.task, 5)
        return app.llm.closed

    assert len(asyncio.run(work())) == 1


@pytest.mark.parametrize(
    "body",
    [
        {"input": "a"},
        {"query": "a", "documents": ["b"]},
        {"queries": "a", "documents": "b"},
        {"text_1": "a", "text_2": "b"},
        {"data_1": "a", "data_2": "b"},
    ],
)
def test_texts_for_a_pooling_model_are_refused_by_one_that_generates(body: dict) -> None:
    reply = post(body)
    assert (reply.status, reply.error["code"]) == (404, "unsupported_task")


@pytest.mark.parametrize("field", ["input", "messages"])
def test_texts_are_classes_to_a_model_that_classifies_unless_a_task_is_named(field: str) -> None:
    async def work() -> tuple[Reply, Reply]:
        app = make_app()
        app.llm.pooling = PoolerConfig(task="classify")
        texts = {"input": "a"} if field == "input" else chat()
        # Only /classify cares about the encoding, only /pooling reads the task first.
        classified = await app.post("/invocations", {**texts, "encoding_format": "base64"})
        return classified, await app.post("/invocations", {**texts, "task": "embed"})

    classified, pooled = asyncio.run(work())
    assert (classified.status, classified.error["param"]) == (400, "encoding_format")
    assert (pooled.status, pooled.error["code"]) == (404, "unsupported_task")


def test_prompt_is_refused_by_a_pooling_model() -> None:
    async def work() -> Reply:
        app = make_app()
        app.llm.pooling = PoolerConfig()
        return await app.post("/invocations", {"prompt": "a"})

    reply = asyncio.run(work())
    assert (reply.status, reply.error["code"]) == (404, "unsupported_task")

"""The official client against the server."""

from __future__ import annotations

from typing import Literal

import openai
import pytest
from pydantic import BaseModel

from tests.e2e.server import BUILT_IN, Server


class Paint(BaseModel):
    """Paint something in a colour."""

    colour: Literal["red", "green", "blue"]
    is_glossy: bool


ASK = [{"role": "user", "content": "Name a colour."}]


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="unused", max_retries=0)


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=BUILT_IN, messages=ASK, max_completion_tokens=8, temperature=0)  # type: ignore[arg-type]
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer._request_id


def test_streamed_chat_equals_the_plain_one(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(model=BUILT_IN, messages=ASK, max_tokens=12, temperature=0)  # type: ignore[arg-type]
    chunks = list(
        client.chat.completions.create(
            model=BUILT_IN,
            messages=ASK,  # type: ignore[arg-type]
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == plain.choices[0].message.content
    assert chunks[-1].usage is not None
    assert plain.usage is not None
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=BUILT_IN,
        messages=ASK,  # type: ignore[arg-type]
        max_tokens=3,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 2
        assert entry.logprob == entry.top_logprobs[0].logprob


def test_parse_gives_a_pydantic_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=BUILT_IN,
        messages=ASK,  # type: ignore[arg-type]
        max_tokens=60,
        temperature=0,
        response_format=Paint,
    )
    assert isinstance(answer.choices[0].message.parsed, Paint)


def test_streamed_parse_gives_the_same_model(client: openai.OpenAI) -> None:
    fields = {"model": BUILT_IN, "messages": ASK, "max_tokens": 60, "temperature": 0, "response_format": Paint}
    plain = client.chat.completions.parse(**fields)  # type: ignore[arg-type]
    with client.chat.completions.stream(**fields) as stream:  # type: ignore[arg-type]
        kinds = {event.type for event in stream}
    final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.parsed == plain.choices[0].message.parsed


def test_parse_gives_the_arguments_of_a_tool(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=BUILT_IN,
        messages=ASK,  # type: ignore[arg-type]
        max_tokens=60,
        temperature=0,
        tools=[openai.pydantic_function_tool(Paint)],
        tool_choice={"type": "function", "function": {"name": "Paint"}},
    )
    assert answer.choices[0].message.tool_calls is not None
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Paint)


async def test_async_parse_tells_of_an_answer_that_was_cut(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="unused", max_retries=0) as client:
        with pytest.raises(openai.LengthFinishReasonError):
            await client.chat.completions.parse(
                model=BUILT_IN,
                messages=ASK,  # type: ignore[arg-type]
                max_tokens=3,
                response_format=Paint,
            )


def test_completions_and_models(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=BUILT_IN, prompt=["One, two,", "Red,"], max_tokens=4, temperature=0)
    assert [c.index for c in answer.choices] == [0, 1]
    streamed = client.completions.create(model=BUILT_IN, prompt="One, two,", max_tokens=4, temperature=0, stream=True)
    assert "".join(c.choices[0].text for c in streamed) == answer.choices[0].text
    assert [m.id for m in client.models.list()] == [BUILT_IN]
    assert client.models.retrieve(BUILT_IN).id == BUILT_IN


def test_errors_become_the_clients_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=BUILT_IN, messages=ASK, temperature=3)  # type: ignore[arg-type]
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nope", messages=ASK)  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=BUILT_IN, prompt=[5] * 9000)
    assert long.value.code == "context_length_exceeded"


async def test_async_client_streams_two_answers_at_once(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="unused", max_retries=0) as client:
        first, second = [
            await client.chat.completions.create(
                model=BUILT_IN,
                messages=ASK,  # type: ignore[arg-type]
                max_tokens=10,
                temperature=0,
                stream=True,
            )
            for _ in range(2)
        ]
        texts = [
            "".join([c.choices[0].delta.content or "" async for c in stream if c.choices]) for stream in (first, second)
        ]
    assert texts[0]
    assert texts[0] == texts[1]


async def test_leaving_an_async_stream_frees_the_server(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="unused", max_retries=0) as client:
        stream = await client.completions.create(model=BUILT_IN, prompt="Once", max_tokens=4000, stream=True)
        async for _ in stream:
            break
        await stream.close()
    server.wait_idle()
    assert server.metric("num_requests_running") == 0

"""The Responses API through the official client: plain, streamed, parsed, gone on from, in the background."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseTextDeltaEvent

from tests.e2e.server import BUILT_IN, Server
from tests.waiting import wait_until

ASK = "Name a colour."
LIMIT_S = 60.0
TIME_TOOL: openai.types.responses.FunctionToolParam = {
    "type": "function",
    "name": "get_time",
    "description": "Give the time in a zone",
    "parameters": {
        "type": "object",
        "properties": {"zone": {"type": "string", "enum": ["UTC", "CET"]}},
        "required": ["zone"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Verdict(pydantic.BaseModel):
    """A structured answer."""

    is_colour: bool
    level: int = pydantic.Field(ge=1, le=5)


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, **fields: object) -> Response:
    return client.responses.create(
        **{"model": BUILT_IN, "input": ASK, "temperature": 0, "max_output_tokens": 8, **fields}
    )  # type: ignore[call-overload,no-any-return]


def test_the_text_is_what_chat_answers(client: openai.OpenAI) -> None:
    response = ask(client, instructions="Be brief.")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASK}]
    chat = client.chat.completions.create(model=BUILT_IN, messages=messages, max_tokens=8, temperature=0)  # type: ignore[arg-type]
    assert response.output_text == chat.choices[0].message.content
    assert response.usage is not None
    assert chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens


def test_a_stream_adds_up_to_its_last_response(client: openai.OpenAI) -> None:
    with client.responses.stream(model=BUILT_IN, input=ASK, temperature=0, max_output_tokens=32) as stream:
        events = list(stream)
    text = "".join(event.delta for event in events if isinstance(event, ResponseTextDeltaEvent))
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert events[-1].response.output_text == text  # type: ignore[union-attr]
    assert text == ask(client, max_output_tokens=32).output_text


def test_a_cut_answer_is_incomplete(client: openai.OpenAI) -> None:
    response = ask(client, max_output_tokens=2, extra_body={"ignore_eos": True})
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


def test_parse_gives_an_object_of_the_callers_own_type(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(
        model=BUILT_IN, input="Is red a colour?", text_format=Verdict, temperature=0, max_output_tokens=64
    )
    assert isinstance(parsed.output_parsed, Verdict)
    with client.responses.stream(
        model=BUILT_IN, input="Is red a colour?", text_format=Verdict, temperature=0, max_output_tokens=64
    ) as stream:
        assert stream.get_final_response().output_parsed == parsed.output_parsed


def test_a_forced_call_goes_out_and_its_output_comes_back(client: openai.OpenAI) -> None:
    choice = {"type": "function", "name": "get_time"}
    first = ask(client, input="What time is it?", tools=[TIME_TOOL], tool_choice=choice, max_output_tokens=64)
    (call,) = first.output
    assert call.type == "function_call"
    assert (call.name, call.status) == ("get_time", "completed")
    assert json.loads(call.arguments)["zone"] in ("UTC", "CET")
    answer = {"type": "function_call_output", "call_id": call.call_id, "output": "12:00"}
    second = ask(client, input=[answer], previous_response_id=first.id, tools=[TIME_TOOL], tool_choice="none")
    assert second.output[0].type == "message"
    items = list(client.responses.input_items.list(second.id, order="asc"))
    assert [item.type for item in items] == ["message", "function_call", "function_call_output"]


def test_a_streamed_call_adds_up_in_the_clients_own_hands(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model=BUILT_IN,
        input="What time is it?",
        tools=[TIME_TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_output_tokens=64,
    ) as stream:
        events = list(stream)
        final = stream.get_final_response()
    (call,) = final.output
    assert call.type == "function_call"
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call.arguments
    assert json.loads(call.arguments)["zone"] in ("UTC", "CET")


def test_logprobs_line_up_with_the_text(client: openai.OpenAI) -> None:
    response = ask(client, include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=4)
    part = response.output[0].content[0]  # type: ignore[union-attr,index]
    assert part.type == "output_text"
    assert part.logprobs is not None
    spelled = b"".join(bytes(entry.bytes) for entry in part.logprobs)
    assert spelled.decode().startswith(part.text)
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)


def test_a_background_response_runs_to_its_end_or_is_cancelled(client: openai.OpenAI, server: Server) -> None:
    queued = ask(client, background=True)
    assert queued.status == "queued"
    wait_until(
        lambda: client.responses.retrieve(queued.id).status not in ("queued", "in_progress"), LIMIT_S, "it has ended"
    )
    assert client.responses.retrieve(queued.id).output_text == ask(client).output_text
    long = ask(client, background=True, max_output_tokens=4000, extra_body={"ignore_eos": True})
    assert client.responses.cancel(long.id).status == "cancelled"
    server.wait_idle()
    client.responses.delete(long.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(long.id)


def test_a_background_stream_is_resumed_where_it_was_left(client: openai.OpenAI) -> None:
    seen = []
    with ask(client, background=True, stream=True, max_output_tokens=24) as stream:  # type: ignore[attr-defined]
        for event in stream:
            seen.append(event)
            if event.type == "response.output_text.delta":
                break
    response_id = seen[0].response.id
    seen += client.responses.retrieve(response_id, stream=True, starting_after=seen[-1].sequence_number)
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    text = "".join(event.delta for event in seen if event.type == "response.output_text.delta")
    assert seen[-1].response.output_text == text


def test_errors_become_the_clients_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        ask(client, tools=[{"type": "web_search"}])
    assert bad.value.param == "tools.0.type"
    with pytest.raises(openai.NotFoundError):
        ask(client, previous_response_id="resp_nope")
    with pytest.raises(openai.BadRequestError) as schema:
        ask(client, text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}})
    assert "nonsense" in schema.value.message

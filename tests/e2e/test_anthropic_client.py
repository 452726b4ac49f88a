"""The official Anthropic client against the server."""

from __future__ import annotations

import anthropic
import pydantic
import pytest
from anthropic.types import MessageParam, ToolParam

from tests.e2e.server import BUILT_IN, Server

ASK: list[MessageParam] = [{"role": "user", "content": "Name a colour."}]
# Not a parameter of this client, but of the API.
GREEDY = {"temperature": 0}
TOOL: ToolParam = {
    "name": "get_time",
    "description": "Tell the time in a zone.",
    "input_schema": {
        "type": "object",
        "properties": {"zone": {"type": "string", "enum": ["UTC", "CET"]}},
        "required": ["zone"],
        "additionalProperties": False,
    },
}


class Paint(pydantic.BaseModel):
    """What the model is asked to fill in."""

    is_warm: bool
    is_dark: bool


@pytest.fixture
def client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.base_url, api_key="unused", max_retries=0)


def ask(client: anthropic.Anthropic, **fields: object) -> anthropic.types.Message:
    body: dict = {"model": BUILT_IN, "max_tokens": 12, "messages": ASK, "extra_body": GREEDY, **fields}
    return client.messages.create(**body)


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_message(client: anthropic.Anthropic) -> None:
    message = ask(client, system="You paint.")
    assert (message.type, message.role, message.model) == ("message", "assistant", BUILT_IN)
    assert message.id.startswith("msg_")
    assert text_of(message)
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert message.usage.output_tokens >= 1
    assert message._request_id


def test_streamed_message_equals_the_plain_one(client: anthropic.Anthropic) -> None:
    plain = ask(client)
    with client.messages.stream(model=BUILT_IN, max_tokens=12, messages=ASK, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == text_of(plain) == text_of(final)
    assert (final.stop_reason, final.stop_sequence) == (plain.stop_reason, plain.stop_sequence)
    assert final.usage.output_tokens == plain.usage.output_tokens
    assert final.usage.input_tokens == plain.usage.input_tokens


async def test_async_client_streams_and_answers(server: Server) -> None:
    async with anthropic.AsyncAnthropic(base_url=server.base_url, api_key="unused", max_retries=0) as client:
        plain = await client.messages.create(model=BUILT_IN, max_tokens=12, messages=ASK, extra_body=GREEDY)
        async with client.messages.stream(model=BUILT_IN, max_tokens=12, messages=ASK, extra_body=GREEDY) as stream:
            text = "".join([piece async for piece in stream.text_stream])
    assert text == text_of(plain)


def test_stop_sequence_is_reported_and_cut_off(client: anthropic.Anthropic) -> None:
    whole = text_of(ask(client))
    stop = whole[4:8]
    message = ask(client, stop_sequences=[stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert text_of(message) == whole[: whole.index(stop)]


def test_tokens_are_counted_as_a_message_reports_them(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=BUILT_IN, messages=ASK, system="You paint.")
    assert counted.input_tokens == ask(client, system="You paint.", max_tokens=1).usage.input_tokens


def test_answer_goes_on_from_a_last_turn_of_the_assistant(client: anthropic.Anthropic) -> None:
    whole = text_of(ask(client))
    begun = whole[: whole.index(" ") + 1].rstrip()
    rest = text_of(ask(client, messages=[*ASK, {"role": "assistant", "content": begun}]))
    assert not rest.startswith(begun)
    assert (begun + rest)[: len(whole)] == whole


def test_forced_call_has_an_object_that_keeps_to_its_schema(client: anthropic.Anthropic) -> None:
    message = ask(client, max_tokens=64, tools=[TOOL], tool_choice={"type": "tool", "name": "get_time"})
    [call] = [block for block in message.content if block.type == "tool_use"]
    assert call.name == "get_time"
    assert call.input in ({"zone": "UTC"}, {"zone": "CET"})
    assert message.stop_reason == "tool_use"


def test_streamed_call_equals_the_plain_one_and_its_result_can_be_sent_back(client: anthropic.Anthropic) -> None:
    fields: dict = {"max_tokens": 64, "tools": [TOOL], "tool_choice": {"type": "tool", "name": "get_time"}}
    [plain] = [block for block in ask(client, **fields).content if block.type == "tool_use"]
    with client.messages.stream(model=BUILT_IN, messages=ASK, extra_body=GREEDY, **fields) as stream:
        final = stream.get_final_message()
    [call] = [block for block in final.content if block.type == "tool_use"]
    assert (call.name, call.input) == (plain.name, plain.input)
    assert final.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "noon"}
    conversation = [*ASK, final.to_param(), {"role": "user", "content": [result]}]
    answer = ask(client, messages=conversation, tools=[TOOL], tool_choice={"type": "none"})
    assert answer.usage.input_tokens > final.usage.input_tokens


def test_answer_is_parsed_into_a_model(client: anthropic.Anthropic) -> None:
    parsed = client.messages.parse(
        model=BUILT_IN, max_tokens=128, messages=ASK, extra_body=GREEDY, output_format=Paint
    ).parsed_output
    assert isinstance(parsed, Paint)


@pytest.mark.parametrize(
    ("fields", "error", "word"),
    [
        ({"model": "other"}, anthropic.NotFoundError, "not_found_error"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error"),
        ({"extra_body": {"temperature": 3}}, anthropic.BadRequestError, "invalid_request_error"),
        ({"messages": []}, anthropic.BadRequestError, "invalid_request_error"),
    ],
)
def test_errors_are_the_classes_of_the_client(
    client: anthropic.Anthropic, fields: dict, error: type[anthropic.APIStatusError], word: str
) -> None:
    with pytest.raises(error) as refusal:
        ask(client, **fields)
    assert refusal.value.body["error"]["type"] == word  # type: ignore[index]
    assert refusal.value.request_id

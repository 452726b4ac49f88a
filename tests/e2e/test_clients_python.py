"""LangChain's ChatOpenAI and LiteLLM against the server: text, streams, tools, structured answers, errors."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Literal

import pytest
from pydantic import BaseModel, ConfigDict

from tests.e2e.server import Server

if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI

# What these packages and what they import warn about themselves is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")
ASK = "Name a colour."
MODEL = "openai/tiny"
# A random model likes blanks between the words of JSON.
MAX_TOKENS = 400


class Paint(BaseModel):
    """Paint something in a colour."""

    model_config = ConfigDict(extra="forbid")

    colour: Literal["red", "green", "blue"]
    thing: Literal["door", "wall"]
    is_glossy: bool


PAINT_TOOL = {"type": "function", "function": {"name": "Paint", "parameters": Paint.model_json_schema()}}


@pytest.fixture
def langchain(tiny: Server) -> ChatOpenAI:
    """LangChain's chat model, greedy and short."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        base_url=f"{tiny.base_url}/v1",
        api_key="unused",
        model="tiny",
        temperature=0,
        max_tokens=MAX_TOKENS,
        max_retries=0,
        stream_usage=True,
    )


def test_langchain_streams_what_it_invokes(langchain: ChatOpenAI) -> None:
    plain = langchain.invoke(ASK)
    assert plain.content
    assert plain.usage_metadata is not None
    chunks = list(langchain.stream(ASK))
    assert "".join(str(chunk.content) for chunk in chunks) == plain.content
    total = sum(chunk.usage_metadata["total_tokens"] for chunk in chunks if chunk.usage_metadata)
    assert total == plain.usage_metadata["total_tokens"]


async def test_langchain_answers_a_batch_of_conversations_at_once(langchain: ChatOpenAI) -> None:
    alone = langchain.invoke(ASK).content
    answers = await langchain.abatch([ASK] * 4)
    assert [answer.content for answer in answers] == [alone] * 4


@pytest.mark.parametrize("choice", ["any", "Paint"])
def test_langchain_gets_calls_of_bound_tools(langchain: ChatOpenAI, choice: str) -> None:
    bound = langchain.bind_tools([Paint], tool_choice=choice, parallel_tool_calls=False)
    answer = bound.invoke(ASK)
    (call,) = answer.tool_calls
    assert call["name"] == "Paint"
    assert call["id"]
    assert Paint.model_validate(call["args"])
    gathered = None
    for chunk in bound.stream(ASK):
        gathered = chunk if gathered is None else gathered + chunk
    assert gathered is not None
    assert [(each["name"], each["args"]) for each in gathered.tool_calls] == [("Paint", call["args"])]


def test_langchain_takes_a_conversation_with_a_tool_result(langchain: ChatOpenAI) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    asking = langchain.bind_tools([Paint], tool_choice="any", parallel_tool_calls=False).invoke(ASK)
    result = ToolMessage("done", tool_call_id=asking.tool_calls[0]["id"])
    assert langchain.bind_tools([Paint], tool_choice="none").invoke([HumanMessage(ASK), asking, result]).content


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gives_structured_answers(langchain: ChatOpenAI, method: Literal["json_schema"]) -> None:
    answer = langchain.with_structured_output(Paint, method=method).invoke(ASK)
    assert isinstance(answer, Paint)


def test_langchain_json_mode_gives_an_object(langchain: ChatOpenAI) -> None:
    bound = langchain.bind(response_format={"type": "json_object"}, max_tokens=400)
    answer = bound.invoke(ASK)
    finish = answer.response_metadata["finish_reason"]
    assert str(answer.content).lstrip().startswith("{")
    assert finish in ("stop", "length")


@pytest.fixture
def litellm_options(tiny: Server, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What every LiteLLM call needs; its table of prices is not fetched."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    return {
        "model": MODEL,
        "api_base": f"{tiny.base_url}/v1",
        "api_key": "unused",
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "messages": [{"role": "user", "content": ASK}],
    }


def test_litellm_streams_what_it_completes(litellm_options: dict[str, object]) -> None:
    import litellm

    plain = litellm.completion(**litellm_options)
    assert plain.choices[0].message.content
    assert plain.usage.total_tokens == plain.usage.prompt_tokens + plain.usage.completion_tokens
    chunks = list(litellm.completion(**litellm_options, stream=True, stream_options={"include_usage": True}))
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        == plain.choices[0].message.content
    )
    assert chunks[-1].usage.total_tokens == plain.usage.total_tokens


async def test_litellm_answers_without_blocking(litellm_options: dict[str, object]) -> None:
    import litellm

    plain = litellm.completion(**litellm_options)
    answer = await litellm.acompletion(**litellm_options)
    assert answer.choices[0].message.content == plain.choices[0].message.content


def test_litellm_gets_calls_and_structured_answers(litellm_options: dict[str, object]) -> None:
    import litellm

    called = litellm.completion(
        **litellm_options, tools=[PAINT_TOOL], tool_choice="required", parallel_tool_calls=False
    )
    for call in called.choices[0].message.tool_calls:
        assert call.function.name == "Paint"
        assert Paint.model_validate_json(call.function.arguments)
    answer = litellm.completion(**litellm_options, response_format=Paint)
    assert Paint.model_validate_json(answer.choices[0].message.content)


def test_litellm_knows_our_errors(litellm_options: dict[str, object]) -> None:
    import litellm

    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**{**litellm_options, "temperature": 3})
    with pytest.raises(litellm.NotFoundError, match="nope"):
        litellm.completion(**{**litellm_options, "model": "openai/nope"})

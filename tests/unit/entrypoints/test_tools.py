"""The tools of a request: what is refused, what the model may do, and tools as text for templates without them."""

from __future__ import annotations

import asyncio

import pytest

from serve.entrypoints.openai.tools import ToolUse, check_tools, plan_tools
from serve.errors import InvalidRequest
from serve.limits import RequestLimits
from tests.unit.entrypoints.app_client import TEMPLATE, App, chat, make_app

CHAT = "/v1/chat/completions"
NAMED = {"type": "function", "function": {"name": "f"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def tool(name: object = "f", **function: object) -> dict:
    return {"type": "function", "function": {"name": name, **function}}


def plan(tools: list[dict] | None, choice: object = None, *, parallel: bool = True, can_parse: bool = True) -> ToolUse:
    check_tools(tools, choice)
    return plan_tools(tools, choice, parallel=parallel, can_parse=can_parse, limits=RequestLimits())


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([], None, "tools"),
        (None, "auto", "tool_choice"),
        (None, "required", "tool_choice"),
        (None, NAMED, "tool_choice"),
        ([tool()], "always", "tool_choice"),
        ([tool()], {"type": "function"}, "tool_choice"),
        ([tool()], {"type": "custom", "function": {"name": "f"}}, "tool_choice"),
        ([tool()], ["auto"], "tool_choice"),
        ([tool()], True, "tool_choice"),
        ([tool("g")], NAMED, "tool_choice"),
        ([tool(), tool()], None, "tools"),
        ([{"type": "retrieval"}], None, "tools.0.type"),
        ([{"type": 3}], None, "tools.0.type"),
        ([{"type": "function"}], None, "tools.0.function"),
        ([tool(), {"type": "function", "function": []}], None, "tools.1.function"),
        ([tool("")], None, "tools.0.function.name"),
        ([tool("two words")], None, "tools.0.function.name"),
        ([tool("caf\u00e9")], None, "tools.0.function.name"),
        ([tool("f\n")], None, "tools.0.function.name"),
        ([tool("a" * 65)], None, "tools.0.function.name"),
        ([tool(None)], None, "tools.0.function.name"),
        ([tool(description=3)], None, "tools.0.function.description"),
        ([tool(parameters="{}")], None, "tools.0.function.parameters"),
        ([tool(strict="yes")], None, "tools.0.function.strict"),
    ],
)
def test_wrong_tools_and_choices_are_refused_by_name(tools: list[dict] | None, choice: object, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_tools(tools, choice)
    assert caught.value.param == param


def test_bound_on_the_number_of_tools_names_its_flag() -> None:
    tools = [tool(f"f{i}") for i in range(129)]
    assert len(plan(tools[:128], "required").tools) == 128
    with pytest.raises(InvalidRequest, match=r"129 tools.*128.*--max-tools"):
        plan(tools, "required")


def test_no_tools_means_no_calls() -> None:
    assert plan(None) == ToolUse()
    assert plan(None, "none").schemas() == {}


def test_tools_without_a_choice_are_the_models_to_call() -> None:
    use = plan([tool(parameters=SCHEMA), tool("g-2_x")])
    assert (use.mode, use.forced, use.max_calls) == ("auto", None, None)
    assert use.schemas() == {"f": SCHEMA, "g-2_x": {}}
    assert plan([tool()], "auto") == plan([tool()])


def test_choice_none_looks_for_no_calls() -> None:
    assert plan([tool()], "none").schemas() == {}


def test_forced_choices() -> None:
    required = plan([tool(), tool("g")], "required")
    assert (required.forced, required.name, required.max_calls) == ("required", None, None)
    named = plan([tool(), tool("g", parameters=SCHEMA)], {"type": "function", "function": {"name": "g"}})
    assert (named.forced, named.name, named.max_calls) == ("named", "g", 1)
    assert named.schemas() == {"g": SCHEMA}


def test_parallel_off_allows_one_call() -> None:
    assert plan([tool()], "auto", parallel=False).max_calls == 1
    assert plan([tool()], "required", parallel=False).max_calls == 1


def test_auto_without_a_parser_says_how_to_get_one() -> None:
    for choice in (None, "auto"):
        with pytest.raises(InvalidRequest, match="--tool-call-parser"):
            plan([tool()], choice, can_parse=False)
    assert plan([tool()], "required", can_parse=False).mode == "required"
    assert plan([tool()], NAMED, can_parse=False).mode == "named"


def prompt_of(app: App, body: dict) -> str:
    """Give the prompt that a chat body runs, and check that /tokenize gives the same ids."""

    async def work() -> str:
        reply = await app.post(CHAT, body)
        assert reply.status == 200, reply.body
        token_ids = app.llm.requests[-1][0]
        names = ("messages", "tools", "add_generation_prompt", "continue_final_message")
        tokenized = await app.post("/tokenize", {name: body[name] for name in names if name in body})
        assert tokenized.json["tokens"] == token_ids
        return bytes(token_ids).decode()

    return asyncio.run(work())


def prompt(template: str = TEMPLATE, settings: dict | None = None, **fields: object) -> str:
    app = make_app(template=template, max_model_len=4096, disable_fastapi_docs=True, **(settings or {}))
    return prompt_of(app, chat(**fields))


def test_tools_are_described_to_a_template_that_does_not_know_them() -> None:
    described = prompt(tools=[tool(description="Count sheep", parameters=SCHEMA), tool("g")], tool_choice="none")
    system, _, rest = described.partition("<user>")
    assert system.startswith("<system>")
    assert '{"name": "f", "description": "Count sheep", "parameters": {"type": "object"' in system
    assert '\n{"name": "g"}\n' in system
    assert "<tool_call>" in system
    assert rest == "hi<a>"


def test_description_joins_a_system_message_that_is_there() -> None:
    said = {"role": "system", "content": "Be brief."}
    messages = [said, {"role": "user", "content": "hi"}]
    text = prompt(messages=messages, tools=[tool()], tool_choice="none")
    assert text.startswith("<system>Be brief.\n\nYou may call")
    assert text.count("<system>") == 1
    parts = [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, messages[1]]
    assert prompt(messages=parts, tools=[tool()], tool_choice="none").startswith("<system>Be brief.\nYou may call")


def test_description_goes_to_the_user_where_a_template_takes_no_system_message() -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    text = prompt(template=refusing + template, tools=[tool()], tool_choice="none")
    assert text.startswith("<user>You may call")
    assert text.endswith("\n\nhi<a>")


def test_template_that_knows_tools_gets_them_as_they_were_sent() -> None:
    sent = [tool(parameters=SCHEMA, strict=True)]
    text = prompt(template="{{ tools | tojson }}{{ messages[0].content }}", tools=sent, tool_choice="none")
    assert text == (
        '[{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": '
        '{"a": {"type": "integer"}}}, "strict": true}}]hi'
    )


def test_tools_can_be_kept_from_the_model_with_choice_none() -> None:
    settings = {"exclude_tools_when_tool_choice_none": True}
    app = make_app(max_model_len=4096, **settings)
    reply = asyncio.run(app.post(CHAT, chat(tools=[tool()], tool_choice="none")))
    assert reply.status == 200
    assert bytes(app.llm.requests[0][0]).decode() == "<user>hi<a>"


HISTORY = [
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
            {"id": "2", "type": "function", "function": {"name": "g", "arguments": ""}},
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "one"},
    {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "two"}, {"type": "text", "text": "2"}]},
    {"role": "assistant", "content": "So.", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 2}}}]},
    {"role": "tool", "tool_call_id": "3", "content": "three"},
]


def test_calls_and_results_of_a_conversation_become_text_for_a_template_without_them() -> None:
    assert prompt(messages=HISTORY) == (
        "<user>hi"
        '<assistant><tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
        "<user><tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n2\n</tool_response>"
        '<assistant>So.\n\n<tool_call>\n{"name": "f", "arguments": {"a": 2}}\n</tool_call>'
        "<user><tool_response>\nthree\n</tool_response><a>"
    )


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x"}, "messages.1.tool_call_id"),
        ({"role": "assistant", "tool_calls": [{"type": "x"}]}, "messages.1.tool_calls.0"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": 3}}]}, "messages.1.tool_calls.0.function.name"),
        ({"role": "assistant", "tool_calls": 3}, "messages.1.tool_calls"),
    ],
)
def test_wrong_calls_in_a_conversation_are_refused_with_their_place(message: dict, param: str) -> None:
    app = make_app(max_model_len=4096)
    body = chat(messages=[{"role": "user", "content": "hi"}, message])
    reply = asyncio.run(app.post(CHAT, body))
    assert (reply.status, reply.error["param"]) == (400, param)


def test_template_with_calls_gets_the_conversation_as_it_was_sent() -> None:
    template = (
        "{% for m in messages %}{{ m.role }}{{ m.tool_calls | length if m.tool_calls else '' }},{% endfor %}{{ tools }}"
    )
    assert prompt(template=template, messages=HISTORY) == "user,assistant2,tool,tool,assistant1,tool,None"

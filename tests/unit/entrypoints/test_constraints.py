"""What becomes of response_format, structured_outputs and forced tools, and what is refused before the engine."""

from __future__ import annotations

import asyncio
import json

import pytest
from jsonschema import Draft202012Validator

from serve.entrypoints.openai.constraints import build_constraint
from serve.entrypoints.openai.protocol import ChatCompletionRequest, parse_request
from serve.entrypoints.openai.tools import plan_tools
from serve.errors import InvalidRequest
from serve.limits import RequestLimits
from serve.sampling_params import StructuredOutputs
from tests.unit.entrypoints.app_client import Reply, chat, make_app

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["x"]}}, "required": ["b"]}
CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Rome", "Paris"]}},
}


def tool(name: str = "f", **function: object) -> dict:
    return {"type": "function", "function": {"name": name, **function}}


def constraint(**fields: object) -> StructuredOutputs | None:
    limits = RequestLimits()
    request = parse_request(ChatCompletionRequest, chat(**fields))
    parallel = request.parallel_tool_calls
    use = plan_tools(request.tools, request.tool_choice, parallel=parallel, can_parse=True, limits=limits)
    return build_constraint(request, use, limits)


def refusal(**fields: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        constraint(**fields)
    return caught.value


def test_free_text_has_no_constraint() -> None:
    assert constraint() is None
    assert constraint(response_format={"type": "text"}) is None
    assert constraint(response_format=None, structured_outputs=None) is None


def test_response_format_json_object() -> None:
    assert constraint(response_format={"type": "json_object"}) == StructuredOutputs("json_object")


def test_schema_keeps_the_order_of_its_properties() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    found = constraint(response_format=wanted)
    assert found is not None
    assert found.kind == "json_schema"
    assert json.loads(found.spec) == SCHEMA
    assert list(json.loads(found.spec)["properties"]) == ["b", "a"]
    assert found.disable_additional_properties
    open_schema = constraint(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}})
    assert open_schema is not None
    assert not open_schema.disable_additional_properties
    assert constraint(structured_outputs={"json": SCHEMA}) == open_schema
    assert constraint(structured_outputs={"json": json.dumps(SCHEMA)}) == open_schema


@pytest.mark.parametrize(
    ("sent", "kind", "spec"),
    [
        ({"regex": "[a-z]+(ab|c)*?"}, "regex", "[a-z]+(ab|c)*?"),
        ({"choice": ["red", "green"]}, "choice", '["red","green"]'),
        ({"grammar": 'root ::= "a" | "b"'}, "grammar", 'root ::= "a" | "b"'),
        ({"json_object": True}, "json_object", ""),
    ],
)
def test_each_kind_of_structured_outputs(sent: dict, kind: str, spec: str) -> None:
    found = constraint(structured_outputs=sent)
    assert found is not None
    assert (found.kind, found.spec) == (kind, spec)


def test_structural_tag_of_both_forms_from_both_fields() -> None:
    tags = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<"]}
    found = constraint(response_format={"type": "structural_tag", **tags})
    assert found is not None
    assert (found.kind, json.loads(found.spec)) == ("structural_tag", {"type": "structural_tag", **tags})
    named = {"format": {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}}
    found = constraint(structured_outputs={"structural_tag": json.dumps(named)})
    assert found is not None
    assert json.loads(found.spec) == named


def test_how_json_is_written_reaches_the_engine() -> None:
    found = constraint(
        structured_outputs={
            "json": {"type": "object"},
            "whitespace_pattern": "[ ]?",
            "disable_any_whitespace": True,
            "disable_additional_properties": True,
        }
    )
    assert found is not None
    assert found.whitespace_pattern == "[ ]?"
    assert found.disable_any_whitespace
    assert found.disable_additional_properties


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_constraints_of_chat_and_completions_reach_the_engine_and_their_refusals_the_client(path: str) -> None:
    async def work() -> tuple[Reply, Reply, list]:
        app = make_app()
        body = {**chat(), "prompt": "x"}
        good = await app.post(path, {**body, "structured_outputs": {"choice": ["a"]}})
        bad = await app.post(path, {**body, "structured_outputs": {"regex": "a**"}})
        return good, bad, app.llm.requests

    good, bad, requests = asyncio.run(work())
    assert (good.status, bad.status, len(requests)) == (200, 400, 1)
    assert requests[0][1].structured_outputs == StructuredOutputs("choice", '["a"]')
    assert bad.error["param"] == "structured_outputs.regex"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 3}}}, None),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": {"type": "structural_tag", "structures": [], "triggers": ["<"]}}, None),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[" * 5000}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": " "}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice.0"),
        ({"structured_outputs": {"grammar": " \n"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a"]}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}, "tools": [tool()], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool(parameters={"type": "array"})], "tool_choice": "required"}, "tools"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(fields: dict, param: str | None) -> None:
    error = refusal(**fields)
    if param is not None:
        assert error.param == param


@pytest.mark.parametrize(
    "pattern", ["foo**", "a+*", "a{2}{3}", "*a", "(+a)", "a|?", "(a*?)??*", "a*+", "[a-z", "a\\", "(?:*)"]
)
def test_regular_expressions_that_repeat_a_repetition_or_do_not_end_are_refused(pattern: str) -> None:
    assert refusal(structured_outputs={"regex": pattern}).param == "structured_outputs.regex"
    inside = {"type": "object", "properties": {"p": {"type": "string", "pattern": pattern}}}
    assert refusal(structured_outputs={"json": inside}).param == "structured_outputs.json"


@pytest.mark.parametrize(
    "pattern",
    [
        "a*?",
        "(a*)*",
        r"\**",
        "[*+?]+",
        "[]*]+",
        "[^]*]?",
        "(?:a)+",
        "(?i)a",
        r"\p{L}+\x{41}*",
        "(?P<n>a)*",
        "a{2,3}?",
        r"\[*",
        "^a$",
    ],
)
def test_regular_expressions_with_marks_that_only_look_like_repetitions_pass(pattern: str) -> None:
    found = constraint(structured_outputs={"regex": pattern})
    assert found is not None
    assert found.spec == pattern


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "a"\nroot ::= "b"',
        'start: "a"\nstart: "b"',
        'root ::= x\nx::="a"\n  x ::= "b"',
        'root ::= "a" |',
        "root ::=",
    ],
)
def test_grammars_that_define_a_rule_twice_or_break_off_are_refused(grammar: str) -> None:
    assert refusal(structured_outputs={"grammar": grammar}).param == "structured_outputs.grammar"


def test_data_in_a_schema_is_not_read_as_a_pattern() -> None:
    schema = {"properties": {"a": {"const": {"pattern": "**"}}, "pattern": {"type": "string"}}, "type": "object"}
    found = constraint(structured_outputs={"json": schema})
    assert found is not None
    assert json.loads(found.spec) == schema


def nested(levels: int) -> dict:
    schema: dict = {"type": "integer"}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("sent", "flag"),
    [
        ({"json": {"description": "x" * 65536}}, "--max-schema-bytes"),
        ({"json": json.dumps({"description": "x" * 65536})}, "--max-schema-bytes"),
        ({"json": nested(65)}, "--max-schema-depth"),
        ({"regex": "a" * 8193}, "--max-regex-chars"),
        ({"grammar": "a" * 65537}, "--max-grammar-chars"),
        ({"choice": ["a"] * 1025}, "--max-choices"),
        ({"choice": ["a" * 65537]}, "--max-choice-chars"),
    ],
)
def test_bounds_name_the_limit_and_its_flag(sent: dict, flag: str) -> None:
    error = refusal(structured_outputs=sent)
    assert flag in str(error)
    assert error.param.startswith("structured_outputs.")


def test_values_at_the_bounds_pass() -> None:
    assert constraint(structured_outputs={"json": nested(64)}) is not None
    assert constraint(structured_outputs={"regex": "a" * 8192}) is not None
    assert constraint(structured_outputs={"choice": ["a"] * 1024}) is not None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [tool()], "tool_choice": "required"}, "tools"),
        ({}, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_engines_refusal_names_the_field_that_asked_for_the_constraint(
    fields: dict, param: str | None, stream: bool
) -> None:
    app = make_app(
        lambda params: [InvalidRequest("it does not compile")], max_model_len=4096, disable_fastapi_docs=True
    )
    reply = asyncio.run(app.post("/v1/chat/completions", chat(stream=stream, **fields)))
    assert (reply.status, reply.error["message"], reply.error["param"]) == (400, "it does not compile", param)
    if "tools" not in fields:
        reply = asyncio.run(app.post("/v1/completions", {"prompt": "a", "stream": stream, **fields}))
        assert (reply.status, reply.error["param"]) == (400, param)


def forced(tools: list[dict], choice: object = "required", **fields: object) -> dict:
    found = constraint(tools=tools, tool_choice=choice, **fields)
    assert found is not None
    assert found.kind == "json_schema"
    assert found.disable_additional_properties
    return json.loads(found.spec)


def accepts(schema: dict, value: object) -> bool:
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema).is_valid(value)


def test_required_is_a_list_of_calls_with_the_arguments_of_their_own_tool() -> None:
    schema = forced(
        [tool("where", parameters=CITY), tool("count", parameters={"properties": {"n": {"type": "integer"}}})]
    )
    rome = {"name": "where", "parameters": {"city": "Rome"}}
    assert accepts(schema, [rome])
    assert accepts(schema, [rome, {"name": "count", "parameters": {"n": 1}}, rome])
    assert not accepts(schema, [])
    assert not accepts(schema, [{"name": "where", "parameters": {"city": "Oslo"}}])
    assert not accepts(schema, [{"name": "where", "parameters": {"n": 1}}])
    assert not accepts(schema, [{"name": "other", "parameters": {}}])
    assert not accepts(schema, [{"name": "count", "parameters": 3}])
    assert not accepts(schema, [{**rome, "more": 1}])
    assert not accepts(schema, rome)


def test_references_of_a_tools_schema_still_point_into_it() -> None:
    parameters = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": "http://example.com/tool",
        "type": "object",
        "properties": {"a": {"$ref": "#/definitions/A"}, "inner": {"$ref": "#"}},
        "required": ["a"],
        "definitions": {"A": {"enum": ["p"]}},
    }
    schema = forced([tool("f", parameters=parameters), tool("g")])
    assert accepts(schema, [{"name": "f", "parameters": {"a": "p", "inner": {"a": "p"}}}])
    assert not accepts(schema, [{"name": "f", "parameters": {"a": "p", "inner": {"a": "q"}}}])


def test_required_without_parallel_calls_is_one_call() -> None:
    schema = forced([tool("where", parameters=CITY)], parallel_tool_calls=False)
    rome = {"name": "where", "parameters": {"city": "Rome"}}
    assert accepts(schema, [rome])
    assert not accepts(schema, [rome, rome])


def test_required_tools_without_parameters_are_called_no_more_often_than_there_are_tools() -> None:
    schema = forced([tool("now"), tool("stop", parameters={"type": "object", "properties": {}})])
    call = {"name": "now", "parameters": {}}
    assert accepts(schema, [call, call])
    assert not accepts(schema, [call] * 3)


def test_named_is_the_arguments_of_that_tool() -> None:
    choice = {"type": "function", "function": {"name": "where"}}
    schema = forced([tool("other"), tool("where", parameters=CITY)], choice)
    assert accepts(schema, {"city": "Paris"})
    assert not accepts(schema, {"city": "Oslo"})
    assert not accepts(schema, "Paris")


def test_tool_without_parameters_takes_an_empty_object() -> None:
    choice = {"type": "function", "function": {"name": "now"}}
    for function in ({}, {"parameters": {}}, {"parameters": {"type": "object", "properties": {}}}):
        schema = forced([tool("now", **function)], choice)
        assert accepts(schema, {})
        assert not accepts(schema, {"a": 1})
        assert not accepts(schema, None)


def test_strict_false_gives_up_the_schema_but_not_the_object() -> None:
    choice = {"type": "function", "function": {"name": "where"}}
    schema = forced([tool("where", parameters=CITY, strict=False)], choice)
    assert accepts(schema, {"anything": 1})
    assert not accepts(schema, "Rome")


def test_free_calls_are_not_constrained() -> None:
    assert constraint(tools=[tool()], tool_choice="none") is None


def test_constraint_beside_tools_that_may_not_be_called_stays() -> None:
    found = constraint(tools=[tool()], tool_choice="none", response_format={"type": "json_object"})
    assert found == StructuredOutputs("json_object")

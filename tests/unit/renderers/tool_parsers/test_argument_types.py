"""Values that a model wrote as bare text get the type that the tool's schema names."""

from __future__ import annotations

import json

import pytest

from serve.renderers.answer_format import AnswerSpec
from serve.renderers.tool_parsers.argument_types import argument_types, typed_json
from tests.unit.renderers.answers import answer_format, parse

SCHEMA: dict[str, object] = {
    "type": "object",
    "$defs": {"Color": {"enum": ["red", "blue"]}, "Loop": {"$ref": "#/$defs/Loop"}, "Count": {"type": "integer"}},
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "size": {"type": "number"},
        "wet": {"type": "boolean"},
        "box": {"type": "object"},
        "list": {"type": "array"},
        "maybe": {"type": ["integer", "null"]},
        "either": {"anyOf": [{"$ref": "#/$defs/Count"}, {"type": "null"}]},
        "color": {"$ref": "#/$defs/Color"},
        "loop": {"$ref": "#/$defs/Loop"},
        "level": {"const": 3},
        "any": {},
    },
}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", "5", "5"),
        ("text", "null", "null"),
        ("text", " a\n b ", " a\n b "),
        ("count", "5", 5),
        ("count", " -12 ", -12),
        ("count", "5.5", 5.5),
        ("count", "five", "five"),
        ("count", "05", "05"),
        ("size", "2.50", 2.5),
        ("size", "1e3", 1000.0),
        ("wet", "True", True),
        ("wet", "false", False),
        ("wet", "yes", "yes"),
        ("box", '{"a": [1, null]}', {"a": [1, None]}),
        ("box", "{'a': 1}", "{'a': 1}"),
        ("list", "[1, 2]", [1, 2]),
        ("list", "[1, 2", "[1, 2"),
        ("maybe", "null", None),
        ("maybe", "None", None),
        ("maybe", "7", 7),
        ("either", "7", 7),
        ("either", "null", None),
        ("color", "red", "red"),
        ("color", "5", "5"),
        ("level", "3", 3),
        ("loop", "5", 5),
        ("any", "[1]", [1]),
        ("any", "word", "word"),
        ("unknown", "5", "5"),
    ],
)
def test_a_value_has_the_type_of_its_schema(key: str, text: str, value: object) -> None:
    assert json.loads(typed_json(text, argument_types(SCHEMA, key))) == value
    assert type(json.loads(typed_json(text, argument_types(SCHEMA, key)))) is type(value)


@pytest.mark.parametrize(
    "schema", [{}, {"properties": []}, {"properties": {"a": {"$ref": "#/x/y"}}}, {"properties": {"a": 5}}]
)
def test_a_schema_that_says_nothing_does_no_harm(schema: dict[str, object]) -> None:
    assert json.loads(typed_json("word", argument_types(schema, "a"))) == "word"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("\nRome\n", "Rome"),
        ("Rome", "Rome"),
        ("\n\nRome\n\n", "\nRome\n"),
        ("\n", ""),
        ("", ""),
        ('\n"a"\\\n', '"a"\\'),
    ],
)
def test_one_line_break_at_each_end_of_a_value_is_markup(value: str, text: str) -> None:
    answer = f"<function=f><parameter=text>{value}</parameter></function>"
    parsed = parse(answer_format("qwen3_coder"), AnswerSpec("", {"f": SCHEMA}), list(answer))
    assert parsed.values == [("f", {"text": text})]


def test_text_is_passed_on_before_its_end_is_seen() -> None:
    parser = answer_format("qwen3_coder").new_parser(AnswerSpec("", {"f": SCHEMA}))
    assert parser is not None
    events = parser.feed("<function=f>\n<parameter=text>\nfirst line\nsecond")
    assert [type(event).__name__ for event in events] == ["CallStart", "CallDelta"]
    assert parser.feed(" line") != []


@pytest.mark.parametrize("tag", ["<parameter=text>a</parameter> oops", "<parameter=text>a</parameter></tool_call>"])
def test_tags_that_break_leave_a_cut_call(tag: str) -> None:
    text = f"<tool_call><function=f>{tag}<x></tool_call>\nAfter"
    for pieces in ([text], list(text)):
        parsed = parse(answer_format("qwen3_coder"), AnswerSpec("", {"f": SCHEMA}), pieces)
        assert parsed.calls == [["f", '{"text":"a"']]
        assert parsed.content in ("After", "<x></tool_call>\nAfter")

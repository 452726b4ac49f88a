"""Calls written as Python: their values are what Python's own literals mean, and nothing else is read."""

from __future__ import annotations

import ast
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.renderers.answer_format import AnswerSpec
from tests.unit.renderers.answers import TOOLS, Parsed, answer_format, parse, split_at

PYTHON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def read(*pieces: str, name: str = "pythonic") -> Parsed:
    return parse(answer_format(name), AnswerSpec("", TOOLS), pieces)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(PYTHON_VALUES, st.lists(st.integers(0, 300), max_size=20))
def test_any_literal_that_python_writes_is_read(value: object, cuts: list[int]) -> None:
    parsed = read(*split_at(f"[run-it(a={value!r}, b=1), now()]", cuts))
    assert parsed.values == [("run-it", {"a": value, "b": 1}), ("now", {})]
    assert parsed.content == ""


@pytest.mark.parametrize(
    "literal",
    [
        r"'it\'s'",
        r'"\x41\u00e9\U0001F600"',
        r"'\ud83d\ude00'",
        r"'a\qb'",
        "'a\\\nb'",
        "(1, 2)",
        "(1)",
        "()",
        "1_000",
        "+5",
        "-.5",
        "[1, ]",
        "{'a': 1,}",
    ],
)
def test_unusual_literals_mean_what_they_mean_in_python(literal: str) -> None:
    odd: dict[str, object] = {r"'\ud83d\ude00'": "\U0001f600", r"'a\qb'": "a\\qb", "+5": 5, "-.5": -0.5}
    expected = odd[literal] if literal in odd else json.loads(json.dumps(ast.literal_eval(literal)))
    assert read(f"[now(a={literal})]").values == [("now", {"a": expected})]


@pytest.mark.parametrize("word", ["true", "false", "null"])
def test_words_of_json_are_read_too(word: str) -> None:
    assert read(f"[now(a={word})]").values == [("now", {"a": json.loads(word)})]


@pytest.mark.parametrize(
    "text",
    [
        "[now('Rome')]",
        "[now.again(a=1)]",
        "[__import__('os')]",
        "[now](https://example.org)",
        "[1, 2]",
        "[]",
        "now()",
        "see [now()]",
        "[now (a=1)]",
    ],
)
def test_what_is_no_call_is_content_unchanged(text: str) -> None:
    assert read(*text).outcome == (text, "", [], ["ContentDelta"])


@pytest.mark.parametrize(
    "value", ["open('x')", "1 + 1", "b", "1e999", "{1: 2}", "[" * 80 + "]" * 80, "'\\xzz'", "--5", "9" * 300]
)
def test_what_is_no_literal_leaves_a_cut_call(value: str) -> None:
    parsed = read(*f"[now(a=1, b={value})]")
    assert (parsed.calls, parsed.content) == ([["now", '{"a":1']], "")
    first = f"[now(b={value})]"
    assert read(*first).outcome == (first, "", [], ["ContentDelta"])


def test_a_list_may_begin_a_later_line() -> None:
    assert read("Sure.\n[now()]\nOk").outcome == (
        "Sure.Ok",
        "",
        [["now", "{}"]],
        ["ContentDelta", "CallStart0", "CallDelta0", "ContentDelta"],
    )


def test_llama4_may_leave_its_marks_out() -> None:
    assert read("[now()]", name="llama4_pythonic").calls == [["now", "{}"]]

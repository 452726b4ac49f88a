"""Calls in JSON beyond the plain case: key order, odd arguments, bare objects, broken ones, and forced answers."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.renderers.answer_format import AnswerSpec
from tests.unit.renderers.answers import TOOLS, Parsed, answer_format, parse, split_at


def read(name: str, *pieces: str, was_cut: bool = False) -> Parsed:
    return parse(answer_format(name), AnswerSpec("", TOOLS), pieces, was_cut=was_cut)


def hermes(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ('{"arguments": {"a": 1}, "name": "now"}', '{"a": 1}'),
        ('{"id": 7, "name": "now", "type": "function", "parameters": {"a" : 1} }', '{"a" : 1}'),
        ('{"name": "now", "arguments": "{\\"a\\": \\"\\u00e9\\"}"}', '{"a": "\u00e9"}'),
        ('{"name": "now", "arguments": null}', "{}"),
        ('{"name": "now"}', "{}"),
        ('{"n\\u0061me": "n\\u006fw", "arguments": {}}', "{}"),
        ('{"name": "now", "arguments": {}, "arguments": {"a": 1}}', "{}"),
        ('{"name": "now", "arguments": {"a": "line\nnext"}}', '{"a": "line\\nnext"}'),
    ],
)
def test_what_counts_as_arguments(call: str, arguments: str) -> None:
    text = hermes(call)
    for pieces in ([text], list(text)):
        parsed = read("hermes", *pieces)
        assert parsed.calls == [["now", arguments]]
        assert parsed.content == ""


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "now", "arguments": [1]}',
        '{"name": "now", "arguments": "no object"}',
        '{"name": "now", "arguments": 5}',
        '{"name": now}',
        "{'name': 'now', 'arguments': {}}",
        '{"arguments": {"a": 1}}',
        "{}",
        "now()",
        '{"name": ["now"]}',
        '{"name": "now", }',
        "",
    ],
)
def test_what_is_no_call_is_content_unchanged(call: str) -> None:
    text = f"I would write {hermes(call)} here."
    assert read("hermes", text).outcome == (text, "", [], ["ContentDelta"])
    assert read("hermes", *text).outcome == (text, "", [], ["ContentDelta"])


@pytest.mark.parametrize("broken", ["Rome}}", '"Rome}}', '"Rome"', '["Rome"}}'])
def test_arguments_that_break_leave_a_cut_call_and_the_next_one_is_read(broken: str) -> None:
    text = (
        hermes('{"name": "now", "arguments": {"city": ' + broken) + "\nAnd\n" + hermes('{"name": "run-it"}') + " done"
    )
    for pieces in ([text], list(text)):
        parsed = read("hermes", *pieces)
        assert [name for name, _ in parsed.calls][:1] == ["now"]
        with pytest.raises(ValueError, match=r"delimiter|Expecting|Unterminated"):
            json.loads(parsed.calls[0][1])
        if broken != '"Rome}}':  # a string without an end swallows what follows
            assert parsed.calls[1:] == [["run-it", "{}"]]
            assert parsed.content.endswith("done")
        assert "tool_call" not in parsed.content


def test_one_block_may_hold_several_calls() -> None:
    for text in ('{"name": "now"}\n{"name": "run-it"}', '[{"name": "now"}, {"name": "run-it"}]'):
        assert read("hermes", *hermes(text)).calls == [["now", "{}"], ["run-it", "{}"]]


def test_a_brace_too_many_does_not_show() -> None:
    parsed = read("hermes", hermes('{"name": "now", "arguments": {}}}') + "\nBye")
    assert (parsed.content, parsed.calls) == ("Bye", [["now", "{}"]])


def test_a_call_begins_when_its_arguments_do() -> None:
    parser = answer_format("hermes").new_parser(AnswerSpec("", TOOLS))
    assert parser is not None
    assert parser.feed('<tool_call>{"name": "get_weather", "argu') == []
    assert parser.feed('ments":') == []
    parsed = Parsed()
    parsed.add(parser.feed(' {"city": "Zu'))
    assert parsed.calls == [["get_weather", '{"city": "Zu']]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "now", "age": 3}',
        '{"name": "Ann"}',
        '{"name": "now"}',
        '{"a": {"name": "now", "parameters": {}}}',
        '[{"name": "now", "parameters": {}}]',
        'int main() { return 0; }\n{\n  "name": "x"\n}',
        "{",
        "\n{",
    ],
)
def test_json_that_is_no_call_is_content_in_families_without_marks(text: str) -> None:
    assert read("llama3_json", text).outcome == (text, "", [], ["ContentDelta"])
    assert read("llama3_json", *text).outcome == (text, "", [], ["ContentDelta"])


def test_a_bare_call_may_begin_a_later_line() -> None:
    parsed = read(
        "llama3_json", *'I will look.\n\n{"name": "now", "parameters": {}}\n{"name": "run-it", "parameters": {"a": 1}}'
    )
    assert parsed.content == "I will look."
    assert parsed.calls == [["now", "{}"], ["run-it", '{"a": 1}']]


def test_the_second_of_two_bare_objects_may_be_content() -> None:
    parsed = read("llama3_json", '{"name": "now", "parameters": {}}; {"b": 1}')
    assert (parsed.content, parsed.calls) == ('{"b": 1}', [["now", "{}"]])


def test_an_unknown_tool_in_a_list_is_content_and_the_first_stays() -> None:
    parsed = read("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "nope", "arguments": {}}]')
    assert parsed.calls == [["now", "{}"]]
    assert parsed.content == '{"name": "nope", "arguments": {}}]'


def test_a_section_without_its_end_has_all_its_calls() -> None:
    text = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    )
    assert read("kimi_k2", f" {text}\n").outcome == ("", "", [["now", "{}"]], ["CallStart0", "CallDelta0"])


ARGUMENTS = st.dictionaries(st.text(max_size=5), st.text(max_size=6) | st.integers() | st.none(), max_size=3)
FORCED = st.lists(st.tuples(st.sampled_from(list(TOOLS)), ARGUMENTS), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(FORCED, st.lists(st.integers(0, 300), max_size=20))
def test_a_forced_list_is_its_calls(calls: list[tuple[str, dict[str, object]]], cuts: list[int]) -> None:
    text = json.dumps([{"name": name, "parameters": arguments} for name, arguments in calls])
    spec = AnswerSpec("", TOOLS, forced="required")
    parsed = parse(answer_format(), spec, split_at(text, cuts))
    assert parsed.calls == [[name, json.dumps(arguments)] for name, arguments in calls]
    assert parsed.content == ""


@settings(max_examples=60, deadline=None, derandomize=True)
@given(ARGUMENTS, st.lists(st.integers(0, 300), max_size=20))
def test_forced_arguments_are_one_call(arguments: dict[str, object], cuts: list[int]) -> None:
    text = json.dumps(arguments, ensure_ascii=False)
    spec = AnswerSpec("", TOOLS, forced="named", forced_name="get_weather")
    parsed = parse(answer_format("hermes"), spec, split_at(f" {text}\n", cuts))
    assert parsed.calls == [["get_weather", text]]
    assert parsed.content == ""


def test_a_forced_list_of_which_one_call_is_allowed() -> None:
    spec = AnswerSpec("", TOOLS, forced="required", max_calls=1)
    text = '[{"name": "now", "parameters": {}}, {"name": "now", "parameters": {}}]'
    assert parse(answer_format(), spec, [text]).outcome == ("", "", [["now", "{}"]], ["CallStart0", "CallDelta0"])


@pytest.mark.parametrize("end", range(1, 30))
def test_a_forced_answer_that_was_cut_is_never_content(end: int) -> None:
    text = '[{"name": "now", "parameters": {"a": 1}}]'[:end]
    parsed = parse(answer_format(), AnswerSpec("", TOOLS, forced="required"), [text], was_cut=True)
    assert parsed.content == ""


def test_forced_calls_come_after_the_thoughts() -> None:
    spec = AnswerSpec("", TOOLS, forced="named", forced_name="now")
    parsed = parse(answer_format("hermes", "deepseek_r1"), spec, list('Hm {"a": 1}.</think>\n\n{"b": 2}'))
    assert (parsed.reasoning, parsed.calls, parsed.content) == ('Hm {"a": 1}.', [["now", '{"b": 2}']], "")

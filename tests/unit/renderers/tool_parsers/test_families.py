"""Every family of tool calls: the same properties for all, over one table of how they write."""

from __future__ import annotations

import json
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.renderers.answer_format import AnswerSpec
from serve.renderers.tool_parsers.registry import TOOL_FORMATS
from tests.unit.renderers.answers import CITY, FAMILIES, TOOLS, Family, Parsed, answer_format, parse, split_at

ALL = pytest.mark.parametrize("family", FAMILIES, ids=[f"{i}-{f.name}" for i, f in enumerate(FAMILIES)])
IN_TEXT = pytest.mark.parametrize("family", [f for f in FAMILIES if f.allows_text], ids=lambda f: f.name)

# Harmony's headers are never content.
OWN_MARKUP = pytest.mark.parametrize("family", [f for f in FAMILIES if f.name != "openai"], ids=lambda f: f.name)
ENGINES = ("hermes", "mistral", "qwen3_coder", "glm45", "deepseek_v3", "pythonic", "openai")
BY_ENGINE = pytest.mark.parametrize("family", {f.name: f for f in FAMILIES if f.name in ENGINES}.values(), ids=ENGINES)

NASTY = 'a "quoted" \\ {brace} [list] </x> \t\u2028 \U0001f600 e\u0301'
ONE_CALL: list[tuple[str, dict[str, object]]] = [("get_weather", {"city": CITY, "days": 3})]
CALLS: list[tuple[str, dict[str, object]]] = [
    ("get_weather", {"city": NASTY, "days": -3, "wet": True, "limits": {"a": [1, {"b": "}"}], "c": None}}),
    ("now", {}),
    ("run-it", {"path": "/x"}),
]
MANY_SPLITS = settings(max_examples=25, deadline=None, derandomize=True)


def read(family: Family, *pieces: str, was_cut: bool = False, max_calls: int | None = None) -> Parsed:
    spec = AnswerSpec(family.prompt, TOOLS, max_calls=max_calls)
    return parse(answer_format(family.name), spec, pieces, was_cut=was_cut)


def test_every_row_of_the_table_has_a_sample() -> None:
    assert {family.name for family in FAMILIES} == set(TOOL_FORMATS)


@ALL
def test_calls_have_the_names_and_values_that_were_written(family: Family) -> None:
    parsed = read(family, family.write(CALLS))
    assert parsed.values == CALLS
    assert parsed.content == ""


@ALL
def test_json_arguments_are_passed_on_as_written(family: Family) -> None:
    if family.style == "json":
        parsed = read(family, family.write(CALLS))
        assert [arguments for _, arguments in parsed.calls] == [family.arguments(given) for _, given in CALLS]
    else:
        parsed = read(family, family.write(ONE_CALL))
        assert parsed.calls == [["get_weather", f'{{"city":{json.dumps(CITY, ensure_ascii=False)},"days":3}}']]


@ALL
def test_every_single_cut_gives_the_same_events(family: Family) -> None:
    text = family.write(CALLS[:2])
    whole = read(family, text).outcome
    for cut in range(len(text) + 1):
        assert read(family, text[:cut], text[cut:]).outcome == whole, text[:cut]


@ALL
def test_one_character_at_a_time_gives_the_same_events(family: Family) -> None:
    text = family.write(CALLS)
    assert read(family, *text).outcome == read(family, text).outcome


@IN_TEXT
@MANY_SPLITS
@given(cuts=st.lists(st.integers(0, 5000), max_size=40))
def test_text_before_between_and_after_calls_survives_any_split(family: Family, cuts: list[int]) -> None:
    written = family.write(CALLS)
    text = "Let me < look {}.\n\n" + written + "\nBetween.\n" + written + "\n\nDone [x](y).\n"
    parsed = read(family, *split_at(text, cuts))
    assert parsed.content == "Let me < look {}.Between.Done [x](y).\n"
    assert parsed.values == [*CALLS, *CALLS]
    assert parsed.order[0] == "ContentDelta"


@ALL
def test_ids_differ_and_have_the_familys_form(family: Family) -> None:
    ids = read(family, family.write(CALLS)).ids
    form = r"[A-Za-z0-9]{9}" if family.name == "mistral" else r"call_[0-9a-f]{24}"
    assert len(set(ids)) == 3
    assert all(re.fullmatch(form, call_id) for call_id in ids)


@IN_TEXT
def test_a_mark_that_begins_no_call_does_not_hide_the_next_one(family: Family) -> None:
    written = family.write(CALLS[1:])
    syntax = TOOL_FORMATS[family.name].syntax
    assert syntax is not None
    mark = next(mark for mark in syntax.marks if written.startswith(mark))
    for begun in (mark, f"{mark}\n", f"{mark}x"):
        for pieces in ([begun + written], list(begun + written)):
            parsed = read(family, *pieces)
            # Mistral's mark begins as its list does, so one too many is taken for markup.
            is_markup = family.name == "mistral" and not begun.endswith("x")
            assert parsed.content == ("" if is_markup else begun.rstrip())
            assert parsed.values == CALLS[1:]


@ALL
def test_calls_beyond_the_limit_are_dropped(family: Family) -> None:
    parsed = read(family, family.write(CALLS), max_calls=1)
    assert parsed.values == CALLS[:1]
    assert parsed.content == ""


@OWN_MARKUP
def test_a_call_to_a_tool_that_does_not_exist_is_content_unchanged(family: Family) -> None:
    text = family.write([("get_whether", {"city": "Rome"})])
    parsed = read(family, text)
    assert parsed.calls == []
    assert parsed.content == text


@ALL
def test_an_answer_cut_anywhere_keeps_what_was_parsed_and_shows_no_markup(family: Family) -> None:
    text = family.write(CALLS[:2])
    whole = read(family, text).calls
    for end in range(len(text)):
        parsed = read(family, text[:end], was_cut=True)
        # The first word of Phi's mark could as well be the answer's.
        assert len(parsed.content) <= 1 or "functools[".startswith(parsed.content)
        assert len(parsed.calls) <= 2
        for (name, arguments), (full_name, full_arguments) in zip(parsed.calls, whole, strict=False):
            assert name == full_name
            assert full_arguments.startswith(arguments)


@OWN_MARKUP
def test_an_answer_that_ends_before_a_call_has_begun_is_content_unchanged(family: Family) -> None:
    text = family.write(ONE_CALL)
    name_end = text.index("get_weather") + len("get_weather")
    for end in range(name_end):
        parsed = read(family, text[:end])
        assert parsed.content == text[:end]
        assert parsed.calls == []


@ALL
@MANY_SPLITS
@given(st.data())
def test_any_damage_splits_alike_and_never_raises(family: Family, data: st.DataObject) -> None:
    text = list(family.write(CALLS))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at] = data.draw(
            st.sampled_from(["", '"', "{", "}", "<", ">", "\\", "]", ",", " ", "\n", "x", "1", "\x01", "("])
        )
    damaged = "".join(text)
    whole = read(family, damaged)
    pieces = split_at(damaged, data.draw(st.lists(st.integers(0, 3000), max_size=30)))
    assert read(family, *pieces).outcome == whole.outcome
    assert all(name in TOOLS for name, _ in whole.calls)


@BY_ENGINE
def test_the_cost_of_a_piece_does_not_grow_with_the_answer(family: Family) -> None:
    def seconds(num_chars: int) -> float:
        text = family.write([("get_weather", {"city": "x y " * (num_chars // 4)})])
        parser = answer_format(family.name).new_parser(AnswerSpec(family.prompt, TOOLS))
        assert parser is not None
        began = time.perf_counter()
        num_events = sum(len(parser.feed(text[at : at + 4])) for at in range(0, len(text), 4))
        assert num_events + len(parser.finish()) >= 2
        return time.perf_counter() - began

    small, large = seconds(8_000), seconds(64_000)
    assert large < 10 * 8 * small


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 90_000,
        '<tool_call>{"name": "now", "arguments": {' + '"a": [{' * 130_000,
        "<tool_call>\n" + " " * 1_000_000,
        '<tool_call>{"arguments": {"a": "' + "<tool_call>" * 90_000,
        "<function=now><parameter=a>" + "</parameter" * 90_000,
        "</tool_call" * 90_000,
    ],
    ids=["marks", "nested", "space", "held", "closers", "content"],
)
@pytest.mark.parametrize("size", [1_000, 1_000_000])
def test_a_megabyte_of_hostile_text_takes_seconds(text: str, size: int) -> None:
    format_ = answer_format("qwen3_coder" if "function" in text else "hermes")
    began = time.perf_counter()
    parsed = parse(format_, AnswerSpec("", TOOLS), [text[at : at + size] for at in range(0, len(text), size)])
    assert len(parsed.content) + sum(len(arguments) for _, arguments in parsed.calls) > 900_000
    assert time.perf_counter() - began < 60

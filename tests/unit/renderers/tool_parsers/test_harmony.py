"""Harmony: channels, recipients, and answers whose marks are missing or unusual."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.renderers.answer_format import AnswerSpec
from tests.unit.renderers.answers import HARMONY_PROMPT, TOOLS, Parsed, answer_format, parse, split_at

ANALYSIS = "<|channel|>analysis<|message|>User wants {json}.<|end|>"
PREAMBLE = "<|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>"
CALL = '<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome"}'
FINAL = "<|start|>assistant<|channel|>final<|message|>It rains < 3 days."


def read(*pieces: str, prompt: str = HARMONY_PROMPT, was_cut: bool = False) -> Parsed:
    spec = AnswerSpec(prompt, TOOLS)
    return parse(answer_format("openai", "openai_gptoss"), spec, pieces, was_cut=was_cut)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 400), max_size=40))
def test_channels_become_thoughts_content_and_calls_at_any_split(cuts: list[int]) -> None:
    parsed = read(*split_at(ANALYSIS + PREAMBLE + CALL + "<|call|>", cuts))
    assert parsed.outcome == (
        "Let me look.",
        "User wants {json}.",
        [["get_weather", '{"city": "Rome"}']],
        ["ReasoningDelta", "ContentDelta", "CallStart0", "CallDelta0"],
    )


@pytest.mark.parametrize("end", ["", "<|return|>", "<|end|>"])
def test_the_mark_at_the_end_may_be_invisible(end: str) -> None:
    parsed = read(ANALYSIS + FINAL + end)
    assert (parsed.content, parsed.reasoning) == ("It rains < 3 days.", "User wants {json}.")


def test_the_recipient_may_stand_before_the_channel() -> None:
    parsed = read(
        "<|channel|>analysis<|message|>Hm.<|end|>"
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}"
    )
    assert parsed.values == [("now", {})]


def test_an_answer_may_begin_with_a_recipient() -> None:
    assert read(" to=functions.now<|channel|>commentary<|message|>{}<|call|>").values == [("now", {})]


def test_an_empty_body_is_a_call_without_arguments() -> None:
    assert read("<|channel|>commentary to=functions.now<|message|><|call|>").calls == [["now", "{}"]]


def test_a_body_that_is_no_object_is_content() -> None:
    parsed = read("<|channel|>commentary to=functions.now<|message|> yesterday<|call|>")
    assert (parsed.content, parsed.calls) == (" yesterday", [])


def test_a_broken_body_leaves_a_cut_call() -> None:
    parsed = read(f'<|channel|>commentary to=functions.get_weather<|message|>{{"city": Rome}}<|call|>{FINAL}')
    assert parsed.calls == [["get_weather", '{"city": ']]
    assert parsed.content == "It rains < 3 days."


def test_a_message_may_begin_without_an_end_before_it() -> None:
    parsed = read(f"<|channel|>analysis<|message|>Hm.{FINAL}<|channel|>final<|message|> Bye.")
    assert (parsed.reasoning, parsed.content) == ("Hm.", "It rains < 3 days. Bye.")


@pytest.mark.parametrize("text", ["Hello.", " Hello <b>.", "assistant", "toast", "<b>"])
def test_an_answer_without_a_header_is_content(text: str) -> None:
    assert read(*text).outcome == (text, "", [], ["ContentDelta"])


def test_the_prompt_may_end_inside_a_message() -> None:
    assert read("t.<|return|>", prompt=f"{HARMONY_PROMPT}<|channel|>final<|message|>Wai").content == "t."
    assert read("t.<|end|>", prompt=f"{HARMONY_PROMPT}<|channel|>analysis<|message|>Wai").reasoning == "t."
    assert read("<|message|>Hm.", prompt=f"{HARMONY_PROMPT}<|channel|>analysis").reasoning == "Hm."


def test_a_header_that_was_cut_says_nothing() -> None:
    header = ANALYSIS + "<|start|>assistant<|channel|>commentary to=functions.now"
    assert read(header, was_cut=True).outcome == ("", "User wants {json}.", [], ["ReasoningDelta"])


def test_without_tools_a_call_is_content_and_thoughts_are_thoughts() -> None:
    parsed = parse(answer_format(None, "openai_gptoss"), AnswerSpec(HARMONY_PROMPT, {}), [ANALYSIS + CALL])
    assert (parsed.content, parsed.reasoning, parsed.calls) == ('{"city": "Rome"}', "User wants {json}.", [])


@pytest.mark.parametrize("forced", ["required", "named"])
def test_forced_calls_stand_in_the_final_channel(forced: str) -> None:
    body = '[{"name": "now", "parameters": {"a": 1}}]' if forced == "required" else '{"a": 1}'
    spec = AnswerSpec(HARMONY_PROMPT, TOOLS, forced="named" if forced == "named" else "required", forced_name="now")
    text = f"{ANALYSIS}<|start|>assistant<|channel|>final<|message|>{body}"
    parsed = parse(answer_format("openai", "openai_gptoss"), spec, list(text))
    assert parsed.calls == [["now", '{"a": 1}']]
    assert (parsed.reasoning, parsed.content) == ("User wants {json}.", "")


def test_a_forced_call_may_be_written_as_harmonys_own() -> None:
    spec = AnswerSpec(HARMONY_PROMPT, TOOLS, forced="named", forced_name="get_weather")
    parsed = parse(answer_format("openai", "openai_gptoss"), spec, list(ANALYSIS + CALL))
    assert parsed.calls == [["get_weather", '{"city": "Rome"}']]

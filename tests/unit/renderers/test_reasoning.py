"""Thoughts are told from the rest: marks given, left out, opened by the prompt, cut, or written as prose."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.renderers.answer_format import AnswerSpec
from serve.renderers.reasoning import REASONING_FORMATS
from tests.unit.renderers.answers import HARMONY_PROMPT, TOOLS, Parsed, answer_format, parse, split_at

CHATML = "<|im_start|>user\nWhat does <think> do?<|im_end|>\n<|im_start|>assistant\n"
THINK_ROWS = [name for name, row in REASONING_FORMATS.items() if not row.is_harmony]
SPLITS = settings(max_examples=40, deadline=None, derandomize=True)


def read(name: str, *pieces: str, prompt: str = CHATML, was_cut: bool = False) -> Parsed:
    return parse(answer_format(reasoning=name), AnswerSpec(prompt, {}), pieces, was_cut=was_cut)


def sample(name: str) -> str:
    """Write thoughts and an answer as the family does."""
    row = REASONING_FORMATS[name]
    opening, closing = row.answer_marks or ("", "")
    break_ = "\n" if row.trims_lines else ""
    answer = f"{break_}{break_}{opening}{break_}All < 7.{break_}{closing}{break_}"
    return f"{row.starts[0]}{break_}I think: 6 * 7\n\n... 42?{break_}{row.ends[0]}{answer}"


@pytest.mark.parametrize("name", THINK_ROWS)
def test_thoughts_and_answer_are_told_apart_at_every_cut(name: str) -> None:
    text = sample(name)
    for cut in range(len(text) + 1):
        parsed = read(name, text[:cut], text[cut:])
        assert parsed.reasoning == "I think: 6 * 7\n\n... 42?"
        assert parsed.content == "All < 7."
        assert parsed.order == ["ReasoningDelta", "ContentDelta"]


@pytest.mark.parametrize("name", THINK_ROWS)
@SPLITS
@given(cuts=st.lists(st.integers(0, 200), max_size=30), damage=st.integers(0, 60))
def test_any_split_of_a_damaged_answer_gives_the_same(name: str, cuts: list[int], damage: int) -> None:
    text = sample(name)
    text = text[:damage] + text[damage + 1 :]
    assert read(name, *split_at(text, cuts)).outcome == read(name, text).outcome


@pytest.mark.parametrize("name", THINK_ROWS)
def test_an_answer_cut_inside_the_thoughts_is_all_thoughts(name: str) -> None:
    text = sample(name)
    end = text.index("42")
    parsed = read(name, text[:end], was_cut=True)
    assert parsed.content == ""
    assert parsed.reasoning == "I think: 6 * 7\n\n... "


@pytest.mark.parametrize("name", ["deepseek_r1", "nemotron_v3", "step3", "olmo3", "minimax_m2", "kimi_k2"])
def test_families_that_begin_thinking_need_no_start_mark(name: str) -> None:
    parsed = read(name, "Hm.\n</think>\n\nYes.")
    assert (parsed.reasoning, parsed.content) == ("Hm.\n", "\n\nYes.")
    assert read(name, " Hm.").reasoning == " Hm."


@pytest.mark.parametrize("name", ["qwen3", "glm45", "mistral", "seed_oss", "granite", "hunyuan_a13b", "deepseek_v3"])
def test_families_that_open_their_thoughts_answer_without_them(name: str) -> None:
    text = " Yes, <think> and [THINK] are marks. </think>"
    parsed = read(name, text)
    assert (parsed.reasoning, parsed.content) == ("", text)


def test_white_space_around_the_marks_is_kept() -> None:
    parsed = read("qwen3", "\n<think>\nHm.\n</think>\n\nYes.\n")
    assert (parsed.reasoning, parsed.content) == ("\nHm.\n", "\n\nYes.\n")


@pytest.mark.parametrize("opened", ["<think>", "<think>\n", "<think>\nI was about"])
def test_thoughts_that_the_prompt_opened_need_no_start_mark(opened: str) -> None:
    parsed = read("qwen3", " to say\n</think>Yes.", prompt=CHATML + opened)
    assert (parsed.reasoning, parsed.content) == (" to say\n", "Yes.")


@pytest.mark.parametrize("closed", ["<think>\n\n</think>\n\n", "</think>", "<think>Hm.</think>So"])
def test_thoughts_that_the_prompt_closed_are_not_looked_for(closed: str) -> None:
    format_ = answer_format(reasoning="deepseek_r1")
    assert format_.new_parser(AnswerSpec(CHATML + closed, {})) is None


def test_marks_in_earlier_turns_open_nothing() -> None:
    assert read("qwen3", "Hello", prompt=CHATML).content == "Hello"
    assert read("qwen3", "Hello", prompt="Tell me about <think> please").content == "Hello"


def test_a_prompt_without_known_turns_is_read_at_its_end() -> None:
    assert read("qwen3", "Hm.</think>Yes.", prompt="[user] Hi [bot]<think>\n").reasoning == "Hm."


def test_thinking_switched_off_makes_all_content() -> None:
    assert answer_format(reasoning="deepseek_r1").new_parser(AnswerSpec(CHATML, {}, thinks=False)) is None


def test_a_mark_that_was_cut_is_not_shown() -> None:
    assert read("qwen3", "<think>Hm.</thi", was_cut=True).reasoning == "Hm."
    assert read("qwen3", "<think>Hm.</thi").reasoning == "Hm.</thi"
    assert read("qwen3", "<thi", was_cut=True).outcome == ("", "", [], [])


def test_both_spellings_of_prose_marks() -> None:
    text = "Here's my thought process: one Here's two. Here's my response: three"
    parsed = read("granite", *text)
    assert (parsed.reasoning, parsed.content) == (" one Here's two. ", " three")


def test_a_section_of_calls_ends_kimis_thoughts() -> None:
    text = (
        "<think>Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    )
    parsed = parse(answer_format("kimi_k2", "kimi_k2"), AnswerSpec(CHATML, TOOLS), list(text))
    assert parsed.reasoning == "Hm."
    assert parsed.values == [("now", {})]


def test_markup_inside_thoughts_is_no_call() -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    parsed = parse(answer_format("hermes", "qwen3"), AnswerSpec(CHATML, TOOLS), list(f"<think>{call}</think>\n{call}"))
    assert parsed.reasoning == call
    assert parsed.values == [("now", {})]
    assert parsed.content == ""


def test_is_reasoning_tells_where_the_next_text_belongs() -> None:
    parser = answer_format("hermes", "qwen3").new_parser(AnswerSpec(CHATML, TOOLS))
    assert parser is not None
    seen = []
    for piece in ("<thi", "nk>", "Hm.", "</think", ">", "\nYes."):
        parser.feed(piece)
        seen.append(parser.is_reasoning)
    assert seen == [False, True, True, True, False, False]


def test_is_reasoning_holds_from_the_start_when_the_prompt_opened_the_thoughts() -> None:
    parser = answer_format(None, "qwen3").new_parser(AnswerSpec(f"{CHATML}<think>", {}))
    assert parser is not None
    assert parser.is_reasoning


def test_harmony_needs_no_other_mark() -> None:
    parsed = read("openai_gptoss", *"<|channel|>analysis<|message|>Hm.<|end|>", prompt=HARMONY_PROMPT)
    assert parsed.outcome == ("", "Hm.", [], ["ReasoningDelta"])

"""The format of a server's answers: chosen by name, with the tokens to show, bounds of thinking and their counts."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from serve.errors import ConfigError
from serve.renderers.answer_format import AnswerFormat, AnswerSpec, choose_answer_format
from serve.renderers.reasoning import REASONING_FORMATS
from serve.renderers.tool_parsers.registry import TOOL_FORMATS
from serve.sampling_params import ReasoningBounds
from tests.fakes import BYTE_VOCAB_SIZE, ByteTokenizer
from tests.source_tree import table
from tests.unit.renderers.answers import HARMONY_PROMPT, TOOLS, answer_format

WORDS = ["<think>", "</think>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<tool_call>", "[TOOL_CALLS]"]
IDS = {word: BYTE_VOCAB_SIZE + index for index, word in enumerate(WORDS)}
PROMPT = "<|im_start|>assistant\n"


class WordTokenizer(ByteTokenizer):
    """Bytes and a few marks as tokens of their own, of which some are special."""

    def __init__(self, special: tuple[str, ...] = ()) -> None:
        super().__init__([word.encode() for word in WORDS])
        self.all_special_ids |= {IDS[word] for word in special}

    def encode(self, text: str, *, add_special_tokens: bool, max_length: int | None = None) -> list[int]:
        ids: list[int] = []
        while text:
            word = next((word for word in WORDS if text.startswith(word)), None)
            ids += [IDS[word]] if word else list(text[0].encode())
            text = text[len(word or text[0]) :]
        return ids


def choose(tools: str | None, reasoning: str | None, *special: str) -> AnswerFormat:
    tokenizer = WordTokenizer(special)
    return choose_answer_format(tokenizer, None, tool_parser=tools, reasoning_parser=reasoning)


def count(format_: AnswerFormat, text: str, prompt: str = PROMPT) -> int:
    ids = WordTokenizer().encode(text, add_special_tokens=False)
    return format_.count_reasoning_tokens(AnswerSpec(prompt, {}), ids)


def test_names_choose_rows_and_none_switches_off() -> None:
    chosen = choose("hermes", "qwen3")
    assert chosen.tools is TOOL_FORMATS["hermes"]
    assert chosen.reasoning is REASONING_FORMATS["qwen3"]
    off = choose("none", "none")
    assert (off.tools, off.reasoning, off.visible_token_ids) == (None, None, ())


@pytest.mark.parametrize(("tools", "reasoning"), [("hermse", None), (None, "think")])
def test_an_unknown_name_is_refused_with_the_known_ones(tools: str | None, reasoning: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(tools, reasoning)
    assert str(tools or reasoning) in str(caught.value)
    assert ("hermes" if tools else "deepseek_r1") in str(caught.value)
    assert ("--tool-call-parser" if tools else "--reasoning-parser") in str(caught.value)


def test_only_special_tokens_need_to_be_made_visible() -> None:
    assert choose("hermes", "qwen3").visible_token_ids == ()
    both = choose("hermes", "qwen3", "<tool_call>", "</think>", "[TOOL_CALLS]")
    assert set(both.visible_token_ids) == {IDS["<tool_call>"], IDS["</think>"]}
    assert choose("mistral", "none", "[TOOL_CALLS]").visible_token_ids == (IDS["[TOOL_CALLS]"],)
    harmony = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
    assert set(choose("none", "openai_gptoss", *harmony).visible_token_ids) == {IDS[word] for word in harmony}


def test_an_answer_that_is_all_content_has_no_parser() -> None:
    assert answer_format().new_parser(AnswerSpec(PROMPT, TOOLS)) is None
    assert answer_format("hermes").new_parser(AnswerSpec(PROMPT, {})) is None
    assert answer_format("hermes", "qwen3").new_parser(AnswerSpec(PROMPT, {}, thinks=False)) is None
    assert answer_format("hermes").new_parser(AnswerSpec(PROMPT, TOOLS)) is not None


@pytest.mark.parametrize(("flag", "rows"), [("tool-call", TOOL_FORMATS), ("reasoning", REASONING_FORMATS)])
def test_the_document_names_every_row(flag: str, rows: Mapping[str, object]) -> None:
    cells = [row[0] for row in table("tools_and_reasoning.md", f"`--{flag}-parser`")]
    assert sorted(name.strip(" `") for cell in cells for name in cell.split(",")) == sorted(rows)


def test_parsers_share_nothing() -> None:
    format_ = answer_format("hermes", "qwen3")
    first, second = (format_.new_parser(AnswerSpec(PROMPT, TOOLS)) for _ in range(2))
    assert first is not None
    assert second is not None
    first.feed("<think>Hm.")
    assert first.is_reasoning
    assert not second.is_reasoning


def test_bounds_of_thoughts_that_are_optional_name_the_start_token() -> None:
    bounds = choose("none", "qwen3").reasoning_bounds(AnswerSpec(PROMPT, {}), budget=9)
    assert bounds == ReasoningBounds("</think>", (IDS["</think>"],), IDS["<think>"], 9)


@pytest.mark.parametrize(("name", "prompt"), [("qwen3", f"{PROMPT}<think>\n"), ("deepseek_r1", PROMPT)])
def test_bounds_of_an_answer_that_begins_thinking_have_no_start_token(name: str, prompt: str) -> None:
    bounds = choose("none", name).reasoning_bounds(AnswerSpec(prompt, {}), budget=None)
    assert bounds == ReasoningBounds("</think>", (IDS["</think>"],), None, None)


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("none", AnswerSpec(PROMPT, {})),
        ("qwen3", AnswerSpec(PROMPT, {}, thinks=False)),
        ("qwen3", AnswerSpec(f"{PROMPT}<think>\n\n</think>\n\n", {})),
        ("granite", AnswerSpec(PROMPT, {})),  # its start mark is prose, not one token
        ("openai_gptoss", AnswerSpec(f"{HARMONY_PROMPT}<|channel|>final<|message|>", {})),
    ],
)
def test_an_answer_that_does_not_think_has_no_bounds(name: str, spec: AnswerSpec) -> None:
    assert choose("none", name).reasoning_bounds(spec, budget=5) is None


def test_a_mark_of_several_tokens_is_forced_as_such() -> None:
    bounds = choose("none", "seed_oss").reasoning_bounds(AnswerSpec("<seed:bos>assistant\n<seed:think>", {}), budget=0)
    assert bounds == ReasoningBounds("</seed:think>", tuple(b"</seed:think>"), None, 0)


def test_harmony_thinks_until_the_final_channel() -> None:
    bounds = choose("none", "openai_gptoss").reasoning_bounds(AnswerSpec(HARMONY_PROMPT, {}), budget=3)
    assert bounds is not None
    assert bounds.end_text == "<|channel|>final<|message|>"
    forced = b"".join(WordTokenizer().token_to_bytes(i) for i in bounds.end_token_ids).decode()
    assert forced == "<|end|><|start|>assistant<|channel|>final<|message|>"
    assert bounds.end_token_ids[0] == IDS["<|end|>"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>ab</think>\n\nc", 4),
        ("<think>\u00e9</think>", 4),  # two bytes of one character are two tokens
        ("\n<think>ab", 4),
        ("ab</think>", 0),
        ("", 0),
        ("\n", 0),
    ],
)
def test_tokens_of_thoughts_are_counted_with_their_marks(text: str, expected: int) -> None:
    assert count(choose("none", "qwen3"), text) == expected


def test_tokens_of_thoughts_without_a_start_mark() -> None:
    assert count(choose("none", "deepseek_r1"), "ab</think>c") == 3
    assert count(choose("none", "qwen3"), "ab</think>c", f"{PROMPT}<think>") == 3
    assert count(choose("none", "qwen3"), "ab", f"{PROMPT}<think>\n\n</think>") == 0
    assert count(choose("none", "none"), "<think>a") == 0


def test_harmonys_thoughts_are_counted_up_to_the_body_of_the_answer() -> None:
    thoughts = "<|channel|>analysis<|message|>ab<|end|><|start|>assistant<|channel|>final<|message|>"
    marks_and_letters = 3 + len("analysisab") + 1 + len("assistantfinal") + 2
    assert count(choose("openai", "openai_gptoss"), f"{thoughts}xyz", HARMONY_PROMPT) == marks_and_letters
    assert count(choose("openai", "openai_gptoss"), "<|channel|>final<|message|>xyz", HARMONY_PROMPT) == 0

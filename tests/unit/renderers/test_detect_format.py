"""Formats are found by the marks that a template, or else a vocabulary, shows."""

from __future__ import annotations

import pytest

from serve.renderers.answer_format import choose_answer_format
from serve.renderers.tool_parsers.registry import TOOL_FORMATS
from tests.fakes import ByteTokenizer
from tests.unit.renderers.answers import BAR, FAMILIES, deepseek

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
HERMES = '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
THINK = "{{ '<think>\\n\\n</think>\\n\\n' }}"
LLAMA = '<|start_header_id|>assistant Respond in the format {"name": function name, "parameters": dictionary}'
DEEPSEEK = f"<{BAR}Assistant{BAR}>{deepseek('tool calls begin')}{deepseek('tool call begin')}"

TEMPLATES = [
    (None, None, None),
    (CHATML, None, None),
    ("<start_of_turn>model\n{{ content }}<end_of_turn>", None, None),
    (CHATML + HERMES, "hermes", None),
    (CHATML + HERMES + THINK, "hermes", "qwen3"),
    (CHATML + "<tool_call>\n<function=example>\n<parameter=p>", "qwen3_coder", None),
    (LLAMA, "llama3_json", None),
    (LLAMA.replace("<|start_header_id|>", "<|header_start|>"), "llama4_json", None),
    ("<|header_start|>[func_name1(params_name1=params_value1)]", "llama4_pythonic", None),
    ("<|start_header_id|>[func_name1(params_name1=params_value1)]", "pythonic", None),
    ("[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral", None),
    ("[AVAILABLE_TOOLS][TOOL_CALLS][THINK]", "mistral", "mistral"),
    (DEEPSEEK + "```json", "deepseek_v3", None),
    (DEEPSEEK + "```json" + "</think>", "deepseek_v3", "deepseek_r1"),
    (DEEPSEEK + deepseek("tool sep"), "deepseek_v31", None),
    (f"<{BAR}DSML{BAR}function_calls>", "deepseek_v32", None),
    ("<|start|>assistant<|channel|>final<|message|>", "openai", "openai_gptoss"),
    ("<|assistant|><think></think><tool_call><arg_key><arg_value>", "glm45", "glm45"),
    ("<|tool_calls_section_begin|>", "kimi_k2", None),
    ("<seed:tool_call><function=f><seed:think>", "seed_oss", "seed_oss"),
    ("<minimax:tool_call><think></think>", "minimax_m2", "minimax_m2"),
    ("<|tool_call_start|>", "lfm2", None),
    ("<function_calls>", "olmo3", None),
    ("<|start_of_role|><|tool_call|>Here is my thought process:", "granite", "granite"),
]


@pytest.mark.parametrize(("template", "tools", "reasoning"), TEMPLATES)
def test_a_template_shows_its_formats(template: str | None, tools: str | None, reasoning: str | None) -> None:
    found = choose_answer_format(ByteTokenizer(), template, tool_parser=None, reasoning_parser=None)
    assert (found.tools and found.tools.name) == tools
    assert (found.reasoning and found.reasoning.name) == reasoning


@pytest.mark.parametrize(
    ("words", "template", "tools", "reasoning"),
    [
        (["<|channel|>", "<|message|>", "<|call|>"], None, "openai", "openai_gptoss"),
        (["<|python_tag|>", "<|eom_id|>"], "<|start_header_id|>", "llama3_json", None),
        (["<|python_tag|>", "<|eom_id|>"], CHATML, None, None),
    ],
)
def test_a_vocabulary_tells_where_the_template_does_not(
    words: list[str], template: str | None, tools: str | None, reasoning: str | None
) -> None:
    tokenizer = ByteTokenizer([word.encode() for word in words])
    found = choose_answer_format(tokenizer, template, tool_parser=None, reasoning_parser=None)
    assert (found.tools and found.tools.name) == tools
    assert (found.reasoning and found.reasoning.name) == reasoning


def test_a_name_wins_over_the_template() -> None:
    found = choose_answer_format(
        ByteTokenizer(), CHATML + HERMES + THINK, tool_parser="pythonic", reasoning_parser="none"
    )
    assert found.tools is TOOL_FORMATS["pythonic"]
    assert found.reasoning is None


@pytest.mark.parametrize(
    "family",
    [f for f in FAMILIES if f.name in ("hermes", "qwen3_coder", "glm45", "deepseek_v3", "kimi_k2", "lfm2", "olmo3")],
    ids=lambda f: f.name,
)
def test_what_a_template_writes_is_what_the_found_parser_reads(family: object) -> None:
    assert isinstance(family, type(FAMILIES[0]))
    written = family.write([("get_weather", {"city": "Rome"})])
    found = choose_answer_format(ByteTokenizer(), written, tool_parser=None, reasoning_parser=None)
    assert found.tools is not None
    assert found.tools.syntax == TOOL_FORMATS[family.name].syntax

"""Phase 11 of 11: finds out from a chat template, or else the vocabulary, how a model writes thoughts and tool calls.

A template shows earlier calls to the model in the model's own format, so its marks are the evidence.
"""

from __future__ import annotations

from typing import Final

from serve.renderers.tokenizer import Tokenizer

_BAR: Final = "\uff5c"
_GAP: Final = "\u2581"

# The first row whose strings are all in the template decides.
_TOOL_EVIDENCE: Final = (
    (("<|channel|>", "<|message|>"), "openai"),
    ((f"{_BAR}DSML{_BAR}",), "deepseek_v32"),
    ((f"<{_BAR}tool{_GAP}calls{_GAP}begin{_BAR}>", "```json"), "deepseek_v3"),
    ((f"<{_BAR}tool{_GAP}calls{_GAP}begin{_BAR}>",), "deepseek_v31"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<steptml:invoke",), "step3"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|START_ACTION|>",), "cohere_command3"),
    (("<arg_key>",), "glm45"),
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<function_calls>",), "olmo3"),
    (("<|action_start|>", "<|plugin|>"), "internlm"),
    (("<tool_calls>", "<answer>"), "hunyuan_a13b"),
    (("<tool_calls>",), "jamba"),
    (("<|tool_call|>", "<|start_of_role|>"), "granite"),
    (("<tool_call>",), "hermes"),
    (("functools[",), "phi4_mini_json"),
    (("[func_name1(", "<|header_start|>"), "llama4_pythonic"),
    (("[func_name1(",), "pythonic"),
    (('"parameters"', "<|header_start|>"), "llama4_json"),
    (('"parameters"', "<|start_header_id|>"), "llama3_json"),
)
_REASONING_EVIDENCE: Final = (
    (("<|channel|>", "<|message|>"), "openai_gptoss"),
    (("[THINK]",), "mistral"),
    (("<seed:think>",), "seed_oss"),
    (("Here is my thought process:",), "granite"),
    (("</think>", "<|tool_calls_section_begin|>"), "kimi_k2"),
    (("</think>", "<minimax:tool_call>"), "minimax_m2"),
    (("</think>", "<steptml:invoke"), "step3"),
    (("<think>", "<answer>"), "hunyuan_a13b"),
    (("<think>", "<response>"), "ernie45"),
    (("<think>", "<arg_key>"), "glm45"),
    (("</think>", f"<{_BAR}Assistant{_BAR}>", f"<{_BAR}tool{_GAP}calls{_GAP}begin{_BAR}>"), "deepseek_r1"),
    (("</think>", f"<{_BAR}Assistant{_BAR}>"), "deepseek_r1"),
    (("<think>",), "qwen3"),
)
_HARMONY_TOKENS: Final = ("<|channel|>", "<|message|>", "<|call|>")
# A model whose template shows no calls, by its tokens and what the template does show.
_VOCABULARY_EVIDENCE: Final = (
    (_HARMONY_TOKENS, "", "openai"),
    (("<|python_tag|>", "<|eom_id|>"), "<|start_header_id|>", "llama3_json"),
)


def detect_tools(tokenizer: Tokenizer, template_text: str | None) -> str | None:
    """Give the name of the tool format, None when nothing tells."""
    template = template_text or ""
    for evidence, name in _TOOL_EVIDENCE:
        if all(text in template for text in evidence):
            return name
    for tokens, text, name in _VOCABULARY_EVIDENCE:
        if text in template and all(tokenizer.token_to_id(token) is not None for token in tokens):
            return name
    return None


def detect_reasoning(tokenizer: Tokenizer, template_text: str | None) -> str | None:
    """Give the name of the reasoning format, None when nothing tells."""
    template = template_text or ""
    for evidence, name in _REASONING_EVIDENCE:
        if all(text in template for text in evidence):
            return name
    if all(tokenizer.token_to_id(token) is not None for token in _HARMONY_TOKENS):
        return "openai_gptoss"
    return None

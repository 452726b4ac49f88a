"""Phase 11 of 11: the table of model families and how they write tool calls, by the names of vLLM's flag."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from serve.renderers.tool_parsers.base import Syntax, new_call_id, new_short_call_id
from serve.renderers.tool_parsers.harmony import HARMONY_MARKS
from serve.renderers.tool_parsers.json_calls import JsonCalls, MistralCalls, NamedCalls
from serve.renderers.tool_parsers.pythonic_calls import PythonicCalls
from serve.renderers.tool_parsers.xml_calls import XmlCalls

# DeepSeek's marks use a full-width bar and a lower-one-eighth block for the space.
_BAR: Final = "\uff5c"
_GAP: Final = "\u2581"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model family writes tool calls.

    syntax is None for harmony, whose calls are messages: harmony.py reads the whole answer. marks are all the strings
    that its parser must see, also where the tokenizer has them as special tokens.
    """

    name: str
    syntax: Syntax | None
    marks: tuple[str, ...]
    new_id: Callable[[], str] = new_call_id


def _deepseek(name: str) -> str:
    return f"<{_BAR}{name.replace(' ', _GAP)}{_BAR}>"


_DEEPSEEK_MARKS: Final = tuple(
    map(_deepseek, ("tool calls begin", "tool calls end", "tool call begin", "tool call end", "tool sep"))
)
_HERMES: Final = JsonCalls(marks=("<tool_call>",), close="</tool_call>", separator=",")
_LLAMA_JSON: Final = JsonCalls(marks=("<|python_tag|>", "\n{"), start="{", separator=";", is_bare=True)
_QWEN_XML: Final = XmlCalls(
    marks=("<tool_call>", "<function="),
    close="</tool_call>",
    name_open="<function=",
    name_close=">",
    key_open="<parameter=",
    key_close=(">",),
    value_close="</parameter>",
    function_close="</function>",
)
_SEED_XML: Final = replace(_QWEN_XML, marks=("<seed:tool_call>", "<function="), close="</seed:tool_call>")
_GLM_XML: Final = XmlCalls(
    marks=("<tool_call>",),
    close="</tool_call>",
    name_open="",
    name_close="",
    key_open="<arg_key>",
    key_close=("</arg_key>", "<arg_value>"),
    value_close="</arg_value>",
    function_close="",
)
_GLM_MARKS: Final = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_MINIMAX_XML: Final = XmlCalls(
    marks=("<minimax:tool_call>",),
    close="</minimax:tool_call>",
    name_open='<invoke name="',
    name_close='">',
    key_open='<parameter name="',
    key_close=('">',),
    value_close="</parameter>",
    function_close="</invoke>",
)
_STEP3_XML: Final = XmlCalls(
    marks=(f"<{_BAR}tool_calls_begin{_BAR}>",),
    close=f"<{_BAR}tool_calls_end{_BAR}>",
    before_name=f"<{_BAR}tool_call_begin{_BAR}>function<{_BAR}tool_sep{_BAR}>",
    name_open='<steptml:invoke name="',
    name_close='">',
    key_open='<steptml:parameter name="',
    key_close=('">',),
    value_close="</steptml:parameter>",
    function_close="</steptml:invoke>",
    after_function=f"<{_BAR}tool_call_end{_BAR}>",
)
_DEEPSEEK_XML: Final = XmlCalls(
    marks=(f"<{_BAR}DSML{_BAR}function_calls>",),
    close=f"</{_BAR}DSML{_BAR}function_calls>",
    name_open=f'<{_BAR}DSML{_BAR}invoke name="',
    name_close='">',
    key_open=f'<{_BAR}DSML{_BAR}parameter name="',
    key_close=('"',),
    value_close=f"</{_BAR}DSML{_BAR}parameter>",
    function_close=f"</{_BAR}DSML{_BAR}invoke>",
    is_flagged=True,
    keeps_lines=True,
)
_DEEPSEEK_V3: Final = NamedCalls(
    marks=(_deepseek("tool calls begin"),),
    close=_deepseek("tool calls end"),
    call_open=_deepseek("tool call begin"),
    before_name=_deepseek("tool sep"),
    after_name=("```json",),
    call_close=("```", _deepseek("tool call end")),
)
_DEEPSEEK_V31: Final = NamedCalls(
    marks=(_deepseek("tool calls begin"),),
    close=_deepseek("tool calls end"),
    call_open=_deepseek("tool call begin"),
    after_name=(_deepseek("tool sep"),),
    call_close=(_deepseek("tool call end"),),
)
_KIMI: Final = NamedCalls(
    marks=("<|tool_calls_section_begin|>",),
    close="<|tool_calls_section_end|>",
    call_open="<|tool_call_begin|>",
    after_name=("<|tool_call_argument_begin|>",),
    call_close=("<|tool_call_end|>",),
)
_KIMI_MARKS: Final = (*_KIMI.marks, _KIMI.close, _KIMI.call_open, *_KIMI.after_name, *_KIMI.call_close)
_TOOL_CALLS_LIST: Final = JsonCalls(marks=("<tool_calls>",), close="</tool_calls>")


def _row(name: str, syntax: Syntax, *marks: str, new_id: Callable[[], str] = new_call_id) -> ToolFormat:
    return ToolFormat(name, syntax, marks or tuple(filter(None, (*syntax.marks, syntax.close))), new_id)


_FORMATS: Final = (
    _row("hermes", _HERMES),
    _row("granite4", _HERMES),
    _row("ernie45", _HERMES),
    _row("llama3_json", _LLAMA_JSON, "<|python_tag|>"),
    _row("llama4_json", _LLAMA_JSON, "<|python_tag|>"),
    _row("mistral", MistralCalls(), "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", new_id=new_short_call_id),
    _row("qwen3_coder", _QWEN_XML),
    _row("qwen3_xml", _QWEN_XML),
    _row("seed_oss", _SEED_XML),
    _row("glm45", _GLM_XML, *_GLM_MARKS),
    _row("glm47", _GLM_XML, *_GLM_MARKS),
    _row("minimax_m2", _MINIMAX_XML),
    _row(
        "step3",
        _STEP3_XML,
        *_STEP3_XML.marks,
        _STEP3_XML.close,
        _STEP3_XML.after_function,
        f"<{_BAR}tool_call_begin{_BAR}>",
        f"<{_BAR}tool_sep{_BAR}>",
    ),
    _row("pythonic", PythonicCalls(marks=("\n[",), start="[")),
    _row(
        "llama4_pythonic",
        PythonicCalls(marks=("<|python_start|>", "\n["), close="<|python_end|>", start="["),
        "<|python_start|>",
        "<|python_end|>",
    ),
    _row("olmo3", PythonicCalls(marks=("<function_calls>",), close="</function_calls>", is_list=False)),
    _row("lfm2", PythonicCalls(marks=("<|tool_call_start|>",), close="<|tool_call_end|>")),
    _row("deepseek_v3", _DEEPSEEK_V3, *_DEEPSEEK_MARKS),
    _row("deepseek_v31", _DEEPSEEK_V31, *_DEEPSEEK_MARKS),
    _row("deepseek_v32", _DEEPSEEK_XML),
    _row("kimi_k2", _KIMI, *_KIMI_MARKS),
    _row("granite", JsonCalls(marks=("<|tool_call|>", "<tool_call>"))),
    _row("phi4_mini_json", JsonCalls(marks=("functools[",))),
    _row("jamba", _TOOL_CALLS_LIST),
    _row("hunyuan_a13b", _TOOL_CALLS_LIST),
    _row(
        "internlm",
        JsonCalls(marks=("<|action_start|><|plugin|>",), close="<|action_end|>"),
        "<|action_start|>",
        "<|plugin|>",
        "<|action_end|>",
    ),
    _row("cohere_command3", JsonCalls(marks=("<|START_ACTION|>",), close="<|END_ACTION|>", name_keys=("tool_name",))),
    ToolFormat("openai", None, HARMONY_MARKS),
)
TOOL_FORMATS: Final = MappingProxyType({row.name: row for row in _FORMATS})

"""Answers as each model family writes them, and helpers to parse them in pieces."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from serve.renderers.answer_format import AnswerFormat, AnswerSpec, choose_answer_format
from serve.renderers.output_events import CallDelta, CallStart, ContentDelta, Event, ReasoningDelta
from tests.fakes import ByteTokenizer

BAR, GAP = "\uff5c", "\u2581"
CITY = "Zu\u0308rich \U0001f3d4"
TOOLS: dict[str, dict[str, object]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "limits": {"type": "object"},
            "wet": {"type": "boolean"},
        },
    },
    "now": {"type": "object", "properties": {}},
    "run-it": {},
}


@dataclass
class Parsed:
    """What an answer was parsed into: joined texts, and calls as [name, arguments text]."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case ContentDelta(text):
                    self.content += text
                case ReasoningDelta(text):
                    self.reasoning += text
                case CallStart(index, call_id, name):
                    assert index == len(self.calls), "indexes count from 0"
                    self.calls.append([name, ""])
                    self.ids.append(call_id)
                case CallDelta(index, text):
                    assert index == len(self.calls) - 1, "arguments belong to the last call"
                    self.calls[index][1] += text
            assert isinstance(event, CallStart) or (event.arguments if isinstance(event, CallDelta) else event.text)
            kind = f"{type(event).__name__}{event.index if isinstance(event, CallStart | CallDelta) else ''}"
            if self.order[-1:] != [kind]:
                self.order.append(kind)

    @property
    def values(self) -> list[tuple[str, object]]:
        """Give the calls with their arguments' values."""
        return [(name, json.loads(arguments)) for name, arguments in self.calls]

    @property
    def outcome(self) -> tuple[str, str, list[list[str]], list[str]]:
        """Give all but the random ids."""
        return self.content, self.reasoning, self.calls, self.order


def answer_format(tools: str | None = None, reasoning: str | None = None) -> AnswerFormat:
    """Give the format by names; None switches off."""
    return choose_answer_format(
        ByteTokenizer(), None, tool_parser=tools or "none", reasoning_parser=reasoning or "none"
    )


def parse(format_: AnswerFormat, spec: AnswerSpec, pieces: Sequence[str], *, was_cut: bool = False) -> Parsed:
    """Parse an answer that comes in these pieces."""
    parser = format_.new_parser(spec)
    assert parser is not None
    parsed = Parsed()
    for piece in pieces:
        parsed.add(parser.feed(piece))
    parsed.add(parser.finish(was_cut=was_cut))
    return parsed


def split_at(text: str, cuts: Iterable[int]) -> list[str]:
    """Cut a text at positions."""
    places = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(places)]


def deepseek(name: str) -> str:
    return f"<{BAR}{name.replace(' ', GAP)}{BAR}>"


HARMONY_PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"


@dataclass(frozen=True)
class Family:
    """How one family writes a call: before and after a row of calls, between them, and one call.

    values tells that arguments are not passed on as written; text tells whether content may stand around the calls.
    """

    name: str
    begin: str
    call: str  # with {name} and {arguments}
    between: str
    end: str
    style: str = "json"  # json, xml, glm, dsml, python
    allows_text: bool = True
    prompt: str = ""

    def write(self, calls: Sequence[tuple[str, dict[str, object]]]) -> str:
        """Write calls as the family does."""
        written = [
            self.call.replace("{name}", name).replace("{arguments}", self.arguments(arguments))
            for name, arguments in calls
        ]
        return self.begin + self.between.join(written) + self.end

    def arguments(self, arguments: dict[str, object]) -> str:
        match self.style:
            case "python":
                return ", ".join(f"{key}={value!r}" for key, value in arguments.items())
            case "json":
                return json.dumps(arguments, ensure_ascii=False)
        shape = {
            "xml": "<parameter={key}>\n{value}\n</parameter>\n",
            "minimax": '<parameter name="{key}">{value}</parameter>\n',
            "step3": '<steptml:parameter name="{key}">{value}</steptml:parameter>\n',
            "glm": "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
            "dsml": f'<{BAR}DSML{BAR}parameter name="{{key}}" string="{{flag}}">{{value}}</{BAR}DSML{BAR}parameter>\n',
        }[self.style]
        return "".join(
            shape.replace("{key}", key)
            .replace("{flag}", "true" if isinstance(value, str) else "false")
            .replace("{value}", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            for key, value in arguments.items()
        )


OBJECT = '{"name": "{name}", "arguments": {arguments}}'
PARAMETERS = '{"name": "{name}", "parameters": {arguments}}'
HERMES = ("<tool_call>\n", OBJECT, "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")
FUNCTION = "<function={name}>\n{arguments}</function>\n"
FAMILIES = (
    Family("hermes", *HERMES),
    Family("granite4", *HERMES),
    Family("ernie45", *HERMES),
    Family("llama3_json", "", PARAMETERS, "; ", "", allows_text=False),
    Family("llama4_json", "<|python_tag|>", PARAMETERS, ";", "", allows_text=False),
    Family("mistral", "[TOOL_CALLS][", OBJECT, ", ", "]"),
    Family("mistral", "[TOOL_CALLS]", "{name}[ARGS]{arguments}", "[TOOL_CALLS]", ""),
    Family("mistral", "[TOOL_CALLS]", "{name}[CALL_ID]aB3dE6gH9[ARGS]{arguments}", "[TOOL_CALLS]", ""),
    Family("mistral", "[TOOL_CALLS]", "{name}{arguments}", "[TOOL_CALLS]", ""),
    Family("qwen3_coder", "<tool_call>\n", FUNCTION, "</tool_call>\n<tool_call>\n", "</tool_call>", "xml"),
    Family("qwen3_xml", "", FUNCTION, "</tool_call>\n", "</tool_call>", "xml"),
    Family("seed_oss", "<seed:tool_call>\n", FUNCTION, "", "</seed:tool_call>", "xml"),
    Family("glm45", "<tool_call>", "{name}\n{arguments}", "</tool_call>\n<tool_call>", "</tool_call>", "glm"),
    Family("glm47", "<tool_call>", "{name}{arguments}", "</tool_call><tool_call>", "</tool_call>", "glm"),
    Family(
        "minimax_m2",
        "<minimax:tool_call>\n",
        '<invoke name="{name}">\n{arguments}</invoke>',
        "\n",
        "\n</minimax:tool_call>",
        "minimax",
    ),
    Family(
        "step3",
        f"<{BAR}tool_calls_begin{BAR}>\n<{BAR}tool_call_begin{BAR}>function<{BAR}tool_sep{BAR}>",
        '<steptml:invoke name="{name}">\n{arguments}</steptml:invoke>',
        f"<{BAR}tool_call_end{BAR}>\n<{BAR}tool_call_begin{BAR}>function<{BAR}tool_sep{BAR}>",
        f"<{BAR}tool_call_end{BAR}>\n<{BAR}tool_calls_end{BAR}>",
        "step3",
    ),
    Family("pythonic", "[", "{name}({arguments})", ", ", "]", "python", allows_text=False),
    Family("llama4_pythonic", "<|python_start|>[", "{name}({arguments})", ", ", "]<|python_end|>", "python"),
    Family("olmo3", "<function_calls>\n", "{name}({arguments})", "\n", "\n</function_calls>", "python"),
    Family("lfm2", "<|tool_call_start|>[", "{name}({arguments})", ", ", "]<|tool_call_end|>", "python"),
    Family(
        "deepseek_v3",
        deepseek("tool calls begin"),
        f"{deepseek('tool call begin')}function{deepseek('tool sep')}{{name}}\n```json\n{{arguments}}\n```"
        f"{deepseek('tool call end')}",
        "\n",
        deepseek("tool calls end"),
    ),
    Family(
        "deepseek_v31",
        deepseek("tool calls begin"),
        f"{deepseek('tool call begin')}{{name}}{deepseek('tool sep')}{{arguments}}{deepseek('tool call end')}",
        "",
        deepseek("tool calls end"),
    ),
    Family(
        "deepseek_v32",
        f"<{BAR}DSML{BAR}function_calls>\n",
        f'<{BAR}DSML{BAR}invoke name="{{name}}">\n{{arguments}}</{BAR}DSML{BAR}invoke>\n',
        "",
        f"</{BAR}DSML{BAR}function_calls>",
        "dsml",
    ),
    Family(
        "kimi_k2",
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
        "",
        "<|tool_calls_section_end|>",
    ),
    Family("granite", "<|tool_call|>[", OBJECT, ", ", "]"),
    Family("phi4_mini_json", "functools[", OBJECT, ", ", "]"),
    Family("jamba", "<tool_calls>[\n", OBJECT, ",\n", "\n]</tool_calls>"),
    Family("hunyuan_a13b", "<tool_calls>[", OBJECT, ", ", "]</tool_calls>"),
    Family(
        "internlm",
        "<|action_start|><|plugin|>\n",
        PARAMETERS,
        "<|action_end|>\n<|action_start|><|plugin|>",
        "<|action_end|>",
    ),
    Family(
        "cohere_command3",
        "<|START_ACTION|>[\n",
        '{"tool_call_id": "0", "tool_name": "{name}", "parameters": {arguments}}',
        ",\n",
        "\n]<|END_ACTION|>",
    ),
    Family(
        "openai",
        "<|channel|>commentary to=functions.",
        "{name} <|constrain|>json<|message|>{arguments}",
        "<|call|><|start|>assistant<|channel|>commentary to=functions.",
        "<|call|>",
        prompt=HARMONY_PROMPT,
        allows_text=False,
    ),
)

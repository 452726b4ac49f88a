"""Phase 11 of 11: what the text of a model's answers may hold, and who tells its parts apart: chosen once for a server.

Thoughts come first and go to ReasoningDelta; in the rest calls are looked for, so markup inside thoughts is no call.
A model that writes harmony has one parser for both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

from serve.errors import ConfigError
from serve.renderers.detect_format import detect_reasoning, detect_tools
from serve.renderers.output_events import Event, OutputParser
from serve.renderers.reasoning import REASONING_FORMATS, ReasoningFormat, ThoughtSplitter
from serve.renderers.text_reader import Sink, drop
from serve.renderers.tokenizer import Tokenizer
from serve.renderers.tool_parsers.base import CallParser, Calls, EventLog, Syntax, new_call_id
from serve.renderers.tool_parsers.harmony import FINAL_MARK, FORCED_END, HARMONY_MARKS, HarmonyParser, is_past_thoughts
from serve.renderers.tool_parsers.json_calls import JsonCalls, NamedArguments
from serve.renderers.tool_parsers.registry import TOOL_FORMATS, ToolFormat
from serve.sampling_params import ReasoningBounds

T = TypeVar("T")

NONE: Final = "none"
# What a grammar makes of tool_choice "required": a list of objects, and nothing else.
_FORCED_LIST: Final = JsonCalls(marks=(), start="[")


@dataclass(frozen=True, slots=True)
class AnswerSpec:
    """What one request expects of the text of its answer.

    prompt_text is the rendered prompt, whose end tells whether thinking is open or closed. tools maps a tool's name
    to the JSON schema of its parameters; without tools no calls are looked for. forced tells that a grammar makes the
    answer calls: "required" a list of {"name", "parameters"}, "named" the arguments of a call to forced_name. Calls
    beyond max_calls are dropped. thinks false: no thoughts are looked for.
    """

    prompt_text: str
    tools: Mapping[str, Mapping[str, object]]
    forced: Literal["required", "named"] | None = None
    forced_name: str | None = None
    max_calls: int | None = None
    thinks: bool = True


class AnswerFormat:
    """How the answers of a server's model are read: a row of each table, or None.

    visible_token_ids are the special tokens that the parsers must see.
    """

    def __init__(self, tokenizer: Tokenizer, tools: ToolFormat | None, reasoning: ReasoningFormat | None) -> None:
        self.tools = tools
        self.reasoning = reasoning
        self._tokenizer = tokenizer
        self._is_harmony = (tools is not None and tools.syntax is None) or (
            reasoning is not None and reasoning.is_harmony
        )
        marks = (*(tools.marks if tools else ()), *(reasoning.marks if reasoning else ()))
        self.visible_token_ids = tuple(
            token_id
            for mark in dict.fromkeys((*marks, *(HARMONY_MARKS if self._is_harmony else ())))
            if (token_id := tokenizer.token_to_id(mark)) in tokenizer.all_special_ids and token_id is not None
        )

    def new_parser(self, spec: AnswerSpec) -> OutputParser | None:
        """Give the parser of one answer, None when the text is all content."""
        log = EventLog()
        new_id = self.tools.new_id if self.tools else new_call_id
        tools = spec.tools
        if spec.forced_name is not None:
            tools = {name: schema for name, schema in tools.items() if name == spec.forced_name}
        calls = Calls(log, tools, max_calls=spec.max_calls, new_id=new_id)
        syntax = self._syntax(spec)
        call_parser = CallParser(syntax, calls, log) if syntax is not None else None
        splitter = self._splitter(spec, log.reasoning, call_parser.feed if call_parser else log.content, calls)
        if splitter is None and call_parser is None:
            return None
        return AnswerParser(log, splitter, call_parser)

    def reasoning_bounds(self, spec: AnswerSpec, *, budget: int | None) -> ReasoningBounds | None:
        """Give where the thinking of an answer ends, None when it does not think.

        Also None when thinking is optional and its start mark is not one token: a constraint then binds at once.
        """
        row = self.reasoning
        if row is None or not spec.thinks:
            return None
        if self._is_harmony:
            if is_past_thoughts(spec.prompt_text):
                return None
            return ReasoningBounds(FINAL_MARK, self._encode(FORCED_END), None, budget)
        is_open = row.is_open_in(spec.prompt_text)
        if is_open is False:
            return None
        start_id = None
        if is_open is None and not row.begins_thinking:
            start_id = self._tokenizer.token_to_id(row.starts[0])
            if start_id is None:
                return None
        return ReasoningBounds(row.ends[0], self._encode(row.ends[0]), start_id, budget)

    def count_reasoning_tokens(self, spec: AnswerSpec, token_ids: Sequence[int]) -> int:
        """Count the tokens up to the end of the thoughts, marks included; 0 without thoughts.

        Bytes stand for characters here: every mark is ASCII, and a token may hold a part of a character.
        """
        splitter = self._splitter(spec, drop, drop, Calls(EventLog(), spec.tools))
        if splitter is None:
            return 0
        for index, token_id in enumerate(token_ids):
            splitter.feed(self._tokenizer.token_to_bytes(token_id).decode("latin-1"))
            if splitter.is_past:
                return index + 1 if splitter.has_thoughts else 0
        return len(token_ids) if splitter.has_thoughts else 0

    def _encode(self, text: str) -> tuple[int, ...]:
        token_id = self._tokenizer.token_to_id(text)
        if token_id is not None:
            return (token_id,)
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _syntax(self, spec: AnswerSpec) -> Syntax | None:
        """Choose how calls are written in this answer; None: there are none, or harmony has them as messages."""
        if spec.forced == "named":
            assert spec.forced_name is not None, "a named call has a name"
            return NamedArguments(spec.forced_name)
        if spec.forced == "required":
            return _FORCED_LIST
        return self.tools.syntax if self.tools and spec.tools else None

    def _splitter(
        self, spec: AnswerSpec, thoughts: Sink, rest: Sink, calls: Calls
    ) -> ThoughtSplitter | HarmonyParser | None:
        """Give what tells thoughts from the rest; None when the answer has none."""
        if self._is_harmony:
            if self.tools is None:
                calls = Calls(EventLog(), {})
            return HarmonyParser(spec.prompt_text, calls, thoughts=thoughts, content=rest)
        row = self.reasoning
        is_open = row.is_open_in(spec.prompt_text) if row is not None and spec.thinks else False
        if row is None or is_open is False:
            return None
        return ThoughtSplitter(row, begins_thinking=is_open or row.begins_thinking, thoughts=thoughts, rest=rest)


class AnswerParser:
    """Reads the text of one answer: thoughts, then calls in what is left."""

    def __init__(
        self, log: EventLog, splitter: ThoughtSplitter | HarmonyParser | None, call_parser: CallParser | None
    ) -> None:
        """splitter gives what is left to call_parser itself."""
        self._log = log
        self._splitter = splitter
        self._call_parser = call_parser
        first = splitter or call_parser
        assert first is not None, "an answer without parts needs no parser"
        self._feed: Callable[[str], None] = first.feed

    @property
    def is_reasoning(self) -> bool:
        """True while the text that comes next is inside the thoughts."""
        return self._splitter is not None and self._splitter.is_reasoning

    def feed(self, text: str) -> list[Event]:
        """Take the next piece of text and give what became certain."""
        self._feed(text)
        return self._log.drain()

    def finish(self, *, was_cut: bool = False) -> list[Event]:
        """Give what was held back; was_cut tells that the answer did not end by itself."""
        if self._splitter is not None:
            self._splitter.finish(was_cut=was_cut)
        if self._call_parser is not None:
            self._call_parser.finish(was_cut=was_cut)
        return self._log.drain()


def choose_answer_format(
    tokenizer: Tokenizer, template_text: str | None, *, tool_parser: str | None, reasoning_parser: str | None
) -> AnswerFormat:
    """Choose the formats by name; None looks for the marks of the template, "none" switches off.

    Raises ConfigError for an unknown name.
    """
    tools = tool_parser or detect_tools(tokenizer, template_text) or NONE
    reasoning = reasoning_parser or detect_reasoning(tokenizer, template_text) or NONE
    return AnswerFormat(
        tokenizer,
        _row("--tool-call-parser", tools, TOOL_FORMATS),
        _row("--reasoning-parser", reasoning, REASONING_FORMATS),
    )


def _row(flag: str, name: str, table: Mapping[str, T]) -> T | None:
    if name == NONE:
        return None
    row = table.get(name)
    if row is None:
        known = ", ".join(sorted(table))
        raise ConfigError(f"{flag} {name} is not known; use one of {known}, or {NONE} to switch it off")
    return row

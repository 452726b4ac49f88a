"""Phase 11 of 11: tells the thoughts of an answer from the rest of it, by a table of the marks of model families."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from serve.renderers.text_reader import LineTrimmer, Marks, Sink, Steps, TextOver, TextReader, is_cut_mark

# What begins a turn in the templates of the families: marks of thoughts before the last of these are not the answer's.
_TURN_STARTS: Final = (
    "<|im_start|>",
    "<\uff5cAssistant\uff5c>",
    "<|assistant|>",
    "[/INST]",
    "[/TOOL_RESULTS]",
    "<|start_header_id|>",
    "<|header_start|>",
    "<|start_of_role|>",
    "<start_of_turn>",
    "<|START_OF_TURN_TOKEN|>",
    "<|im_assistant|>",
    "<seed:bos>",
    "]~b]",
)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model family marks its thoughts.

    begins_thinking: an answer begins inside the thoughts when the prompt neither opened nor closed them. implicit_ends
    end the thoughts and belong to what follows. answer_marks may enclose the answer after the thoughts. With
    trims_lines one line break at each end of the thoughts and of the enclosed answer belongs to the marks; else
    thoughts and answer are given with all their white space. is_harmony: the marks are those of harmony.py.
    """

    name: str
    starts: tuple[str, ...] = ("<think>",)
    ends: tuple[str, ...] = ("</think>",)
    begins_thinking: bool = False
    implicit_ends: tuple[str, ...] = ()
    answer_marks: tuple[str, str] | None = None
    trims_lines: bool = False
    is_harmony: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """Give all strings that the parser must see."""
        return (*self.starts, *self.ends, *self.implicit_ends, *(self.answer_marks or ()))

    def is_open_in(self, prompt_text: str) -> bool | None:
        """Tell whether a prompt leaves the thoughts open (True) or closed (False); None when it does neither."""
        begin = max(prompt_text.rfind(mark) for mark in _TURN_STARTS)
        # A prompt without any known beginning of a turn is trusted only where it ends.
        tail = prompt_text[begin:] if begin >= 0 else prompt_text.rstrip()[-max(map(len, self.marks)) :]
        opened = max(tail.rfind(mark) for mark in self.starts)
        closed = max(tail.rfind(mark) for mark in self.ends)
        return None if opened == closed else opened > closed


_FORMATS: Final = (
    ReasoningFormat("deepseek_r1", begins_thinking=True),
    ReasoningFormat("deepseek_v3"),
    ReasoningFormat("qwen3"),
    ReasoningFormat("mimo"),
    ReasoningFormat("glm45"),
    ReasoningFormat("glm47"),
    ReasoningFormat("nemotron_v3", begins_thinking=True),
    ReasoningFormat("step3", begins_thinking=True),
    ReasoningFormat("olmo3", begins_thinking=True),
    ReasoningFormat("minimax_m2", begins_thinking=True),
    ReasoningFormat("kimi_k2", begins_thinking=True, implicit_ends=("<|tool_calls_section_begin|>",)),
    ReasoningFormat("seed_oss", starts=("<seed:think>",), ends=("</seed:think>",)),
    ReasoningFormat("mistral", starts=("[THINK]",), ends=("[/THINK]",)),
    ReasoningFormat(
        "granite",
        starts=("Here is my thought process:", "Here's my thought process:"),
        ends=("Here is my response:", "Here's my response:"),
    ),
    ReasoningFormat("hunyuan_a13b", answer_marks=("<answer>", "</answer>"), trims_lines=True),
    ReasoningFormat("ernie45", begins_thinking=True, answer_marks=("<response>", "</response>"), trims_lines=True),
    ReasoningFormat("openai_gptoss", starts=(), ends=(), is_harmony=True),
)
REASONING_FORMATS: Final = MappingProxyType({row.name: row for row in _FORMATS})


class ThoughtSplitter:
    """Splits one answer into thoughts and the rest.

    has_thoughts and is_past tell whether thinking has begun and whether it is over, or never came.
    """

    def __init__(self, row: ReasoningFormat, *, begins_thinking: bool, thoughts: Sink, rest: Sink) -> None:
        """begins_thinking: text that does not begin with a start mark is thoughts, too."""
        self._row = row
        self._begins_thinking = begins_thinking
        self._thoughts = thoughts
        self._rest = rest
        self._reader = TextReader()
        self._steps = self._run()
        self.has_thoughts = begins_thinking
        self.is_past = False

    @property
    def is_reasoning(self) -> bool:
        """True while the text that comes next is inside the thoughts."""
        return self.has_thoughts and not self.is_past

    def feed(self, text: str) -> None:
        """Take the next piece of text."""
        self._reader.push(text)
        next(self._steps, None)

    def finish(self, *, was_cut: bool) -> None:
        """Give what was held back, but not a mark that was cut."""
        self._reader.end()
        next(self._steps, None)
        text = self._reader.release() + self._reader.rest()
        if not (was_cut and is_cut_mark(text)):
            (self._thoughts if self.is_reasoning else self._rest)(text)

    def _run(self) -> Steps[None]:
        try:
            yield from self._begin()
            if self.has_thoughts:
                mark = yield from self._reader.until(
                    Marks((*self._row.ends, *self._row.implicit_ends)), self._trimmed(self._thoughts)
                )
                if mark in self._row.implicit_ends:
                    self._rest(mark)
            self.is_past = True
            if self._row.answer_marks and self.has_thoughts:
                yield from self._read_enclosed(*self._row.answer_marks)
            yield from self._reader.pass_on(self._rest)
        except TextOver:
            return

    def _begin(self) -> Steps[None]:
        """Decide whether the answer begins with thoughts; a start mark goes, and white space before it."""
        self._reader.hold()
        yield from self._reader.skip_space()
        start = yield from self._reader.accept_any(self._row.starts)
        text = self._reader.release()
        if start is not None:
            self.has_thoughts = True
        elif self._begins_thinking:
            self._trimmed(self._thoughts)(text)
        else:
            self._rest(text)

    def _read_enclosed(self, opening: str, closing: str) -> Steps[None]:
        """Read the answer between its marks, if it has them; white space around them goes."""
        self._reader.hold()
        yield from self._reader.skip_space()
        is_enclosed = yield from self._reader.accept(opening)
        text = self._reader.release()
        if not is_enclosed:
            self._rest(text)
            return
        yield from self._reader.until(Marks((closing,)), self._trimmed(self._rest))
        yield from self._reader.skip_space()

    def _trimmed(self, sink: Sink) -> Sink:
        return LineTrimmer(sink).add if self._row.trims_lines else sink

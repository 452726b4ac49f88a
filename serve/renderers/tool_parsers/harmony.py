"""Phase 11 of 11: harmony, in which an answer is a row of messages on channels (gpt-oss).

A message is a header, <|message|> and a body. The analysis channel holds thoughts; a message to functions.NAME is a
call; everything else is content: the final channel, and what the model says on the commentary channel before a call.
"""

from __future__ import annotations

import contextlib
import re
from typing import Final

from serve.renderers.text_reader import Marks, NotMarkup, Sink, Steps, TextOver, TextReader, drop, is_cut_mark
from serve.renderers.tool_parsers.base import Calls
from serve.renderers.tool_parsers.json_calls import NO_ARGUMENTS, read_object

HARMONY_MARKS: Final = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
FINAL_MARK: Final = "<|channel|>final<|message|>"
# From the middle of the thoughts to the final channel.
FORCED_END: Final = f"<|end|><|start|>assistant{FINAL_MARK}"
_START: Final = "<|start|>"
_MESSAGE: Final = "<|message|>"
_CHANNEL: Final = "<|channel|>"
_HEADER_ENDS: Final = Marks((_MESSAGE, "<|end|>", "<|call|>", "<|return|>"))
_BODY_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>", _START, _CHANNEL)
_HEADER_STARTS: Final = Marks((_START, _CHANNEL))
_FIRST_WORDS: Final = (_START, _CHANNEL, "<|constrain|>", _MESSAGE, "to=")
_RECIPIENT: Final = re.compile(r"(?:^|[\s>])to=functions\.([A-Za-z0-9_-]+)")
_CHANNEL_NAME: Final = re.compile(r"<\|channel\|>\s*([a-z]+)")
_ANALYSIS: Final = "analysis"


def is_past_thoughts(prompt_text: str) -> bool:
    """Tell whether a prompt ends inside a message that is no thought."""
    header, mark, _ = prompt_text.rpartition(_START)[2].partition(_MESSAGE)
    channel = _CHANNEL_NAME.search(header)
    return bool(mark) and not (channel and channel[1] == _ANALYSIS)


class HarmonyParser:
    """Splits one answer into thoughts, content and calls.

    has_thoughts and is_past tell whether thinking has begun and whether something else has begun after it.
    """

    def __init__(self, prompt_text: str, calls: Calls, *, thoughts: Sink, content: Sink) -> None:
        """prompt_text is the rendered prompt: it ends inside a header, or inside the body of a message."""
        self._calls = calls
        self._thoughts = thoughts
        self._content = content
        self._reader = TextReader()
        # Where the end of the text is now: what is left unread there goes to this sink.
        self._sink: Sink = drop
        self._header = prompt_text.rpartition(_START)[2] if _START in prompt_text else ""
        self._steps = self._run()
        self.has_thoughts = False
        self.is_past = False

    @property
    def is_reasoning(self) -> bool:
        """True while the text that comes next is inside the thoughts."""
        return self._sink == self._thoughts

    def feed(self, text: str) -> None:
        """Take the next piece of text."""
        self._reader.push(text)
        next(self._steps, None)

    def finish(self, *, was_cut: bool) -> None:
        """Give what was held back, but not a mark that was cut. A header that the end interrupts says nothing."""
        self._reader.end()
        next(self._steps, None)
        text = self._reader.release() + self._reader.rest()
        if not (was_cut and is_cut_mark(text)):
            self._sink(text)

    def _run(self) -> Steps[None]:
        try:
            yield from self._read_first()
            while True:
                yield from self._read_message()
        except TextOver:
            return

    def _read_first(self) -> Steps[None]:
        """Read on from where the prompt ends; an answer that begins without a header is content."""
        header, mark, _ = self._header.partition(_MESSAGE)
        self._header = header
        if mark:
            yield from self._read_body()
            return
        if _CHANNEL not in header:
            self._sink = self._content
            self._reader.hold()
            yield from self._reader.skip_space()
            word = yield from self._reader.accept_any(_FIRST_WORDS)
            text = self._reader.release()
            if word is None:
                self._content(text)
                self._header = ""
                yield from self._read_body()
                return
            self._header += text
            if word == _MESSAGE:
                yield from self._read_body()
                return
        yield from self._read_message()

    def _read_message(self) -> Steps[None]:
        """Read the rest of a header, and its body."""
        self._sink = drop
        pieces = [self._header]
        mark = yield from self._reader.until(_HEADER_ENDS, pieces.append)
        self._header = "".join(pieces)
        if mark == _MESSAGE:
            yield from self._read_body()
        else:
            yield from self._find_header()

    def _read_body(self) -> Steps[None]:
        """Read a body by its header."""
        channel = _CHANNEL_NAME.search(self._header)
        recipient = _RECIPIENT.search(self._header)
        if recipient and self._calls.knows(recipient[1]):
            self.is_past = True
            mark = yield from self._read_call(recipient[1])
        elif channel and channel[1] == _ANALYSIS:
            self.has_thoughts = True
            mark = yield from self._pass_body(self._thoughts)
        else:
            self.is_past = True
            mark = yield from self._pass_body(self._content)
        if mark in (_START, _CHANNEL):
            self._header = mark
        else:
            yield from self._find_header()

    def _pass_body(self, sink: Sink) -> Steps[str]:
        self._sink = sink
        return (yield from self._reader.until(Marks(_BODY_ENDS), sink))

    def _find_header(self) -> Steps[None]:
        """Go to the next header; text that belongs to no message is content."""
        self._sink = self._content
        self._header = yield from self._reader.until(_HEADER_STARTS, self._content)

    def _read_call(self, name: str) -> Steps[str]:
        """Read the arguments of a call; give the mark at its end. A body that is no object is content."""
        reader, calls = self._reader, self._calls
        self._sink = drop
        reader.hold()
        yield from reader.skip_space()
        if (yield from reader.peek()) != "{":
            mark = yield from reader.accept_any(_BODY_ENDS)
            if mark is None:
                self._content(reader.release())
                return (yield from self._pass_body(self._content))
            calls.begin(name, reader)
            calls.add(NO_ARGUMENTS)
            calls.end()
            return mark
        with contextlib.suppress(NotMarkup):
            yield from read_object(reader, calls, name)
        calls.end()
        return (yield from reader.until(Marks(_BODY_ENDS), drop))

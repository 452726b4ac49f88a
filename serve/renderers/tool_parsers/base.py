"""Phase 11 of 11: what all syntaxes of tool calls share: the search for markup, and the events that it becomes.

Rules that hold for every syntax:

- A call is announced when its name is known, is one of the request's tools, and its arguments have begun as an
  object. Until then all that was read can still turn out to be content, and then is given unchanged.
- Markup that breaks after that leaves a cut call: the arguments so far stay, the rest up to the end of the call is
  dropped. The arguments of a cut call are no JSON object, so no client runs half a call.
- White space next to a call's markup belongs to the markup.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from serve.renderers.output_events import CallDelta, CallStart, ContentDelta, Event, ReasoningDelta
from serve.renderers.text_reader import Marks, NotMarkup, Steps, TextOver, TextReader, drop, is_cut_mark

_ID_BYTES: Final = 12
_SHORT_ID_CHARS: Final = string.ascii_letters + string.digits
_SHORT_ID_LENGTH: Final = 9
WHITE_SPACE: Final = " \t\r\n"


def new_call_id() -> str:
    """Give an id as OpenAI writes them: call_ and 24 hexadecimal digits."""
    return f"call_{secrets.token_hex(_ID_BYTES)}"


def new_short_call_id() -> str:
    """Give an id as Mistral's templates demand them: nine letters and digits."""
    return "".join(secrets.choice(_SHORT_ID_CHARS) for _ in range(_SHORT_ID_LENGTH))


class EventLog:
    """The events of one piece of text; neighbours of one kind are joined."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._kind: tuple[type[Event], int] | None = None
        self._pieces: list[str] = []

    def content(self, text: str) -> None:
        """Add content."""
        self._add((ContentDelta, 0), text)

    def reasoning(self, text: str) -> None:
        """Add thoughts."""
        self._add((ReasoningDelta, 0), text)

    def arguments(self, index: int, text: str) -> None:
        """Add arguments of a call."""
        self._add((CallDelta, index), text)

    def call(self, index: int, call_id: str, name: str) -> None:
        """Announce a call."""
        self._flush()
        self._events.append(CallStart(index, call_id, name))

    def drain(self) -> list[Event]:
        """Take all events."""
        self._flush()
        events, self._events = self._events, []
        return events

    def _add(self, kind: tuple[type[Event], int], text: str) -> None:
        if not text:
            return
        if kind != self._kind:
            self._flush()
            self._kind = kind
        self._pieces.append(text)

    def _flush(self) -> None:
        if self._kind is None:
            return
        kind, index = self._kind
        text = "".join(self._pieces)
        self._kind = None
        self._pieces.clear()
        if kind is CallDelta:
            self._events.append(CallDelta(index, text))
        else:
            self._events.append(ContentDelta(text) if kind is ContentDelta else ReasoningDelta(text))


class Calls:
    """The calls of one answer: announces them, and drops those beyond max_calls.

    has_begun tells whether the markup now read has led to a call, is_open whether that call is still being read.
    """

    def __init__(
        self,
        log: EventLog,
        tools: Mapping[str, Mapping[str, object]],
        *,
        max_calls: int | None = None,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._log = log
        self._tools = tools
        self._max_calls = max_calls
        self._new_id = new_id
        self._count = 0
        self.is_open = False
        self.has_begun = False

    def knows(self, name: str) -> bool:
        """Tell whether the request has a tool of this name."""
        return name in self._tools

    def check(self, name: str) -> None:
        """Raise NotMarkup unless the request has a tool of this name."""
        if name not in self._tools:
            raise NotMarkup

    def schema(self, name: str) -> Mapping[str, object]:
        """Give the schema of a tool's parameters."""
        return self._tools[name]

    def begin(self, name: str, reader: TextReader) -> None:
        """Announce a call whose arguments follow; what reader held can no more become content."""
        self.check(name)
        reader.release()
        self._count += 1
        self.is_open = self.has_begun = True
        if not self._is_dropped:
            self._log.call(self._count - 1, self._new_id(), name)

    def add(self, arguments: str) -> None:
        """Give more of the open call's arguments."""
        assert self.is_open, "arguments belong to a call"
        if not self._is_dropped:
            self._log.arguments(self._count - 1, arguments)

    def end(self) -> None:
        """Close the open call: its markup is complete, or broken."""
        self.is_open = False

    @property
    def _is_dropped(self) -> bool:
        return self._max_calls is not None and self._count > self._max_calls


class Syntax(Protocol):
    """How a model family writes calls; one object serves all answers.

    marks begin markup anywhere, start (one character or empty) only at the beginning of the answer. close ends a call
    whose markup broke; empty when only the next mark or the end of the answer does.
    """

    @property
    def marks(self) -> tuple[str, ...]:
        """Give the strings that markup begins with."""

    @property
    def start(self) -> str:
        """Give the character that begins markup at the beginning of the answer."""

    @property
    def close(self) -> str:
        """Give the string that ends a call."""

    def read(self, mark: str, reader: TextReader, calls: Calls) -> Steps[None]:
        """Read what follows mark; raise NotMarkup where it is no markup, or broken."""


class CallParser:
    """Splits an answer into content and calls; one instance an answer."""

    def __init__(self, syntax: Syntax, calls: Calls, log: EventLog) -> None:
        self._syntax = syntax
        self._calls = calls
        self._log = log
        self._reader = TextReader()
        self._marks = Marks(syntax.marks)
        self._ends = Marks((*syntax.marks, syntax.close) if syntax.close else syntax.marks)
        self._space: list[str] = []  # white space that belongs to what comes next
        self._follows_call = False
        self._is_in_markup = False
        self._steps = self._run()

    def feed(self, text: str) -> None:
        """Take the next piece of text; what became certain goes to the log."""
        self._reader.push(text)
        next(self._steps, None)

    def finish(self, *, was_cut: bool) -> None:
        """Give what was held back. Markup that the end interrupts is content, unless the answer was cut."""
        self._reader.end()
        next(self._steps, None)
        is_candidate = self._reader.is_holding
        text = self._reader.release() + self._reader.rest()
        if self._is_in_markup:
            self._note_call()
        if self._is_in_markup and (was_cut or not is_candidate):
            text = ""
        if not (was_cut and is_cut_mark(text)):
            self._content(text)
        if not self._follows_call:
            self._log.content("".join(self._space))

    def _run(self) -> Steps[None]:
        try:
            if self._syntax.start and (yield from self._accept_start()):
                yield from self._markup(self._syntax.start)
            while True:
                mark = yield from self._reader.until(self._marks, self._content)
                yield from self._markup(mark)
        except TextOver:
            return

    def _accept_start(self) -> Steps[bool]:
        self._reader.hold()
        yield from self._reader.skip_space()
        self._content(self._reader.release())
        return (yield from self._reader.accept(self._syntax.start))

    def _markup(self, mark: str) -> Steps[None]:
        """Read markup behind its mark, and again while the rest of a broken call ends with a mark."""
        next_mark: str | None = mark
        while next_mark is not None and next_mark != self._syntax.close:
            self._is_in_markup = True
            self._calls.has_begun = False
            self._reader.hold(next_mark)
            next_mark = yield from self._section(next_mark)
            self._is_in_markup = False

    def _section(self, mark: str) -> Steps[str | None]:
        """Read one piece of markup; give the mark that ended the rest of a broken call, if there was one."""
        try:
            yield from self._syntax.read(mark, self._reader, self._calls)
        except NotMarkup:
            if self._calls.is_open:
                self._calls.end()
                self._note_call()
                return (yield from self._reader.until(self._ends, drop))
        self._note_call()
        self._content(self._reader.release())
        return None

    def _note_call(self) -> None:
        if self._calls.has_begun:
            self._space.clear()
            self._follows_call = True

    def _content(self, text: str) -> None:
        """Give content; white space at its end waits for what follows, white space behind a call goes."""
        end = len(text.rstrip(WHITE_SPACE))
        if end:
            if self._follows_call:
                self._log.content(text[:end].lstrip(WHITE_SPACE))
            else:
                self._log.content("".join(self._space))
                self._log.content(text[:end])
            self._space.clear()
            self._follows_call = False
        if end < len(text):
            self._space.append(text[end:])

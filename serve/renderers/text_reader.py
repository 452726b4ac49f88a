"""Phase 11 of 11: reads the text of an answer as a grammar would, although it comes in pieces.

A grammar is a generator over a TextReader: it yields when it needs more text, so how the text was cut never shows.
Everything here costs constant time a character, whatever was read before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import Final, TypeVar

from serve.renderers.json_scanner import JsonScanner

T = TypeVar("T")
Steps = Generator[None, None, T]
Sink = Callable[[str], None]

_SPACE: Final = re.compile(r"[ \t\r\n]*")
_MAX_NAME_CHARS: Final = 256


class NotMarkup(Exception):
    """What was taken for markup is not, or is broken."""


class TextOver(Exception):
    """The answer ended where the grammar wanted more."""


class Marks:
    """Fixed strings to look for; none may be inside another, so the first one found is the one meant."""

    def __init__(self, marks: tuple[str, ...]) -> None:
        assert all(marks), "a mark is not empty"
        assert not any(a != b and a in b for a in marks for b in marks), f"marks overlap: {marks}"
        self._marks = marks
        self._longest = max(map(len, marks), default=0)
        # Without marks a pattern that matches nowhere.
        self._any = re.compile("|".join(map(re.escape, marks)) or r"(?!)")

    def find(self, text: str, start: int) -> tuple[int, str] | None:
        """Give position and text of the first mark at or after start."""
        found = self._any.search(text, start)
        return (found.start(), found[0]) if found else None

    def num_open(self, text: str, start: int) -> int:
        """Count the characters at the end of the text that may become a mark."""
        for begin in range(max(start, len(text) - self._longest + 1), len(text)):
            if any(mark.startswith(text[begin:]) for mark in self._marks):
                return len(text) - begin
        return 0


class TextReader:
    """The text not yet read, and the primitives of a grammar over it.

    All primitives that wait raise TextOver when the answer ends first. hold() starts to keep what is read, for a
    grammar that may have to give it back; release() ends that and gives it.
    """

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._is_over = False
        self._held: list[str] | None = None

    def push(self, text: str) -> None:
        """Append a piece of text."""
        self._text = self._text[self._position :] + text
        self._position = 0

    def end(self) -> None:
        """Say that no more text comes."""
        self._is_over = True

    def rest(self) -> str:
        """Take all that was pushed and not read."""
        return self._take(len(self._text))

    def hold(self, first: str = "") -> None:
        """Keep what is read from here on, after first."""
        self._held = [first]

    def release(self) -> str:
        """Keep nothing more; give what was kept."""
        held, self._held = self._held or [], None
        return "".join(held)

    @property
    def is_holding(self) -> bool:
        """Tell whether what is read is kept."""
        return self._held is not None

    def _take(self, end: int) -> str:
        taken = self._text[self._position : end]
        self._position = end
        if self._held is not None and taken:
            self._held.append(taken)
        return taken

    def _wait(self) -> Steps[None]:
        if self._is_over:
            raise TextOver
        yield

    def peek(self) -> Steps[str]:
        """Give the next character without taking it."""
        while self._position == len(self._text):
            yield from self._wait()
        return self._text[self._position]

    def take(self) -> Steps[str]:
        """Take one character."""
        yield from self.peek()
        return self._take(self._position + 1)

    def accept(self, literal: str) -> Steps[bool]:
        """Take literal if it comes next; tell whether it did."""
        while True:
            end = self._position + len(literal)
            ahead = self._text[self._position : end]
            if ahead == literal:
                self._take(end)
                return True
            if not literal.startswith(ahead):
                return False
            yield from self._wait()

    def accept_any(self, literals: tuple[str, ...]) -> Steps[str | None]:
        """Take the one of the literals that comes next and give it; None when none does."""
        longest = max(map(len, literals), default=0)
        while True:
            ahead = self._text[self._position : self._position + longest]
            for literal in literals:
                if ahead.startswith(literal):
                    self._take(self._position + len(literal))
                    return literal
            if not any(literal.startswith(ahead) for literal in literals):
                return None
            yield from self._wait()

    def expect(self, literal: str) -> Steps[None]:
        """Take literal; raise NotMarkup when something else comes."""
        if not (yield from self.accept(literal)):
            raise NotMarkup

    def match(self, pattern: re.Pattern[str], *, max_chars: int = _MAX_NAME_CHARS) -> Steps[str]:
        """Take the longest run of characters of a class, which pattern repeats; raise NotMarkup beyond max_chars."""
        pieces: list[str] = []
        num_chars = 0
        while True:
            found = pattern.match(self._text, self._position)
            pieces.append(self._take(found.end() if found else self._position))
            num_chars += len(pieces[-1])
            if num_chars > max_chars:
                raise NotMarkup
            if self._position < len(self._text):
                return "".join(pieces)
            yield from self._wait()

    def skip_space(self) -> Steps[None]:
        """Take white space as JSON defines it."""
        while True:
            found = _SPACE.match(self._text, self._position)
            assert found, "the pattern matches the empty string"
            self._take(found.end())
            if self._position < len(self._text):
                return
            yield from self._wait()

    def until(self, marks: Marks, sink: Sink) -> Steps[str]:
        """Take text up to a mark and the mark; the text goes to sink as soon as it is certain. Give the mark."""
        while True:
            found = marks.find(self._text, self._position)
            if found is not None:
                at, mark = found
                sink(self._take(at))
                return self._take(at + len(mark))
            sink(self._take(len(self._text) - marks.num_open(self._text, self._position)))
            yield from self._wait()

    def pass_on(self, sink: Sink) -> Steps[None]:
        """Give all text to sink until the answer ends."""
        while True:
            sink(self.rest())
            yield from self._wait()

    def json_value(self, sink: Sink, *, begun: str = "") -> Steps[None]:
        """Take one JSON value and give its text to sink as it comes; raise NotMarkup where it is not JSON.

        begun is the beginning of the value, already taken.
        """
        scanner = JsonScanner()
        scanner.scan(begun, 0)
        sink(begun)
        while True:
            end, text = scanner.scan(self._text, self._position)
            self._take(end)
            if text:
                sink(text)
            if scanner.is_broken:
                raise NotMarkup
            if scanner.is_done:
                return
            yield from self._wait()

    def json_string(self) -> Steps[str]:
        """Take one JSON string and give what it says."""
        if (yield from self.peek()) != '"':
            raise NotMarkup
        pieces: list[str] = []
        yield from self.json_value(pieces.append)
        value = json.loads("".join(pieces))
        assert isinstance(value, str), "a JSON value that begins with a quote is a string"
        return value


def is_cut_mark(text: str) -> bool:
    """Tell whether what is left of an answer that was cut shows as the beginning of a mark."""
    return len(text) > 1 and text[0] in "<["


class LineTrimmer:
    """Passes text on without one line break at its beginning and one at its end."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._is_first = True
        self._line_break = ""

    def add(self, text: str) -> None:
        """Take more text; a line break at its end waits until it is known whether more comes."""
        if not text:
            return
        text = self._line_break + (text.removeprefix("\n") if self._is_first else text)
        self._is_first = False
        self._line_break = "\n" if text.endswith("\n") else ""
        self._sink(text.removesuffix("\n"))


def drop(text: str) -> None:
    """Take text that nobody gets."""

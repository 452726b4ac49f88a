"""Phase 11 of 11: tool calls written in JSON: as an object with name and arguments, or as a name before the arguments.

Arguments are passed on as the model wrote them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Final

from serve.renderers.json_scanner import JsonScanner
from serve.renderers.text_reader import NotMarkup, Steps, TextReader, drop
from serve.renderers.tool_parsers.base import Calls

NO_ARGUMENTS: Final = "{}"
_NAME: Final = re.compile(r"[A-Za-z0-9_.:-]*")
_NAME_KEYS: Final = ("name",)
_ARGUMENTS_KEYS: Final = ("arguments", "parameters")
# What a call's object may hold besides: anything else shows that bare JSON is no call.
_OTHER_KEYS: Final = ("id", "type")


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Calls as JSON objects, or a list of them, between marks.

    With is_bare a call has no mark of its own: an object is a call only when it says nothing but a name and
    arguments. separator may stand between objects that follow each other without a mark.
    """

    marks: tuple[str, ...]
    close: str = ""
    start: str = ""
    separator: str = ""
    is_bare: bool = False
    name_keys: tuple[str, ...] = _NAME_KEYS

    def read(self, mark: str, reader: TextReader, calls: Calls) -> Steps[None]:
        """Read the objects behind mark, which may end with the bracket that opens the first."""
        opening: str | None = mark[-1] if mark[-1] in "{[" else None
        if opening is None:
            yield from reader.skip_space()
            opening = yield from reader.accept_any(("{", "["))
        if opening is None:
            raise NotMarkup
        if opening == "[":
            yield from self._read_list(reader, calls)
        else:
            yield from self._read_objects(reader, calls)
        if self.close:
            yield from reader.skip_space()
            yield from reader.expect(self.close)
        calls.end()

    def _read_list(self, reader: TextReader, calls: Calls) -> Steps[None]:
        """Read a list behind its bracket; the last call stays open."""
        while True:
            yield from reader.skip_space()
            yield from reader.expect("{")
            yield from self._read_object(reader, calls)
            yield from reader.skip_space()
            if not (yield from reader.accept(",")):
                break
            calls.end()
            reader.hold()
        yield from reader.expect("]")

    def _read_objects(self, reader: TextReader, calls: Calls) -> Steps[None]:
        """Read an object behind its brace and those that follow it; the last call stays open."""
        while True:
            yield from self._read_object(reader, calls)
            if not self.separator:
                return
            yield from reader.skip_space()
            yield from reader.accept(self.separator)
            yield from reader.skip_space()
            if not (yield from reader.accept("{")):
                return
            calls.end()
            reader.hold("{")

    def _read_object(self, reader: TextReader, calls: Calls) -> Steps[None]:
        """Read one call behind its brace, keys in any order; it stays open."""
        name: str | None = None
        arguments: str | None = None
        while True:
            key = yield from _read_key(reader)
            if key in self.name_keys and name is None:
                name = yield from reader.json_string()
                calls.check(name)
                if arguments is not None:
                    calls.begin(name, reader)
                    calls.add(arguments)
            elif key in _ARGUMENTS_KEYS and arguments is None:
                arguments = yield from _read_arguments(reader, calls, name)
            elif self.is_bare and not calls.is_open and key not in _OTHER_KEYS:
                raise NotMarkup
            else:
                yield from reader.json_value(drop)
            yield from reader.skip_space()
            if not (yield from reader.accept(",")):
                break
        yield from reader.expect("}")
        if name is None or (arguments is None and self.is_bare):
            raise NotMarkup
        if arguments is None:
            calls.begin(name, reader)
            calls.add(NO_ARGUMENTS)


@dataclass(frozen=True, slots=True)
class NamedCalls:
    """Calls as a name before a JSON object, in a section between marks[0] and close.

    A call is: call_open, then before_name up to and with that string (when not empty), the name, after_name, the
    object, call_close. The strings after_name and call_close may have white space before, between and behind them.
    """

    marks: tuple[str, ...]
    close: str
    call_open: str
    after_name: tuple[str, ...]
    call_close: tuple[str, ...]
    before_name: str = ""
    start: str = ""

    def read(self, mark: str, reader: TextReader, calls: Calls) -> Steps[None]:
        """Read the calls of a section up to its end."""
        while True:
            yield from reader.skip_space()
            if calls.has_begun and (yield from reader.accept(self.close)):
                return
            calls.end()
            if calls.has_begun:
                reader.hold()
            yield from reader.expect(self.call_open)
            if self.before_name:
                yield from reader.match(_NAME)
                yield from reader.expect(self.before_name)
            yield from self._read_call(reader, calls)

    def _read_call(self, reader: TextReader, calls: Calls) -> Steps[None]:
        name = bare_name((yield from reader.match(_NAME)))
        calls.check(name)
        for literal in self.after_name:
            yield from reader.skip_space()
            yield from reader.expect(literal)
        yield from reader.skip_space()
        yield from read_object(reader, calls, name)
        for literal in self.call_close:
            yield from reader.skip_space()
            yield from reader.expect(literal)
        calls.end()


@dataclass(frozen=True, slots=True)
class MistralCalls:
    """Calls behind [TOOL_CALLS]: a JSON list or object, or a name, an optional id and [ARGS] before the arguments."""

    marks: tuple[str, ...] = ("[TOOL_CALLS]",)
    close: str = ""
    start: str = ""

    def read(self, mark: str, reader: TextReader, calls: Calls) -> Steps[None]:
        """Read a list, an object, or one call by name; a mark written twice counts once."""
        yield from reader.skip_space()
        while (yield from reader.accept(mark)):
            yield from reader.skip_space()
        if (yield from reader.peek()) in "[{":
            yield from _MISTRAL_LIST.read(mark, reader, calls)
            return
        name = yield from reader.match(_NAME)
        calls.check(name)
        yield from reader.skip_space()
        if (yield from reader.accept("[CALL_ID]")):
            yield from reader.match(_NAME)
        yield from reader.accept("[ARGS]")
        yield from reader.skip_space()
        yield from read_object(reader, calls, name)
        calls.end()


_MISTRAL_LIST: Final = JsonCalls(marks=())


@dataclass(frozen=True, slots=True)
class NamedArguments:
    """An answer that is the arguments of one call, whose name was asked for."""

    name: str
    marks: tuple[str, ...] = ()
    close: str = ""
    start: str = "{"

    def read(self, mark: str, reader: TextReader, calls: Calls) -> Steps[None]:
        """Read the object whose brace is the mark."""
        calls.begin(self.name, reader)
        yield from reader.json_value(calls.add, begun=mark)
        calls.end()


def read_object(reader: TextReader, calls: Calls, name: str) -> Steps[None]:
    """Announce the call when its arguments begin as an object, and pass them on; it stays open."""
    if (yield from reader.peek()) != "{":
        raise NotMarkup
    calls.begin(name, reader)
    yield from reader.json_value(calls.add)


def bare_name(name: str) -> str:
    """Give a function's name without the namespace and the counter that Kimi K2 writes: functions.NAME:0."""
    return name.removeprefix("functions.").partition(":")[0]


def _read_key(reader: TextReader) -> Steps[str]:
    yield from reader.skip_space()
    key = yield from reader.json_string()
    yield from reader.skip_space()
    yield from reader.expect(":")
    yield from reader.skip_space()
    return key


def _read_arguments(reader: TextReader, calls: Calls, name: str | None) -> Steps[str]:
    """Read arguments and give their text; when the name is known, announce the call and pass them on.

    Besides an object they may be the text of one in a string, or null for none.
    """
    if name is not None and (yield from reader.peek()) == "{":
        yield from read_object(reader, calls, name)
        return ""
    pieces: list[str] = []
    yield from reader.json_value(pieces.append)
    text = "".join(pieces)
    if text.startswith('"'):
        text = json.loads(text).strip().encode(errors="replace").decode()
    elif text == "null":
        text = NO_ARGUMENTS
    if not is_object(text):
        raise NotMarkup
    if name is not None:
        calls.begin(name, reader)
        calls.add(text)
    return text


def is_object(text: str) -> bool:
    """Tell whether a text is one JSON object."""
    scanner = JsonScanner()
    end, _ = scanner.scan(text, 0)
    return text.startswith("{") and scanner.is_done and end == len(text)

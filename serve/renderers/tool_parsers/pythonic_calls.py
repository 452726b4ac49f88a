"""Phase 11 of 11: tool calls written as Python: [f(a=1, b="x"), g()]. Only literals are read; nothing is evaluated."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Final

from serve.renderers.text_reader import NotMarkup, Steps, TextReader
from serve.renderers.tool_parsers.base import Calls

Json = str | int | float | bool | list["Json"] | dict[str, "Json"] | None

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]*")
_WORD: Final = re.compile(r"[A-Za-z0-9_]*")
_NUMBER_CHARS: Final = re.compile(r"[-+0-9.eE_]*")
_HEX: Final = re.compile(r"[0-9a-fA-F]*")
_PLAIN: Final = {'"': re.compile(r'[^\\"]*'), "'": re.compile(r"[^\\']*")}
_NO_LIMIT: Final = 2**63
_MAX_DEPTH: Final = 64
_WORDS: Final = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", "/": "/", **{c: c for c in "\\'\""}}
_NUM_HEX: Final = {"x": 2, "u": 4, "U": 8}
_MAX_CODE_POINT: Final = 0x10FFFF


@dataclass(frozen=True, slots=True)
class PythonicCalls:
    """Calls with keyword arguments: a list in brackets, or one call after another when is_list is false."""

    marks: tuple[str, ...]
    close: str = ""
    start: str = ""
    is_list: bool = True

    def read(self, mark: str, reader: TextReader, calls: Calls) -> Steps[None]:
        """Read the calls behind mark, which may end with the list's bracket."""
        if self.is_list and not mark.endswith("["):
            yield from reader.skip_space()
            yield from reader.expect("[")
        while True:
            yield from reader.skip_space()
            yield from self._read_call(reader, calls)
            yield from reader.skip_space()
            if (yield from self._is_last(reader)):
                break
            calls.end()
            reader.hold()
        if self.close and mark not in ("[", "\n["):
            yield from reader.skip_space()
            yield from reader.expect(self.close)
        calls.end()

    def _is_last(self, reader: TextReader) -> Steps[bool]:
        if not self.is_list:
            return (yield from reader.peek()) == self.close[0]
        if (yield from reader.accept(",")):
            return False
        yield from reader.expect("]")
        return True

    def _read_call(self, reader: TextReader, calls: Calls) -> Steps[None]:
        """Read one call; it stays open."""
        name = yield from reader.match(_NAME)
        calls.check(name)
        yield from reader.expect("(")
        separator = "{"
        while True:
            yield from reader.skip_space()
            if (yield from reader.accept(")")):
                break
            key = yield from reader.match(_WORD)
            yield from reader.skip_space()
            if not key:
                raise NotMarkup
            yield from reader.expect("=")
            yield from reader.skip_space()
            value = yield from _literal(reader, 0)
            yield from reader.skip_space()
            end = yield from reader.accept_any((",", ")"))
            if end is None:
                raise NotMarkup
            if separator == "{":
                calls.begin(name, reader)
            calls.add(f"{separator}{json.dumps(key)}:{_compact(value)}")
            separator = ","
            if end == ")":
                break
        if separator == "{":
            calls.begin(name, reader)
            calls.add(separator)
        calls.add("}")


def _literal(reader: TextReader, depth: int) -> Steps[Json]:
    """Read one literal: a string, a number, True, False, None, a list, a tuple or a dict, nested at most so deep."""
    if depth == _MAX_DEPTH:
        raise NotMarkup
    opening = yield from reader.peek()
    if opening in _PLAIN:
        return (yield from _string(reader))
    if opening in "+-.0123456789":
        return _number((yield from reader.match(_NUMBER_CHARS)))
    if opening in "[(":
        return (yield from _items(reader, depth))
    if opening == "{":
        return (yield from _dict(reader, depth))
    word = yield from reader.match(_WORD)
    if word not in _WORDS:
        raise NotMarkup
    return _WORDS[word]


def _number(text: str) -> int | float:
    """Give the value of a number as Python writes it; it is short."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        raise NotMarkup from None
    if not math.isfinite(value):
        raise NotMarkup
    return value


def _string(reader: TextReader) -> Steps[str]:
    """Read a string in single or double quotes with Python's escapes; unknown ones keep their backslash."""
    quote = yield from reader.take()
    pieces: list[str] = []
    while True:
        pieces.append((yield from reader.match(_PLAIN[quote], max_chars=_NO_LIMIT)))
        if (yield from reader.take()) == quote:
            break
        pieces.append((yield from _escape(reader)))
    # Two escapes may stand for one character, and half of one for none.
    return "".join(pieces).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _escape(reader: TextReader) -> Steps[str]:
    character = yield from reader.take()
    if character not in _NUM_HEX:
        return _ESCAPES.get(character, f"\\{character}")
    digits = ""
    while len(digits) < _NUM_HEX[character]:
        digits += yield from reader.take()
    if not _HEX.fullmatch(digits) or int(digits, 16) > _MAX_CODE_POINT:
        raise NotMarkup
    return chr(int(digits, 16))


def _items(reader: TextReader, depth: int) -> Steps[Json]:
    """Read a list or a tuple; brackets around one value without a comma mean that value."""
    close = "]" if (yield from reader.take()) == "[" else ")"
    items: list[Json] = []
    has_comma = close == "]"
    while True:
        yield from reader.skip_space()
        if (yield from reader.accept(close)):
            break
        items.append((yield from _literal(reader, depth + 1)))
        yield from reader.skip_space()
        if not (yield from reader.accept(",")):
            yield from reader.expect(close)
            break
        has_comma = True
    return items if has_comma or not items else items[0]


def _dict(reader: TextReader, depth: int) -> Steps[Json]:
    """Read a dict whose keys are strings."""
    yield from reader.take()
    members: dict[str, Json] = {}
    while True:
        yield from reader.skip_space()
        if (yield from reader.accept("}")):
            break
        if (yield from reader.peek()) not in _PLAIN:
            raise NotMarkup
        key = yield from _string(reader)
        yield from reader.skip_space()
        yield from reader.expect(":")
        yield from reader.skip_space()
        members[key] = yield from _literal(reader, depth + 1)
        yield from reader.skip_space()
        if not (yield from reader.accept(",")):
            yield from reader.expect("}")
            break
    return members


def _compact(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

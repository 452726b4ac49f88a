"""Phase 11 of 11: tool calls written as tags, one for each argument; the tool's schema says what a value means."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Final

from serve.renderers.text_reader import LineTrimmer, Marks, NotMarkup, Sink, Steps, TextReader
from serve.renderers.tool_parsers.argument_types import ANY_TYPE, STRING, argument_types, typed_json
from serve.renderers.tool_parsers.base import Calls

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]*")
_KEY: Final = re.compile(r"[^<>\"\n]*")
_IS_TEXT: Final = ' string="true">'
_IS_JSON: Final = ' string="false">'


@dataclass(frozen=True, slots=True)
class XmlCalls:
    """Calls as tags between marks and close.

    A call is before_name, name_open, the name, name_close, then for each argument key_open, its name, the strings of
    key_close, the value, value_close, and at last function_close and after_function. Where function_close is empty
    the section's own close ends the call. With is_flagged a key is followed by string="true" or string="false", which
    says whether the value is text or JSON. One line break at each end of a value belongs to the markup, unless
    keeps_lines.
    """

    marks: tuple[str, ...]
    close: str
    name_open: str
    name_close: str
    key_open: str
    key_close: tuple[str, ...]
    value_close: str
    function_close: str
    before_name: str = ""
    after_function: str = ""
    is_flagged: bool = False
    keeps_lines: bool = False
    start: str = ""

    def read(self, mark: str, reader: TextReader, calls: Calls) -> Steps[None]:
        """Read the calls of a section; a call that comes without the section's mark is alone."""
        if mark == self.name_open:
            yield from self._read_call(reader, calls)
            calls.end()
            yield from reader.skip_space()
            yield from reader.accept(self.close)
            return
        while True:
            yield from reader.skip_space()
            if calls.has_begun:
                if not self.function_close or (yield from reader.accept(self.close)):
                    break
                calls.end()
                reader.hold()
            for literal in filter(None, (self.before_name, self.name_open)):
                yield from reader.expect(literal)
            yield from self._read_call(reader, calls)
        calls.end()

    def _read_call(self, reader: TextReader, calls: Calls) -> Steps[None]:
        """Read one call behind name_open; it stays open."""
        name = yield from reader.match(_NAME)
        calls.check(name)
        yield from reader.expect(self.name_close)
        ends = (self.key_open, self.function_close or self.close)
        num_arguments = 0
        while True:
            yield from reader.skip_space()
            end = yield from reader.accept_any(ends)
            if end is None:
                raise NotMarkup
            if num_arguments == 0:
                calls.begin(name, reader)
                calls.add("{")
            if end != self.key_open:
                break
            yield from self._read_argument(reader, calls, name, "," if num_arguments else "")
            num_arguments += 1
        calls.add("}")
        if self.after_function:
            yield from reader.skip_space()
            yield from reader.expect(self.after_function)

    def _read_argument(self, reader: TextReader, calls: Calls, name: str, separator: str) -> Steps[None]:
        """Read one argument behind key_open; text is passed on as it comes, other values when they are complete."""
        key = (yield from reader.match(_KEY)).strip()
        types = argument_types(calls.schema(name), key)
        for index, literal in enumerate(self.key_close):
            if index:
                yield from reader.skip_space()
            yield from reader.expect(literal)
        if self.is_flagged:
            flag = yield from reader.accept_any((_IS_TEXT, _IS_JSON))
            if flag is None:
                raise NotMarkup
            types = STRING if flag == _IS_TEXT else ANY_TYPE
        calls.add(f"{separator}{json.dumps(key, ensure_ascii=False)}:")
        if types == STRING:
            calls.add('"')
            yield from self._read_value(reader, lambda text: calls.add(json.dumps(text, ensure_ascii=False)[1:-1]))
            calls.add('"')
        else:
            pieces: list[str] = []
            yield from self._read_value(reader, pieces.append)
            calls.add(typed_json("".join(pieces), types))

    def _read_value(self, reader: TextReader, sink: Sink) -> Steps[None]:
        """Take text up to value_close; it goes to sink as it comes."""
        yield from reader.until(Marks((self.value_close,)), sink if self.keeps_lines else LineTrimmer(sink).add)
